"""Candidates that are verified (assisted decoding, prompt lookup) are selected for; prompts, however short, are not."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import Gathers
from forward_calls import widths_of
from harness import assert_exact, generate, prompt
from long_models import long_fresh, long_tiny, sparse
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, DiskSwapConfig
from hf_offload_cache.core import SelectiveLayer, selective_layer
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.fetch import Choice, Fetched
from hf_offload_cache.methods.disk_swap import LowRankPredictor
from hf_offload_cache.model import AttentionCall, Geometry, attach

LENGTH, NEW = 1500, 24
FIELDS: dict[str, Any] = {"group_size": 16, "num_recent": 32, "num_selected": 64, "reuse_capacity": 0}
"""Records without padding; a step of one query attends to 5 units, sinks included, and one of several to 10."""
BUDGET = 5


@dataclass
class Combined:
    """What every step that selected attended to."""

    queries: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)


@contextlib.contextmanager
def combined() -> Iterator[Combined]:
    """Every call of attention over a choice is compared with plain softmax over the tokens that it names, each query
    seeing what is not behind it."""
    seen = Combined()
    combine = SelectiveLayer.combine

    def watched(layer: Any, call: AttentionCall, choice: Choice, fetched: Fetched, visible: Any) -> Any:
        output, weights = combine(layer, call, choice, fetched, visible)
        keys, values = layer.whole()
        count, tail = call.num_queries, layer.history.recent.shape[1]
        places = torch.from_numpy(layer.history.positions(choice.units)[0])
        places = torch.cat([places[places >= 0], torch.arange(layer.length - tail, layer.length)])
        own = torch.arange(layer.length - count, layer.length)
        assert torch.isin(own, places).all()
        query, groups = call.query[0], call.query.shape[1] // keys.shape[1]
        scores = query @ keys[0, :, places].repeat_interleave(groups, 0).transpose(1, 2) * call.scaling
        scores = scores.masked_fill(places > own[:, None], float("-inf"))
        attended = values[0, :, places]
        if fetched.estimates is not None:  # its entries have keys of zeros, and are the last ones
            scores = torch.cat([scores, fetched.estimates.bias[0]], -1)
            attended = torch.cat([attended, layer.history.form.split(fetched.estimates.entries)[1][0]], 1)
        expected = scores.softmax(-1) @ attended.repeat_interleave(groups, 0)
        torch.testing.assert_close(output[0], expected.transpose(0, 1), rtol=1e-4, atol=1e-5)
        seen.queries.append(count)
        seen.units.append(choice.units.shape[1])
        return output, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectiveLayer, "combine", watched)
        yield seen


def repetitive(model: Any) -> torch.Tensor:
    """A prompt in which n-grams come back."""
    return prompt(model, 1, 11).repeat(1, LENGTH // 11 + 1)[:, :LENGTH]


def test_prompt_lookup_reads_a_part_of_the_history(tmp_path: Path) -> None:
    """Each verification counts as a step of decoding, and a token reads a small part of the full KV."""
    model = long_tiny("llama")
    fields = {**FIELDS, "engine": "mapped", "path": tmp_path}
    with widths_of(model.model.embed_tokens) as forwards, sparse(model, **fields) as cache:
        out = generate(model, cache, repetitive(model), max_new_tokens=NEW, prompt_lookup_num_tokens=5)
        report = cache.report()
    steps = len(forwards) - 1
    assert out.tokens.shape[1] == LENGTH + NEW
    assert steps < NEW - 1
    assert report.decode_steps == steps
    assert 0 < report.selected_fraction < 0.2
    assert 0 < report.bytes_read < 0.15 * steps * report.full_kv_bytes


def test_candidates_are_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor is told of a prompt, and not of a verification: it goes on from what mattered."""
    model, told = long_tiny("llama"), list[int]()
    prompted = LowRankPredictor.prompted
    with widths_of(model.model.embed_tokens) as forwards, sparse(model, **FIELDS) as cache:
        monkeypatch.setattr(
            LowRankPredictor, "prompted", lambda own, factor: [told.append(len(forwards)), prompted(own, factor)][1]
        )
        generate(model, cache, repetitive(model), max_new_tokens=NEW, prompt_lookup_num_tokens=5)
    assert max(forwards[1:]) > 1 and forwards[0] >= LENGTH  # its first candidates come with the prompt
    assert set(told) == {1}


