"""`SpecCache`: every token attended to, the guess beside it seen by nobody, what was chosen as it came."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_calls import widths_of
from harness import PAD, TOLERANCE, generate, padding, prompt, repetitive_prompt
from long_llama import long_model
from low_bits import stood_for
from spec_fields import SMALL
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_offload_cache.errors import ConfigError, CorruptRecordError
from hf_offload_cache.methods.spec import LOYALTY, SpecCache, SpecConfig, SpecLayer
from hf_offload_cache.methods.spec import chosen_entries as entry_reads
from hf_offload_cache.methods.spec import copy as low_bit_copy
from hf_offload_cache.model import Geometry
from hf_offload_cache.report.report import size_text

LENGTH, NEW = 300, 80


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 3}, "bits must be one of"),
        ({"quant_group": 16}, "quant_group must be one of"),
        ({"group_size": 24}, "group_size must divide quant_group"),
        ({"num_selected": -1}, "num_selected must be at least 0"),
        ({"speculative": 1}, "speculative must be one of"),
        ({"top_up": None}, "top_up must be one of"),
        ({"top_up": "never"}, "top_up must be one of"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SpecConfig(**fields)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sample": {"do_sample": True, "top_k": 0},
    "candidates": {"prompt_lookup_num_tokens": 4},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "speculative": {},
    "not speculative": {"speculative": False},
    "topped up": {"top_up": "always"},
    "1 bit": {"bits": 1, "quant_group": 64},
}


def asked(rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mask = padding(rows, LENGTH, 41)
    return prompt(long_model(), rows, LENGTH).masked_fill(mask == 0, PAD), {"attention_mask": mask}


USUALLY = {
    ("speculative", "beams"), ("speculative", "sample"), ("topped up", "beams"), ("topped up", "candidates"),
    ("not speculative", "greedy"), ("not speculative", "candidates"), ("1 bit", "greedy"), ("1 bit", "sample"),
}  # fmt: skip
"""What the default run has: each setting twice, and each way."""


@pytest.mark.parametrize(
    ("setting", "way"),
    [pytest.param(*one, marks=[] if one in USUALLY else pytest.mark.slow) for one in itertools.product(SETTINGS, WAYS)],
)
def test_all_of_it_chosen_is_exact(setting: str, way: str) -> None:
    model, rows = long_model(), 1 if way == "candidates" else 2
    ids, mask = (repetitive_prompt(model, LENGTH), {}) if rows == 1 else asked(rows)
    found, new = [], NEW if "quant_group" in SETTINGS[setting] else NEW // 2  # as many as a group of the copy has
    with SpecCache(model, **{**SMALL, "num_selected": 1000, **SETTINGS[setting]}) as own:
        for cache in (own, DynamicCache(config=model.config)):
            torch.manual_seed(0)
            found.append(generate(model, cache, ids, max_new_tokens=new, **mask, **WAYS[way]))
        assert torch.equal(found[0].tokens, found[1].tokens)
        torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=TOLERANCE)
        assert own.report().selected_fraction == 1.0
        assert own.layers[1].predictor.copy.tokens > LENGTH


def copied(layer: SpecLayer, came: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the copy of a layer stands for, from what came in."""
    form, held = layer.predictor.copy.form, layer.predictor.copy.tokens
    return stood_for(form, *came[:, :, :held].split([form.entry.key_dim, form.entry.value_dim], 3))


