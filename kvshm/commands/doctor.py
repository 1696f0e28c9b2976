"""``kvshm doctor``: whether this machine is fit for shared caches, and what to do where it is not."""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

import kvshm
from kvshm import wire
from kvshm.shm.capacity import rooms_of
from kvshm.shm.objects import SHM_DIR, object_path
from kvshm.units import format_nbytes

__all__ = ["NEEDS", "Finding", "add_arguments", "examine", "run"]

NEEDS = {"numpy": "1.26", "ml_dtypes": "0.5", "msgpack": "1.0.5", "posix_ipc": "1.1"}  # as in setup.cfg: least versions
_LEAST_PYTHON = (3, 10)
_LEAST_SHM = 1 << 30  # bytes: containers often have 64 MiB, which is less than any real cache
_LEAST_FILES = 256  # a segment takes one descriptor while it is made or attached; sockets and pipes come on top
_CHILD_TIMEOUT_S = 60.0

# What the other process of the page test does: it maps the array that it is told of, adds one, and tells the sum.
_CHILD = """
import sys
from kvshm import wire
array = wire.unpack(sys.stdin.buffer.read()).to_array()
array += 1
print(int(array.sum()))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    state: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvshm doctor``."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings: 0 unless one of them is a failure."""
    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:<4}  {finding.what}: {finding.found}")
            if finding.remedy:
                print(f"      -> {finding.remedy}")
        counts = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warn", "fail")}
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if any(finding.state == "fail" for finding in findings) else 0


def examine() -> list[Finding]:
    """Look at everything. A look that ends with an error is a failure of its own, and the others go on."""
    findings: list[Finding] = []
    for look in _LOOKS:
        try:
            findings += look()
        except Exception as error:
            what = (look.__doc__ or "").splitlines()[0].rstrip(".")
            findings.append(Finding("fail", what, f"{type(error).__name__}: {error}", "see the error"))
    return findings


def _look_at_python() -> Iterator[Finding]:
    """Python and the system."""
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    if sys.version_info < _LEAST_PYTHON:
        yield Finding("fail", "python", found, f"use Python {'.'.join(map(str, _LEAST_PYTHON))} or newer")
    elif platform.system() != "Linux":
        yield Finding("warn", "python", found, "kvshm is tested on Linux only")
    else:
        yield Finding("ok", "python", found)