def test_candidates_see_what_is_not_behind_them(checked_gathers: Gathers) -> None:
    """A verification attends to no more than twice the budget, and each of its queries to itself and what is before."""
    model = long_tiny("llama")
    with widths_of(model.model.embed_tokens) as forwards, combined() as seen, sparse(model, **FIELDS) as cache:
        generate(model, cache, repetitive(model), max_new_tokens=NEW, prompt_lookup_num_tokens=5)
    steps = forwards[1:]
    assert max(steps) == 6
    assert seen.queries == [count for count in steps for _ in range(3)]
    assert len(checked_gathers) == 3 * len(steps)
    assert max(seen.units) <= 2 * BUDGET
    assert max(units for units, count in zip(seen.units, seen.queries, strict=True) if count > 1) > BUDGET


def test_a_cache_without_candidates(checked_gathers: Gathers) -> None:
    """They raise before the prompt, and before a step if they were not announced; the cache goes on without them."""
    model, ids = long_tiny("llama"), repetitive(long_tiny("llama"))
    with sparse(model, **FIELDS, candidates=False) as cache, torch.no_grad():
        with pytest.raises(BudgetError, match=r"candidates is False: .* nothing was added"):
            generate(model, cache, ids, max_new_tokens=NEW, prompt_lookup_num_tokens=5)
        assert cache.get_seq_length() == 0
        out = generate(model, cache, ids, max_new_tokens=2)
        cache.activate_past_recording()  # as `generate` does on some devices, to take its last token back
        model(out.tokens[:, -1:], past_key_values=cache)
        cache.crop(-1)
        with pytest.raises(BudgetError, match="nothing was added"):
            model(out.tokens[:, -3:], past_key_values=cache)
        assert cache.get_seq_length() == LENGTH + 1
        model(out.tokens[:, -1:], past_key_values=cache)
        assert cache.get_seq_length() == LENGTH + 2


def test_a_union_that_is_cut(monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers) -> None:
    """Queries that want distinct units get the ones that matter most, twice the budget of them."""
    model = long_tiny("llama")
    chosen: list[np.ndarray] = []
    number = iter(range(1000))

    def distinct(layer: Any, query: Any, *, guess: bool = False, again: bool = False) -> Choice:
        units = np.arange(BUDGET)[None] + BUDGET * (next(number) % 8)
        return Choice(units, importance=np.full(units.shape, float(units[0, 0]), dtype=np.float32))

    choose_for = SelectiveLayer.choose_for

    def watched(layer: Any, call: AttentionCall, visible: Any) -> Any:
        choice, estimate = choose_for(layer, call, visible)
        chosen.append(choice.units)
        return choice, estimate

    with sparse(model, look_ahead=False, **FIELDS) as cache:
        cache.activate_past_recording()
        with torch.no_grad():
            model(prompt(model, 1, LENGTH), past_key_values=cache)
            model(prompt(model, 1, 1), past_key_values=cache)
            monkeypatch.setattr(type(cache.selective[0]), "choose", distinct)
            monkeypatch.setattr(SelectiveLayer, "choose_for", watched)
            model(prompt(model, 1, 8), past_key_values=cache)
    assert len(chosen) == 3
    for units in chosen:
        assert units.tolist() == [list(range(6 * BUDGET, 8 * BUDGET))]
    assert len(checked_gathers) == 6


def test_a_verification_without_a_mask_is_causal() -> None:
    model = long_tiny("llama")
    mask_of = selective_layer.gathered_mask
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def both(call: AttentionCall, history: Any, choice: Choice, fetched: Fetched) -> torch.Tensor:
        mask = mask_of(call, history, choice, fetched)
        pairs.append((mask, mask_of(dataclasses.replace(call, mask=None), history, choice, fetched)))
        return mask

    with pytest.MonkeyPatch.context() as patch, sparse(model, **FIELDS) as cache, torch.no_grad():
        patch.setattr(selective_layer, "gathered_mask", both)
        cache.activate_past_recording()
        model(prompt(model, 1, LENGTH), past_key_values=cache)
        model(prompt(model, 1, 6, 3), past_key_values=cache)
    assert len(pairs) == 3
    for given, made in pairs:
        assert given.dtype == made.dtype == torch.bool
        assert not given.all()
        assert torch.equal(given, made)


