"""What lies between two steps of `SpecCache`: forks, saved contexts, failed forwards, and what attention holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import checked
from forward_calls import told_of_forwards, widths_of
from harness import COMMON, build, generate, prompt
from long_llama import long_model
from shared_keys import gemma3n
from spec_fields import ALL, SMALL
from torch.profiler import ProfilerActivity, profile, record_function
from torch_memory import most_held
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from hf_offload_cache.errors import ContextError
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import (
    Entries,
    LowBitCopy,
    LowBitForm,
    LowBitPredictor,
    MixedAttention,
    SpecCache,
    SpecLayer,
)
from hf_offload_cache.model import Geometry

LENGTH = 300
SOME: dict[str, Any] = {**SMALL, "num_selected": 20, "bits": 1}


def fed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of each of ids (B, T), given one at a time."""
    with torch.no_grad():
        return torch.cat([model(one, past_key_values=cache).logits for one in ids.split(1, 1)], 1)


def prefilled(model: Any, cache: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache)


def windowed() -> Any:
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    config = Gemma3TextConfig(**{**COMMON, **sizes, "max_position_embeddings": 8192, "layer_types": layers})
    return build(Gemma3ForCausalLM, config)


@contextmanager
def failing(module: Any) -> Iterator[None]:
    def fail(kwargs: Any) -> None:
        raise MemoryError("made to fail")

    with told_of_forwards(module, before=fail):
        yield


# --- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [SOME, {**SOME, "bits": 2, "speculative": False}], ids=["guess", "none"])
def test_a_copy_in_the_middle_of_decoding_goes_on_alike(fields: dict[str, Any], tmp_path: Path) -> None:
    model = long_model()
    ids, steps = prompt(model, 2, LENGTH), prompt(model, 2, 20, seed=5)
    with SpecCache(model, path=tmp_path, **fields) as cache:
        prefilled(model, cache, ids)
        fed(model, cache, steps[:, :10])
        cache.save(tmp_path / "context")
        with cache.fork() as twin, SpecCache.open(tmp_path / "context", model, path=tmp_path) as opened:
            expected, *found = (fed(model, one, steps[:, 10:]) for one in (cache, twin, opened))
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)  # sums in another order


@pytest.mark.parametrize("wrong", [torch.zeros(1, 2, 4), torch.zeros(2, 2, 4).long(), torch.full((1, 2, 4), 9999)])
def test_what_was_chosen_is_checked(wrong: torch.Tensor) -> None:
    model = long_model()
    with SpecCache(model, **SOME) as cache, SpecCache(model, **SOME) as other:
        prefilled(model, cache, prompt(model, 1, LENGTH))
        layer, fresh = cache.layers[0], other.layers[0]
        cache.freeze()
        parts = [part.share() for part in layer.freeze()]
        with pytest.raises(ContextError, match=r"layer 0 of the context .*: chosen of its choice is"):
            fresh.restore({**layer.capture(), "chosen": wrong}, parts, torch.device("cpu"))


@pytest.mark.parametrize("rows", [[1], [1, 1], [0]])
def test_what_was_given_up_is_not_looked_for_in_host_memory(rows: list[int], tmp_path: Path) -> None:
    model = long_model()
    steps = prompt(model, len(rows), 6, seed=3)
    with SpecCache(model, path=tmp_path, **ALL) as cache:
        prefilled(model, cache, prompt(model, 2, 200))
        cache.batch_select_indices(torch.tensor(rows))
        cache.save(tmp_path / "context")
        expected = fed(model, cache, steps)
    with SpecCache.open(tmp_path / "context", model, path=tmp_path, engine="memory") as opened:
        torch.testing.assert_close(fed(model, opened, steps), expected, rtol=1e-4, atol=1e-4)


