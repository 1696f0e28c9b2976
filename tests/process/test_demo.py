"""``kvshm demo`` as a user runs it: real processes, a small prompt, both reports, servers that lie, fail and die."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvshm
from kvshm.server import server_driven as copies
from kvshm.server.cache_server import CacheServer
from kvshm.server.hits import Hit
from kvshm.server.state import ServerState
from kvshm.transfer import scatter_chunks
from tests.support.processes import environment

pytestmark = pytest.mark.slow

CHUNK_SIZE = 48
PROMPT = bytes(range(256))[:199]  # four full chunks and seven tokens
CHUNKS = ["--chunk-size", str(CHUNK_SIZE)]
TIMEOUT_S = 120.0


def _command(tmp_path: Path, *arguments: str, prompt: bytes = PROMPT) -> list[str]:
    path = tmp_path / "prompt.txt"
    path.write_bytes(prompt)
    demo = [sys.executable, "-m", "kvshm", "demo", "--prompt", str(path), "--tokens", "5"]
    return [*demo, *(arguments if "--server" in arguments else (*CHUNKS, *arguments))]


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


def test_second_engine_reuses_the_prefix_and_writes_the_same(tmp_path: Path) -> None:
    done = _run(_command(tmp_path, "--json"))
    assert done.stderr == ""
    assert done.returncode == 0
    report = json.loads(done.stdout)
    first, second = report["engines"]
    assert report["identical"] is True
    assert first["output_hex"] == second["output_hex"]
    assert len(bytes.fromhex(first["output_hex"])) == 5
    assert first["logits_digest"] == second["logits_digest"]
    assert (first["num_retrieved"], first["num_prefilled"]) == (0, 199)
    assert (second["num_retrieved"], second["num_prefilled"]) == (192, 7)
    assert first["first_block_ids"] != second["first_block_ids"]
    assert report["segments_left"] == []

    geometry = report["geometry"]
    token = 4 * 2 * 2 * 64 * 2  # layers, K and V, heads, elements, bytes
    assert geometry["format"] == "NL_X_TWO_NB_BS_NH_HS"
    assert geometry["nbytes_per_token"] == token
    assert geometry["nbytes_per_block"] == 16 * token
    assert geometry["nbytes_per_chunk"] == CHUNK_SIZE * token
    assert report["shared"]["nbytes"] == geometry["num_blocks"] * 16 * token
    assert (report["shared"]["num_segments"], report["shared"]["num_descriptors"]) == (1, 4)
    for copy in (report["store"], report["retrieve"]):
        assert copy["num_tokens"] == 192
        assert copy["nbytes"] == 192 * token
        assert copy["gb_per_s"] == pytest.approx(copy["nbytes"] / copy["s"] / 1e9)
        assert copy["memcpy_gb_per_s"] == pytest.approx(copy["nbytes"] / copy["memcpy_s"] / 1e9)
    again = report["retrieve"]
    assert again["again_gb_per_s"] == pytest.approx(again["nbytes"] / again["again_s"] / 1e9)


@pytest.mark.parametrize(("num_tokens", "num_reused"), [(1, 0), (CHUNK_SIZE, 0), (CHUNK_SIZE + 1, CHUNK_SIZE)])
def test_the_last_token_is_always_computed(tmp_path: Path, num_tokens: int, num_reused: int) -> None:
    done = _run(_command(tmp_path, "--json", prompt=PROMPT[:num_tokens]))
    assert done.stderr == ""
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["engines"][1]["num_retrieved"] == num_reused
    assert report["store"]["num_tokens"] == num_tokens // CHUNK_SIZE * CHUNK_SIZE
    assert (report["retrieve"]["again_s"] is None) == (num_reused == 0)


def test_text_report_with_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(_command(tmp_path), stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux tells that the last one has left the terminal
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert b"engine 1 prefill" in shown
    assert b"engine 2 prefill" in shown
    assert b"[" + b"#" * 30 + b"] 199/199 tokens" in shown
    assert shown.endswith(b"\r\x1b[K")
    assert lines[-1].split() == ["identical:", "yes"]
    assert any(line.startswith("cache:") and "bfloat16" in line for line in lines)
    assert any(line.startswith("retrieve:") and "192 tokens" in line and "memcpy" in line for line in lines)
    assert any(line.startswith("saved:") for line in lines)


@contextlib.contextmanager
def _server() -> Iterator[CacheServer]:
    """A server in this process, where its parts can be replaced by others that fail."""
    with CacheServer("tcp://127.0.0.1:0", capacity=8 << 20, chunk_size=CHUNK_SIZE) as server:
        yield server


def _run_on(server: CacheServer, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(_command(tmp_path, "--server", server.endpoint, *arguments))


def test_any_server_will_do(tmp_path: Path) -> None:
    with _server() as server:
        for _ in range(2):  # a run finds nothing of an earlier one
            done = _run_on(server, tmp_path, "--json")
            assert done.stderr == ""
            assert done.returncode == 0
            report = json.loads(done.stdout)
            assert report["identical"] is True
            assert report["geometry"]["tokens_per_chunk"] == CHUNK_SIZE
            assert [engine["num_retrieved"] for engine in report["engines"]] == [0, 192]
            assert report["store"]["num_tokens"] == 192
        assert server.call(server.status)["instances"] == []


def test_one_wrong_bit_in_the_cache_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(context: Any, block_ids: Any, chunks: Any, *more: Any) -> None:
        chunks[1][12344] ^= 1 << 6  # in the fraction of a bfloat16
        scatter_chunks(context, block_ids, chunks, *more)

    monkeypatch.setattr(copies, "scatter_chunks", flip)
    with _server() as server:
        done = _run_on(server, tmp_path, "--json")
        assert re.fullmatch(r"kvshm demo: the engines' (tokens and )?logits differ\n", done.stderr)
        assert done.returncode == 1
        report = json.loads(done.stdout)
        assert report["identical"] is False
        assert report["same"]["logits"] is False
        assert report["engines"][1]["num_retrieved"] == 192
        assert _run_on(server, tmp_path).stdout.endswith("identical: NO\n")


def test_a_cache_that_keeps_nothing_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerState, "longest_hit", lambda *_: Hit(0, []))
    with _server() as server:
        done = _run_on(server, tmp_path, "--json")
    assert done.returncode == 1
    assert done.stderr == "kvshm demo: engine 2 got 0 tokens from the cache instead of 192\n"
    assert json.loads(done.stdout)["identical"] is True


def test_a_cache_that_refuses_is_a_failure_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("block ids of the wrong colour")

    monkeypatch.setattr(copies, "gather_chunks", refuse)
    with _server() as server:
        done = _run_on(server, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "kvshm demo: engine 1 gave up: CacheServerError: kvshm_store: block ids of the wrong colour\n"
    )


def _segments_of(run_id: str) -> list[str]:
    return [segment.name for segment in kvshm.list_segments() if run_id in segment.name]


# The command line, one thing about its plan or its processes changed.
DRIVER = """
import secrets, subprocess, sys
from kvshm import cli
from kvshm.demo import command, run
secrets.token_hex = lambda nbytes: {run_id!r}
{change}
sys.exit(cli.main(sys.argv[1:]))
"""

# What happens to the n-th process that the demo started, once engine 1 has stored.
TO_CHILD = """
children = []
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        children.append(self)
subprocess.Popen = Popen
def follow(self, number, message):
    if message["step"] == "stored":
        children[{child}].send_signal({signum})
