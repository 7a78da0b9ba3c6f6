"""The fidelity benchmark: its floors, its tables by hand-made rows, and all of it on a tiny model."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from long_llama import long_model
from transformers import DynamicCache
from words import words

from eval import fidelity
from eval.baselines.in_memory import SINKS, quantized_share, window_cache, window_tokens
from eval.fidelity_tables import markdown, shipped, summarised
from eval.studies.common import Rows, draw
from hf_offload_cache.errors import BudgetError

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


def test_a_window_needs_more_than_its_sinks() -> None:
    assert window_tokens("1/13", 4096) == 315
    with pytest.raises(BudgetError, match="memory must keep at least 8 tokens"):
        window_tokens("1/13", 100)


def test_what_a_quantized_cache_holds() -> None:
    """Of 32 bits 4 and half a bit of scale and shift; the latest 128 tokens as they are."""
    assert long_model().dtype == torch.float32
    assert quantized_share(long_model(), 4, 128) == 1.0
    assert quantized_share(long_model(), 4, 1280) == pytest.approx(0.9 * 4.5 / 32 + 0.1)


# --- tables ------------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    """Two texts and three facts of two caches and a window, at 1/13."""
    found = []
    for name, kl in (("disk-swap 1/13", 0.1), ("cluster 1/13", 0.2), ("window 1/13", 0.9)):
        for sample in range(2):
            text = {"kl": kl + sample / 10, "perplexity": 1.0 + kl / 11, "top1": 0.9, "peak_share": 0.07}
            text |= {"layer_mass": [0.5 + sample / 10, 0.9], "mass": 0.7}
            found.append({"part": "text", "tokens": 4096, "sample": sample, "name": name, **text})
    for name, answers in (
        ("DynamicCache", (1, 1, 0)), ("disk-swap 1/13", (1, 1, None)), ("cluster 1/13", (1, 0, None)),
    ):  # fmt: skip
        for sample, answered in enumerate(answers):
            if answered is not None:
                key = {"part": "facts", "tokens": 4096, "facts": 1, "sample": sample, "prompt": 1, "code": str(sample)}
                found.append({**key, "name": name, "answered": bool(answered)})
    found.append({"part": "text", "tokens": 4096, "sample": 0, "name": "spec 1/13", "refused": "too little"})
    for name, seconds in (("model alone", 0.01), ("DynamicCache", 0.2), ("disk-swap 1/13", 0.1)):
        quartiles = [seconds, seconds]
        speed = {"median_seconds": seconds, "quartiles": quartiles}
        found.append({"part": "speed", "tokens": 4096, "name": name, **speed})
    for name, over in (("window", (1.1, 1.3)), ("disk-swap", (1.0, 1.018)), ("cluster", (1.0, 1.022))):
        for sample, perplexity in enumerate(over):  # instead of those of the texts
            scored = {"perplexity": perplexity, "uncertain": 0.01}
            found.append({"part": "perplexity", "tokens": 4096, "sample": sample, "name": f"{name} 1/13", **scored})
    wider = {"kl": 0.01, "perplexity": 1.0, "top1": 1.0, "peak_share": 0.07}
    found.append({"part": "text", "tokens": 4096, "sample": 0, "name": "disk-swap-800 1/13", **wider})
    found.append({"part": "long", "tokens": 2560, "name": "cluster 1/13", "kl": 0.03, "perplexity": 1.0})
    return found


def test_a_cell_is_the_mean_of_its_rows() -> None:
    summary = summarised(rows())
    cells = {(cell["tokens"], cell["name"]): cell for cell in summary["cells"]}
    own = cells[4096, "disk-swap 1/13"]
    assert (own["cache"], own["memory"], own["found"], own["known"], own["seconds"]) == ("disk-swap", "1/13", 2, 2, 0.1)
    assert own["kl"] == pytest.approx(0.15) and own["layer_mass"] == pytest.approx([0.55, 0.9])
    assert (own["worst"], own["worst_layer"]) == (pytest.approx(0.55), 0)
    assert cells[4096, "cluster 1/13"]["found"] == 1 and cells[4096, "spec 1/13"]["refused"]
    assert cells[4096, "DynamicCache"]["kl"] == 0 and cells[2560, "cluster 1/13"]["long_kl"] == 0.03
    assert (4096, "model alone") not in cells


def test_tables_for_people_and_for_the_choice() -> None:
    summary = summarised(rows())
    text = markdown(summary)
    line = next(line for line in text.splitlines() if line.startswith("| disk-swap"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["disk-swap", "1/13", "1/14.3", "0.1500", "0.900", "1.0090 ± 0.0071"]
    assert cells[6:] == ["0.700", "0.55", "2 of 2", "100"]  # no column of what nobody was asked there
    (longest,) = (line for line in text.splitlines() if line.startswith("| cluster") and "0.0300" in line)
    assert longest.split("|")[-2].strip() == "0.0300" and "mass" not in text.partition("## 2,560")[2].split("##")[0]
    assert "| 1.2000 ± 0.0085 |" in next(line for line in text.splitlines() if line.startswith("| window"))
    assert "## 4,096 tokens" in text and any("refused" in line for line in text.splitlines() if "| spec" in line)
    kept = shipped(summary)["cells"]
    assert {cell["cache"] for cell in kept} == {"disk-swap", "cluster", "DynamicCache"}  # of spec nothing is known
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    usual, wider = (cell for cell in kept if cell["cache"] == "disk-swap")
    assert (usual["seconds"], "num_selected" in usual) == (0.1, False)
    assert (wider["num_selected"], wider["kl"], wider["memory"]) == (800, 0.01, "1/13")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_pictures_are_drawn(tmp_path: Path) -> None:
    for name, plot in fidelity.STUDY.plots.items():
        draw(fidelity.STUDY, plot, summarised(rows()), rows(), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# --- the whole -----------------------------------------------------------------------------------------------------


def test_all_of_it_on_a_tiny_model(tmp_path: Path) -> None:
    """Rows of each part for each cache that fits, and none twice; files as asked for."""
    options = ["--tokens", "1200", "--steps", "4", "--samples", "1", "--documents", "1", "--output", "300"]
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
    assert {row["name"] for row in measured.where(part="facts", facts=4)} >= {"DynamicCache"}
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