@pytest.mark.parametrize("chunk", [None, 20])
def test_a_short_second_question_after_candidates_is_exact(chunk: int | None, checked_gathers: Gathers) -> None:
    """A prompt attends to everything, however short it is: its first token is that of exact mode."""
    model = long_tiny("llama")
    options: dict[str, Any] = {"max_new_tokens": 1}
    if chunk is not None:
        options["prefill_chunk_size"] = chunk
    with sparse(model, **FIELDS) as cache:
        first = generate(model, cache, repetitive(model), max_new_tokens=NEW, prompt_lookup_num_tokens=5)
        assert cache.contents.recording
        assert cache.shared.step is None
        verified = len(checked_gathers)
        assert verified > 0
        question = torch.cat([first.tokens[:, : cache.get_seq_length()], prompt(model, 1, 27, 4)], 1)
        plain = DynamicCache(config=model.config)
        for layer_idx, layer in enumerate(cache.offloaded):
            plain.update(*layer.whole(), layer_idx)
        selected = cache.report().decode_steps
        answer = generate(model, cache, question, **options)
        assert len(checked_gathers) == verified
        assert cache.report().decode_steps == selected
        assert_exact(generate(model, plain, question, max_new_tokens=1), answer)  # 5.17 begins it anew in pieces
        generate(model, cache, torch.cat([answer.tokens, prompt(model, 1, 3, 5)], 1), max_new_tokens=3)
        assert cache.report().decode_steps == selected + 2


@pytest.mark.parametrize("chunk", [24, 200])
def test_a_prompt_in_pieces_continues_a_cache(chunk: int, tmp_path: Path) -> None:
    """Both turns have the tokens of prompts in one forward, where everything is selected, and hold each token once."""
    model, options = long_tiny("llama"), {"max_new_tokens": 6, "do_sample": False}
    fields = {**FIELDS, "num_selected": 900}
    made = []
    for size in ({}, {"prefill_chunk_size": chunk}):
        with DiskSwapCache(model, path=tmp_path, **fields) as cache:
            first = model.generate(prompt(model, 1, 620), past_key_values=cache, **options, **size)
            question = torch.cat([first, prompt(model, 1, 150, 4)], 1)
            made.append(model.generate(question, past_key_values=cache, **options, **size))
            assert cache.tokens == made[-1].shape[1] - 1
            assert torch.equal(cache.input_ids, made[-1][:, :-1])
    assert torch.equal(*made)


def test_the_last_piece_of_a_prompt_is_exact(checked_gathers: Gathers) -> None:
    """Pieces of 24 tokens, of a cache that was told that candidates will come."""
    model = long_tiny("llama")
    ids = prompt(model, 1, 620)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=1, prefill_chunk_size=24)
    with sparse(model, **FIELDS) as cache:
        cache.activate_past_recording()
        assert_exact(expected, generate(model, cache, ids, max_new_tokens=1, prefill_chunk_size=24))
        assert cache.report().decode_steps == 0
    assert len(checked_gathers) == 0


