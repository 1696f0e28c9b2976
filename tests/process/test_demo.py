"""``kvshm demo`` as a user runs it: real processes, a small prompt, both reports, a server, a cache that lies."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshm.server.cache_server import CacheServer

CHUNK_SIZE = 48
PROMPT = bytes(range(256))[:199]  # four full chunks and seven tokens
ARGUMENTS = ["--tokens", "5", "--chunk-size", str(CHUNK_SIZE)]
TIMEOUT_S = 120.0


def _command(tmp_path: Path, prompt: bytes = PROMPT) -> list[str]:
    path = tmp_path / "prompt.txt"
    path.write_bytes(prompt)
    return [sys.executable, "-m", "kvshm", "demo", "--prompt", str(path), *ARGUMENTS]


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


def test_second_engine_reuses_the_prefix_and_writes_the_same(tmp_path: Path) -> None:
    done = _run([*_command(tmp_path), "--json"])
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
        assert 0 < copy["copy_s"] < copy["s"]
        assert copy["gb_per_s"] == pytest.approx(copy["nbytes"] / copy["copy_s"] / 1e9)
        assert copy["memcpy_gb_per_s"] == pytest.approx(copy["nbytes"] / copy["memcpy_s"] / 1e9)


def test_text_report_ends_with_the_verdict(tmp_path: Path) -> None:
    done = _run(_command(tmp_path))
    assert done.stderr == ""
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-1].split() == ["identical:", "yes"]
    assert any(line.startswith("cache:") and "bfloat16" in line for line in lines)
    assert any(line.startswith("retrieve:") and "192 tokens" in line and "memcpy" in line for line in lines)
    assert any(line.startswith("saved:") for line in lines)


@pytest.mark.parametrize(("num_tokens", "num_reused"), [(1, 0), (CHUNK_SIZE, 0), (CHUNK_SIZE + 1, CHUNK_SIZE)])
def test_the_last_token_is_always_computed(tmp_path: Path, num_tokens: int, num_reused: int) -> None:
    done = _run([*_command(tmp_path, PROMPT[:num_tokens]), "--json"])
    assert done.stderr == ""
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["engines"][1]["num_retrieved"] == num_reused
    assert report["store"]["num_tokens"] == num_tokens // CHUNK_SIZE * CHUNK_SIZE


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(_command(tmp_path), stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux tells that the last one has left the terminal
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
    assert process.returncode == 0
    assert b"engine 1 prefill" in shown
    assert b"engine 2 prefill" in shown
    assert b"[" + b"#" * 30 + b"] 199/199 tokens" in shown
    assert shown.endswith(b"\r\x1b[K")


# Another program in the place of the cache process: it imports the real one and changes one thing.
LIAR = """
import sys
from kvshm.demo import cache
{change}
if __name__ == "__main__":
    sys.exit(cache.main())
"""

# Runs the command line with that program as cache process.
DRIVER = """
import functools, sys
from kvshm import cli
from kvshm.demo import command, run
command.Plan = functools.partial(run.Plan, cache_module="liar")
sys.exit(cli.main(sys.argv[1:]))
"""


def _run_with_liar(tmp_path: Path, change: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "liar.py").write_text(LIAR.format(change=change))
    command = _command(tmp_path)
    command[1:3] = ["-c", DRIVER]
    return _run([*command, *arguments], env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})


def test_one_wrong_bit_in_the_cache_is_seen(tmp_path: Path) -> None:
    change = """
scatter = cache.scatter_chunks
def flip(context, block_ids, chunks, **options):
    chunks[1][12344] ^= 1 << 6  # in the fraction of a bfloat16
    scatter(context, block_ids, chunks, **options)
cache.scatter_chunks = flip
"""
    done = _run_with_liar(tmp_path, change, "--json")
    assert re.fullmatch(r"kvshm demo: the engines' (tokens and )?logits differ\n", done.stderr)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["identical"] is False
    assert report["same"]["logits"] is False
    assert report["engines"][1]["num_retrieved"] == 192
    assert _run_with_liar(tmp_path, change).stdout.endswith("identical: NO\n")


def test_a_cache_that_keeps_nothing_is_a_failure(tmp_path: Path) -> None:
    done = _run_with_liar(tmp_path, "cache.ChunkCache.lookup = lambda *_: 0", "--json")
    assert done.returncode == 1
    assert done.stderr == "kvshm demo: engine 2 got 0 tokens from the cache instead of 192\n"
    assert json.loads(done.stdout)["identical"] is True


def test_a_cache_that_refuses_is_a_failure_that_says_why(tmp_path: Path) -> None:
    change = """
def refuse(*_, **__):
    raise ValueError("block ids of the wrong colour")
cache.gather_chunks = refuse
"""
    done = _run_with_liar(tmp_path, change)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "kvshm demo: engine 1 gave up: RuntimeError: the cache process refused 'store': "
        "ValueError: block ids of the wrong colour\n"
    )


def test_a_cache_that_dies_is_a_failure(tmp_path: Path) -> None:
    done = _run_with_liar(tmp_path, "cache.gather_chunks = lambda *_: sys.exit(3)")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kvshm demo: engine 1 gave up: ConnectionResetError: the process at the other end" in done.stderr


def test_a_cache_server_in_the_place_of_the_cache_process(tmp_path: Path) -> None:
    with CacheServer("tcp://127.0.0.1:0", capacity=8 << 20, chunk_size=CHUNK_SIZE) as server:
        command = _command(tmp_path)[:-2]  # the chunk size is the server's
        for _ in range(2):  # a run finds nothing of an earlier one
            done = _run([*command, "--server", server.endpoint, "--json"])
            assert done.stderr == ""
            assert done.returncode == 0
            report = json.loads(done.stdout)
            assert report["identical"] is True
            assert [engine["num_retrieved"] for engine in report["engines"]] == [0, 192]
            assert report["store"]["num_tokens"] == 192
            assert report["retrieve"]["copy_s"] is None
            assert report["retrieve"]["gb_per_s"] == pytest.approx(
                report["retrieve"]["nbytes"] / report["retrieve"]["s"] / 1e9
            )


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
