"""Transfers where processes matter: in shared memory, after a fork, at exit, next to pages that may not be touched."""

from __future__ import annotations

import kvshm
from kvshm.context import CPUCacheContext
from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks
from tests.support.processes import Peer, run_python

SHAPE = (2, 13, 4, 3, 5)


def test_another_process_moves_chunks_of_the_same_pages() -> None:
    layers = kvshm.empty_many([SHAPE] * 2, ["bfloat16"] * 2)
    for number, layer in enumerate(layers):
        layer.view("uint16").reshape(-1)[:] = range(number, number + layer.size)
    context = CPUCacheContext(layers, 8, {"kv_layout": "NHD"})
    here = bytearray(object_group_nbytes(context, 0))
    gather_chunks(context, [[11, 2]], [here])
    with Peer() as peer:
        descriptors = [kvshm.wrap(layer).to_bytes().hex() for layer in layers]
        peer.run("from kvshm import ShmArrayWrapper; from kvshm.context import CPUCacheContext")
        peer.run("from kvshm.transfer import gather_chunks, object_group_nbytes, scatter_chunks")
        peer.run(f"wrappers = [ShmArrayWrapper.from_bytes(bytes.fromhex(text)) for text in {descriptors}]")
        peer.run("context = CPUCacheContext(wrappers, 8, {'kv_layout': 'NHD'})")
        peer.run("there = bytearray(object_group_nbytes(context, 0))")
        peer.run("gather_chunks(context, [[11, 2]], [there])")
        assert peer.get("there.hex()") == here.hex()
        peer.run("scatter_chunks(context, [[5, 12]], [there])")
        gather_chunks(context, [[5, 12]], [again := bytearray(len(here))])
        assert again == here
        scatter_chunks(context, [[0, 1]], [here])
        peer.run("gather_chunks(context, [[0, 1]], [there])")
        assert peer.get("there.hex()") == here.hex()


def test_a_forked_child_has_copy_threads_of_its_own() -> None:
    run_python(
        """
import os, warnings
import numpy as np
from kvshm.context import CPUCacheContext
from kvshm.transfer import gather_chunks, object_group_nbytes

warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks of processes that have threads
cache = list(np.random.default_rng(0).integers(0, 256, (2, 2, 64, 16, 8, 64), dtype=np.uint8))
context = CPUCacheContext(cache, 256, {"kv_layout": "NHD"})
ids = [np.random.default_rng(1).permutation(64)]
first = list(np.zeros((4, object_group_nbytes(context, 0)), np.uint8))
gather_chunks(context, ids, first, num_threads=3)

def again():
    chunks = [np.zeros_like(chunk) for chunk in first]
    gather_chunks(context, ids, chunks, num_threads=3)
    assert all(map(np.array_equal, chunks, first))

children = []
for _ in range(3):
    child = os.fork()
    if not child:
        try:
            again()
            grandchild = os.fork()
            if not grandchild:
                again()
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        except BaseException:
            os._exit(1)
    children.append(child)
again()
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
"""
    )


def test_transfers_work_while_the_interpreter_shuts_down() -> None:
    printed = run_python(
        """
import atexit
import numpy as np
from kvshm.context import CPUCacheContext
from kvshm.transfer import gather_chunks, object_group_nbytes

cache = list(np.random.default_rng(0).integers(0, 256, (2, 2, 64, 16, 8, 64), dtype=np.uint8))
context = CPUCacheContext(cache, 256, {"kv_layout": "NHD"})
chunk = np.zeros(object_group_nbytes(context, 0), np.uint8)

@atexit.register
def late():
    for num_threads in (1, 3):
        chunk[...] = 0
        gather_chunks(context, [range(16)], [chunk], num_threads=num_threads)
        print(np.array_equal(chunk[:16 * 16 * 512], cache[0][0, :16].ravel()))
"""
    )
    assert printed.split() == ["True", "True"]


def test_bytes_between_blocks_are_never_touched() -> None:
    # The pages between the blocks may be neither read nor written: touching one ends the process.
    run_python(
        """
import ctypes, mmap
import numpy as np
from kvshm.copying import Piece, choose_way, gather, plane_of, scatter, stacks_of

page, num_blocks = mmap.PAGESIZE, 9
pages = mmap.mmap(-1, 2 * num_blocks * page)
memory = np.frombuffer(pages, np.uint8)
memory[...] = np.arange(memory.size) // page
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
address = memory.__array_interface__["data"][0]
for block in range(num_blocks):
    assert not mprotect(address + (2 * block + 1) * page, page, 0)
ids = np.array([8, 0, 3, 4, 5])
slots, heads = 4, 2
width = page // slots // heads
shape = (num_blocks, slots, heads, width)
for heads_first in (False, True):
    slot_step, head_step = (width, slots * width) if heads_first else (heads * width, width)
    paged = np.ndarray(shape, np.uint8, memory, 0, (2 * page, slot_step, head_step, 1))
    plane = plane_of(paged, 0, heads * width)
    (stack,) = stacks_of([plane], len(ids))
    for way in (choose_way(plane.order, ids), choose_way(None, ids)):
        chunk = np.zeros(len(ids) * page, np.uint8)
        gather(stack, range(1), [Piece(chunk, ids)], [way])
        assert chunk.reshape(-1, page)[:, 0].tolist() == (2 * ids).tolist()
        for shared in (False, True):
            scatter(stack, range(1), [Piece(chunk, ids)], [way], shared=shared)
"""
    )
