"""What the studies of copies in a few bits run and say."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from letters import Letters
from long_llama import long_model

from eval.profiles import PROFILES
from eval.studies import common, low_bit_attention, low_bit_hits, low_bit_quality, low_bit_speed

MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
STUDIES: dict[Any, list[str]] = {
    low_bit_quality: ["--tokens", "700", "--steps", "4", "--samples", "1"],
    low_bit_hits: ["--tokens", "700", "--steps", "4", "--samples", "1", "--selected", "8", "300"],
    low_bit_speed: ["--tokens", "700", "--steps", "20", "--devices", "own", "ufs"],
    low_bit_attention: ["--tokens", "1024", "--batch", "1", "--repetitions", "2"],
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a study its summary and rows on a small model; each runs once."""
    done: dict[Any, tuple[dict[str, Any], common.Rows]] = {}

    def measure(study: Any) -> tuple[dict[str, Any], common.Rows]:
        if study not in done:
            parser = argparse.ArgumentParser()
            parser.add_argument("--path", default=str(tmp_path_factory.mktemp("study")))
            study.STUDY.arguments(parser)
            arguments, rows = parser.parse_args(STUDIES[study]), common.Rows(say=lambda line: None)
            loaded: dict[str, Any] = {"model": long_model(), "tokenizer": Letters()}
            if study is low_bit_speed:
                loaded = {"loaded": (long_model(), Letters())}
            found = study.run(arguments, rows, **({} if study is low_bit_attention else loaded))
            done[study] = found, rows
        return done[study]

    return measure


def test_more_bits_and_what_is_fetched_are_nearer(measured: Any) -> None:
    found, rows = measured(low_bit_quality)
    table = found["contenders"]
    assert len(rows.rows) == len(table) == 14
    of = {name: row["kl"] for name, row in table.items()}
    assert of["1 bit, g=64, alone"] > of["2 bits, alone"] > of["4 bits, alone"] > 0
    assert of["1 bit, g=32, alone"] > of["1 bit, g=32"] and of["2 bits, alone"] > of["2 bits, topped up"]
    assert [one["measured"] for one in found["must_reach"]] == pytest.approx([
        of["1 bit, g=32, alone"] / of["1 bit, g=32"], of["1 bit, g=64, alone"] / of["1 bit, g=64"],
        of["2 bits, alone"] / of["2 bits"], of["2 bits, alone"] / of["2 bits, topped up"],
    ])  # fmt: skip


def test_more_tokens_hold_more_of_the_attention(measured: Any) -> None:
    """And a guess holds no more of it than the token itself would."""
    found, _ = measured(low_bit_hits)
    few, _, many, all_of_it = ({**row} for row in found["means"])
    assert (few["selected"], few["guess"], all_of_it["selected"], all_of_it["guess"]) == (8, True, 300, False)
    assert few["mass"] < many["mass"] and few["mass"] <= few["best"] + 1e-6
    assert len(few["layer_mass"]) == 3 and few["worst"] == min(few["layer_mass"])


@pytest.mark.slow
def test_every_device_is_taken(measured: Any) -> None:
    found, rows = measured(low_bit_speed)
    assert set(found["seconds"]) == {"own", "ufs"} <= set(PROFILES)
    assert all(set(low_bit_speed.OURS) < set(of) for of in found["seconds"].values())
    assert len(rows.rows) == 2 * (1 + len(low_bit_speed.OURS))


def test_what_a_guess_takes_and_saves() -> None:
    taken = {"the copy alone": 1.0, "with a guess": 1.4, "without": 2.1, "topped up": 9.0}
    rows = [
        {"device": device, "name": name, "median_seconds": factor * seconds if name == "without" else seconds}
        for device, factor in (("own", 0.5), ("emmc", 1.0))
        for name, seconds in taken.items()
    ]
    found = low_bit_speed.summary(rows)["must_reach"]
    assert [one["measured"] for one in found] == pytest.approx([0.75, 1.4, 1.5, 1.4])
    bounds = [(None, None), (None, 1.5), (1.3, None), (None, None)]
    assert [(one["at_least"], one["at_most"]) for one in found] == bounds


def test_the_copy_is_compared_with_what_is_stored(measured: Any) -> None:
    found, rows = measured(low_bit_attention)
    assert {(row["what"], row["queries"]) for row in rows.rows} == {
        (what, queries) for what in ("as stored", "1 bits", "2 bits", "4 bits") for queries in (1, 2)
    }
    low, plain = (rows.where(what=what, queries=1)[0]["milliseconds"] for what in ("2 bits", "as stored"))
    assert found["must_reach"][0]["measured"] == low / plain


@MATPLOTLIB
@pytest.mark.parametrize("study", STUDIES)
def test_plots_are_drawn(study: Any, measured: Any, tmp_path: Path) -> None:
    found, rows = measured(study)
    common.draw(study.STUDY, found, rows.rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