@pytest.mark.parametrize(("left", "older"), [(0, False), (5, False), (5, True)])
def test_a_prompt_in_pieces_is_continued(left: int, older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the complete conversation, with padding on the left and without, each new token is computed once; `older`: in
    the way of a transformers that would begin anew."""
    if older:
        monkeypatch.setattr(attach, "feeds_pieces_anew", lambda: True)
    model = long_tiny("llama")
    ids, more = prompt(model, 1, 90), prompt(model, 1, 50, 1)
    mask = torch.ones(1, 140, dtype=torch.long)
    mask[:, :left] = 0
    text, tokens = torch.cat([ids, more], 1), []
    options = {"attention_mask": mask, "max_new_tokens": 4}
    expected = generate(model, DynamicCache(config=model.config), text, **options)
    with DiskSwapCache(model, exact=True) as cache:
        generate(model, cache, ids, attention_mask=mask[:, :90], max_new_tokens=1)
        hook = model.get_input_embeddings().register_forward_hook(lambda _, given, __: tokens.append(given[0].shape[1]))
        assert_exact(expected, generate(model, cache, text, prefill_chunk_size=20, **options))
        hook.remove()
    assert tokens == [20, 20, 10, 1, 1, 1]


def test_new_tokens_alone_continue_a_cache() -> None:
    """With the mask of the complete conversation, which tells `generate` that earlier ids are left out."""
    model = long_tiny("llama")
    text = prompt(model, 1, 120)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(text), "max_new_tokens": 4}
    expected = generate(model, DynamicCache(config=model.config), text, **options)
    with DiskSwapCache(model, exact=True) as cache:
        generate(model, cache, text[:, :100], max_new_tokens=1)
        answer = generate(model, cache, text[:, 100:], **options)
    assert torch.equal(answer.tokens[:, -4:], expected.tokens[:, -4:])


def test_a_question_that_is_fed_by_hand_after_candidates_is_exact(checked_gathers: Gathers) -> None:
    model = long_tiny("llama")
    with sparse(model, **FIELDS) as cache, torch.no_grad():
        generate(model, cache, repetitive(model), max_new_tokens=NEW, prompt_lookup_num_tokens=5)
        verified, selected = len(checked_gathers), cache.report().decode_steps
        plain = DynamicCache(config=model.config)
        for layer_idx, layer in enumerate(cache.offloaded):
            plain.update(*layer.whole(), layer_idx)
        question = prompt(model, 1, 9, 3)
        answer, expected = (model(question, past_key_values=each).logits for each in (cache, plain))
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)  # of float32, merged block by block
        assert (len(checked_gathers), cache.report().decode_steps) == (verified, selected)
        cache.activate_past_recording()  # whoever verifies by hand says so again
        model(prompt(model, 1, 4, 4), past_key_values=cache)
        assert cache.report().decode_steps == selected + 1


@pytest.mark.parametrize(
    "fields",
    [{}, {"reuse_capacity": 40}, {"group_size": 4}, {"remainder": True, "entry_bits": 8}, {"heads_apart": True}],
    ids=["none", "slots", "small", "default", "apart"],
)
def test_a_budget_is_kept_by_verifications_too(fields: dict[str, Any]) -> None:
    """Steps of one query and of many stay within the plan; a union beyond a staging area is read in parts."""
    sizes = {"num_key_value_heads": 4, "hidden_size": 256, "num_attention_heads": 8}
    model = long_fresh("llama", max_position_embeddings=4096, **sizes)
    usual = {"num_selected": 400, "num_recent": 32, "look_ahead": True, "write_queue": "64KiB", "rank": 16}
    fields = {**usual, "remainder": False, **fields}
    plan = DiskSwapCache.plan(Geometry.of(model), DiskSwapConfig(block_tokens=64, **fields), 3200, 1)
    limits = {"memory": plan.peak_bytes, "max_context": 3200, "max_batch": 1, "block_tokens": 64}
    staged, widest = 0, 0
    with DiskSwapCache(model, **fields, **limits) as cache, torch.no_grad():
        cache.activate_past_recording()
        assert cache.selecting is not None
        model(prompt(model, 1, 3000), past_key_values=cache)
        hold = cache.storage.account.hold

        def watched(owner: str, nbytes: int) -> None:
            nonlocal staged
            hold(owner, nbytes)
            staged = max(staged, cache.storage.account.by_owner["staging"])

        def chosen(layer_idx: int, choice: Choice) -> None:
            nonlocal widest
            widest = max(widest, choice.units.shape[1] * cache.selective[0].history.form.group_size)

        cache.storage.account.hold = watched  # type: ignore[method-assign]
        cache.selecting.watch = chosen
        for seed in range(5):
            model(prompt(model, 1, 24, seed), past_key_values=cache)
            cache.crop(-20)
            model(prompt(model, 1, 1, seed), past_key_values=cache)
        report = cache.report()
    wider = plan.decode["selection"] if fields["remainder"] else 0  # which the plan counts instead of a second area
    assert 0 < staged <= plan.decode["staging"] + wider
    assert report.peak_memory_bytes <= plan.peak_bytes
    assert widest > 1.5 * 400, "some union is beyond an area"
