"""An engine's registration: kept alive by its client's link, and made anew whenever the server is another.

Knows neither the engine's face nor its client, so that both can be dropped by whoever holds them.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from kvshm import wire
from kvshm.client import kvshm_server, lmcache_server
from kvshm.client.connections import (
    CacheServerError,
    ClientClosedError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from kvshm.client.link import ServerLink
from kvshm.client.operations import KvshmServer, ServerInfo
from kvshm.client.requests import NotRegisteredError, Requests
from kvshm.client.sessions import Copies, EngineCache, Session
from kvshm.protocol import EngineIdentity

__all__ = ["Registration", "TransferMode"]

TransferMode = Literal["lmcache_driven", "engine_driven"]

_SERVER_ERRORS = (CacheServerError, ServerTimeoutError, ServerUnreachableError, wire.WireError)
_T = TypeVar("_T")

_logger = logging.getLogger("kvshm")


class Registration:
    """One engine, registered with whatever server is there.

    Args:
        null_block_id: The block that stands for no data; None: there is none; "server": what the server says.
        raises: Raise what goes wrong with the server instead of missing.
    """

    def __init__(
        self,
        link: ServerLink,
        cache: EngineCache,
        identity: EngineIdentity,
        transfer_mode: TransferMode,
        null_block_id: int | Literal["server"] | None,
        raises: bool,
    ) -> None:
        # 63 random bits: process ids repeat from container to container.
        self.instance_id = secrets.randbits(63)
        self.identity = identity
        self._link = link
        self._cache = cache
        self._transfer_mode = transfer_mode
        self._null_block_id = null_block_id
        self._raises = raises
        self._requests = Requests(link.connections, self.instance_id)
        self._copies = Copies(self.instance_id)
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._generation = 0  # sessions so far
        self._server: ServerInfo | None = None  # that it is registered with
        self._is_over = False  # unregistered for good

    def __repr__(self) -> str:
        who = self.identity
        state = "registered" if self.is_registered else "over" if self._is_over else "without a server"
        return (
            f"instance {self.instance_id}, model {who.model_name!r}, worker {who.worker_id} of {who.world_size}, "
            f"{self._transfer_mode}, {state}"
        )

    @property
    def server(self) -> ServerInfo | None:
        """The server that it was registered with last; None: none takes it."""
        return self._server

    @property
    def session(self) -> Session:
        """The latest session, also where the server is away."""
        assert self._session is not None
        return self._session

    @property
    def is_registered(self) -> bool:
        """Whether the server knows this engine, as far as is known here."""
        return self._server is not None and self._link.is_up

    def register_with(self, info: ServerInfo) -> None:
        """Register, unless it is over, and be kept so by the link.

        Raises:
            ValueError: The cache does not fit the server's chunks.
            CacheServerError: The server does not take it; or its chunks have another size than before.
            ServerTimeoutError, ServerUnreachableError: It is not there.
        """
        with self._lock:
            if self._is_over:
                return
            self._server = None
            known = self._session
            if known is not None and info.chunk_size != known.info.chunk_size:
                raise CacheServerError(
                    f"the cache server came back with chunks of {info.chunk_size} tokens, but this engine is "
                    f"registered for chunks of {known.info.chunk_size}; make a new client and register anew"
                )
            session = self._make_session(info)
            session.register()
            # From the first ping on, silence is judged by the shorter limit, also if this process dies right now.
            self._link.ping(self.instance_id)
            self._session = session
            self._generation += 1
            self._server = info
            if known is not None:
                known.close()
            self._link.add(self)

    def attempt(self, work: Callable[[Session], _T], failed: _T) -> _T:
        """Do something with the server; ``failed`` where that is not possible.

        Registers again where the server has forgotten this engine.

        Raises:
            CacheServerError, ServerTimeoutError, ServerUnreachableError, WireError: With ``raises``, why it is not.
        """
        if self._link.is_inherited:
            raise RuntimeError(
                f"engine {self.instance_id} was registered by the parent of this process; make a client and register "
                f"here"
            )
        if self._is_over:
            return failed
        if not self._link.is_up:
            if self._raises:
                raise ServerUnreachableError(f"the cache server is away: {self._link.last_error}")
            return failed
        generation = self._generation
        try:
            try:
                return work(self.session)
            except NotRegisteredError:
                with self._lock:
                    if self._has_left():
                        return failed
                    if self._generation == generation:  # else another thread has registered again
                        self._link.register_again(self, self._link.info(again=True))
                return work(self.session)
        except OSError as error:  # it did not answer, or is not there
            self._link.mark_down(error)
            if self._raises:
                raise
        except (CacheServerError, wire.WireError) as error:
            self._link.last_error = str(error)
            _logger.info("kvshm: a miss: %s", self._link.last_error)
            if self._raises:
                raise
        except ClientClosedError:  # meanwhile
            if not self._is_over:
                raise
        return failed

    def unregister(self) -> None:
        """Let the server forget this engine. Idempotent."""
        if self._link.is_inherited:
            return
        self._is_over = True
        with self._lock:
            self._link.remove(self)
            # A server that was too slow is marked down, and may still touch this engine's memory: it is asked all the
            # same. One that is gone for good is not waited for.
            must_ask = (self._server is not None and self._link.is_up) or self._requests.has_late
            self._server = None
            try:
                if must_ask:
                    self._leave(None)
            except ClientClosedError:
                _logger.info("kvshm: instance %d was not unregistered: its client is closed", self.instance_id)
            except _SERVER_ERRORS as error:
                self._link.last_error = str(error)
                if self._raises:
                    raise
            finally:
                self._close()

    def say_farewell(self, timeout_s: float) -> None:
        """Unregister, if that can be done in this time, before the connections are closed."""
        self._is_over = True
        with self._lock:
            if self._server is not None and timeout_s > 0:
                self._server = None
                try:
                    self._leave(timeout_s)
                except _SERVER_ERRORS as error:
                    _logger.info("kvshm: instance %d was not unregistered: %s", self.instance_id, str(error))
            self._close()
        self._requests.disconnect()

    def settle(self) -> None:
        """Catch up on what could not be said before. Raises what requests raise."""
        if self._session is not None:
            self._session.settle()

    def unsettled_block_ids(self) -> list[set[int]]:
        """Per kernel group, blocks of late requests that the server may still be reading or writing."""
        if self._requests.has_late and self._link.is_up:
            try:
                self.settle()
            except (*_SERVER_ERRORS, ClientClosedError) as error:
                _logger.info("kvshm: late requests cannot be asked for: %s", str(error))
        return self._requests.unsettled_block_ids(len(self.session.manager.kernel_groups))

    def _has_left(self) -> bool:
        return self._is_over

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._copies.close()

    def _leave(self, timeout_s: float | None) -> None:
        if self.session.unregister(timeout_s):
            self._requests.settle_all()

    def _make_session(self, info: ServerInfo) -> Session:
        is_engine_driven = self._transfer_mode == "engine_driven"
        if isinstance(info, KvshmServer):
            null_block_id = info.null_block_id if self._null_block_id == "server" else self._null_block_id
            of_kvshm = kvshm_server.EngineDriven if is_engine_driven else kvshm_server.ServerDriven
            return of_kvshm(
                self._link.connections, self._requests, info, self._cache, self.identity, null_block_id, self._copies
            )
        null_block_id = 0 if self._null_block_id == "server" else self._null_block_id
        of_lmcache = lmcache_server.EngineDriven if is_engine_driven else lmcache_server.ServerDriven
        return of_lmcache(self._link, self._requests, info, self._cache, self.identity, null_block_id, self._copies)
