"""The two scripts in examples/, as the two processes that they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60.0


def test_reader_and_engine_see_the_same_pages(tmp_path: Path) -> None:
    path = tmp_path / "cache.kv"
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "engine.py", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert str(path) in engine.stdout.readline()
        reader = subprocess.run(
            [sys.executable, EXAMPLES / "reader.py", path],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert reader.stderr == ""
        # 3 layers, K and V, 4 heads of 32 elements, 2 bytes; 16 tokens
        assert reader.stdout == "the reader copied 24576 bytes, 1536 a token\n"
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.read() == "the engine finds in block 9: [0.5, 1.5, 2.5]\n"
    assert engine.returncode == 0
    assert not path.exists()
