"""The quality studies: their measures on hand-made values, the shared prefill, and each command on a tiny model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import build
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval.needles import Needle
from eval.studies import common, contexts, found_facts, quality_needles_depth, quality_reuse, teacher_forced, watch
from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.fetch import Choice, Fetched

FIELDS: dict[str, Any] = {"num_selected": 48, "group_size": 4, "num_recent": 8, "reuse_capacity": 48, "rank": 16}
QUALITY = ("mass", "rolling", "reuse", "layerwise", "needles_budget", "needles_depth")
MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


class Words:
    """A tokenizer whose tokens are words."""

    pad_token_id = eos_token_id = 0

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        ids = [1 + zlib.crc32(word.encode()) % 198 for word in text.split()]
        return {"input_ids": torch.tensor([ids]) if kwargs.get("return_tensors") else ids}

    def decode(self, ids: torch.Tensor, **kwargs: Any) -> str:
        return " ".join(map(str, ids.tolist()))


def tiny(dtype: torch.dtype = torch.float32, **fields: Any) -> LlamaForCausalLM:
    """A llama of 3 layers, 4 query heads and 2 key heads of 16."""
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096}
    model = build(LlamaForCausalLM, LlamaConfig(**{**sizes, **fields}), scale=3.0)
    return model.to(dtype)


def some_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 199, (1, count), generator=torch.Generator().manual_seed(seed))


# --- the shared prefill ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_shared_prefill_is_a_contenders_own(dtype: torch.dtype, asked: bool, tmp_path: Path) -> None:
    """Filled from one prefill, a cache has its own compact keys, and gives its own logits and tokens: whether single
    steps follow at once, or the rest of a prompt."""
    model, ids = tiny(dtype), some_ids(700)
    for layer, factor in zip(model.model.layers, (0.1, 1, 30), strict=True):  # from dense attention to sharp
        layer.self_attn.q_proj.weight.data.mul_(factor)
    start = contexts.prefill(model, ids[:, :684])
    found = []
    for shared in (True, False):
        with DiskSwapCache(model, path=tmp_path, **FIELDS) as cache:
            if shared:
                contexts.replay(cache, model, start)
            else:
                with torch.no_grad():
                    model(input_ids=start.ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            compact = [layer.predictor.learnt.keys.capture()["keys"].clone() for layer in cache.offloaded]
            text = contexts.answer(model, Words(), cache, ids, 12) if asked else ""  # type: ignore[arg-type]
            logits = contexts.follow(model, cache, some_ids(4, seed=1))
            found.append((compact, text, logits))
            assert cache.report().selected_fraction < 0.5
    (compact, text, logits), own = found
    assert all(torch.equal(one, other) for one, other in zip(compact, own[0], strict=True))
    assert text == own[1]
    assert torch.equal(logits, own[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_shared_prefill_is_dynamic_caches_own(dtype: torch.dtype) -> None:
    """Bit for bit, and what one contender appends is not seen by the next."""
    model, ids = tiny(dtype), some_ids(120)
    start, own = contexts.prefill(model, ids[:, :100]), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :100], past_key_values=own, use_cache=True)
    for keys, values, layer in zip(start.keys, start.values, own.layers, strict=True):
        assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
    expected = contexts.follow(model, own, ids[:, 100:])
    for _ in range(2):
        with contexts.open_cache(model, None, 0) as cache:
            contexts.replay(cache, model, start)
            assert torch.equal(contexts.follow(model, cache, ids[:, 100:]), expected)
    assert start.queries[0].shape == (1, 4, 100, 16)


def test_a_model_whose_layers_are_not_all_offloaded_is_refused() -> None:
    """A sliding window's keys cannot be put into another cache."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build(MistralForCausalLM, MistralConfig(**sizes, num_key_value_heads=2, sliding_window=16))
    with pytest.warns(UserWarning, match="nothing to offload"), pytest.raises(ValueError, match="full attention"):
        contexts.prefill(model, some_ids(20))


