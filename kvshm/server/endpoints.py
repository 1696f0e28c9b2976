"""Where a server listens: loopback addresses and socket files, unless the operator says otherwise."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat

import zmq

__all__ = ["bind", "checked_endpoint", "remove_socket_file"]

_logger = logging.getLogger("kvshm")


def checked_endpoint(endpoint: str, allow_remote: bool) -> str:
    """An endpoint that a server may bind.

    Raises:
        ValueError: It is invalid, or other hosts could reach it and ``allow_remote`` is false.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        if address.startswith("@"):
            raise ValueError(
                f"endpoint {endpoint!r} is an abstract address, which any user of this host may connect to; give the "
                f"path of a file, such as ipc:///run/user/{os.getuid()}/kvshm.sock"
            )
        return endpoint
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"invalid endpoint {endpoint!r}: expected tcp://127.0.0.1:PORT or ipc://PATH")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"endpoint {endpoint!r} needs brackets: tcp://[{host}]:{port}")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        if not allow_remote:
            raise ValueError(
                f"endpoint {endpoint!r} is not a loopback address, and whoever reaches it can read and change the "
                f"cache; give allow_remote=True (kvshm serve --allow-remote) if that is meant"
            )
        _logger.warning("kvshm server: %s may be reached from other hosts; there is no authentication", endpoint)
    return f"tcp://{host}:{port}"


def bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, and give the address with the port really taken.

    Raises:
        OSError: It is taken, or no address of this host.
    """
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, f"{path} is there and no socket, and listening would remove it; give another path")
    if path != endpoint and _is_served(path):
        raise OSError(errno.EADDRINUSE, f"another server listens on {endpoint}; stop it or give another path")
    if "[" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            error.errno, f"cannot listen on {endpoint}: {error.strerror}; give another port or path"
        ) from None
    if path != endpoint:
        os.chmod(path, 0o600)
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def _is_served(path: str) -> bool:
    """Whether somebody accepts connections there. ZeroMQ would take the path over without a word."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def remove_socket_file(endpoint: str) -> None:
    """Remove what an ``ipc://`` endpoint left in the file system."""
    path = endpoint.removeprefix("ipc://")
    if path != endpoint:
        with contextlib.suppress(OSError):
            os.unlink(path)
