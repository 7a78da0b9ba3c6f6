"""The fidelity benchmark: its floors, its tables by hand-made rows, another process's rows, and all of it on a tiny
model."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from long_llama import long_model
from transformers import DynamicCache
from words import words

from eval import fidelity, fidelity_contenders
from eval.baselines.in_memory import SINKS, quantized_share, window_cache, window_tokens
from eval.fidelity_tables import markdown, shipped, summarised
from eval.kvpress_contender import KVPress
from eval.studies.common import Rows, draw
from eval.studies.contexts import follow, prefill
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.methods.cluster import cache as cluster
from hf_offload_cache.tuning import distance, perplexity_over

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
    promised = {row["figure"]: row["met"] for row in summary["must_reach"]}
    assert promised["disk-swap at 1/13: of DynamicCache's 2 answers at 4,096 tokens"] is True
    assert promised["cluster at 1/13: of DynamicCache's 2 answers at 4,096 tokens"] is False
    assert promised["disk-swap at 1/13, 4,096 tokens: perplexity over DynamicCache's"] is True
    assert promised["spec at 1/13, 4,096 tokens: perplexity over DynamicCache's: refused"] is False
    assert promised["cluster at 1/13, 4,096 tokens: perplexity over DynamicCache's"] is False
    assert promised["spec at 1/13: of DynamicCache's 0 answers"] is None


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


def test_facts_of_what_was_refused_were_not_found_and_a_wider_step_has_facts_of_all_lengths_or_none() -> None:
    found: list[dict[str, Any]] = []
    asked = [("DynamicCache", (2048, 7936)), ("disk-swap 1/13", (2048, 7936)), ("disk-swap-800 1/13", (7936,))]
    for name, lengths in (*asked, ("cluster 1/13", (2048, 7936))):
        for tokens, sample in ((tokens, sample) for tokens in lengths for sample in range(2)):
            key = {"part": "facts", "tokens": tokens, "facts": 1, "sample": sample, "prompt": tokens, "code": "5"}
            answered = None if name.startswith("cluster") and sample else True
            found.append({**key, "name": name, "answered": answered})
    for name, _ in asked[1:]:
        text = {"kl": 0.1, "perplexity": 1.0, "top1": 1.0, "peak_share": 0.07}
        found.append({"part": "text", "tokens": 7936, "sample": 0, "name": name, **text})
    found.append({**found[-1], "name": "cluster 1/13"})
    summary = summarised(found)
    assert "| 1 of 2 (1 refused) |" in next(line for line in markdown(summary).splitlines() if "| cluster" in line)
    usual, wider, cluster = (one for one in shipped(summary)["cells"] if one["tokens"] == 7936 and one.get("kl"))
    assert (usual["found"], usual["known"], usual["fact_tokens"]) == (4, 4, [2048, 7168])
    assert (cluster["found"], cluster["known"], cluster["fact_tokens"]) == (2, 4, [2048, 7168])
    assert wider["num_selected"] == 800 and "known" not in wider


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_pictures_are_drawn(tmp_path: Path) -> None:
    for name, plot in fidelity.STUDY.plots.items():
        draw(fidelity.STUDY, plot, summarised(rows()), rows(), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# --- kvpress ------------------------------------------------------------------------------------------------------

STUB = """
import contextlib
class SnapKVPress:
    def __init__(self, compression_ratio):
        self.kept = 1 - compression_ratio
    @contextlib.contextmanager
    def __call__(self, model):
        attention = [layer.self_attn for layer in model.model.layers]
        hooks = [module.register_forward_hook(self.forward_hook, with_kwargs=True) for module in attention]
        yield
        for hook in hooks:
            hook.remove()
    def forward_hook(self, module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        gone = layer.keys.shape[2] - int(layer.keys.shape[2] * self.kept)
        layer.keys, layer.values = layer.keys[:, :, gone:], layer.values[:, :, gone:]
"""
"""What drops the first tokens of a context after its prefill."""


def test_another_process_follows_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full cache in which what was dropped is masked, tokens at their places; the process ends with it."""
    share, gone = "1/4", 30
    (tmp_path / "kvpress.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = long_model()

    def wanted(first: int, tokens: list[int], greedy: int = 0, dropped: int = gone) -> torch.Tensor:
        """Logits of these and of so many greedy ones after the first tokens of IDS."""
        cache, said = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(IDS[:, :first], past_key_values=cache)
            for place in range(first, first + len(tokens) + greedy):
                seen = torch.ones(1, place + 1, dtype=torch.int64)
                seen[:, :dropped] = 0
                token = tokens[place - first] if place - first < len(tokens) else int(said[-1].argmax())
                where = torch.tensor([[place]])
                given = {"attention_mask": seen, "position_ids": where, "past_key_values": cache}
                said.append(model(torch.tensor([[token]]), **given).logits[0, -1])
        return torch.stack(said)

    with KVPress(sys.executable, model) as press:
        logits, held = press.follow("SnapKVPress", share, IDS[:, :40], IDS[:, 40:50])
        torch.testing.assert_close(logits, wanted(40, IDS[0, 40:50].tolist()), rtol=1e-4, atol=1e-4)
        full = sum(keys.nbytes for keys in prefill(model, IDS[:, :40]).keys)
        assert held == 2 * full * (40 - gone) // 40
        said, held = press.answer("SnapKVPress", share, IDS, 40, 6, [])
        assert said == wanted(40, IDS[0, 40:].tolist(), 5)[-6:].argmax(-1).tolist()
        assert held == 2 * full * (40 - gone) // 40
        assert press.answer("SnapKVPress", share, IDS, 40, 6, said[1:2])[0] == said[: said.index(said[1]) + 1]
        for first, ratio in ((30, "1/2"), (40, "1/2"), (40, share)):  # another context, memory; and as it was
            logits, _ = press.follow("SnapKVPress", ratio, IDS[:, :first], IDS[:, first : first + 3])
            dropped = first - first * 2 // 4 if ratio == "1/2" else gone
            then = wanted(first, IDS[0, first : first + 3].tolist(), dropped=dropped)
            torch.testing.assert_close(logits, then, rtol=1e-4, atol=1e-4)
        process, folder = press._process, Path(press._folder.name)
        with pytest.raises(RuntimeError, match="kvpress ended with 1 at NoPress"):
            press.follow("NoPress", share, IDS[:, :40], IDS[:, 40:50])
    assert process.poll() is not None and not folder.exists()


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


def test_what_is_read_token_by_token_is_judged_at_its_end() -> None:
    """20 tokens at once, 30 one by one, and the last ten judged; as by hand."""
    model, found = long_model(), Rows(say=lambda line: None)
    given, window = argparse.Namespace(path=None), {"window 1/2": {"cache": "window", "memory": "1/2"}}
    fidelity._go_on(given, found, window, model, IDS, 20, 10, {"part": "x"})
    said = []
    for cache in (DynamicCache(config=model.config), window_cache(model, "1/2", 60)):
        with torch.no_grad():
            model(IDS[:, :20], past_key_values=cache)
        follow(model, cache, IDS[:, 20:50])
        said.append(follow(model, cache, IDS[:, 50:]))
    (row,) = found.rows
    assert row["kl"] == pytest.approx(distance(*said)["kl"], rel=1e-3) and row["kl"] > 1e-3
    assert row["perplexity"] == pytest.approx(perplexity_over(*said, IDS[:, 50:]), rel=1e-5) != 1
    losses = [-one.log_softmax(-1)[:-1].gather(1, IDS[0, 51:, None])[:, 0] for one in said]
    assert row["uncertain"] == pytest.approx(float((losses[1] - losses[0]).std() / 3), rel=1e-3)


@pytest.mark.parametrize("there", [False, True])
def test_caches_are_left_out_where_their_package_is_not(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is said; the others are measured."""
    options = ["--tokens", "200", "--steps", "2", "--samples", "1", "--memory", "1/2", "--parts", "text"]
    given, said = fidelity.STUDY.parsed([*options, "--caches", "window", "4-bit", "cluster-800"]), list[str]()
    monkeypatch.setattr(fidelity_contenders, "is_optimum_quanto_available", lambda: there)
    monkeypatch.setattr(cluster, "find_spec", lambda name: there or None)
    monkeypatch.setattr(fidelity, "_text", lambda model, context, new, reference, name, *others: {"kl": 0.0})
    rows = Rows(say=said.append)
    fidelity.run(given, rows, (long_model(), words()))
    others = ["4-bit itself", "cluster-800 1/2"] if there else []
    assert [row["name"] for row in rows.rows] == ["window 1/2", *others]
    for why in ("4-bit: left out: transformers' quantized cache needs optimum-quanto", "cluster-800: left out: C"):
        assert any(line.startswith(why) for line in said) is not there
