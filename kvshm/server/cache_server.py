"""The cache server: a socket, a loop, and threads that copy.

One thread, the loop, reads requests, owns the state (:mod:`kvshm.server.service`) and writes replies; it never copies
a chunk and never maps or unmaps memory, so a ping is answered while gigabytes move. Every request with a readable uid
gets a reply, also when it fails: then its failure value and one more frame that says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, TypeVar

import zmq

from kvshm import wire
from kvshm._version import __version__
from kvshm.protocol import (
    NO_RESULT,
    FailureCode,
    Operation,
    ProtocolError,
    client_of,
    is_uid_frame,
    operation_of,
    parse_payload,
)
from kvshm.server.endpoints import bind, checked_endpoint, remove_socket_file
from kvshm.server.jobs import Done, JobPool
from kvshm.server.registrations import EngineDriven, NotRegisteredError, Registration, Registrations
from kvshm.server.service import CacheService
from kvshm.server.settings import DEFAULTS, Settings
from kvshm.server.state import DEFERRED, Refused, ServerState
from kvshm.shm.liveness import Liveness
from kvshm.store.chunk_store import ChunkStore
from kvshm.store.pool_memory import PoolMemory
from kvshm.store.slabs import SlabAllocator

__all__ = ["CacheServer"]

_MAX_FRAME_NBYTES = 64 << 20  # a million token ids take 9 MB
_TICK_S = 0.5
_IDLE_MS = 250
_MAX_LAST_REQUESTS = 1000
_WAKER_ENDPOINT = "inproc://loop"
_NIL = wire.pack(None)

_logger = logging.getLogger("kvshm")
_T = TypeVar("_T")


class CacheServer:
    """A cache server on this host; ``kvshm serve`` runs one.

    Args:
        endpoint: ``tcp://`` on a loopback address (port 0: any free one) or ``ipc://``.
        capacity: Bytes of chunk objects. They lie in one segment, whose pages are reserved in the background.
        chunk_size: Tokens of a chunk.
        null_block_id: The block that stands for no data; None: there is none.
        allow_remote: Bind an address that other hosts reach. There is no authentication.
        num_workers: Threads that copy; None: 2 to 4, by the number of processors.
        pool_name: Name of the pool's segment; None: a random one.
        http_port: Serve ``/status``, ``/metrics`` and ``/cache/checksums`` there; 0: any.
        reap_after_s, grace_s: Silence after which an engine is dropped, if it ever pinged and if it never did.
        pin_ttl_s: How long a lookup pins what it found.
        prepare_ttl_s: How long slots are lent to an engine of LMCache's that copies by itself; one of kvshm's has them
            as long as it lives.
        verify: Gather every chunk twice and compare: finds engines that write to blocks while they are stored.

    Raises:
        ValueError: An endpoint or a number that makes no sense, or a remote address without ``allow_remote``.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5555",
        capacity: int = DEFAULTS.capacity,
        chunk_size: int = DEFAULTS.chunk_size,
        null_block_id: int | None = DEFAULTS.null_block_id,
        *,
        allow_remote: bool = False,
        num_workers: int | None = None,
        pool_name: str | None = None,
        http_port: int | None = None,
        reap_after_s: float = DEFAULTS.reap_after_s,
        grace_s: float = DEFAULTS.grace_s,
        pin_ttl_s: float = DEFAULTS.pin_ttl_s,
        prepare_ttl_s: float = DEFAULTS.prepare_ttl_s,
        verify: bool = DEFAULTS.verify,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; at least 1 thread must copy")
        if http_port is not None and not 0 <= http_port < 1 << 16:
            raise ValueError(f"http_port is {http_port}; a port is a number from 0 (any free one) to 65535")
        self._wanted_endpoint = checked_endpoint(endpoint, allow_remote)
        self._settings = Settings(
            capacity, chunk_size, null_block_id, reap_after_s, grace_s, pin_ttl_s, prepare_ttl_s, verify
        )
        self._num_workers = num_workers or max(2, min(4, os.cpu_count() or 1))
        self._pool_name = pool_name
        self._http_port = http_port
        self._http: Any = None
        self._endpoint: str | None = None
        self._stop = threading.Event()
        self._loop: threading.Thread | None = None
        self._waker_lock = threading.Lock()
        self._started_at = time.monotonic()
        self._messages = {"requests": 0, "malformed": 0, "failed": 0}

    def __repr__(self) -> str:
        where = "not running" if self._endpoint is None else f"at {self._endpoint}"
        return f"CacheServer({self._settings.capacity} bytes, chunks of {self._settings.chunk_size} tokens, {where})"

    @property
    def endpoint(self) -> str:
        """Where the server really listens.

        Raises:
            RuntimeError: It is not running.
        """
        if self._endpoint is None:
            raise RuntimeError("the server is not running; call start()")
        return self._endpoint

    @property
    def http_url(self) -> str | None:
        """Where HTTP is served, if it is."""
        return None if self._http is None else str(self._http.url)

    def start(self) -> CacheServer:
        """Bind, make the pool, and serve in a thread of this process.

        Raises:
            OSError: The endpoint is taken, or the shared memory has no room for the capacity.
            RuntimeError: It was started before.
        """
        if self._loop is not None:
            raise RuntimeError("the server was started before; make a new one")
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.term)
            self._socket = self._context.socket(zmq.ROUTER)
            undo.callback(self._socket.close, 0)
            self._socket.setsockopt(zmq.LINGER, 500)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_NBYTES)
            self._socket.setsockopt(zmq.RCVTIMEO, _IDLE_MS)
            # A client that connects again under its routing id is not turned away while the broken connection lingers.
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.bind(_WAKER_ENDPOINT)
            self._waker = self._context.socket(zmq.DEALER)
            undo.callback(self._waker.close, 0)
            # Random, so that no peer can take its place under its routing id.
            self._waker_id = secrets.token_bytes(16)
            self._waker.setsockopt(zmq.ROUTING_ID, self._waker_id)
            self._waker.connect(_WAKER_ENDPOINT)
            self._endpoint = bind(self._socket, self._wanted_endpoint)
            undo.callback(self._forget_endpoint)
            self._pool = PoolMemory(SlabAllocator(self._settings.capacity).nbytes, self._pool_name)
            undo.callback(self._pool.close)
            self._liveness = Liveness()
            undo.callback(self._liveness.close)
            self._jobs = JobPool(self._num_workers, self._wake)
            undo.callback(self._jobs.close)
            self._state = ServerState(
                self._settings, ChunkStore(self._settings.capacity), self._pool, self._jobs.submit
            )
            self._service = CacheService(self._state, self.status, self._liveness)
            if self._http_port is not None:
                from kvshm.server.http import HttpFrontend  # noqa: PLC0415  most servers need none

                self._http = HttpFrontend(self, self._http_port)
                undo.callback(self._http.close)
                self._http.start()
            self._loop = threading.Thread(target=self._serve, name="kvshm-server", daemon=True)
            self._reserving = threading.Thread(target=self._reserve, name="kvshm-reserve", daemon=True)
            undo.pop_all()
        self._loop.start()
        self._reserving.start()
        return self

    def close(self) -> None:
        """Finish running copies, answer them, and leave nothing behind; idempotent."""
        if self._loop is None or self._endpoint is None:
            return
        self._stop.set()
        self._jobs.call(lambda: None)  # wakes the loop
        self._loop.join()
        self._reserving.join()
        if self._http is not None:
            self._http.close()
        self._jobs.close()
        self._waker.close(0)
        self._socket.close()
        self._context.term()
        self._forget_endpoint()
        self._pool.close()
        self._liveness.close()

    def __enter__(self) -> CacheServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(self, function: Callable[[], _T], timeout_s: float = 10.0) -> _T:
        """Run something in the loop, where the state may be read, and return its result. Any thread may call it.

        Raises:
            TimeoutError: The loop did not come to it.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.call(run)
        return future.result(timeout_s)

    @property
    def registrations(self) -> Registrations:
        """The engines. Read in the loop, see :meth:`call`."""
        return self._state.registrations

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Run work in a worker thread and ``done`` with its result in the loop. Called in the loop."""
        self._jobs.submit(work, done)

    def status(self) -> dict[str, Any]:
        """How the server is, as ``kvshm status`` prints it. Called in the loop, see :meth:`call`."""
        state, now = self._state, self._state.clock()
        store = state.objects
        return {
            "version": __version__,
            "epoch": self._service.epoch,
            "endpoint": self._endpoint,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "chunk_size": self._settings.chunk_size,
            "pool": {
                "name": self._pool.name,
                "nbytes": self._pool.nbytes,
                "reserved_nbytes": self._pool.reserved_nbytes,
                "used_nbytes": store.allocator.used_nbytes,
                "busy_nbytes": store.allocator.busy_nbytes,
                "error": self._pool.error,
            },
            "objects": {
                "cached": len(store),
                "pinned": store.num_pinned,
                "unfinished": store.num_unfinished,
                **asdict(store.stats),
            },
            "lookups": {
                "open": len(state.lookups) + len(state.plain_lookups),
                "pins": state.lookups.num_pins + state.plain_lookups.num_pins,
            },
            "jobs": self._jobs.num_unfinished,
            "instances": [self._report(registration, now) for registration in state.registrations],
            "counters": asdict(state.counters),
            "messages": dict(self._messages),
            "last_error": state.last_error,
        }

    def _report(self, registration: Registration, now: float) -> dict[str, Any]:
        stores, retrieves = self._state.loans.counts(registration.instance_id)
        return {
            "instance_id": registration.instance_id,
            "model_name": registration.model[0],
            "world_size": registration.model[1],
            "workers": sorted(registration.workers),
            "transfer_mode": "engine_driven" if isinstance(registration.way, EngineDriven) else "lmcache_driven",
            "silent_s": round(now - registration.last_seen, 3),
            "has_pinged": registration.has_pinged,
            "running_copies": registration.num_running,
            "prepared_stores": stores,
            "prepared_retrieves": retrieves,
            "objects": [layout.meaning.hex() for layout in registration.objects],
        }

    # The loop

    def _serve(self) -> None:
        next_tick = time.monotonic() + _TICK_S
        while not self._stop.is_set():
            self._receive()
            if time.monotonic() >= next_tick:
                self._service.tick()
                next_tick = time.monotonic() + _TICK_S
        self._service.close()
        while self._jobs.num_unfinished:
            self._receive()
        # What has arrived by now is refused rather than dropped; a bounded number, so that peers cannot delay this.
        for _ in range(_MAX_LAST_REQUESTS):
            if not self._socket.poll(0):
                break
            self._receive()

    def _receive(self) -> None:
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return
        try:
            if frames[0] == self._waker_id:
                self._jobs.finish()
            else:
                self._handle(frames)
        except Exception:  # one request must not end the service of all
            _logger.exception("kvshm server: a request of %d frames failed", len(frames))

    def _wake(self) -> None:
        # Finished work comes the same way as requests, so the loop waits in one place and polls nothing.
        with self._waker_lock, contextlib.suppress(zmq.Again):
            self._waker.send(b"", zmq.NOBLOCK)

    def _handle(self, frames: list[bytes]) -> None:
        self._messages["requests"] += 1
        if len(frames) < 3 or not is_uid_frame(frames[1]):
            self._messages["malformed"] += 1  # a reply could not be matched to it
            return
        call = _Call(self._send, frames[:3])
        try:
            call.operation = operation = operation_of(frames[2])
            if self._stop.is_set():
                raise Refused("the server is closing; it serves nothing new")
            result = self._service.operations[operation.name](call, *parse_payload(operation, frames[3:]))
        except ProtocolError as error:
            self._messages["malformed"] += 1
            call.fail(str(error), FailureCode.MALFORMED)
        except NotRegisteredError as error:
            call.fail(str(error), FailureCode.NOT_REGISTERED)
        except (OSError, ValueError) as error:
            call.fail(str(error) or type(error).__name__)
        except Exception as error:  # always a reply
            _logger.exception("kvshm server: %s failed", call.operation.name if call.operation else "a request")
            call.fail(f"the server failed: {error!r}", FailureCode.INTERNAL)
        else:
            if result is not DEFERRED:
                call.answer(result)

    def _send(self, frames: list[bytes], failed: bool) -> None:
        self._messages["failed"] += failed
        # A ROUTER never waits: a peer that does not read its replies, or has gone, loses them.
        self._socket.send_multipart(frames)

    def _reserve(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._pool.reserve_all(self._stop)

    def _forget_endpoint(self) -> None:
        if self._endpoint is not None:
            remove_socket_file(self._endpoint)
        self._endpoint = None


@dataclass(slots=True, eq=False)
class _Call:
    """One request: where its reply goes."""

    send: Callable[[list[bytes], bool], None]
    head: list[bytes]  # the client's address, uid, operation: the reply begins with these, byte by byte
    operation: Operation | None = None

    @property
    def client(self) -> bytes:
        """Whose it is: a client's of kvshm, or else a connection's."""
        return client_of(self.head[0])

    def answer(self, result: Any) -> None:
        """Send the result."""
        self.send(self.head if result is NO_RESULT else [*self.head, wire.pack(result)], False)

    def fail(self, reason: str, code: FailureCode = FailureCode.REFUSED) -> None:
        """Send the operation's failure value and why."""
        operation = self.operation
        failure = NO_RESULT if operation is None else operation.failure
        frames = [*self.head, _NIL if failure is NO_RESULT else wire.pack(failure), wire.pack(reason)]
        if operation is not None and operation.id is None:
            frames.append(wire.pack(code.value))
        self.send(frames, True)
