"""Failures, kills and a full tmpfs, at each step of making a segment."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import posix_ipc
import pytest

import kvshm
from kvshm.posix_shm import shm_create_readwrite, shm_map_readwrite
from kvshm.shm import mappings, objects, pages
from tests.support.memory import created, exists, num_descriptors, num_mappings, sweep_until_gone
from tests.support.processes import Peer, PeerError, run_python

# The calls of create() in order; some come more than once.
STEPS = [
    (os, "fstat", 1),
    (fcntl, "flock", 1),
    (os, "fstat", 2),
    (os, "posix_fallocate", 1),
    (os, "posix_fallocate", 3),
    (os, "fchmod", 1),
    (fcntl, "flock", 2),
    (os, "fstat", 3),
    (pages, "map_shared", 1),
]


def fail_after(patch: pytest.MonkeyPatch, module: Any, name: str, nth: int, error: BaseException) -> Callable[[], int]:
    """Let the nth call of a function do its work and then raise; gives how often it was called."""
    function, num_calls = getattr(module, name), 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = function(*arguments, **keywords)
        if num_calls == nth:
            raise error
        return result

    patch.setattr(module, name, call)
    return lambda: num_calls


@pytest.mark.parametrize("create", [kvshm.Segment.create, lambda nbytes, name: shm_create_readwrite(name, nbytes)])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "injected"), KeyboardInterrupt("injected")])
@pytest.mark.parametrize(("module", "name", "nth"), STEPS, ids=[f"{name} {nth}" for _, name, nth in STEPS])
def test_a_failed_creation_leaves_nothing(
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    nth: int,
    error: BaseException,
    create: Callable[..., object],
) -> None:
    kvshm.sweep()
    mappings._table.swept = True  # or the sweep before a first creation makes the calls that are to fail
    before = num_descriptors(), created()
    with monkeypatch.context() as patch:
        num_calls = fail_after(patch, module, name, nth, error)
        with pytest.raises(type(error), match="injected"):
            create(1_000_003, segment_name)
        assert num_calls() >= nth
    assert not exists(segment_name)
    assert (num_descriptors(), created()) == before
    if name != "map_shared":  # what the test maps behind the library's back stays
        assert num_mappings(segment_name) == 0
    with kvshm.Segment.create(1_000_003, segment_name) as segment:
        assert not segment.array((1_000_003,), "uint8").any()


def test_calls_that_fail_for_good_leave_nothing(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "injected")

    for module, name in {(module, name) for module, name, _ in STEPS}:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(OSError, match="injected"):
                kvshm.Segment.create(1_000_003, segment_name)
            assert len(os.listdir("/proc/self/fd")) == before
        assert not exists(segment_name)


@pytest.mark.parametrize(
    ("attach", "module", "name"),
    [
        (attach, module, name)
        for attach in (kvshm.Segment.attach, shm_map_readwrite)
        for module, name in ((os, "fstat"), (fcntl, "flock"), (pages, "map_shared"))
    ]
    + [(kvshm.Segment.attach, weakref, "ref")],
)
def test_a_failed_attachment_leaves_the_segment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, attach: Callable[..., object], module: Any, name: str
) -> None:
    with Peer() as peer:
        peer.run("import kvshm\nsegment = kvshm.Segment.create(1009)")
        segment_name = peer.get("segment.name")
        before = num_descriptors()

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(OSError, match="injected"):
                attach(segment_name, 1009)
        assert num_descriptors() == before
        assert num_mappings(segment_name) == 0
        assert os.stat(f"/dev/shm{segment_name}").st_size == 1009


KILL = """
import os, fcntl, signal, sys, kvshm
from kvshm.shm import pages
kvshm.sweep()
module, name, nth, segment_name = {module}, {name!r}, {nth}, {segment_name!r}
function, num_calls = getattr(module, name), 0

def call(*arguments, **keywords):
    global num_calls
    num_calls += 1
    result = function(*arguments, **keywords)
    if num_calls == nth:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

kvshm.shm.mappings._table.swept = True
setattr(module, name, call)
kvshm.Segment.create(1_000_003, segment_name)
"""


@pytest.mark.parametrize(("module", "name", "nth"), STEPS, ids=[f"{name} {nth}" for _, name, nth in STEPS])
def test_a_creator_killed_at_any_step_leaves_what_the_next_removes(
    segment_name: str, module: Any, name: str, nth: int
) -> None:
    short = module.__name__.rpartition(".")[2]
    run_python(KILL.format(module=short, name=name, nth=nth, segment_name=segment_name), returncode=-signal.SIGKILL)
    sweep_until_gone(segment_name)


def test_signals_all_the_time_do_not_keep_a_reservation_from_ending() -> None:
    """Each signal makes the kernel undo the call under way; one call for all would never end."""
    run_python("""
import signal, kvshm, os
num_signals = 0
def count(*_):
    global num_signals
    num_signals += 1
