"""Segments between real processes: who sees what, and what is left when one ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import kvshm
from kvshm.dtypes import DTYPES
from tests.support.memory import PAGE, exists, fill, num_mappings, sweep_until_gone
from tests.support.processes import Peer, PeerError, run_python, run_script


def test_both_sides_see_each_others_writes_for_every_dtype() -> None:
    with Peer() as peer:
        peer.run("import kvshm, numpy as np")
        for seed, name in enumerate(DTYPES):
            array = kvshm.empty((3, 5, 7), name)
            peer.run(f"array = kvshm.ShmArrayWrapper.from_bytes({kvshm.wrap(array).to_bytes()!r}).to_array()")
            assert peer.get("(type(array) is np.ndarray, array.shape)") == [True, [3, 5, 7]]
            content = fill(array, seed)  # written after the peer mapped it
            assert peer.get("array.tobytes().hex()") == content.hex()
            peer.run("array[1, 2, 3] = 1")
            assert array[1, 2, 3] == np.ones((), DTYPES[name])
            assert peer.get("array.dtype.name") == array.dtype.name


def test_views_and_layers_of_one_segment_are_mapped_once() -> None:
    layers = kvshm.empty_many([(7, 2, 5, 3)] * 11, "bfloat16")
    for seed, layer in enumerate(layers):
        fill(layer, seed)
    message = kvshm.wire.pack([kvshm.wrap(layer[2:5]) for layer in layers])
    name = kvshm.wrap(layers[0]).shm_name
    with Peer() as peer:
        peer.run(f"import kvshm\nviews = [wrapper.to_array() for wrapper in kvshm.wire.unpack({message!r})]")
        assert num_mappings(name, peer.pid) == 1
        for index, layer in enumerate(layers):
            assert peer.get(f"views[{index}].tobytes().hex()") == layer[2:5].tobytes().hex()
        peer.run("del views")
        assert num_mappings(name, peer.pid) == 0


def test_moved_memory_is_seen_by_others() -> None:
    with Peer() as peer:
        peer.run("""