class CheckedLayer(SpecLayer):
    """Each step's output against one softmax, in float64, over what it should have attended to, from what came in; and
    what it then asks for against the tokens that have most of that softmax."""

    came: torch.Tensor | None = None
    steps: list[int]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *given: Any, **more: Any) -> Any:
        returned = super().update(keys, values, *given, **more)
        both = torch.cat([keys, values], -1).detach().clone()
        self.fresh = both[:, :, both.shape[2] - self.guessed :]
        both = both[:, :, : both.shape[2] - self.guessed]
        self.came = both if self.came is None else torch.cat([self.came[:, :, : self.length - both.shape[2]], both], 2)
        return returned

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        self.came = self.came[rows]

    def attend_sparsely(self, call: Any, visible: Any) -> Any:
        self.collect()
        tokens, leaving = None if self.chosen is None else self.chosen.tokens.cpu().numpy().copy(), self._leaving
        output, weights = super().attend_sparsely(call, visible)
        if tokens is None or self.config.top_up or not self.guessed:
            return output, weights
        held, dim = self.predictor.copy.tokens, self.history.form.key_dim
        low_keys, low_values = copied(self, self.came)
        every = torch.cat([self.came, self.fresh], 2)
        keys, values = every[..., :dim].double().clone(), every[..., dim:].double().clone()
        for row, head in np.ndindex(tokens.shape[:2]):
            exact = torch.zeros(held, dtype=torch.bool)
            exact[tokens[row, head][tokens[row, head] >= 0]] = True
            if leaving is not None:
                exact[leaving.tokens[row, head].tolist()] = True
            keys[row, head, :held][~exact] = low_keys[row, head][~exact].double()
            values[row, head, :held][~exact] = low_values[row, head][~exact].double()
        repeats = call.query.shape[1] // keys.shape[1]
        scores = call.query.double() @ keys.repeat_interleave(repeats, 1).transpose(2, 3) * call.scaling
        q, length = scores.shape[2:]
        seen = torch.ones(q, length, dtype=torch.bool).tril(length - q) if call.mask is None else call.mask
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = (shares @ values.repeat_interleave(repeats, 1)).transpose(1, 2)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
        own, wanted = shares[..., :held].unflatten(1, (-1, repeats)).sum(2).unbind(2)
        wanted += own
        wanted[..., 1:] += own[..., :-1]  # and what follows what the token itself attends to
        for row, head in np.ndindex(tokens.shape[:2]):
            wanted[row, head, tokens[row, head]] *= LOYALTY
            asked = self.chosen.wanted[row, head].cpu().numpy()
            first = 0 if visible is None else int(visible[row].int().argmax())
            others = np.setdiff1d(asked, first + np.arange(self.config.num_sinks))
            assert len(asked) == self.config.chosen and len(others) == self.config.num_selected
            rest = np.setdiff1d(np.arange(held), asked)
            assert wanted[row, head][others].min() >= wanted[row, head][rest].max() - 1e-6
        self.steps.append(len(tokens[tokens >= 0]))
        return output, weights


@pytest.mark.parametrize(
    ("bits", "padded"),
    [
        (1, False), (2, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, True), (2, False), (4, False), (4, True))),
    ],
)  # fmt: skip
def test_a_step_attends_to_what_it_should(bits: int, padded: bool) -> None:
    """Latest tokens and what was chosen as they came, the rest as the copy has it; the guess chooses what follows."""
    steps: list[int] = []
    layer = type("Layer", (CheckedLayer,), {"steps": steps})
    cls = type("SpecCache", (SpecCache,), {"layer_class": layer})
    ids, mask = asked(2) if padded else (prompt(long_model(), 2, LENGTH), {})
    with cls(long_model(), num_selected=20, bits=bits, **SMALL) as cache:
        generate(long_model(), cache, ids, max_new_tokens=NEW, **mask)
    assert len(steps) > 3 * (NEW - 2) and set(steps) == {2 * 2 * 24}


class Seen(LogitsProcessor):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append((*input_ids.shape, *scores.shape))
        return scores.roll(1, -1)


class Stop(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= LENGTH + 12)


class Streamer:
    def __init__(self) -> None:
        self.put_, self.ended = list[torch.Tensor](), 0

    def put(self, value: torch.Tensor) -> None:
        self.put_.append(value.reshape(-1))

    def end(self) -> None:
        self.ended += 1


def test_a_guess_is_seen_by_nobody() -> None:
    """Streamers, processors, criteria and hidden states are those of one token a step; so is the text."""
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    found = []
    for told in (True, False):
        seen, streamer = Seen(), Streamer()
        more = {"streamer": streamer, "output_hidden_states": True} if told else {}
        watched = widths_of(model.model.embed_tokens)
        with watched as forwards, SpecCache(model, num_selected=20, **SMALL) as cache, torch.no_grad():
            out = model.generate(
                ids, past_key_values=cache, do_sample=False, max_new_tokens=40, return_dict_in_generate=True,
                logits_processor=LogitsProcessorList([seen]), stopping_criteria=StoppingCriteriaList([Stop()]), **more,
            )  # fmt: skip
            assert cache.tokens == LENGTH + 11
            assert cache.report().decode_steps == 11
        assert forwards == [LENGTH, 1, *[2] * 11]
        assert seen.shapes == [(1, LENGTH + i, 1, 199) for i in range(12)]
        if told:
            assert torch.equal(torch.cat(streamer.put_), out.sequences[0]) and streamer.ended == 1
            assert [one[-1].shape[1] for one in out.hidden_states] == [LENGTH, *[1] * 11]
        found.append(out.sequences)
    assert torch.equal(*found)