signal.signal(signal.SIGALRM, count)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
segment = kvshm.Segment.create(1 << 29)
signal.setitimer(signal.ITIMER_REAL, 0)
assert os.stat("/dev/shm" + segment.name).st_blocks * 512 == 1 << 29
assert num_signals > 5, num_signals
""")


def test_an_interrupt_while_reserving_leaves_nothing(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def interrupt(fd: int, start: int, length: int) -> None:
        fallocate(fd, start, length)
        if start:
            signal.raise_signal(signal.SIGINT)

    before = num_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kvshm.Segment.create(1_000_003, segment_name)
    assert not exists(segment_name)
    assert num_descriptors() == before


# A tmpfs of its own for each test below, in mount namespaces of their own.

MIB = 1 << 20
ENTER = """
import kvshm, os, subprocess
assert subprocess.call(["mount", "-t", "tmpfs", "-o", "size={}", "none", "/dev/shm"]) == 0
"""
FREE = "os.statvfs('/dev/shm').f_bavail * os.statvfs('/dev/shm').f_frsize"


@pytest.fixture
def small(unshare: tuple[str, ...]) -> Iterator[Peer]:
    """A peer whose /dev/shm holds 40 MiB and nothing yet."""
    with Peer(*unshare) as peer:
        peer.run(ENTER.format(40 * MIB))
        yield peer


@pytest.mark.namespaces
def test_no_room_is_an_error_with_numbers_and_a_remedy(small: Peer) -> None:
    for nbytes in (41 * MIB, 12 * MIB):  # found out beforehand, and on the way
        small.run(f"room = kvshm.Segment.create({30 * MIB})")
        with pytest.raises(
            PeerError,
            match=rf"no room in shared memory for {nbytes} bytes: {10 * MIB} bytes are free of "
            rf"{40 * MIB} in /dev/shm.*docker run --shm-size.*Kubernetes",
        ) as caught:
            small.run(f"kvshm.empty(({nbytes},), 'uint8')")
        assert caught.value.kind == "ShmFullError"
        assert small.get("os.listdir('/dev/shm')") == [small.get("room.name[1:]")]
        assert small.get(FREE) == 10 * MIB
        small.run("del room")
        assert small.get(FREE) == 40 * MIB
    assert small.get("int(kvshm.zeros((3,), 'uint8').sum())") == 0


@pytest.mark.namespaces
def test_all_that_is_free_can_be_had(small: Peer) -> None:
    small.run(f"whole = kvshm.Segment.create({FREE})\nwhole.array((whole.nbytes,), 'uint8')[:] = 7")
    assert small.get(FREE) == 0
    with pytest.raises(PeerError, match=f"no room in shared memory for 1 bytes: 0 bytes are free of {40 * MIB}"):
        small.run("kvshm.Segment.create(1)")


@pytest.mark.namespaces
@pytest.mark.parametrize("is_first", [True, False])
def test_a_dead_process_that_filled_everything_makes_room(small: Peer, is_first: bool) -> None:
    small.run(f"""
import sys
if not {is_first}:
    kvshm.Segment.create(1)
dead = subprocess.run([sys.executable, '-c', '''
import kvshm, os
keep = kvshm.Segment.create({39 * MIB})
os.kill(os.getpid(), 9)
'''])
assert dead.returncode == -9, dead
while kvshm.list_segments()[0].in_use:  # the kernel lets go of its lock a moment after its death
    pass
""")
    assert small.get(FREE) == MIB
    small.run(f"again = kvshm.Segment.create({39 * MIB})")
    assert small.get("len(kvshm.list_segments())") == 1


@pytest.mark.namespaces
def test_of_two_that_want_too_much_one_gets_it(unshare: tuple[str, ...]) -> None:
    with Peer(*unshare) as first:
        first.run(ENTER.format(100 * MIB))
        second_prefix = ("nsenter", "--target", str(_child_of(first)), "--mount")
        with Peer(*second_prefix) as second:
            second.run("import kvshm, os")
            for peer in (first, second):
                peer.run(f"""
def ask():
    global segment
    try:
        segment = kvshm.Segment.create({60 * MIB})
    except kvshm.ShmFullError:
        return 0
    return 1
kvshm.sweep()
""")
            for _ in range(8):
                for peer in (first, second):
                    peer.start("eval", "ask()")
                assert sorted(peer.answer() for peer in (first, second)) == [0, 1]
                for peer in (first, second):
                    peer.run("segment = None")
                assert first.get(FREE) == 100 * MIB


def _child_of(peer: Peer) -> int:
    with open(f"/proc/{peer.pid}/task/{peer.pid}/children", encoding="ascii") as children:
        return int(children.read().split()[0])


@pytest.mark.namespaces
def test_another_shm_directory_is_explained(small: Peer) -> None:
    array = kvshm.zeros((3,), "uint8")
    with pytest.raises(PeerError, match=r"this process sees another /dev/shm \(containers must share it"):
        small.run(f"kvshm.ShmArrayWrapper.from_bytes({kvshm.wrap(array).to_bytes()!r}).to_array()")


@pytest.mark.namespaces
def test_no_shm_directory_at_all(unshare: tuple[str, ...]) -> None:
    with Peer(*unshare) as peer:
        peer.run("import kvshm, os, subprocess\nassert subprocess.call(['mount', '-t', 'tmpfs', 'none', '/dev']) == 0")
        with pytest.raises(PeerError, match="/dev/shm") as caught:
            peer.run("kvshm.Segment.create(1)")
        assert caught.value.kind == "FileNotFoundError"
        with pytest.raises(PeerError, match="/dev/shm"):
            peer.run("kvshm.Segment.attach('kvshm_x')")


@pytest.mark.namespaces
def test_without_a_reservation_the_promise_may_be_empty(small: Peer) -> None:
    small.run(f"lazy = kvshm.Segment.create({400 * MIB}, reserve=False)")
    assert small.get(FREE) == 40 * MIB


def test_names_that_collide_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([b"\1" * 11, b"\1" * 11, b"\2" * 11])
    monkeypatch.setattr(os, "urandom", lambda _: next(draws))
    first, second = kvshm.Segment.create(1), kvshm.Segment.create(1)
    assert first.name == objects.SHM_NAME_PREFIX + "01" * 11
    assert second.name == objects.SHM_NAME_PREFIX + "02" * 11


def test_a_name_unlinked_by_others_is_no_error(segment_name: str) -> None:
    with kvshm.Segment.create(1, segment_name):
        posix_ipc.unlink_shared_memory(segment_name)