command._Bar.follow = follow
"""


def _run_changed(tmp_path: Path, change: str, *arguments: str) -> tuple[int, str]:
    """Exit status and stderr of a run that printed nothing and left no segment."""
    run_id = secrets.token_hex(4)
    command = _command(tmp_path, *arguments)
    command[1:3] = ["-c", DRIVER.format(run_id=run_id, change=change)]
    done = _run(command, env=environment())
    assert done.stdout == ""
    assert _segments_of(run_id) == []
    return done.returncode, done.stderr


def test_a_server_that_cannot_start_is_a_failure_that_says_why(tmp_path: Path) -> None:
    code, errors = _run_changed(tmp_path, "run.Plan.capacity = 1 << 60")
    assert code == 1
    assert re.fullmatch(r"kvshm serve: .*no room.*\nkvshm demo: the cache server did not start\n", errors)


def test_a_server_that_dies_is_a_failure(tmp_path: Path) -> None:
    code, errors = _run_changed(tmp_path, TO_CHILD.format(child=0, signum=int(signal.SIGKILL)))
    assert code == 1
    assert re.fullmatch(r"kvshm demo: engine \d gave up: ServerUnreachableError: [^\n]+\n", errors)


def test_an_engine_that_dies_is_a_failure(tmp_path: Path) -> None:
    code, errors = _run_changed(tmp_path, TO_CHILD.format(child=1, signum=int(signal.SIGKILL)))
    assert (code, errors) == (1, "kvshm demo: engine 1 ended with exit status -9\n")


def test_an_engine_that_hangs_is_a_failure(tmp_path: Path) -> None:
    patience = "run.Plan.silence_s = 3.0; run._GRACE_S = 0.2"
    code, errors = _run_changed(tmp_path, patience + TO_CHILD.format(child=1, signum=int(signal.SIGSTOP)))
    assert (code, errors) == (1, "kvshm demo: engine 1 gave no sign of life for 3 s\n")


def test_what_a_dead_engine_leaves_goes_though_a_server_has_it_mapped(tmp_path: Path) -> None:
    with _server() as server:
        change = TO_CHILD.format(child=0, signum=int(signal.SIGKILL))
        code, errors = _run_changed(tmp_path, change, "--server", server.endpoint)
        assert (code, errors) == (1, "kvshm demo: engine 1 ended with exit status -9\n")
        assert len(server.call(server.status)["instances"]) == 1


def test_without_pyzmq_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['zmq'] = None; from kvshm.cli import main; sys.exit(main(sys.argv[1:]))"
    done = _run([sys.executable, "-c", code, "demo"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvshm: zmq is not installed, which this needs: pip install 'kvshm[server]'\n"
    assert _run([sys.executable, "-c", code, "demo", "--help"]).returncode == 0


def test_a_server_ends_with_its_stdin() -> None:
    """As the demo starts it; here whoever holds the pipe ends by SIGKILL, as the last thing it could."""
    code = """