def test_a_copy_that_is_behind_is_made_when_attention_comes(tmp_path: Path) -> None:
    """It is not saved; until a group leaves the tail, attention goes over everything."""
    model = long_model()
    ids, steps = prompt(model, 1, LENGTH), prompt(model, 1, 50, seed=5)
    with SpecCache(model, path=tmp_path, **ALL) as cache:
        prefilled(model, cache, ids)
        for layer in cache.selective:
            layer.predictor.truncate(0)
        cache.save(tmp_path / "context")
    with SpecCache.open(tmp_path / "context", model, path=tmp_path) as opened:
        found = fed(model, opened, steps)
        for layer in opened.selective:
            assert layer.predictor.copy.tokens == layer.history.units * 4 > 300
            fresh, tokens = layer.make_predictor(), layer.history.units * 4
            fresh.copy.append(((one.keys, one.values) for one in layer.history.blocks(tokens)), tokens)
            for name, held in layer.predictor.copy.capture().items():
                assert torch.equal(held, fresh.copy.capture()[name])
            fresh.close()
    reference = DynamicCache(config=model.config)
    prefilled(model, reference, ids)
    torch.testing.assert_close(found, fed(model, reference, steps), rtol=1e-4, atol=1e-4)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "batch"),
    [
        ({"top_up": "always"}, 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            ({}, 1), ({}, 2), ({"speculative": False}, 1), ({"speculative": False}, 2), ({"top_up": "always"}, 1),
        )),
    ],
)  # fmt: skip
def test_layers_that_share_keys_count_each_token_once(fields: dict[str, Any], batch: int) -> None:
    model = gemma3n()
    ids = prompt(model, batch, 200)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=80)
    with checked(SpecCache)(model, **{**ALL, **fields}) as cache:
        found = generate(model, cache, ids, max_new_tokens=80)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_ours_has_no_guess(tmp_path: Path) -> None:
    model = build(BloomForCausalLM, BloomConfig(vocab_size=199, hidden_size=64, n_layer=2, n_head=4))
    ids = prompt(model, 1, LENGTH)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=6)
    with SpecCache(model, path=tmp_path, **ALL) as cache, widths_of(model.transformer.word_embeddings) as seen:
        found = generate(model, cache, ids, max_new_tokens=6)
        assert set(seen[1:]) == {1}
        cache.save(tmp_path / "context")
        longer = torch.cat([found.tokens, prompt(model, 1, 5)], 1)
        with SpecCache.open(tmp_path / "context", model, path=tmp_path) as opened:
            again = generate(model, opened, longer, max_new_tokens=4)
        assert torch.equal(again.tokens, generate(model, cache, longer, max_new_tokens=4).tokens)
    assert torch.equal(found.logits, expected.logits)


def test_a_prompt_that_fits_the_latest_tokens_has_no_guess() -> None:
    model = long_model()
    with SpecCache(model) as cache, widths_of(model.model.embed_tokens) as seen:
        generate(model, cache, prompt(model, 1, 10), max_new_tokens=8)
    assert set(seen[1:]) == {1}


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_models_that_give_no_text_have_no_guess(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**{**COMMON, "max_position_embeddings": 8192, "num_labels": 3})).eval()
    ids = prompt(model, 2, LENGTH)
    with pytest.warns(UserWarning, match="speculative=False for .*: it does not generate text"):
        cache = SpecCache(model, **ALL)
    reference = DynamicCache(config=model.config)
    with cache, torch.no_grad():
        for one in (ids, ids[:, :1], ids[:, 1:2]):
            found, expected = (model(one, past_key_values=held).logits for held in (cache, reference))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_guess_is_of_the_kind_of_its_token() -> None:
    config = GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    model = build(GPT2LMHeadModel, config)
    ids, reference = prompt(model, 1, 200), DynamicCache(config=model.config)
    with SpecCache(model, **ALL) as cache, torch.no_grad(), widths_of(model.transformer.wte) as seen:
        for one in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:3]):
            found = model(one, token_type_ids=one, past_key_values=cache).logits
            torch.testing.assert_close(
                found, model(one, token_type_ids=one, past_key_values=reference).logits, rtol=1e-4, atol=1e-4
            )
    assert seen[-4:].count(2) == 2  # ours: a token and a guess, and the kind of both


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2], ids=["pre-decoding", "a step"])
def test_no_guess_counts_after_a_forward_that_failed(steps: int) -> None:
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **SOME) as cache, torch.no_grad():
        prefilled(model, cache, ids)
        if steps:
            fed(model, cache, ids[:, :steps])
        with failing(model.lm_head), pytest.raises(MemoryError):
            model(ids[:, :1], past_key_values=cache)
        held = cache.layers[0].length
        model.model(ids[:, :1], past_key_values=cache)
        assert [layer.length for layer in cache.layers] == [held + 1] * 3


