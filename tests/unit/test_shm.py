"""Segments in one process: contents, lifetimes, refusals."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import Segment
from kvshm.dtypes import DTYPES
from kvshm.shm import mappings, pages
from kvshm.shm import segments as shm
from kvshm.shm.objects import create_object
from tests.support.memory import PAGE, exists, fill, num_descriptors, num_mappings


def test_create_attach_unlink(segment_name: str) -> None:
    segment = Segment.create(1009, segment_name[1:])
    assert (segment.name, segment.nbytes, segment.is_owner) == (segment_name, 1009, True)
    assert segment.address % PAGE == 0
    written = segment.array((1009,), "uint8")
    assert not written.any()
    content = fill(written)
    attached = Segment.attach(segment_name)
    assert (attached.name, attached.nbytes, attached.is_owner) == (segment_name, 1009, False)
    assert attached.array((1009,), "uint8").tobytes() == content
    segment.unlink()
    segment.unlink()
    assert not exists(segment_name)
    assert written.tobytes() == content


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1])
def test_the_length_is_exact_and_not_that_of_the_pages(nbytes: int) -> None:
    with Segment.create(nbytes) as segment:
        assert Segment.attach(segment.name).nbytes == nbytes
        assert Segment.attach(segment.name).array((nbytes,), "uint8").nbytes == nbytes
        with pytest.raises(ValueError, match=rf"but segment .* has {nbytes}; create it with nbytes >= {nbytes + 1}"):
            segment.array((nbytes + 1,), "uint8")


def test_a_process_maps_a_segment_once() -> None:
    with Segment.create(3 * PAGE) as segment:
        others = [Segment.attach(segment.name, PAGE + index) for index in range(5)]
        assert {other.address for other in others} == {segment.address}
        assert num_mappings(segment.name) == 1


def test_a_smaller_length_is_meant_and_kept() -> None:
    with Segment.create(1000) as segment:
        part = Segment.attach(segment.name, 10)
        assert part.nbytes == 10
        with pytest.raises(ValueError, match=r"but segment .* has 10;"):
            part.array((11,), "uint8")


def test_a_segment_that_is_too_small_is_refused_and_not_resized() -> None:
    with Segment.create(1000) as segment:
        for _ in range(2):  # mapped or not
            with pytest.raises(ValueError, match="has 1000 bytes but 1001 were to be mapped"):
                Segment.attach(segment.name, 1001)
            assert os.stat(f"/dev/shm{segment.name}").st_size == 1000


def test_a_segment_that_shrank_is_refused() -> None:
    with Segment.create(2 * PAGE) as segment:
        os.truncate(f"/dev/shm{segment.name}", 5)
        with pytest.raises(ValueError, match="has 5 bytes"):
            Segment.attach(segment.name, 6)


def test_a_segment_that_grew_is_mapped_anew() -> None:
    with Segment.create(PAGE) as segment:
        segment.array((1,), "uint8")[0] = 7
        os.truncate(f"/dev/shm{segment.name}", 2 * PAGE)
        larger = Segment.attach(segment.name, 2 * PAGE)
        assert larger.array((1,), "uint8")[0] == 7
        assert larger.array((2 * PAGE,), "uint8")[-1] == 0
        del larger
        assert exists(segment.name)


@pytest.mark.parametrize("nbytes", [0, -3])
def test_lengths_are_positive(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"not {nbytes}"):
        Segment.create(nbytes)
    with pytest.raises(ValueError, match=f"not {nbytes}"):
        Segment.attach("any", nbytes)


@pytest.mark.parametrize("name", ["", "/", "a/b", "..", "x" * 255, "a\0"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a segment"):
        Segment.create(1, name)
    with pytest.raises(ValueError, match="cannot name a segment"):
        Segment.attach(name)


def test_a_taken_name_and_a_missing_one(segment_name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no segment"):
        Segment.attach(segment_name)
    assert not exists(segment_name)
    with Segment.create(1, segment_name), pytest.raises(FileExistsError, match="exists already"):
        Segment.create(1, segment_name)


def test_room_is_checked_first(segment_name: str) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    with pytest.raises(kvshm.ShmFullError, match=r"--shm-size.*Kubernetes") as caught:
        Segment.create(1 << 60, segment_name)
    error = caught.value
    assert (error.errno, error.requested) == (errno.ENOSPC, 1 << 60)
    assert error.free <= free + (1 << 30)
    for number in (1 << 60, error.free, error.total):
        assert f"{number} " in str(error)


@pytest.mark.parametrize("name", list(DTYPES))
def test_arrays_are_plain_and_stay_when_all_else_is_gone(name: str) -> None:
    segment = Segment.create(1680)
    array = segment.array((3, 5, 7), name)
    assert type(array) is np.ndarray
    assert array.dtype == DTYPES[name]
    assert array.flags.c_contiguous
    assert array.flags.writeable
    content = fill(array)
    view = array[1:, ::-1].T
    expected = view.copy()
    segment_name = segment.name
    segment.unlink()
    del segment, array
    gc.collect()
    assert view.tobytes() == expected.tobytes()
    assert content
    assert num_mappings(segment_name) == 1
    del view
    assert num_mappings(segment_name) == 0


def test_strides_and_offset_count_elements() -> None:
    with Segment.create(200) as segment:
        whole = segment.array((100,), "int16")
        whole[:] = np.arange(100)
        padded = segment.array((3, 5), "int16", stride=(7, 1), offset=11)
        assert padded.tolist() == [[11 + 7 * row + column for column in range(5)] for row in range(3)]


def test_numbers_of_numpy_are_numbers() -> None:
    with Segment.create(np.int64(30)) as segment:
        array = segment.array([np.uint8(3), 2], "int16", [2, 1], np.int32(4))
        assert array.shape == (3, 2)
        assert segment.array(15, "int16").shape == (15,)
    with pytest.raises(TypeError):
        Segment.create(3.0)  # type: ignore[arg-type]


def test_the_name_goes_with_the_last_array_or_handle() -> None:
    segment = Segment.create(10)
    name = segment.name
    array = segment.array((10,), "uint8")
    del segment
    assert exists(name)
    other = Segment.attach(name)
    del array
    assert exists(name)
    del other
    assert not exists(name)
    assert num_mappings(name) == 0


def test_leaving_the_context_unlinks_and_arrays_live_on() -> None:
    with Segment.create(10) as segment:
        array = segment.array((10,), "uint8")
        array[3] = 5
    assert not exists(segment.name)
    assert array[3] == 5


def test_only_the_handle_that_created_unlinks() -> None:
    with Segment.create(10) as segment:
        with Segment.attach(segment.name) as attached:
            attached.unlink()
        assert exists(segment.name)


def test_a_name_taken_by_another_segment_is_left_alone(segment_name: str) -> None:
    first = Segment.create(10, segment_name)
    os.unlink(f"/dev/shm{segment_name}")
    with Segment.create(20, segment_name) as second:
        first.unlink()
        del first
        assert Segment.attach(segment_name).nbytes == second.nbytes == 20


def test_the_same_name_again_is_another_segment(segment_name: str) -> None:
    with Segment.create(PAGE, segment_name) as old:
        old_array = old.array((1,), "uint8")
        old_array[0] = 1
    with Segment.create(PAGE, segment_name) as new:
        new.array((1,), "uint8")[0] = 2
        attached = Segment.attach(segment_name)
        assert attached.address == new.address != old.address
        assert (attached.array((1,), "uint8")[0], old_array[0]) == (2, 1)


def test_deleted_behind_our_back(segment_name: str) -> None:
    segment = Segment.create(10, segment_name)
    array = segment.array((10,), "uint8")
    os.unlink(f"/dev/shm{segment_name}")
    array[0] = 9
    with pytest.raises(FileNotFoundError, match="login manager removed it at logout"):
        Segment.attach(segment_name)
    segment.unlink()
    assert array[0] == 9


def test_readonly_arrays_cannot_be_written() -> None:
    with Segment.create(10) as segment:
        reader = Segment.attach(segment.name, readonly=True)
        array = reader.array((10,), "uint8")
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        segment.array((10,), "uint8")[0] = 4
        assert array[0] == 4
        assert reader.address != segment.address
        del reader, array
        assert exists(segment.name), "a reader of this process took the creator's name with it"


def test_a_half_made_segment_is_not_attached(segment_name: str) -> None:
    fd = os.open(f"/dev/shm{segment_name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        with pytest.raises(TimeoutError, match=r"was not finished within 0.01 s"):
            Segment.attach(segment_name, timeout_s=0.01)
        os.ftruncate(fd, 10)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="still making it or died"):
            Segment.attach(segment_name, timeout_s=0.01)
        threading.Timer(0.02, fcntl.flock, (fd, fcntl.LOCK_SH)).start()
        assert Segment.attach(segment_name, timeout_s=30).nbytes == 10
    finally:
        os.close(fd)
        os.unlink(f"/dev/shm{segment_name}")


def test_other_kinds_of_files_are_refused(segment_name: str) -> None:
    path = f"/dev/shm{segment_name}"
    os.mkfifo(path)
    try:
        with pytest.raises(ValueError, match="no segment of shared memory but another kind of file"):
            Segment.attach(segment_name)
    finally:
        os.unlink(path)
    os.symlink("/etc/passwd", path)
    try:
        with pytest.raises(OSError, match="symbolic links"):
            Segment.attach(segment_name)
    finally:
        os.unlink(path)


def test_segments_hold_no_descriptors() -> None:
    before = num_descriptors()
    segments = [Segment.create(1) for _ in range(7)]
    attached = [Segment.attach(segment.name, readonly=True) for segment in segments]
    assert num_descriptors() == before
    del segments, attached
    assert num_descriptors() == before


def test_refused_attachments_leak_nothing(segment_name: str) -> None:
    with Segment.create(10, segment_name) as segment:
        before = num_descriptors()
        for _ in range(3):
            with pytest.raises(ValueError, match="has 10 bytes"):
                Segment.attach(segment_name, 11)
            with pytest.raises(FileNotFoundError):
                Segment.attach(segment_name + "x")
        assert num_descriptors() == before
        assert num_mappings(segment_name) == 1
        assert segment.nbytes == 10


def test_list_and_sweep_leave_live_segments() -> None:
    with Segment.create(10) as segment:
        assert kvshm.SegmentInfo(segment.name, 10, in_use=True) in kvshm.list_segments()
        assert segment.name not in kvshm.sweep()
        array: Any = segment.array((10,), "uint8")
        del segment
        gc.collect()
        assert array is not None


def test_repr_says_what_it_is() -> None:
    with Segment.create(13) as segment:
        assert repr(segment) == f"Segment(name={segment.name!r}, nbytes=13, is_owner=True)"


def test_huge_pages_are_had_or_missed_without_harm() -> None:
    nbytes = 5 << 20
    segment = Segment.create(nbytes, hugepages="try")
    assert 0 <= segment.huge_nbytes <= nbytes
    if pages.huge_page_size():
        assert segment.address % pages.huge_page_size() == 0
    content = fill(segment.array((nbytes,), "uint8"))
    assert Segment.attach(segment.name, readonly=True).array((nbytes,), "uint8").tobytes() == content
    try:
        required = Segment.create(nbytes, hugepages="require")
    except OSError as error:
        assert "huge pages were required" in str(error)  # noqa: PT017  either may happen
    else:
        assert required.huge_nbytes >= nbytes // pages.huge_page_size() * pages.huge_page_size()
    assert not any(layer.any() for layer in kvshm.empty_many([(PAGE,)] * 3, "uint8", hugepages="try"))


def test_huge_pages_that_are_required_and_refused(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(pages, "make_huge", refuse)
    monkeypatch.setattr(pages, "num_huge_bytes", lambda *_: 0)
    monkeypatch.setattr(shm, "HUGE_PAGE_SIZE", 1 << 21)
    assert Segment.create(5 << 20, hugepages="try").huge_nbytes == 0
    with pytest.raises(OSError, match=f"required for {4 << 20} bytes but the kernel gave them for 0") as caught:
        Segment.create(5 << 20, segment_name, hugepages="require")
    assert caught.value.errno == errno.EOPNOTSUPP
    assert not exists(segment_name)


def test_threads_create_attach_and_drop_at_once() -> None:
    errors: list[BaseException] = []
    shared = Segment.create(PAGE)
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            start.wait()
            for index in range(60):
                with Segment.create(1 + seed * 7 + index) as own:
                    array = Segment.attach(own.name).array((1,), "uint8")
                    del own
                    array[0] = seed
                    assert array[0] == seed
                other = Segment.attach(shared.name).array((PAGE,), "uint8")
                other[seed] = index
                assert other[seed] == index
                del other
                if index % 20 == seed:
                    gc.collect()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert num_mappings(shared.name) == 1


def test_numbers_that_no_segment_can_have_are_refused(segment_name: str) -> None:
    for nbytes, mode in ((2**63, 0o600), (2**100, 0o600), (7, 2**40), (7, -1)):
        with pytest.raises(ValueError, match="must be at most"):
            Segment.create(nbytes, segment_name, mode, reserve=False)
    with Segment.create(7, segment_name), pytest.raises(TypeError):
        Segment.attach(segment_name, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [5, None, b"/kvshm_x", ["x"]])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(TypeError, match="the name of a segment must be a string"):
        Segment.attach(name)
    if name is not None:  # then it is a random one
        with pytest.raises(TypeError, match="the name of a segment must be a string"):
            Segment.create(7, name)
        with pytest.raises(TypeError, match="the name of a segment must be a string"):
            kvshm.empty((7,), "uint8", name=name)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1, "1", None])
def test_times_that_cannot_be_waited_for(segment_name: str, timeout_s: Any) -> None:
    with Segment.create(7, segment_name), pytest.raises(ValueError, match="timeout_s is"):
        Segment.attach(segment_name, timeout_s=timeout_s)


def test_a_directory_is_no_segment(segment_name: str) -> None:
    os.mkdir(f"/dev/shm{segment_name}")
    try:
        with pytest.raises(ValueError, match="another kind of file"):
            Segment.attach(segment_name)
    finally:
        os.rmdir(f"/dev/shm{segment_name}")


def test_names_that_cannot_be_listed_stop_no_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise PermissionError("not allowed to list")

    monkeypatch.setattr(mappings, "sweep", refused)
    monkeypatch.setattr(mappings._table, "swept", False)
    assert kvshm.zeros((3,), "uint8").tolist() == [0, 0, 0]


def test_a_segment_that_is_unlinked_before_it_is_locked_is_not_attached(
    monkeypatch: pytest.MonkeyPatch, segment_name: str
) -> None:
    """A sweeper took it for an orphan; whoever looks for the name now finds none, or a younger one."""
    fd, name, _ = create_object(4096, segment_name)
    real = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if os.path.exists(f"/dev/shm{name}"):
            os.unlink(f"/dev/shm{name}")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileNotFoundError, match="there is no segment"):
        Segment.attach(name)
    os.close(fd)