import os, signal, subprocess, sys
serve = [sys.executable, "-m", "kvshm", "serve", "--port", "0", "--capacity", "1MiB", "--json", "--until-stdin-closes"]
server = subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server.stdin.write(b"what comes is dropped" * 1000)
server.stdin.flush()
print(server.stdout.readline().decode(), end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = _run([sys.executable, "-c", code], env=environment())  # reads stderr, which the server holds, to its end
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert json.loads(done.stdout)["endpoint"].startswith("tcp://127.0.0.1:")


def test_a_server_without_stdin_is_told_so() -> None:
    serve = f"exec {sys.executable} -m kvshm serve --port 0 --until-stdin-closes <&-"
    done = _run(["sh", "-c", serve])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvshm serve: --until-stdin-closes needs an open stdin; give it a pipe\n"


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.socket() as held:  # a port that nobody listens at
        held.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        done = _run([sys.executable, "-m", "kvshm", "demo", "--server", url])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvshm demo: ")
    assert url in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "/nonexistent/prompt"], "No such file or directory: '/nonexistent/prompt'"),
        (["--prompt", os.devnull], "/dev/null has 0 bytes; a prompt has 1 to 32768, each is a token"),
        (["--chunk-size", "40"], "--chunk-size 40 is no multiple of the 16 tokens of a block"),
        (["--chunk-size", "0"], "argument --chunk-size: 0 is not positive"),
        (["--chunk-size", "16", "--server", "tcp://127.0.0.1:1"], "not allowed with argument --chunk-size"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    done = _run([sys.executable, "-m", "kvshm", "demo", *arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