def test_keys_that_reached_no_attention_before_a_failure_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **ALL) as cache, SpecCache(model, **ALL) as twin:
        for one in (cache, twin):
            prefilled(model, one, ids)
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1], "attend", lambda call: (_ for _ in ()).throw(MemoryError("made to fail")))
            with pytest.raises(MemoryError):
                fed(model, cache, ids[:, :1])
        torch.testing.assert_close(fed(model, cache, ids[:, :3]), fed(model, twin, ids[:, :3]), rtol=1e-4, atol=1e-4)


def test_windows_do_not_record_after_a_step_that_failed() -> None:
    model = windowed()
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **SOME) as cache, torch.no_grad():
        generate(model, cache, ids, max_new_tokens=3)
        with failing(model.lm_head), pytest.raises(MemoryError):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(RuntimeError):  # a window was ahead
            model(ids[:, :5], past_key_values=cache)
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.reset()
        prefilled(model, cache, ids)
        assert [cache.layers[at].keys.shape[2] for at in (0, 2)] == [15, 15]


def test_rows_that_inference_mode_moved_are_anyones() -> None:
    model = long_model()
    ids = prompt(model, 2, LENGTH)
    with SpecCache(model, **SOME) as cache:
        prefilled(model, cache, ids)
        fed(model, cache, ids[:, :2])
        with torch.inference_mode():
            cache.reorder_cache(torch.tensor([1, 0]))
        assert fed(model, cache, ids[:, 2:4]).isfinite().all()


# --- changes -------------------------------------------------------------------------------------------------------


def test_a_guess_follows_its_row() -> None:
    model = long_model()
    ids = prompt(model, 2, LENGTH)
    with SpecCache(model, **SOME) as cache:
        prefilled(model, cache, ids)
        fed(model, cache, ids[:, :2])
        cache._guess = torch.tensor([[7], [8]])
        cache.batch_repeat_interleave(2)
        assert cache._guess.tolist() == [[7], [7], [8], [8]]
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
        assert cache._guess.tolist() == [[8], [7], [7], [7]]
        cache.batch_select_indices(torch.tensor([0, 3]))
        assert cache._guess.tolist() == [[8], [7]]


@pytest.mark.parametrize("change", ["crop", "reset"])
def test_a_guess_does_not_outlive_what_it_followed(change: str) -> None:
    """The token runs once more, by itself, so that there is another."""
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **SOME) as cache, widths_of(model.model.embed_tokens) as seen:
        prefilled(model, cache, ids)
        fed(model, cache, ids[:, :3])
        if change == "crop":
            cache.crop(-2)
        else:
            cache.reset()
            prefilled(model, cache, ids)
        seen.clear()
        fed(model, cache, ids[:, :2])
    assert seen == [1, 2, 2]


# --- what is chosen, and what attention holds -----------------------------------------------------------------------


def test_padding_is_never_chosen() -> None:
    shares, visible = torch.zeros(2, 1, 50), torch.ones(2, 60, dtype=torch.bool)
    shares[1, 0, 3], shares[1, 0, 49] = 1.0, 0.1
    visible[1, :45] = False
    predictor = object.__new__(LowBitPredictor)
    predictor._num_sinks = 4
    found = predictor.most(shares, visible, 20)
    assert np.sort(found[1, 0]).tolist() == [-1] * 15 + [45, 46, 47, 48, 49]
    assert (found[0] >= 0).all() and {0, 1, 2, 3} <= set(found[0, 0].tolist())