def test_a_budget_is_planned_for_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """"memory" goes to `for_budget` with the length; "none" is a cache of the fields as they are."""
    asked: dict[str, Any] = {}

    def for_budget(model: Any, **given: Any) -> DiskSwapCache:
        asked.update(given)
        return DiskSwapCache(model, path=given["path"])

    monkeypatch.setattr(DiskSwapCache, "for_budget", staticmethod(for_budget), raising=False)
    model = tiny()
    with contexts.open_cache(model, {"memory": "1/13", "rank": 8}, 700, str(tmp_path)):
        assert contexts.share("1/6.5") == "2/13" and contexts.share("3MiB") == "3MiB"
        assert asked == {"memory": "1/13", "rank": 8, "max_context": 700, "max_batch": 1, "path": str(tmp_path)}
    asked.clear()
    with contexts.open_cache(model, {"memory": "none", "rank": 8}, 700, str(tmp_path)) as cache:
        assert not asked
        assert cache.config.rank == 8


def test_a_plan_that_does_not_hold_is_no_refusal(tmp_path: Path) -> None:
    """What is too little is an answer of a study; what was planned for and was too little is a fault."""
    model, fields = tiny(), {"memory": "1/2", "num_selected": 40}
    with pytest.raises(BudgetError), contexts.open_cache(model, {**fields, "memory": 900}, 700, str(tmp_path)):
        raise AssertionError
    fault = pytest.raises(RuntimeError, match=r"the plan of DiskSwapCache for .* did not hold: memory: more would")
    with fault, contexts.open_cache(model, fields, 700, str(tmp_path)):
        raise BudgetError("memory: more would")


def test_reference_texts_are_stretches_of_their_own() -> None:
    """The lengths asked for, none like another; too long a one is refused."""
    texts = contexts.reference_texts(Words(), 5, 300)  # type: ignore[arg-type]
    assert [text.shape for text in texts] == [(1, 300)] * 5
    assert len({tuple(text[0].tolist()) for text in texts}) == 5
    with pytest.raises(ValueError, match="at most"):
        contexts.reference_texts(Words(), 1, 10**7)  # type: ignore[arg-type]


# --- what is watched ---------------------------------------------------------------------------------------------


def test_weights_of_a_hand_made_attention() -> None:
    """Two query heads of one key head; keys in two parts; exp of the scaled scores is 1, 2, 5 and 1, 1, 1."""
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [5.0, 0.0]]).log().nan_to_num(neginf=0.0)[None, None]
    query = torch.tensor([[2.0, 0.0], [0.0, 3.0]])[None, :, None]
    weights = watch.attention_weights(query, [keys[:, :, :2], keys[:, :, 2:]], 0.5)
    torch.testing.assert_close(weights, torch.tensor([[1 / 8, 2 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3]]))
    look = watch.Look(0, weights, [torch.tensor([0, 2])], None, 0)
    assert look.mass == pytest.approx((6 / 8 + 2 / 3) / 2)
    assert watch.Look(0, weights, None, None, 0).mass == 1.0
    apart = watch.Look(0, weights, [torch.tensor([2]), torch.tensor([0, 1])], None, 0)
    assert apart.mass == pytest.approx((5 / 8 + 2 / 3) / 2)
    # summed over both heads the last token is the most important one, then the second
    assert [look.important(share) for share in (0.3, 0.6, 1.0)] == [0.5, 0.5, 1.0]
    assert watch.Look(0, weights[:1].repeat(2, 1), [torch.tensor([2]), torch.tensor([0, 1])], None, 0).important(
        0.6
    ) == pytest.approx(0.75)


def test_columns_of_hand_made_selections() -> None:
    """Groups 1 and 3 of 2 tokens, of which one is not attended to; 11 tokens are held, 3 of them in the tail."""

    class History:
        length, recent = 11, torch.empty(1, 3, 1)

        def positions(self, units: np.ndarray) -> np.ndarray:
            return (units[:, :, None] * 2 + np.arange(2)).reshape(1, -1)

    choice, entries = Choice(np.array([[1, 3]])), torch.empty(1, 7, 1)
    layer: Any = SimpleNamespace(history=History())
    whole = Fetched(entries, 4, None)
    assert [own.tolist() for own in watch.attended_columns(layer, choice, whole, True)] == [[2, 3, 6, 7, 8, 9, 10]]
    part = Fetched(entries, 4, np.array([[True, False, True, True]]))
    assert [own.tolist() for own in watch.attended_columns(layer, choice, part, False)] == [[2, 6, 7, 10]]


