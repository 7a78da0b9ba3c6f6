"""The fidelity benchmark: a floor of it, and all of it on a tiny model."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from long_llama import long_model
from transformers import DynamicCache
from words import words

from eval import fidelity
from eval.baselines.in_memory import SINKS, window_cache
from eval.fidelity_tables import shipped
from eval.studies.common import Rows, draw

IDS = torch.randint(4, 199, (1, 60), generator=torch.Generator().manual_seed(0))


# --- floors ------------------------------------------------------------------------------------------------------


def test_a_window_attends_to_the_first_and_the_latest() -> None:
    """As a full cache does in which all others are masked, at their positions; token by token and several at once."""
    model, cache = long_model(), window_cache(long_model(), "1/2", 40)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        for one in (cache, full):
            model(IDS[:, :40], past_key_values=one, use_cache=True)
        for first, last in ((40, 41), (41, 42), (42, 45)):
            said = model(IDS[:, first:last], past_key_values=cache, use_cache=True).logits[0, -1]
            seen = torch.ones(1, last, dtype=torch.int64)
            seen[:, SINKS : first - 20 + SINKS] = 0
            places = torch.arange(first, last)[None]
            wanted = model(
                IDS[:, first:last], past_key_values=full, use_cache=True, attention_mask=seen, position_ids=places
            ).logits[0, -1]
            torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-4)
            assert cache.get_seq_length() == last and cache.layers[0].keys.shape[2] == 20


# --- the whole -----------------------------------------------------------------------------------------------------


def test_all_of_it_on_a_tiny_model(tmp_path: Path) -> None:
    """Rows of each part for each cache that fits, and none twice; files as asked for."""
    options = ["--tokens", "1200", "--steps", "4", "--samples", "1", "--documents", "1", "--output", "260"]
    options += ["--memory", "9/10", "1/100", "--caches", "disk-swap", "cluster", "random", "window"]
    options += ["--few", "2/3", "--scored", "12", "--parts", *fidelity.PARTS, "--markdown", str(tmp_path / "table.md")]
    options += ["--shipped", str(tmp_path / "table.json"), "--path", str(tmp_path)]
    given, measured, loaded = fidelity.STUDY.parsed(options), Rows(say=lambda line: None), (long_model(), words())
    fidelity.run(given, measured, loaded)
    texts = {row["name"]: row for row in measured.where(part="text")}
    assert set(texts) == {f"{name} {memory}" for name in given.caches for memory in given.memory}
    for name in ("disk-swap 1/100", "cluster 1/100", "random 1/100"):
        assert "memory" in texts[name]["refused"]
    for name in ("disk-swap 9/10", "cluster 9/10", "random 9/10", "window 9/10"):
        assert texts[name].get("kl", -1) > -1e-6 and texts[name]["peak_share"] <= 0.9, texts[name]
        assert len(texts[name]["layer_mass"]) == long_model().config.num_hidden_layers
    assert texts["disk-swap 9/10"]["mass"] > texts["random 9/10"]["mass"]
    assert {row["name"] for row in measured.where(part="needles", planted=4)} >= {"DynamicCache"}
    assert {row["name"] for row in measured.where(part="speed")} > {"DynamicCache", "disk-swap 9/10", "cluster 9/10"}
    for part in ("perplexity", "long"):
        scored = {row["name"]: row for row in measured.where(part=part)}
        assert set(scored) == {f"{name} 2/3" for name in given.caches}
        assert all(row.get("refused") or row["uncertain"] > 0 for row in scored.values())
    timed = measured.where(part="speed", name="DynamicCache")
    measured.rows = [row for row in measured.rows if row["part"] != "speed" or row["name"] != "cluster 9/10"]
    fidelity.run(given, measured, loaded)  # one cache is missing: all are timed again, in turns
    again = measured.where(part="speed", name="DynamicCache")
    assert len(again) == len(timed) == 1 and again != timed
    names = {row["name"] for row in measured.where(part="speed")}
    other = argparse.Namespace(**{**vars(given), "caches": ["abstract-tree"], "parts": ["speed"]})
    fidelity.run(other, measured, loaded)  # beside those of before
    assert {row["name"] for row in measured.where(part="speed")} == names | {"abstract-tree 9/10"}
    before = list(measured.rows)
    summary = fidelity.run(given, measured, loaded)
    assert measured.rows == before
    assert "disk-swap" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text()) == shipped(summary)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.json", "table.md"]
    if find_spec("matplotlib"):
        for name, plot in fidelity.STUDY.plots.items():
            draw(fidelity.STUDY, plot, summary, measured.rows, tmp_path / f"{name}.png")
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