def test_records_in_host_memory_have_no_slots() -> None:
    model = long_model()
    with SpecCache(model, **{**SOME, "group_size": 32}, engine="memory", reuse_capacity=64) as cache:
        prefilled(model, cache, prompt(model, 1, LENGTH))
        fed(model, cache, prompt(model, 1, 4))
        owners = cache.report().memory_by_owner
        planned = SpecCache.plan(Geometry.of(model), cache.config, LENGTH + 4, 1)
    assert owners["chosen entries"] == planned.decode["chosen entries"] > 0
    assert {"reuse slots", "slots"}.isdisjoint(owners) and {"reuse slots", "slots"}.isdisjoint(planned.decode)
    assert set(owners) <= {*planned.decode, "records in memory"}


@pytest.mark.parametrize(
    ("heads", "attention", "fields", "queries", "tokens"),
    [
        (1, "sdpa", {}, 1, 4096), (1, "eager", {}, 1, 4096), (1, "eager", {"speculative": False}, 1, 4096),
        (4, "eager", {}, 1, 4096), (1, "eager", {"top_up": "always"}, 1, 4096), (2, "sdpa", {"bits": 1}, 1, 4096),
        (2, "sdpa", {}, 2, 4096), (4, "sdpa", {"num_selected": 400}, 1, 1024),
    ],
)  # fmt: skip
def test_attention_holds_what_the_account_says(
    heads: int, attention: str, fields: dict[str, Any], queries: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpecCache, "weigh", lambda *_: None)
    config = {**COMMON, "num_key_value_heads": heads, "num_attention_heads": 4, "num_hidden_layers": 1}
    config |= {"max_position_embeddings": 16384, "attn_implementation": attention}
    model = build(LlamaForCausalLM, LlamaConfig(**config))
    ids, booked, attend = prompt(model, 1, tokens), list[int](), SpecLayer.attend_sparsely

    def told(layer: SpecLayer, *args: Any) -> Any:
        account = layer.shared.storage.account
        account.reset_peaks()
        before = account.peak
        with record_function("attention of a layer"):
            found = attend(layer, *args)
        booked.append(account.peak - before)
        return found

    monkeypatch.setattr(SpecLayer, "attend_sparsely", told)
    with SpecCache(model, engine="memory", block_tokens=256, **fields) as cache, torch.no_grad():
        mask = torch.ones(1, tokens, dtype=torch.long)
        mask[:, :100] = 0
        if queries > 1:
            cache.activate_past_recording()
        for part in range(0, tokens, 1024):
            given = {"attention_mask": mask[:, : part + 1024], "logits_to_keep": 1}
            model(ids[:, part : part + 1024], past_key_values=cache, **given)
        for _ in range(1 if queries > 1 else 3):
            mask = torch.cat([mask, torch.ones(1, queries, dtype=torch.long)], 1)
            booked.clear()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                model(ids[:, :queries], attention_mask=mask, past_key_values=cache)
    assert 0.3 * booked[-1] < most_held(seen, "attention of a layer") <= 1.03 * booked[-1]


def test_entries_as_they_were_stored_take_what_is_said() -> None:
    form = RecordFormat(2, 64, 2, 64, torch.bfloat16, 4)
    copy = LowBitCopy(LowBitForm(form, 2, 64), 1, torch.device("cpu"), MemoryAccount())
    own = torch.randn(1, 2, 512, 64).bfloat16()
    copy.append([(own, own)], 512)
    chosen = Entries(torch.arange(500).expand(1, 2, -1), own[:, :, :500], own[:, :, :500])
    query = torch.randn(1, 8, 2, 64).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, record_function("attention"):
        MixedAttention(copy, query, 0.125, (own[:, :, :100], own[:, :, :100]), None).attend([chosen], [0, 1])
    scored = LowBitPredictor.scored_bytes(copy.form, 512, 1, 8, 2, 2)
    stored = MixedAttention.stored_bytes(form, 1, 8, 2, 600)
    held = most_held(seen, "attention")
    assert scored < held - stored // 2 and held <= 1.03 * (scored + stored)