def test_mass_outside_what_is_always_attended_to() -> None:
    """Of what lies between: on what was attended to, and on as many of the best."""
    weights = torch.tensor([[0.5, 0.1, 0.2, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1, 0.1]])
    look = watch.Look(0, weights, [torch.tensor([0, 1, 4]), torch.tensor([0, 2, 3, 4])], None, 0)
    captured, best = look.between(1, 4)
    assert captured == pytest.approx((0.25 + 2 / 3) / 2)
    assert best == pytest.approx((0.5 + 2 / 3) / 2)


def test_overlap_of_hand_made_selections() -> None:
    """A share of the later selection; the first has none before it."""
    selections = [np.array([1, 2, 3, 4]), np.array([2, 3, 9]), np.array([2, 3, 4, 9])]
    assert watch.overlap(selections) == pytest.approx([2 / 3, 3 / 4])
    assert watch.overlap(selections[:1]) == []


def test_tokens_needed_are_counted() -> None:
    """Mean over heads 0.4, 0.1, 0.1, 0.3, 0.1; in pairs 0.5, 0.4, 0.1, of which the last is half a pair."""
    weights = torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.1], [0.2, 0.1, 0.1, 0.5, 0.1]])
    assert [watch.tokens_needed(weights, mass) for mass in (0.3, 0.4, 0.6, 0.7, 0.75, 1.0)] == [1, 1, 2, 2, 3, 5]
    assert [watch.tokens_needed(weights, mass, 2) for mass in (0.5, 0.6, 0.95)] == [2, 4, 5]


