"""Copy threads: every job once, errors come out, nobody waits for helpers that are busy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvshm import threads
from kvshm.threads import default_num_threads, run_jobs

MANY = 10**9


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSHM_THREADS", raising=False)
    monkeypatch.delenv("KVSHM_THREADS_MIN_NBYTES", raising=False)


def test_small_transfers_stay_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_THREADS", "3")
    sizes = (0, 1, 2 * threads.MIN_NBYTES - 1, 2 * threads.MIN_NBYTES, 3 * threads.MIN_NBYTES, MANY)
    assert [default_num_threads(nbytes) for nbytes in sizes] == [1, 1, 1, 2, 3, 3]
    monkeypatch.setenv("KVSHM_THREADS_MIN_NBYTES", "100")
    assert [default_num_threads(nbytes) for nbytes in (199, 200, 300)] == [1, 2, 3]


def test_the_default_is_the_cpus_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert default_num_threads(MANY) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert default_num_threads(MANY) == 7


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "٣"])
def test_settings_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVSHM_THREADS", text)
    with pytest.raises(ValueError, match=r"KVSHM_THREADS is .*whole number from 1 on"):
        default_num_threads(MANY)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_job_runs_once(num_threads: int) -> None:
    done: list[int] = []
    run_jobs((partial(done.append, number) for number in range(97)), num_threads)
    assert sorted(done) == list(range(97))
    if num_threads == 1:
        assert done == list(range(97))


def test_jobs_run_side_by_side() -> None:
    meet = threading.Barrier(3, timeout=60)  # no job ends before three run
    run_jobs(iter([meet.wait] * 3), 3)  # type: ignore[list-item]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_comes_out_and_ends_the_rest(num_threads: int) -> None:
    done: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(1000):
            yield partial(fail if number == 5 else done.append, number)

    with pytest.raises(ZeroDivisionError, match="number 5"):
        run_jobs(jobs(), num_threads)
    assert len(done) < 999


def fail(number: int) -> None:
    raise ZeroDivisionError(f"number {number}")


def test_an_error_of_a_helper_comes_out() -> None:
    caller = threading.get_ident()
    helper_failed = threading.Event()

    def job() -> None:
        if threading.get_ident() == caller:
            assert helper_failed.wait(60)
        else:
            helper_failed.set()
            raise ZeroDivisionError("in a helper")

    with pytest.raises(ZeroDivisionError, match="in a helper"):
        run_jobs(iter([job] * 2), 2)


def test_jobs_may_fail_while_they_are_made() -> None:
    def jobs() -> Iterator[Callable[[], None]]:
        yield lambda: None
        raise ZeroDivisionError("no more jobs")

    with pytest.raises(ZeroDivisionError, match="no more jobs"):
        run_jobs(jobs(), 3)


def test_nobody_waits_for_helpers_that_are_busy_elsewhere() -> None:
    size = max(threads.MOST_THREADS, threads._num_cpus())
    busy, release = threading.Barrier(size + 1, timeout=60), threading.Event()

    def hold() -> None:
        busy.wait()
        assert release.wait(60)

    pool = threads._pool(os.getpid())
    held = [pool.submit(hold) for _ in range(size)]
    busy.wait()
    done: list[int] = []
    run_jobs((partial(done.append, number) for number in range(9)), size + 1)
    assert done == list(range(9)), "the caller ran them all"
    release.set()
    for future in held:
        future.result()


def test_several_callers_share_the_threads() -> None:
    sums = [0] * 8

    def call(caller: int) -> None:
        lock = threading.Lock()

        def add(number: int) -> None:
            with lock:
                sums[caller] += number

        run_jobs((partial(add, number) for number in range(200)), 3)

    with ThreadPoolExecutor(len(sums)) as callers:
        list(callers.map(call, range(len(sums))))
    assert sums == [sum(range(200))] * len(sums)


def test_without_new_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()  # takes no work any more, as when the interpreter shuts down
    monkeypatch.setattr(threads, "_pool", lambda pid: pool)
    done: list[int] = []
    run_jobs((partial(done.append, number) for number in range(5)), 4)
    assert done == list(range(5))


def test_transfers_of_all_sizes_share_their_threads() -> None:
    def jobs(count: int) -> Iterator[threads.Job]:
        return iter([lambda: None] * count)

    for count in range(2, 9):
        threads.run_jobs(jobs(4 * count), count)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("kvshm-copy")]
    assert len(named) <= threads.MOST_THREADS
