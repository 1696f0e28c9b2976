"""The benchmark: what it prints, compares and draws. No test looks at how fast anything is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshm import bench
from kvshm.bench.results import Amount, Cost, Run, Transfer, interleaved, load_run, timed
from kvshm.bench.table import describe
from kvshm.bench.transfers import LAYOUTS, TOKENS_PER_CHUNK, Layout, Workload
from kvshm.cli import main

MACHINE = {"kvshm": "1", "python": "3", "numpy": "2", "system": "S", "libc": "C", "processor": "P", "cpus": 2}


def a_run(factor: float = 1.0) -> Run:
    return Run(
        machine=dict(MACHINE),
        settings={},
        transfers=[
            Transfer("NHD", "[2, NB]", direction, 2, 2**20, 0.002 * factor, 0.001, 0.5 / factor, (0.4, 0.6))
            for direction in ("gather", "scatter")
        ],
        costs=[
            Cost("register", 10, "layer", 0.001 * factor),
            Cost("round trip", 1, "", 2e-5),
            Cost("register", 1000, "layer", 0.1 * factor),
        ],
        amounts=[Amount("page faults", 0, "faults")],
    )


def test_a_run_as_tables() -> None:
    assert [line.split("  ")[0] for line in describe(a_run()).splitlines()] == [
        "kvshm 1, Python 3, NumPy 2, C",
        "P, 2 CPUs, S, load None",
        "",
        "transfer",
        "NHD [2, NB]",
        "",
        "cost",
        "register",
        "",
        "round trip",
        "",
        "memory, server",
        "page faults",
    ]
    text = " ".join(describe(a_run()).split())
    assert "NHD [2, NB] 2 1 MiB 0.52 GB/s 1.05 GB/s 0.50 0.52 GB/s 1.05 GB/s 0.50" in text
    assert "register 10 layers 1 ms 100 us/layer 1,000 layers 100 ms 100 us/layer n^1.00" in text
    assert "round trip 20 us" in text


def test_two_runs_side_by_side() -> None:
    text = " ".join(describe(a_run(), a_run(2)).split())
    assert "0.50 0.52 GB/s 1.05 GB/s 0.50 0.25 0.25" in text
    assert "register 10 layers 1 ms 100 us/layer 2 ms 0.50x" in text
    other = Run(machine={}, settings={})
    assert "1 ms 100 us/layer - -" in " ".join(describe(a_run(), other).split())


def test_a_run_is_read_back_as_it_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(a_run().to_json()))
    assert load_run(path) == a_run()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}, "settings": {}, "transfers": [{}]}', "7"])
def test_files_that_hold_no_run(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no run of kvshm bench --json"):
        load_run(path)
    assert main(["bench", "--quick", "--compare", str(path)]) == 2
    assert f"--compare {path}: no run of kvshm bench --json" in capsys.readouterr().err


def test_calls_are_timed_in_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert "".join(order) == "abababab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    calls: list[int] = []
    assert timed(lambda: calls.append(1), 2, at_least_s=0.0) > 0
    assert len(calls) == 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_workload_moves_what_it_says(layout: Layout, num_threads: int) -> None:
    thin = Layout(**{**{name: getattr(layout, name) for name in layout.__slots__}, "num_layers": 2})
    workload = Workload(thin, TOKENS_PER_CHUNK)
    kept = TOKENS_PER_CHUNK if layout.sw_size_tokens == -1 else layout.sw_size_tokens
    assert workload.nbytes == thin.token_nbytes * kept
    calls = workload.calls(num_threads)
    calls["copyto"]()
    assert (workload.chunks == 3).all()
    calls["gather"]()
    assert (workload.chunks == 1).all()
    calls["scatter"]()


def run_bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "--quick", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_everything_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawing = tmp_path / "run.svg"
    pytest.importorskip("matplotlib")
    parts = ("transfers", "growth", "costs", "memory")
    run = run_bench(capsys, "--plot", str(drawing), "--threads", "1", "2", "--only", *parts)
    assert {(row["layout"], row["direction"], row["num_threads"]) for row in run["transfers"]} == {
        (layout.name, direction, num_threads)
        for layout in LAYOUTS
        for direction in ("gather", "scatter")
        for num_threads in (1, 2)
    }
    names = {row["name"] for row in run["costs"]}
    assert {"register", "attach a segment", "get_temp_kernel_group_buffer", "import kvshm"} <= names
    assert all(row["seconds"] > 0 for row in run["costs"])
    assert any("page faults" in row["name"] for row in run["amounts"])
    assert set(MACHINE) <= set(run["machine"])
    assert drawing.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_the_server_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq")
    from kvshm.bench import server_process

    found = [Amount("server: round trip", 7.0, "us")]
    monkeypatch.setattr(server_process, "measure", lambda *a, **k: found)  # which takes half a minute
    run = run_bench(capsys, "--only", "server")
    assert run["amounts"] == [{"name": "server: round trip", "value": 7.0, "unit": "us"}]


def test_without_pyzmq_there_is_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.served, "is_there", lambda: False)
    measured: list[str] = []

    def measure(args: argparse.Namespace, names: list[str]) -> Run:
        measured.extend(names)
        return Run(machine={}, settings={})

    monkeypatch.setattr(bench, "_measure", measure)
    assert main(["bench", "--only", "memory", "server"]) == 2
    assert capsys.readouterr().err == "kvshm bench --only server needs zmq: pip install 'kvshm[server]'\n"
    assert not measured
    assert main(["bench", "--json"]) == 0
    assert "server is skipped: pyzmq is not installed" in capsys.readouterr().err
    assert measured == ["transfers", "growth", "costs", "memory"]


def test_parts_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_bench(capsys, "--only", "memory")
    assert run["amounts"]
    assert not run["transfers"]
    assert not run["costs"]


def test_a_drawing_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "kvshm.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--quick", "--plot", "run.svg"]) == 2
    assert capsys.readouterr().err == "kvshm bench --plot needs matplotlib: pip install 'kvshm[plot]'\n"


@pytest.mark.parametrize(("name", "text"), [("run.png", "end in .svg"), ("no/such/run.svg", "No such file")])
def test_a_drawing_needs_a_place(tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "--quick", "--plot", str(tmp_path / name)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--repeat", "x"], ["--size", "many"], ["--only", "all"]])
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