def test_a_guess_is_no_token_of_a_budget() -> None:
    """The last token that was planned for has one beside it, which nothing holds."""
    model, ids = long_model(), prompt(long_model(), 1, LENGTH)
    with SpecCache(model, max_context=LENGTH + NEW, **SMALL) as cache:
        generate(model, cache, ids, max_new_tokens=NEW + 1)  # what comes last is not stored
        assert cache.get_seq_length() == cache.config.max_context


def test_nothing_is_fetched() -> None:
    model = long_model()
    with widths_of(model.model.embed_tokens) as forwards, SpecCache(model, num_selected=0, **SMALL) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=12)
        report = cache.report()
        assert report.bytes_read == 0 and 0 < report.selected_fraction < 0.2
    assert forwards == [LENGTH, *[1] * 11]


def test_more_bits_are_nearer() -> None:
    model, apart = long_model(), dict[str, float]()
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=2).logits
    for name, fields in {
        "1": {"bits": 1, "num_selected": 0}, "2": {"num_selected": 0}, "4": {"bits": 4, "num_selected": 0},
        "2, fetched": {"num_selected": 128, "speculative": False},
    }.items():  # fmt: skip
        with SpecCache(model, **SMALL, **fields) as cache:
            apart[name] = float((generate(model, cache, ids, max_new_tokens=2).logits - expected)[1].abs().max())
    assert apart["4"] < apart["2"] < apart["1"] and apart["2, fetched"] < apart["2"]


def test_a_second_turn_and_a_crop_into_the_copy() -> None:
    """All chosen: as `DynamicCache`, whatever was cropped and asked since."""
    model, found = long_model(), []
    with SpecCache(model, num_selected=1000, **SMALL) as own:
        for cache in (own, DynamicCache(config=model.config)):
            out = generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=30).tokens
            cache.crop(-86)
            ids = torch.cat([out[:, : LENGTH + 29 - 86], prompt(model, 2, 9, seed=8)], 1)
            out = generate(model, cache, ids, max_new_tokens=50).tokens
            found.append(generate(model, cache, torch.cat([out, prompt(model, 2, 5)], 1), max_new_tokens=20).tokens)
    assert torch.equal(*found)


