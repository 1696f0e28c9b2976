"""``kvshm ls`` and ``kvshm sweep``: what is printed of segments in use, orphaned, gone and not to be removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import kvshm
from kvshm.cli import main
from kvshm.commands import segments

UID = os.geteuid()


@pytest.fixture(autouse=True)
def shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory in the place of /dev/shm, with one segment in use, two orphans and one that has just gone."""
    infos = [("/kvshm_a", 3 << 20, True), ("/kvshm_b", 1536, False), ("/kvshm_c", 7, False), ("/kvshm_gone", 5, False)]
    for (name, _, _), age_s in zip(infos[:3], (5, 90, 3 * 86_400), strict=True):
        path = tmp_path / name[1:]
        path.touch()
        os.utime(path, (0, time.time() - age_s))
    monkeypatch.setattr(segments, "object_path", lambda name: str(tmp_path / name[1:]))
    monkeypatch.setattr(kvshm, "list_segments", lambda: [kvshm.SegmentInfo(*info) for info in infos])

    def sweep() -> list[str]:
        infos.remove(("/kvshm_b", 1536, False))
        return ["/kvshm_b"]

    monkeypatch.setattr(kvshm, "sweep", sweep)


def test_ls_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    header, *rows, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "UID", "AGE", "STATE"]
    assert [row.split() for row in rows] == [
        ["/kvshm_a", "3", "MiB", str(UID), "5", "s", "in", "use"],
        ["/kvshm_b", "1.5", "KiB", str(UID), "1.5", "m", "orphaned"],
        ["/kvshm_c", "7", "bytes", str(UID), "3.0", "d", "orphaned"],
    ]
    assert len({row.index(word) for row, word in zip(rows, ("in use", "orphaned", "orphaned"), strict=True)}) == 1
    assert summary == "3 segments, 3 MiB; 2 orphaned, which kvshm sweep removes"


def test_ls_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["nbytes"], row["uid"], row["in_use"]) for row in rows] == [
        ("/kvshm_a", 3 << 20, UID, True),
        ("/kvshm_b", 1536, UID, False),
        ("/kvshm_c", 7, UID, False),
    ]
    assert [round(row["age_s"], -1) for row in rows] == [0, 90, 259_200]


def test_ls_of_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvshm, "list_segments", list)
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["0 segments, 0 bytes"]
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_sweep_fails_if_an_orphan_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "removed /kvshm_b",
        f"could not remove /kvshm_c: it belongs to uid {UID}; sweep as that user",
        "1 orphaned segments removed",
    ]


def test_sweep_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"removed": ["/kvshm_b"], "left": ["/kvshm_c"]}


def test_sweep_that_removes_all_it_found_is_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvshm, "list_segments", list)
    assert main(["sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": ["/kvshm_b"], "left": []}
