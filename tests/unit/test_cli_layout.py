"""``kvshm layout``: sizes against a count by hand, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvshm.cli import main
from kvshm.commands.layout import plan
from kvshm.formats import EngineKVFormat
from kvshm.layout import parse_kvcache_shape_spec

HYBRID = "(2,13,4,3,5):bfloat16:7;(1,11,2,1,17):uint8:2"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["layout", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_sizes_of_one_group() -> None:
    result = plan(parse_kvcache_shape_spec("(2,13,4,3,5):bfloat16:7"), chunk_size=12)
    token = 2 * 3 * 5 * 2 * 7
    assert result["nbytes_per_token"] == token
    assert result["nbytes_per_chunk"] == 12 * token
    assert result["num_tokens"] == 13 * 4
    assert result["nbytes"] == 13 * 4 * token
    [group] = result["groups"]
    assert group["nbytes_per_block"] == 4 * token
    assert group["formats"]["NL_X_TWO_NB_BS_NH_HS"] == "7 x [2, 13, 4, 3, 5]"
    assert group["formats"]["NL_X_NB_TWO_NH_BS_HS"] == "7 x [13, 2, 3, 4, 5]"
    assert not any(EngineKVFormat[name].is_mla for name in group["formats"])


def test_groups_add_up_and_the_smallest_is_full_first() -> None:
    result = plan(parse_kvcache_shape_spec(HYBRID), chunk_size=8)
    tokens = [2 * 3 * 5 * 2 * 7, 17 * 2]
    assert result["nbytes_per_token"] == sum(tokens)
    assert result["nbytes"] == 13 * 4 * tokens[0] + 11 * 2 * tokens[1]
    assert result["num_tokens"] == 22
    assert [group["layers"] for group in result["groups"]] == [[0, 6], [7, 8]]
    assert "NL_X_NB_BS_HS" in result["groups"][1]["formats"]


def test_a_budget_is_told_in_tokens_and_in_whole_chunks() -> None:
    groups = parse_kvcache_shape_spec("(2,13,4,3,5):bfloat16:7")
    assert plan(groups, 12, budget=12 * 420 * 3 + 421)["budget"] == {
        "nbytes": 12 * 420 * 3 + 421,
        "num_tokens": 37,
        "num_chunks": 3,
        "num_tokens_in_chunks": 36,
    }


def test_no_memory_is_touched_for_a_cache_of_petabytes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "(2,1000000000,16,8,128):bfloat16:32", "--json")
    assert code == 0
    assert json.loads(out)["nbytes"] == 2_097_152_000_000_000


def test_text_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["(2,1024,16,8,128):bfloat16:32", "--budget", "16GiB", "--format", "nl_x_two_nb_bs_nh_hs"]
    code, text, _ = _run(capsys, *arguments)
    assert code == 0
    assert "131,072 bytes (128 KiB) a token" in text
    assert "arrays 32 x [2, 1024, 16, 8, 128] (NL_X_TWO_NB_BS_NH_HS)" in text
    assert "holds 131,072 tokens; 131,072 in 512 whole chunks" in text
    code, out, _ = _run(capsys, *arguments, "--json")
    result: dict[str, Any] = json.loads(out)
    assert code == 0
    assert result["shape"] == "(2,1024,16,8,128):bfloat16:32"
    assert result["nbytes_per_chunk"] == 256 * 131_072
    assert result["budget"]["num_tokens"] == 131_072
    assert list(result["groups"][0]["formats"]) == ["NL_X_TWO_NB_BS_NH_HS"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["(2,13,4,3):bfloat16:7"], r"has 4 sizes; it takes five"),
        (["(2,13,4,3,5):float64:7"], r"has dtype 'float64'"),
        (
            ["(2,13,4,3,5):bfloat16:7", "--chunk-size", "10"],
            r"no whole number of blocks of 4 tokens; use a multiple of 4",
        ),
        ([HYBRID, "--chunk-size", "-8"], r"chunk of -8 tokens .* use a multiple of 4"),
        (["(2,13,4,3,5):bfloat16:7", "--format", "NHD"], r"unknown format 'NHD'; known are NB_NL_TWO"),
        (
            ["(2,13,4,3,5):bfloat16:7", "--format", "NL_X_NB_BS_HS"],
            r"which NL_X_NB_BS_HS \(NL x \[NB, BS, HS\]\) cannot",
        ),
        (["(2,13,4,3,5):bfloat16:7", "--budget", "lots"], r"'lots' is no amount of bytes"),
    ],
)
def test_wrong_shapes_and_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = _run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("kvshm layout: ")
    assert re.search(message, err)


def test_every_listed_format_takes_as_many_bytes() -> None:
    """The arrays of each format hold exactly the group's bytes: counted from the printed shape."""
    for spec in ("(2,13,4,3,5):bfloat16:7", "(1,11,2,1,17):bfloat16:3", "(1,11,2,5,17):bfloat16:3"):
        [group] = plan(parse_kvcache_shape_spec(spec), chunk_size=4)["groups"]
        assert group["formats"]
        for name, shape in group["formats"].items():
            count = 1
            for number in shape.replace("[", " ").replace("]", " ").replace("x", " ").replace(",", " ").split():
                count *= int(number)
            assert count * 2 == group["nbytes"], name