def test_what_is_saved_opens_with_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is quantised anew, and answers are the same."""
    model, ids = long_model(), prompt(long_model(), 1, LENGTH)
    with SpecCache(model, path=tmp_path, num_selected=20, **SMALL) as cache:
        first = generate(model, cache, ids, max_new_tokens=4).tokens
        cache.save(tmp_path / "context")
        more = torch.cat([first, prompt(model, 1, 3)], 1)
        expected = generate(model, cache, more, max_new_tokens=8).tokens
    monkeypatch.setattr(low_bit_copy, "pack", None)  # whoever calls it raises
    with SpecCache.open(tmp_path / "context", model, path=tmp_path) as opened:
        assert opened.layers[0].predictor.copy.tokens == 288
        monkeypatch.undo()
        assert torch.equal(generate(model, opened, more, max_new_tokens=8).tokens, expected)


@pytest.mark.parametrize(("bits", "group", "share"), [(2, 64, 0.201), (1, 64, 0.139), (1, 32, 0.165)])
def test_what_fits_at_8k(bits: int, group: int, share: float) -> None:
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, head_dim=64, intermediate_size=16, vocab_size=32)).bfloat16()
    geometry = Geometry.of(model)
    full, fields = geometry.full_kv_bytes(8192, 1), {"bits": bits, "quant_group": group, "num_selected": 64}
    config = SpecCache.fit(geometry, int(share * full), 8192, 1, fields)
    plan = SpecCache.plan(geometry, config, 8192, 1)
    elements = 2 * 30 * 3 * 64 * (8192 - config.num_recent) // group * group
    assert plan.decode["low-bit copy"] == pytest.approx(elements * (bits + 32 / group) / 8, rel=0.01)
    assert plan.peak_bytes <= share * full


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_out_of_host_memory_comes_what_is_wanted_and_no_more(padded: bool, tmp_path: Path) -> None:
    """The same answers as from a disk, after a fork too, but for the order of sums."""
    model, found, read = long_model(), [], []
    ids, mask = asked(2) if padded else (prompt(model, 2, LENGTH), {})
    for engine in ("memory", "auto"):
        fields = {"num_recent": 8, "quant_group": 32, "block_tokens": 64, "num_selected": 20, "top_up": "always"}
        with SpecCache(model, path=tmp_path, engine=engine, **fields) as cache:
            first = generate(model, cache, ids, max_new_tokens=NEW, **mask)
            assert cache.layers[0].history.form.group_size == (32 if engine == "memory" else 4)
            read.append(cache.report().bytes_read)
            with cache.fork() as twin:
                more = torch.cat([first.tokens, prompt(model, 2, 3)], 1)
                seen = {name: torch.nn.functional.pad(one, (0, NEW + 3), value=1) for name, one in mask.items()}
                found.append((first.logits, generate(model, twin, more, max_new_tokens=8, **seen).logits))
                assert twin.layers[0].history.store.in_memory == (engine == "memory")
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    assert 0 < read[0] < read[1] / 8


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_what_was_saved_is_read_into_host_memory(
    key: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is opened, whole and checked; single rows come out of it then, and it can be saved anew."""
    model, place = long_model(), tmp_path / "context"
    fields = {"num_recent": 8, "quant_group": 32, "block_tokens": 64, "num_selected": 20, "path": tmp_path}
    fields["encryption_key"] = None if key is None else lambda: key
    with SpecCache(model, **fields) as cache:
        first = generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4).tokens
        cache.save(place)
        more = torch.cat([first, prompt(model, 1, 3)], 1)
        expected = generate(model, cache, more, max_new_tokens=8).tokens
    with SpecCache.open(place, model, engine="memory", **fields) as opened:
        stored = sum(layer.history.store.memory_bytes for layer in opened.layers)
        assert opened.host_bytes == opened.report().host_bytes == stored >= 288 / LENGTH * opened.report().full_kv_bytes
        assert all(layer.history.store.in_memory for layer in opened.layers)
        monkeypatch.setattr(entry_reads, "records_of", None)  # whoever brings records raises
        assert torch.equal(generate(model, opened, more, max_new_tokens=8).tokens, expected)
        monkeypatch.undo()
        opened.save(tmp_path / "again")
    with SpecCache.open(tmp_path / "again", model, **fields) as again:
        opened_length, kept = again.get_seq_length(), prompt(model, 1, 5)
        assert opened_length == more.shape[1] + 7
        generate(model, again, torch.cat([expected, kept], 1), max_new_tokens=4)
    (largest,) = sorted(place.glob("*.records"), key=lambda file: file.stat().st_size)[-1:]
    with largest.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptRecordError):
        SpecCache.open(place, model, engine="memory", **fields)


def test_budgets_leave_out_what_host_memory_stores() -> None:
    """It is told apart: of what is held, planned and reported."""
    model = long_model()
    with SpecCache.for_budget(model, "6/5", max_context=2 * LENGTH, max_batch=1, engine="memory") as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=NEW)
        report, plan = cache.report(), SpecCache.plan(Geometry.of(model), cache.config, 2 * LENGTH, 1)
        stored = sum(layer.history.store.memory_bytes for layer in cache.layers)
        assert report.host_bytes == cache.host_bytes == report.memory_by_owner["records in memory"] == stored > 0
        assert report.memory_bytes - stored <= plan.decode_bytes <= plan.peak_bytes <= report.memory_budget
        assert plan.host_bytes >= stored and "records in memory" not in plan.decode
        assert report.peak_memory_bytes <= report.memory_budget and report.host_peak_bytes == stored
        assert f"host memory now {size_text(stored)}" in " ".join(str(report).replace("│", " ").split())
    with SpecCache.for_budget(model, "5/2", max_context=2 * LENGTH, max_batch=1, engine="auto") as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=2)
        assert cache.report().host_bytes == 0