import kvshm, mmap, numpy as np
array = np.frombuffer(mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32).reshape(64, 32)
view = array[3]
view[:] = 5
data = kvshm.migrate_to_shm_and_wrap(array).to_bytes().hex()
""")
        wrapper = kvshm.ShmArrayWrapper.from_bytes(bytes.fromhex(peer.get("data")))
        mapped = wrapper.to_array()
        assert mapped[3].tolist() == [5] * 32
        peer.run("view[7] = 11")
        assert mapped[3, 7] == 11
        mapped[3, 8] = 13
        assert peer.get("float(view[8])") == 13
        peer.run("import gc\ndel array, view\ngc.collect()")
        assert not exists(wrapper.shm_name)
        assert num_mappings(wrapper.shm_name, peer.pid) == 0
        assert mapped[3, 7] == 11


def test_arrays_outlive_the_other_side() -> None:
    with Peer() as peer:
        peer.run("import kvshm\narray = kvshm.zeros((3, 5), 'int16')\narray[:] = 7")
        wrapper = kvshm.ShmArrayWrapper.from_bytes(bytes.fromhex(peer.get("kvshm.wrap(array).to_bytes().hex()")))
        mapped = wrapper.to_array()
    assert not exists(wrapper.shm_name)
    assert mapped.tolist() == [[7] * 5] * 3
    with pytest.raises(FileNotFoundError):
        wrapper.to_array()


def test_who_only_attached_takes_nothing_along() -> None:
    array = kvshm.zeros((PAGE,), "uint8")
    wrapper = kvshm.wrap(array)
    for ending in (
        "",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "seg.unlink()",
        "seg.__exit__(None, None, None)",
    ):
        run_python(
            f"import kvshm\nseg = kvshm.Segment.attach({wrapper.shm_name!r})\n"
            f"array = kvshm.ShmArrayWrapper.from_bytes({wrapper.to_bytes()!r}).to_array()\narray[:] += 1\n{ending}"
        )
        assert exists(wrapper.shm_name)
    assert array.tolist() == [5] * PAGE


ENDINGS = {
    "return": ("", 0),
    "sys.exit": ("import sys; sys.exit(3)", 3),
    "with the handle deleted": ("del seg", 0),
    "with all deleted": ("del seg, array", 0),
    "from a thread": ("import threading; threading.Thread(target=lambda: None).start()", 0),
    "in a cycle": ("cycle = [array, seg]; cycle.append(cycle); del seg, array, cycle", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_name_goes_when_its_creator_ends(ending: str) -> None:
    code, returncode = ENDINGS[ending]
    name = run_python(
        "import kvshm\nseg = kvshm.Segment.create(10)\narray = seg.array((10,), 'uint8')\n"
        f"other = kvshm.empty((5,), 'int8')\nprint(seg.name, kvshm.wrap(other).shm_name)\n{code}",
        returncode=returncode,
    )
    assert [exists(part) for part in name.split()] == [False, False]


def test_the_name_goes_when_its_creator_is_interrupted() -> None:
    peer = Peer()
    peer.run("import kvshm\narray = kvshm.empty((10,), 'uint8')")
    name = peer.get("kvshm.wrap(array).shm_name")
    peer.process.send_signal(signal.SIGINT)
    _, stderr = peer.process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert not exists(name)


def test_a_killed_creators_segment_is_removed_by_the_next_process() -> None:
    peer = Peer()
    peer.run("import kvshm\narray = kvshm.empty((1013,), 'uint8')")
    name = peer.get("kvshm.wrap(array).shm_name")
    assert kvshm.SegmentInfo(name, 1013, in_use=True) in kvshm.list_segments()
    peer.kill()
    deadline = time.monotonic() + 30
    while kvshm.SegmentInfo(name, 1013, in_use=True) in kvshm.list_segments():  # the kernel lets go a moment later
        assert time.monotonic() < deadline
    run_python("import kvshm; kvshm.empty((1,), 'uint8')")
    assert not exists(name)


def test_a_killed_creators_segment_stays_while_somebody_uses_it() -> None:
    peer = Peer()
    peer.run("import kvshm\narray = kvshm.empty((10,), 'uint8')\narray[:] = 3")
    data = bytes.fromhex(peer.get("kvshm.wrap(array).to_bytes().hex()"))
    wrapper = kvshm.ShmArrayWrapper.from_bytes(data)
    mapped = wrapper.to_array()
    peer.kill()
    run_python("import kvshm; kvshm.sweep(); kvshm.empty((1,), 'uint8')")
    assert exists(wrapper.shm_name)
    run_python(f"import kvshm; assert kvshm.ShmArrayWrapper.from_bytes({data!r}).to_array().sum() == 30")
    del mapped
    sweep_until_gone(wrapper.shm_name)


@pytest.mark.namespaces
def test_locks_and_not_process_ids_say_who_lives(unshare: tuple[str, ...]) -> None:
    ours = kvshm.empty((10,), "uint8")
    with Peer(*unshare) as peer:
        peer.run("import kvshm, os\narray = kvshm.empty((10,), 'uint8')")
        assert peer.get("os.getpid()") == 1
        theirs = peer.get("kvshm.wrap(array).shm_name")
        assert theirs not in kvshm.sweep()
        assert kvshm.wrap(ours).shm_name not in peer.get("kvshm.sweep()")
        assert exists(theirs)
    assert not exists(theirs)
    peer = Peer(*unshare)
    peer.run("import kvshm\narray = kvshm.empty((10,), 'uint8')")
    theirs = peer.get("kvshm.wrap(array).shm_name")
    os.kill(peer.pid, signal.SIGKILL)  # unshare; it takes its child along
    peer.process.communicate(timeout=60)
    sweep_until_gone(theirs)
    assert exists(kvshm.wrap(ours).shm_name)


FORK = """
import os, sys, gc, kvshm, mmap, numpy as np
from kvshm.shm import mappings
segment = kvshm.Segment.create(100)
array = segment.array((100,), "uint8")
moved = np.frombuffer(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
moved_name = kvshm.wrap(moved).shm_name
lock = mappings.table_lock()
{before}
child = os.fork()
if child == 0:
    array[0] += 1
    moved[0] += 1
    assert not segment.is_owner
{child}
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert segment.is_owner
assert os.path.exists("/dev/shm" + segment.name) and os.path.exists("/dev/shm" + moved_name)
assert (array[0], moved[0]) == (1, 1)
assert kvshm.Segment.attach(segment.name).array((100,), "uint8")[0] == 1
print(segment.name, moved_name)
"""


@pytest.mark.parametrize(
    "child",
    [
        "",
        "os._exit(0)",
        "segment.unlink()",
        "segment.__exit__(None, None, None)",
        "del segment, array, moved; gc.collect()",
        "own = kvshm.empty((7,), 'int8'); del array; kvshm.sweep()",
        "kvshm.wrap(moved).to_array(); kvshm.Segment.attach(segment.name)",
        "os.execv(sys.executable, [sys.executable, '-c', 'import kvshm; kvshm.sweep()'])",
        "again = os.fork(); again == 0 and os._exit(0); os.waitpid(again, 0)",
    ],
)
def test_a_forked_child_takes_nothing_along(child: str) -> None:
    names = run_python(FORK.format(before="", child=f"    {child}"))
    assert [exists(name) for name in names.split()] == [False, False]


def test_a_forked_childs_lock_is_free() -> None:
    before = """
import threading
held, done = threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
"""
    ignore = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"  # that it forks with threads
    code = FORK.format(before=before, child="    kvshm.empty((3,), 'uint8')\n    kvshm.wrap(moved).to_array()")
    names = run_python(ignore + code.replace("assert os.waitstatus", "done.set(); assert os.waitstatus"))
    assert [exists(name) for name in names.split()] == [False, False]


CHILDREN = """
import multiprocessing, sys, kvshm

def child(wrapper, queue):
    array = wrapper.to_array()
    array[0] += 1
    own = kvshm.empty((11,), "int32")
    segment = kvshm.Segment.create(7)
    child.keep = own, segment  # alive when the process ends
    queue.put((kvshm.wrap(own), segment.name))
    queue.get()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    array = kvshm.zeros((3,), "bfloat16")
    names = []
    for _ in range(2):
        queue = context.Queue()
        process = context.Process(target=child, args=(kvshm.wrap(array), queue))
        process.start()
        wrapper, name = queue.get()
        assert wrapper.to_array().shape == (11,)
        names += [wrapper.shm_name, name]
        kvshm.Segment.attach(name)
        queue.put(None)
        process.join()
        assert process.exitcode == 0
    assert array.tolist() == [2, 0, 0]
    assert kvshm.wrap(array).to_array()[0] == 2
    print(*names, kvshm.wrap(array).shm_name)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_remove_what_they_created(method: str, tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    names = run_script(script, method)
    assert len(names.split()) == 5
    assert [exists(name) for name in names.split()] == [False] * 5


def test_importing_is_cheap_and_touches_no_signal() -> None:
    run_python("""
import signal, sys
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
import kvshm
array = kvshm.empty((3,), "bfloat16")
kvshm.wrap(array).to_array()
assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
heavy = {"torch", "zmq", "hypothesis", "aiohttp", "matplotlib", "multiprocessing", "asyncio", "pytest"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
""")


def test_decoding_needs_nothing_but_kvshm() -> None:
    data = kvshm.wrap(kvshm.zeros((3,), "float8_e4m3fnuz")).to_bytes()
    run_python(f"import kvshm; assert kvshm.ShmArrayWrapper.from_bytes({data!r}).dtype.name == 'float8_e4m3fnuz'")


def test_many_layers_with_few_descriptors() -> None:
    run_python("""
import resource, os, kvshm
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = len(os.listdir("/proc/self/fd"))
layers = kvshm.empty_many([(3, 5)] * 512, "float16") + [kvshm.empty((7,), "uint8") for _ in range(512)]
wrappers = kvshm.wire.unpack(kvshm.wire.pack([kvshm.wrap(layer) for layer in layers]))
views = [wrapper.to_array() for wrapper in wrappers]
readers = [kvshm.Segment.attach(wrapper.shm_name, readonly=True) for wrapper in wrappers]
assert len(os.listdir("/proc/self/fd")) == before
del layers, views, readers
assert len(os.listdir("/proc/self/fd")) == before
with open("/proc/self/maps") as lines:
    assert not any("/dev/shm/kvshm" in line for line in lines)
""")


def test_readers_cannot_write() -> None:
    array = kvshm.zeros((PAGE,), "uint8")
    name = kvshm.wrap(array).shm_name
    with Peer() as peer:
        peer.run(f"import kvshm\nview = kvshm.Segment.attach({name!r}, readonly=True).array((3,), 'uint8')")
        with pytest.raises(PeerError, match="read-only"):
            peer.run("view[0] = 1")
        lines = Path(f"/proc/{peer.pid}/maps").read_text().splitlines()
        assert [line.split()[1] for line in lines if name in line] == ["r--s"]
        array[0] = 3
        assert peer.get("int(view[0])") == 3


def test_other_users_are_kept_out_and_told_why() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    array = kvshm.zeros((3,), "uint8")
    name = kvshm.wrap(array).shm_name
    with Peer() as peer:
        peer.run("import kvshm, os\nos.setgid(65534)\nos.setuid(65534)")
        with pytest.raises(PeerError, match=r"belongs to uid 0 gid 0, mode 0600; this process runs as uid 65534"):
            peer.run(f"kvshm.Segment.attach({name!r})")
        assert peer.get(f"[s.in_use for s in kvshm.list_segments() if s.name == {name!r}]") == [True]
        assert name not in peer.get("kvshm.sweep()")
    with Peer() as peer:
        peer.run("import kvshm, os\nos.setgid(65534)\nos.setuid(65534)\nos.umask(0o77)")
        peer.run("shared = kvshm.Segment.create(10, mode=0o660)")
        assert oct(os.stat(f"/dev/shm{peer.get('shared.name')}").st_mode & 0o7777) == "0o660"
        assert kvshm.Segment.attach(peer.get("shared.name")).nbytes == 10
