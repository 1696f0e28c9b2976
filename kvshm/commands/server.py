"""``kvshm serve`` and ``kvshm status``: run a cache server, and ask one how it is."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from kvshm.server.settings import DEFAULTS
from kvshm.units import format_nbytes, parse_nbytes

__all__ = ["add_serve_arguments", "add_status_arguments", "run_serve", "run_status"]

DEFAULT_PORT = 5555


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``kvshm serve`` takes."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port on 127.0.0.1; 0: any free one (%(default)s)"
    )
    where.add_argument("--endpoint", metavar="URL", help="tcp://HOST:PORT or ipc://PATH instead")
    parser.add_argument("--allow-remote", action="store_true", help="let --endpoint be reached from other hosts")
    parser.add_argument(
        "--capacity",
        type=_nbytes,
        default=DEFAULTS.capacity,
        metavar="SIZE",
        help="size of the cache, such as 4GiB (1GiB)",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=DEFAULTS.chunk_size, metavar="TOKENS", help="tokens of a chunk (%(default)s)"
    )
    parser.add_argument(
        "--null-block-id",
        type=int,
        default=DEFAULTS.null_block_id,
        metavar="ID",
        help="the block that stands for no data (%(default)s)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that copy (2 to 4, by the processors)")
    parser.add_argument("--shm-name", metavar="NAME", help="name of the pool's segment (a random one)")
    parser.add_argument("--http-port", type=int, metavar="PORT", help="serve /status and /metrics there; 0: any")
    parser.add_argument(
        "--reap-after",
        type=float,
        default=DEFAULTS.reap_after_s,
        metavar="S",
        help="drop an engine that fell silent (%(default)s)",
    )
    parser.add_argument(
        "--grace", type=float, default=DEFAULTS.grace_s, metavar="S", help="drop one that never pinged (%(default)s)"
    )
    parser.add_argument(
        "--pin-ttl",
        type=float,
        default=DEFAULTS.pin_ttl_s,
        metavar="S",
        help="how long a lookup pins chunks (%(default)s)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="gather twice and compare, to find engines that write meanwhile"
    )
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end also when stdin ends: give it a pipe, and the server ends with whoever holds the other end",
    )
    parser.add_argument("--json", action="store_true", help="print where it listens as JSON")
    parser.add_argument("--verbose", action="store_true", help="log what is refused, and why")


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or, if that is wanted, the end of stdin."""
    # Each command imports its half when it runs: a server is ready that much sooner.
    from kvshm.server.cache_server import CacheServer  # noqa: PLC0415

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO if args.verbose else logging.WARNING
    )
    if args.allow_remote and args.endpoint is None:
        print("kvshm serve: --allow-remote needs --endpoint; --port is always on 127.0.0.1", file=sys.stderr)
        return 2
    if args.until_stdin_closes and sys.stdin is None:
        print("kvshm serve: --until-stdin-closes needs an open stdin; give it a pipe", file=sys.stderr)
        return 2
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        server = CacheServer(
            args.endpoint or f"tcp://127.0.0.1:{args.port}",
            args.capacity,
            args.chunk_size,
            args.null_block_id,
            allow_remote=args.allow_remote,
            num_workers=args.workers,
            pool_name=args.shm_name,
            http_port=args.http_port,
            reap_after_s=args.reap_after,
            grace_s=args.grace,
            pin_ttl_s=args.pin_ttl,
            verify=args.verify,
        )
    except ValueError as error:
        print(f"kvshm serve: {error}", file=sys.stderr)
        return 2
    try:
        server.start()
    except (OSError, ValueError) as error:
        print(f"kvshm serve: {error.args[-1]}", file=sys.stderr)
        return 1
    try:
        where = {"endpoint": server.endpoint, "http_url": server.http_url, "capacity": args.capacity}
        if args.json:
            print(json.dumps(where), flush=True)
        else:
            print(f"kvshm serve: {format_nbytes(args.capacity)} at {server.endpoint}", flush=True)
            if server.http_url is not None:
                print(f"kvshm serve: HTTP at {server.http_url}", flush=True)
        if args.until_stdin_closes:
            threading.Thread(target=_await_end_of_stdin, args=(stopping,), name="kvshm-stdin", daemon=True).start()
        stopping.wait()
    finally:
        server.close()
    return 0


def _await_end_of_stdin(stopping: threading.Event) -> None:
    """Stop once nobody holds the other end of stdin. What comes from there is dropped."""
    # Not sys.stdin.read: a thread that waits in there holds a lock that the interpreter takes when it ends.
    with contextlib.suppress(OSError):  # of a socket or terminal whose other end has gone
        while os.read(sys.stdin.fileno(), 4096):
            pass
    stopping.set()


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``kvshm status`` takes."""
    parser.add_argument("url", nargs="?", default=f"tcp://127.0.0.1:{DEFAULT_PORT}", help="the server (%(default)s)")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="how long to wait (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_status(args: argparse.Namespace) -> int:
    """Print a server's status."""
    from kvshm.client.cache_client import (  # noqa: PLC0415
        CacheClient,
        CacheServerError,
        ServerTimeoutError,
        ServerUnreachableError,
    )
    from kvshm.client.operations import KvshmServer  # noqa: PLC0415

    try:
        with CacheClient(args.url, timeout_s=args.timeout, connect_timeout_s=args.timeout) as client:
            if not isinstance(client.server_info(), KvshmServer):
                print(f"kvshm status: {args.url} is a real LMCache server; ask its HTTP /status", file=sys.stderr)
                return 1
            status = client.status()
    except (CacheServerError, ServerTimeoutError, ServerUnreachableError, ValueError) as error:
        print(f"kvshm status: {error}", file=sys.stderr)
        return 1
    print(json.dumps(status) if args.json else _status_text(status))
    return 0


def _status_text(status: dict[str, Any]) -> str:
    pool, objects, counters = status["pool"], status["objects"], status["counters"]
    looked_up = counters["lookup_tokens"]
    rate = f"{counters['hit_tokens'] / looked_up:.1%} of {looked_up} tokens" if looked_up else "nothing looked up yet"
    lines = [
        (
            f"kvshm {status['version']} at {status['endpoint']}, up {status['uptime_s']:.0f} s, "
            f"chunks of {status['chunk_size']} tokens"
        ),
        (
            f"pool     {format_nbytes(pool['used_nbytes'])} of {format_nbytes(pool['nbytes'])} used, "
            f"{format_nbytes(pool['reserved_nbytes'])} reserved, segment {pool['name']}"
        ),
        (
            f"objects  {objects['cached']} cached, {objects['pinned']} pinned, {objects['unfinished']} unfinished, "
            f"{objects['evicted']} evicted so far"
        ),
        f"hits     {rate}",
        f"engines  {len(status['instances'])}",
    ]
    lines += [
        f"  {engine['instance_id']}  {engine['model_name']}  {engine['transfer_mode']}  "
        f"silent for {engine['silent_s']:.1f} s"
        for engine in status["instances"]
    ]
    if status["last_error"]:
        lines.append(f"last error  {status['last_error']}")
    return "\n".join(lines)