def _look_at_packages() -> Iterator[Finding]:
    """Packages that kvshm needs, and those of its extras."""
    for name, least in NEEDS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", name, "not installed", f"pip install '{name}>={least}'")
            continue
        if _release(version) < _release(least):
            yield Finding("fail", name, f"{version}, older than {least}", f"pip install -U '{name}>={least}'")
        else:
            yield Finding("ok", name, version)
    try:
        yield Finding("ok", "pyzmq", importlib.metadata.version("pyzmq"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("ok", "pyzmq", "not installed (optional)", "for kvshm serve: pip install 'kvshm[server]'")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _look_at_directory() -> Iterator[Finding]:
    """The file system of shared memory."""
    if not os.path.isdir(SHM_DIR):
        yield Finding("fail", SHM_DIR, "does not exist", f"mount -t tmpfs -o size=50% tmpfs {SHM_DIR}")
        return
    if not os.access(SHM_DIR, os.W_OK | os.X_OK):
        yield Finding("fail", SHM_DIR, f"uid {os.geteuid()} may not write to it", f"chmod 1777 {SHM_DIR}, as root")
        return
    kind = _file_system(SHM_DIR)
    if kind in ("tmpfs", "ramfs"):
        yield Finding("ok", SHM_DIR, f"a {kind}")
    else:
        yield Finding(
            "fail" if kind else "warn",
            SHM_DIR,
            f"of type {kind or 'unknown'}, so that caches may be written to a disk",
            f"mount -t tmpfs -o size=50% tmpfs {SHM_DIR}",
        )


def _file_system(path: str) -> str:
    """The type of the file system at a mount point or below it; empty if it cannot be told."""
    best, kind = "", ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, after = line.partition(" - ")
            mount = fields.split()[4]
            # Later lines are mounted over earlier ones.
            if (path == mount or path.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
                best, kind = mount, after.split()[0]
    return kind


def _look_at_room() -> Iterator[Finding]:
    """Room for segments."""
    fd = os.open(SHM_DIR, os.O_RDONLY | os.O_DIRECTORY)
    try:
        shm, *limits = rooms_of(fd)
    finally:
        os.close(fd)
    found = f"{format_nbytes(shm.free)} free of {format_nbytes(shm.total)}"
    larger = "docker run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory; mount -o remount,size=8g /dev/shm"
    if shm.total < _LEAST_SHM:
        yield Finding("warn", f"room in {shm.place}", found, f"too little for a real cache: {larger}")
    elif shm.free < shm.total // 10:
        yield Finding("warn", f"room in {shm.place}", found, f"nearly full: kvshm ls, kvshm sweep; or {larger}")
    else:
        yield Finding("ok", f"room in {shm.place}", found)
    # One line a place: of nested limits the scarcest counts. A limit beyond any memory is how some kernels write none.
    places = {limit.place: limit for limit in sorted(limits, key=lambda limit: -limit.free) if limit.total < 1 << 60}
    for limit in places.values():
        found = f"{format_nbytes(limit.free)} free of {format_nbytes(limit.total)}"
        if limit.free < shm.free * 9 // 10:
            remedy = f"{shm.place} promises more than that: keep caches below it, or raise the memory limit"
            yield Finding("warn" if limit.free < _LEAST_SHM else "ok", limit.place, found, remedy)
        else:
            yield Finding("ok", limit.place, found)


def _look_at_segments() -> Iterator[Finding]:
    """Segments that exist."""
    segments = kvshm.list_segments()
    orphaned = [segment for segment in segments if not segment.in_use]
    found = f"{len(segments)}, of which {len(orphaned)} orphaned"
    if orphaned:
        yield Finding("warn", "segments", found, f"kvshm sweep ({format_nbytes(sum(s.nbytes for s in orphaned))})")
    else:
        yield Finding("ok", "segments", found)


def _look_at_open_files() -> Iterator[Finding]:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        yield Finding("warn", "open files", f"at most {soft}", f"ulimit -n {_LEAST_FILES * 4} (hard limit: {hard})")
    else:
        yield Finding("ok", "open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _look_at_huge_pages() -> Iterator[Finding]:
    """Huge pages for shared memory."""
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        with open(path, encoding="ascii") as file:
            setting = re.search(r"\[(\w+)\]", file.read())
    except OSError:
        yield Finding("ok", "huge pages", "this kernel has none for shared memory")
        return
    chosen = setting[1] if setting else "unknown"
    remedy = "" if chosen in ("always", "within_size", "advise") else f"for caches of many GiB: echo advise > {path}"
    yield Finding("ok", "huge pages", f"shmem_enabled is {chosen}", remedy)


def _look_at_locks() -> Iterator[Finding]:
    """Locks on segments."""
    with kvshm.Segment.create(1) as segment:
        fd = os.open(object_path(segment.name), os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Finding("ok", "locks", "a segment in use is seen to be in use")
        else:
            remedy = "kvshm sweep, also the one before a first segment, would remove caches in use: mount a tmpfs"
            yield Finding("fail", "locks", "a segment in use is not seen to be in use", remedy)
        finally:
            os.close(fd)


def _look_at_sharing() -> Iterator[Finding]:
    """Sharing pages between two processes."""
    array = kvshm.zeros((1009,), "int64")
    array[:] = np.arange(len(array))
    before = int(array.sum())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=wire.pack(kvshm.wrap(array)),
        capture_output=True,
        env=environment,
        timeout=_CHILD_TIMEOUT_S,
        check=False,
    )
    if child.returncode == 0 and int(child.stdout) == int(array.sum()) == before + len(array):
        yield Finding("ok", "sharing", "another process read and wrote the same pages")
    else:
        errors = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no error was printed"]
        yield Finding("fail", "sharing", f"another process did not see the same pages: {errors[0]}", "see the error")


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _look_at_python,
    _look_at_packages,
    _look_at_directory,
    _look_at_room,
    _look_at_segments,
    _look_at_open_files,
    _look_at_huge_pages,
    _look_at_locks,
    _look_at_sharing,
)