@pytest.mark.parametrize("rolling", [True, False])
def test_what_is_seen_is_what_was_attended(rolling: bool, tmp_path: Path) -> None:
    """Of each layer and step: the watched weights, cut to the watched columns, give what the layer's attention gave."""
    model, ids = tiny(), some_ids(606)
    start = contexts.prefill(model, ids[:, :600])
    looks: list[watch.Look] = []
    given: list[torch.Tensor] = []
    with DiskSwapCache(model, path=tmp_path, **FIELDS) as cache:
        contexts.replay(cache, model, start)
        layers = [block.self_attn for block in model.model.layers]
        hooks = [layer.o_proj.register_forward_pre_hook(lambda _, args: given.append(args[0])) for layer in layers]
        with watch.Watch(cache, start.keys, looks.append, rolling):
            contexts.follow(model, cache, ids[:, 600:])
        for hook in hooks:
            hook.remove()
        assert not {"attend", "combine"} & set(vars(cache.offloaded[0]))
        held = [layer.values.repeat_interleave(2, 1) for layer in cache.offloaded]
        assert len(looks) == len(given) == 18
        for index, (look, output) in enumerate(zip(looks, given, strict=True)):
            assert look.layer_idx == index % 3 and look.columns is not None and look.groups is not None
            columns = look.columns[0]
            assert look.weights.shape == (4, 601 + index // 3)
            kept = look.weights[:, columns]
            kept = kept / kept.sum(-1, keepdim=True)
            expected = torch.einsum("ht,htd->hd", kept, held[look.layer_idx][0][:, columns])
            torch.testing.assert_close(output.view(4, 16), expected, rtol=1e-4, atol=1e-4)
            assert 0 < look.mass < 1
            assert 0 <= look.resident <= len(look.groups)
        assert sum(look.resident for look in looks) == cache.storage.counters.units_resident


def test_everything_is_seen_of_an_exact_cache() -> None:
    """Weights are those that the model itself reports in eager attention; all positions count as attended."""
    model, ids = tiny(), some_ids(64)
    start = contexts.prefill(model, ids[:, :60])
    looks: list[watch.Look] = []
    with contexts.open_cache(model, {"exact": True, "engine": "memory"}, 0) as cache:
        contexts.replay(cache, model, start)
        with watch.Watch(cache, start.keys, looks.append):  # type: ignore[arg-type]
            contexts.follow(model, cache, ids[:, 60:])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    for index, look in enumerate(looks):
        position = 60 + index // 3
        torch.testing.assert_close(look.weights, attentions[look.layer_idx][0, :, position, : position + 1])
        assert look.columns is None and look.mass == 1.0


# --- what is computed of it --------------------------------------------------------------------------------------


def test_the_worst_layer_is_that_of_the_mean() -> None:
    """Not the mean of each text's worst."""
    rest: dict[str, Any] = {"attended": 10.0, "kl": 0.5, "top1": 1.0, "overlap": None, "peak_share": 0.1}
    rest |= {"important": 0.4, "judged": None}
    rows = [
        {"name": "one", "layer_mass": [0.2, 0.9], "hit_rate": 0.5, **rest},
        {"name": "one", "layer_mass": [0.8, 0.3], "hit_rate": None, **rest},
    ]
    found = teacher_forced.means(rows)["one"]
    assert (found["mass"], found["worst"], found["worst_layer"]) == (pytest.approx(0.55), pytest.approx(0.5), 0)
    assert (found["hit_rate"], found["overlap"]) == (0.5, None)


def test_what_the_full_cache_does_not_know_is_asked_of_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor when an interrupted study goes on; what it knows is asked of those who were not asked yet."""
    needles = [Needle(f"document {number}", "a fact", "what?", str(number), 0.5) for number in range(3)]
    prefilled: list[int] = []
    monkeypatch.setattr(found_facts, "build_prompt", lambda tokenizer, document, question: torch.zeros(1, 9))
    monkeypatch.setattr(found_facts, "prefill", lambda model, ids: prefilled.append(1))
    monkeypatch.setattr(found_facts, "open_cache", lambda model, fields, room, path: contextlib.nullcontext(fields))

    def answered(fields: Any, model: Any, tokenizer: Any, context: Any, ids: Any, code: str, rolling: bool) -> dict:
        return {"answered": code != "1", "text": ""}

    monkeypatch.setattr(found_facts, "_ask_one", answered)
    contenders = {name: teacher_forced.Contender({}) for name in ("first", "second")}
    arguments = argparse.Namespace(known=True, path=None)

    def asked(rows: common.Rows, known: bool, **chosen: teacher_forced.Contender) -> list[tuple[int, str]]:
        before = len(rows.rows)
        arguments.known = known
        found_facts.ask(arguments, rows, chosen, needles, None, None)
        return [(row["sample"], row["name"]) for row in rows.rows[before:]]

    head = {"study": "needles", "arguments": {}}
    rows = common.Rows(head, tmp_path / "rows.json", say=lambda line: None)
    every = [(0, "DynamicCache"), (0, "first"), (1, "DynamicCache"), (2, "DynamicCache"), (2, "first")]
    assert asked(rows, True, first=contenders["first"]) == every and len(prefilled) == 3
    again = common.Rows(head, tmp_path / "rows.json", say=lambda line: None)
    again.resume()
    assert asked(again, True, **contenders) == [(0, "second"), (2, "second")] and len(prefilled) == 5
    assert asked(again, False, **contenders) == [(1, "first"), (1, "second")]


def test_facts_are_lost_of_those_that_the_full_cache_knows() -> None:
    """Needles of two lengths may have the same number; what `DynamicCache` missed cannot be lost."""
    rows = [
        {"name": name, "sample": sample, "prompt": prompt, "code": str(sample), "answered": answered}
        for name, answers in {"DynamicCache": (1, 1, 0, 1), "small": (1, 0, 0, 0)}.items()
        for (sample, prompt), answered in zip([(0, 9), (1, 9), (2, 9), (0, 99)], answers, strict=True)
    ]
    table = found_facts.lost(rows)
    assert (table["small"]["lost"], table["small"]["of"]) == (2, 3)
    assert table["small"]["lost_share"] == pytest.approx(2 / 3)
    assert table["DynamicCache"]["lost"] == 0
    refused = {"name": "small", "sample": 3, "prompt": 9, "code": "3", "answered": None}
    row = found_facts.lost([*rows, {**rows[0], "sample": 3, "code": "3"}, refused])["small"]
    assert (row["asked"], row["lost"], row["of"], row["refused"]) == (4, 2, 3, 1)
    assert found_facts.lost(rows[2:3])["DynamicCache"]["lost_share"] is None


def test_depths_fall_into_bands() -> None:
    """Half-open bands; one without a needle has no share."""
    asked = [(0.1, True), (0.3, False), (0.9, True), (0.8, None)]
    rows = [{"depth": depth, "answered": answered} for depth, answered in asked]
    assert quality_needles_depth.band_shares(rows, 2) == [0.5, 1.0]
    assert quality_needles_depth.band_shares(rows, 4) == [1.0, 0.0, None, 1.0]


def test_reuse_rates_are_spread() -> None:
    """Mean, least, most and deviation over inputs; nothing selected is an error that says what to do."""
    lists: dict[str, Any] = {"overlap": 0.5, "layer_hits": [0.2, 0.4], "layer_overlap": [0.6, None]}
    found = quality_reuse.spread([{"hit_rate": rate, **lists} for rate in (0.6, 0.8)])
    assert [found[name] for name in ("inputs", "mean", "least", "most")] == [2, pytest.approx(0.7), 0.6, 0.8]
    assert found["deviation"] == pytest.approx(0.1)
    assert found["layer_hits"] == pytest.approx([0.2, 0.4])
    with pytest.raises(ValueError, match="more --tokens"):
        quality_reuse.spread([{"hit_rate": None, **lists}])


def test_contenders_come_from_the_command_line() -> None:
    """Settings replace the usual ones; what is shared gives way; "rolling" is not a field of the cache."""
    usual = {"one": {"rank": 8}}
    none = teacher_forced.contenders_of(argparse.Namespace(set=[]), usual, memory="1/13")
    assert none == {"one": teacher_forced.Contender({"memory": "1/13", "rank": 8})}
    given = argparse.Namespace(set=["off:memory=none,rolling=false"])
    off = {"off": teacher_forced.Contender({"memory": "none"}, False)}
    assert teacher_forced.contenders_of(given, usual, memory="1/13") == off


# --- the command -------------------------------------------------------------------------------------------------


def _study(run: Callable[[argparse.Namespace, common.Rows], dict[str, Any]]) -> common.Study:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=5)

    def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
        figure.subplots().plot([row["index"] for row in rows])

    return common.Study("counting", "How far does it count?", run, plot, arguments, {"count": 2})


def _count(arguments: argparse.Namespace, rows: common.Rows) -> dict[str, Any]:
    measured = 0
    for index in range(arguments.count):
        if not rows.has(index=index):
            rows.add(index=index, twice=2 * index, parts=[index])
            measured += 1
        if index == 2 and measured == 3:
            raise KeyboardInterrupt
    return {"measured": measured, "must_reach": [common.judged("counted", float(measured), least=3)]}


def test_a_study_resumes_where_it_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are on disk as soon as they are measured; a resumed run measures the rest; another's rows are refused."""
    target, study = tmp_path / "out.json", _study(_count)
    with pytest.raises(KeyboardInterrupt):
        common.main(study, ["--json", str(target)])
    assert [row["index"] for row in json.loads(target.read_text())["rows"]] == [0, 1, 2]
    result = common.main(study, ["--json", str(target), "--resume"])
    assert result["summary"]["measured"] == 2
    written = json.loads(target.read_text())
    assert [row["index"] for row in written["rows"]] == [0, 1, 2, 3, 4]
    assert written["summary"] == result["summary"] and written["arguments"]["count"] == 5
    assert "must reach: counted: 2 (at least 3): missed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        common.main(study, ["--json", str(target), "--resume", "--count", "4"])
    assert "--resume: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        common.main(study, ["--resume"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_quick_changes_what_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    """--quick has sizes of its own; an argument that is given stays."""
    assert common.main(_study(_count), ["--quick"])["summary"]["measured"] == 2
    assert common.main(_study(_count), ["--quick", "--count", "1"])["summary"]["measured"] == 1
    assert "index 1  twice 2\n" in capsys.readouterr().out


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """What cannot be written leaves the old file, and nothing beside it."""
    target = tmp_path / "out.json"
    common.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        common.write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_promises_are_judged() -> None:
    """At least, at most, and nothing measured."""
    assert common.judged("rate", 0.7, least=0.7)["met"] is True
    assert common.judged("lost", 0.06, most=0.05)["met"] is False
    assert common.judged("ratio", None, least=1.5)["met"] is None


@MATPLOTLIB
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    """As the file's ending says."""
    target = tmp_path / "out.png"
    common.main(_study(_count), ["--quick", "--plot", str(target)])
    assert target.read_bytes().startswith(b"\x89PNG")


@MATPLOTLIB
def test_one_of_several_plots_is_drawn(tmp_path: Path) -> None:
    """By an option of its own, which no row depends on."""

    def backwards(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
        figure.subplots().plot([row["index"] for row in reversed(rows)])

    study = dataclasses.replace(_study(_count), more_plots={"back": ("the way back", backwards)})
    target, measured = tmp_path / "out.svg", tmp_path / "out.json"
    common.main(study, ["--quick", "--json", str(measured)])
    common.main(study, ["--quick", "--json", str(measured), "--resume", "--plot-back", str(target)])
    assert "</svg>" in target.read_text() and "plot_back" not in measured.read_text()
    again = tmp_path / "again.svg"
    common.main(study, ["--quick", "--json", str(measured), "--resume", "--plot-back", str(again)])
    assert again.read_bytes() == target.read_bytes()


# --- each study on a tiny model ----------------------------------------------------------------------------------

_SMALL = {
    "mass": ["--set", "more:num_selected=500", "--set", "less:num_selected=200", "--memory", "none", "--tokens", "640"],
    "rolling": ["--recent", "8", "1", "--tokens", "600", "--facts", "1", "--fact-tokens", "700"],
    "reuse": ["--set", "small:num_selected=64,group_size=4", "--reuse", "64", "--tokens", "600"],
    "layerwise": ["--tokens", "200"],
    "chunks": ["--tokens", "2400"],
    "needles_budget": ["--set", "1/13:num_selected=64", "--tokens", "800", "--samples", "2"],
    "needles_depth": ["--set", "small:memory=none,num_selected=64", "--lengths", "700", "--depths", "2"],
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[str, Any], common.Rows]]:
    """Name -> module, summary and rows of that study on a tiny model; each runs once."""
    done: dict[str, tuple[Any, dict[str, Any], common.Rows]] = {}
    model = tiny()

    def measure(name: str) -> tuple[Any, dict[str, Any], common.Rows]:
        if name not in done:
            module = importlib.import_module(f"eval.studies.quality_{name}")
            parser = argparse.ArgumentParser()
            parser.add_argument("--path", default=str(tmp_path_factory.mktemp(name)))
            module.STUDY.arguments(parser)
            own = ["--samples", "1"] if "needles" in name else ["--samples", "2", "--steps", "4"]
            arguments, rows = parser.parse_args([*own, *_SMALL[name]]), common.Rows(say=lambda line: None)
            done[name] = module, module.STUDY.run(arguments, rows, model=model, tokenizer=Words()), rows
        return done[name]

    return measure


def test_chunks_are_compared(measured: Callable[[str], Any]) -> None:
    """Judging all keys finds most, whole chunks bring what is not important, and the tree judges less than all."""
    _, summary, rows = measured("chunks")
    table = summary["contenders"]
    assert len(rows.rows) == 2 * len(table) == 24
    assert table["all keys"]["judged"] == 1 > table["tree alone"]["judged"] > table["fixed chunks of 16"]["judged"] > 0
    assert table["fixed chunks of 16"]["judged"] == pytest.approx(2 / 16, rel=1e-3)
    assert table["all keys"]["important"] == max(row["important"] for row in table.values())
    assert table["tree alone"]["important"] > table["fixed chunks of 64"]["important"]
    halves = table["tree alone, halves judged"]
    assert table["tree alone"]["judged"] <= halves["judged"] < table["tree alone, all halves judged"]["judged"]
    assert halves["mass"] == pytest.approx(table["tree alone"]["mass"], abs=0.02)
    assert [one["met"] for one in summary["must_reach"]].count(None) == 0 and len(summary["must_reach"]) == 5


def test_mass_is_compared(measured: Callable[[str], Any]) -> None:
    """Each contender attends to a part and captures a part; who attends to more captures more."""
    _, summary, rows = measured("mass")
    table = summary["contenders"]
    assert len(rows.rows) == 4
    for row in table.values():
        assert 0 < row["worst"] <= row["mass"] < 1
        assert 0 < row["attended"] < 640
    assert table["more"]["mass"] > table["less"]["mass"]


def test_the_rolling_buffer_is_taken_away(measured: Callable[[str], Any]) -> None:
    """Without it fewer tokens are attended to, and all of the buffer's are missing but the current one."""
    table = measured("rolling")[1]["contenders"]
    for recent in (8, 1):
        on, off = (table[f"{word}, {recent} recent"] for word in ("on", "off"))
        assert off["attended"] < on["attended"]
        assert off["mass"] < on["mass"]
    assert table["on, 8 recent"]["attended"] - table["off, 8 recent"]["attended"] >= 7
    facts = measured("rolling")[1]["facts"]
    assert list(facts) == ["DynamicCache", *table]


def test_reuse_is_measured(measured: Callable[[str], Any]) -> None:
    """Rates are those of the cache's report; a step reuses at least what the step before selected, when it fits."""
    _, summary, rows = measured("reuse")
    found = summary["contenders"]["small"]
    assert found["inputs"] == 2
    assert 0 < found["least"] <= found["mean"] <= found["most"] < 1
    for row in rows.rows:
        assert np.mean(row["layer_hits"]) == pytest.approx(row["hit_rate"], abs=0.1)
        assert 0 < row["overlap"] < 1


def test_density_is_measured(measured: Callable[[str], Any]) -> None:
    """Whole groups need at least as many tokens as single ones; never more than there are."""
    _, summary, rows = measured("layerwise")
    table = summary["tokens_needed_in_groups_of"]
    for single, grouped in zip(table["1"]["layers"], table["16"]["layers"], strict=True):
        assert 1 <= single <= grouped <= 204
    assert len(rows.rows) == 4


def test_needles_are_asked_of_every_contender(measured: Callable[[str], Any]) -> None:
    """A row each; a model that knows nothing loses nothing."""
    _, summary, rows = measured("needles_budget")
    assert [row["name"] for row in rows.rows] == ["DynamicCache", "1/13"] * 2
    assert summary["contenders"]["1/13"]["of"] == 0
    assert summary["must_reach"][0]["measured"] is None
    assert all(row["text"] for row in rows.rows)
    assert 0 < rows.rows[1]["selected_fraction"] < 0.9


def test_needles_cover_depths_and_lengths(measured: Callable[[str], Any]) -> None:
    """A column a length, a cell a band of depth, a map a contender."""
    summary = measured("needles_depth")[1]
    assert summary["answered"] == {"DynamicCache": [[0.0, 0.0]], "small": [[0.0, 0.0]]}


@MATPLOTLIB
@pytest.mark.parametrize("name", QUALITY)
def test_studies_are_drawn(name: str, measured: Callable[[str], Any], tmp_path: Path) -> None:
    """Every plot has axes with labels and something in them."""
    from matplotlib.figure import Figure

    module, summary, rows = measured(name)
    figure = Figure()
    module.STUDY.plot(summary, rows.rows, figure)
    for axes in figure.axes:
        assert axes.has_data()
        assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title()
    common.draw(module.STUDY, summary, rows.rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
