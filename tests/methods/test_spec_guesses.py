"""The guess beside a token: which it is and where, which models are given none, and what others are told of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from forward_calls import told_of_forwards
from harness import COMMON, PAD, build, prompt, repetitive_prompt
from long_llama import long_model
from pairwise import combinations
from shared_keys import gemma3n
from spec_fields import ALL, SMALL
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_offload_cache.fetch import Fetcher
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import (
    EntryReads,
    LowBitCopy,
    LowBitForm,
    MixedAttention,
    SpecCache,
    SpecLayer,
)
from hf_offload_cache.model import Geometry

LENGTH = 300


class Forwards:
    """What a model's layers were given in each forward, and all of its logits."""

    def __init__(self, model: Any) -> None:
        self.ids: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._told = contextlib.ExitStack()
        self._told.enter_context(told_of_forwards(model.model, before=self._given))
        self._told.enter_context(told_of_forwards(model.lm_head, lambda kwargs, out: self._headed(out)))

    def _headed(self, logits: torch.Tensor) -> None:
        self.logits.append(logits)

    def _given(self, kwargs: Any) -> None:
        self.ids.append(kwargs["input_ids"])
        self.places.append(kwargs["position_ids"])

    @property
    def widths(self) -> list[int]:
        return [ids.shape[1] for ids in self.ids]

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *args: Any) -> None:
        self._told.close()


def decoded(model: Any, cache: Any, ids: torch.Tensor, new: int = 10, **options: Any) -> Any:
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


def test_a_guess_is_the_likeliest_token_after_the_last_guess_one_place_on() -> None:
    model, ids = long_model(), prompt(long_model(), 2, LENGTH)
    with SpecCache(model, num_selected=20, **SMALL) as cache, Forwards(model) as seen:
        out = decoded(model, cache, ids)
    assert seen.widths == [LENGTH, 1, *[2] * 9]
    for step in range(2, 11):
        token, guess = seen.ids[step].unbind(1)
        assert torch.equal(token, out[:, LENGTH + step - 2])
        assert torch.equal(guess, seen.logits[step - 1][:, -1].argmax(-1))
        place = LENGTH + step - 2
        assert (seen.places[step] == torch.tensor([place, place + 1])).all()


def test_guesses_go_with_their_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reordered = long_model(), list[torch.Tensor]()
    reorder = SpecCache.reorder_cache

    def told(cache: SpecCache, beams: Any) -> None:
        reordered.append(beams)
        reorder(cache, beams)

    monkeypatch.setattr(SpecCache, "reorder_cache", told)
    with SpecCache(model, num_selected=20, **SMALL) as cache, Forwards(model) as seen:
        decoded(model, cache, prompt(model, 1, LENGTH), num_beams=3)
    assert seen.widths[1:4] == [1, 2, 2] and any(not torch.equal(beams, torch.arange(3)) for beams in reordered)
    for step in range(3, len(seen.ids)):
        before = seen.logits[step - 1][:, -1].argmax(-1)
        assert torch.equal(seen.ids[step][:, 1], before[reordered[step - 2]])


def test_what_a_guess_wants_is_begun_to_be_read_a_step_before(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = long_model(), list[tuple[str, int, frozenset[int]]]()
    ahead, bring = EntryReads.ahead, EntryReads.bring
    for name, own in (("ahead", ahead), ("bring", bring)):

        def spy(self: Any, fetcher: Any, history: Any, tokens: Any, name: str = name, own: Any = own) -> Any:
            told.append((name, id(history), frozenset(tokens[tokens >= 0].tolist())))
            return own(self, fetcher, history, tokens)

        monkeypatch.setattr(EntryReads, name, spy)
    read, read_ahead = list[Any](), Fetcher.ahead

    def reads(self: Any, history: Any, choice: Any, *args: Any) -> None:
        read.append(history)
        read_ahead(self, history, choice, *args)

    monkeypatch.setattr(Fetcher, "ahead", reads)
    with SpecCache(model, num_selected=20, path=tmp_path, engine="direct", **SMALL) as cache:
        decoded(model, cache, prompt(model, 1, LENGTH))
        report = cache.report()
    assert len(read) == sum(bool(tokens) for name, _, tokens in told if name == "ahead") > 10
    layers = {history for _, history, _ in told}
    for layer in layers:
        own = [(name, tokens) for name, history, tokens in told if history == layer]
        begun = [tokens for name, tokens in own if name == "ahead"]
        fetched = [tokens for name, tokens in own if name == "bring"][1:]  # the first of all was for the first token
        assert len(begun) >= 9 and all(tokens in begun for tokens in fetched) and any(fetched)
    assert report.hit_rate is not None and report.prefetch_hit_rate is not None
    assert report.hit_rate < report.prefetch_hit_rate <= 1


# --- models --------------------------------------------------------------------------------------------------------


def rotary(kind: str) -> Any:
    own: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        own |= {"original_max_position_embeddings": 128, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longest = 128 if kind == "dynamic" else 1024
    config = LlamaConfig(**{**COMMON, "max_position_embeddings": longest, "rope_parameters": own})
    return build(LlamaForCausalLM, config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_hang_on_the_length_see_no_guess(kind: str) -> None:
    """They are those of the last position, which a guess would move."""
    model = rotary(kind)
    ids = prompt(model, 1, 120)
    with pytest.warns(UserWarning, match=f"speculative=False for LlamaForCausalLM: its rotary embedding \\({kind}\\)"):
        cache = SpecCache(model, **ALL)
    with cache, Forwards(model) as seen:
        found = decoded(model, cache, ids, 20)
        assert any("speculative=False" in one for one in cache.report().warnings)
    assert set(seen.widths[1:]) == {1}
    assert torch.equal(found, decoded(model, DynamicCache(config=model.config), ids, 20))


def test_learned_positions_end_where_they_end() -> None:
    model = build(GPT2LMHeadModel, GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=256))
    ids = prompt(model, 1, 240)
    with SpecCache(model, **ALL) as cache:
        found = decoded(model, cache, ids, 17)
    assert torch.equal(found, decoded(model, DynamicCache(config=model.config), ids, 17))


def test_rotary_embeddings_go_on_beyond_the_positions_of_training() -> None:
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 128}))
    ids = prompt(model, 1, 120)
    with SpecCache(model, **ALL) as cache, Forwards(model) as seen:
        found = decoded(model, cache, ids, 20)
    assert set(seen.widths[2:]) == {2}
    assert torch.equal(found, decoded(model, DynamicCache(config=model.config), ids, 20))


@pytest.mark.parametrize("selected", [1000, 0])
def test_windows_hold_no_more_than_they_need(selected: int) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    config = Gemma3TextConfig(**{**COMMON, **sizes, "max_position_embeddings": 8192, "layer_types": layers})
    model = build(Gemma3ForCausalLM, config)
    ids = prompt(model, 1, LENGTH)
    with SpecCache(model, **{**SMALL, "num_selected": selected}) as cache:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            assert [cache.layers[at].keys.shape[2] for at in (0, 2)] == [15, 15]
        for _ in range(2):
            cache.reset()
            found = decoded(model, cache, ids, 20)
            assert [cache.layers[at].keys.shape[2] for at in (0, 2)] == [15, 15]
            assert not any(cache.layers[at].record_past for at in (0, 2))
    if selected:
        assert torch.equal(found, decoded(model, DynamicCache(config=model.config), ids, 20))


def test_hidden_states_of_more_than_three_axes_lose_the_guess_alone() -> None:
    model = gemma3n()
    ids, found = prompt(model, 2, 200), []
    for cache in (DynamicCache(config=model.config), SpecCache(model, **ALL)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            steps = [model(ids[:, at : at + 1], past_key_values=cache, output_hidden_states=True) for at in range(3)]
        found.append(steps[-1])
    for theirs, own in zip(found[0].hidden_states, found[1].hidden_states, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)


def test_a_layer_that_shares_keys_does_not_choose_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chose = gemma3n(), list[int]()
    want = SpecLayer._want

    def told(layer: SpecLayer, *args: Any) -> Any:
        chose.append(layer.layer_idx)
        return want(layer, *args)

    monkeypatch.setattr(SpecLayer, "_want", told)
    ids = prompt(model, 1, 200)
    with SpecCache(model, num_selected=20, **SMALL) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        chose.clear()
        model(ids[:, 1:2], past_key_values=cache)
        own = [layer.layer_idx for layer in cache.selective]
    assert chose == own and len(own) < model.config.layer_types.count("full_attention")


def test_what_has_left_is_held_no_longer_than_it_is_attended_to() -> None:
    model = long_model()
    with SpecCache(model, num_selected=20, **SMALL) as cache, torch.no_grad():
        decoded(model, cache, prompt(model, 1, LENGTH), 1)
        for step in range(80):
            model(prompt(model, 1, LENGTH)[:, step : step + 1], past_key_values=cache)
            assert all(layer._leaving is None for layer in cache.selective)


@pytest.mark.parametrize("in_config", [True, False])
def test_what_tells_of_all_tokens_is_asked_without_a_guess(in_config: bool) -> None:
    config = MixtralConfig(**{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None})
    model = build(MixtralForCausalLM, config)
    model.config.output_router_logits = in_config
    ids, found = prompt(model, 1, LENGTH), []
    for cache in (DynamicCache(config=model.config), SpecCache(model, **ALL)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            asked = {} if in_config else {"output_router_logits": True}
            found.append(model(ids[:, :1], past_key_values=cache, **asked))
    assert [one.shape for one in found[1].router_logits] == [one.shape for one in found[0].router_logits]
    torch.testing.assert_close(found[1].aux_loss, found[0].aux_loss)


def test_weights_that_the_config_asks_for_are_there() -> None:
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "attn_implementation": "eager"}))
    model.config.output_attentions = True
    ids, found = prompt(model, 1, 200), []
    for cache in (DynamicCache(config=model.config), SpecCache(model, num_selected=20, **SMALL)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).attentions)
    for theirs, own in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-4)


# --- calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [True, False])
def test_a_row_that_is_padding_yet_gives_numbers(speculative: bool) -> None:
    """Token by token, the second row begins 40 later."""
    model, mask = long_model(), torch.ones(2, 80, dtype=torch.long)
    mask[1, :40] = 0
    ids = prompt(model, 2, 80).masked_fill(mask == 0, PAD)
    places, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for cache in (DynamicCache(config=model.config), SpecCache(model, speculative=speculative, **ALL)):
        with torch.no_grad():
            steps = [
                model(
                    ids[:, at : at + 1], attention_mask=mask[:, : at + 1], position_ids=places[:, at : at + 1],
                    past_key_values=cache,
                ).logits[:, -1]
                for at in range(80)
            ]  # fmt: skip
        found.append(torch.stack(steps))
    assert not found[1].isnan().any()
    torch.testing.assert_close(found[1][40:], found[0][40:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1][:, 0], found[0][:, 0], rtol=1e-3, atol=1e-3)


def test_guesses_come_back_after_candidates() -> None:
    model = long_model()
    ids = repetitive_prompt(model, LENGTH)
    with SpecCache(model, num_selected=20, **SMALL) as cache, Forwards(model) as seen:
        out = decoded(model, cache, ids, 10, prompt_lookup_num_tokens=4)
        before = len(seen.ids)
        decoded(model, cache, torch.cat([out, ids[:, :5]], 1), 8)
    assert seen.widths[before + 1 :] == [1, *[2] * 7]


def test_hooks_of_users_see_what_they_asked_for() -> None:
    model, seen = long_model(), list[int]()
    hook = model.register_forward_hook(lambda module, given, out: seen.append(out.logits.shape[1]))
    with SpecCache(model, num_selected=20, **SMALL) as cache:
        decoded(model, cache, prompt(model, 1, LENGTH), 6)
    hook.remove()
    assert seen == [1] * 6


@pytest.mark.parametrize(
    ("fields", "candidates"),
    combinations(
        ({"reuse_capacity": 400}, {"speculative": False, "num_selected": 200}, {"num_selected": 200}),
        ({}, {"prompt_lookup_num_tokens": 8}),
    ),
)
def test_what_is_planned_is_enough(fields: dict[str, Any], candidates: dict[str, Any], tmp_path: Any) -> None:
    model, tokens = long_model(), 1500
    sizes = {"max_context": tokens + 60, "max_batch": 1, "block_tokens": 128, "write_queue": "64KiB", **fields}
    peak = SpecCache.plan(Geometry.of(model), SpecCache.config_class(**sizes), tokens + 60, 1).peak_bytes
    with SpecCache(model, memory=peak, path=tmp_path, **sizes) as cache:
        decoded(model, cache, repetitive_prompt(model, tokens), 40, **candidates)
        assert cache.report().peak_memory_bytes <= peak


def test_scores_are_as_exact_as_float32() -> None:
    """Queries of a width whose root is no power of two, in 16 bits: they are scaled in 32."""
    form = RecordFormat(1, 80, 1, 80, torch.bfloat16, 4)
    copy = LowBitCopy(LowBitForm(form, 4, 32), 1, torch.device("cpu"), MemoryAccount())
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, 1, count, 80, generator=generator).bfloat16() for count in (2, 30))
    values = torch.eye(30, 80)[None, None]
    found, _ = MixedAttention(copy, query * 8, 80**-0.5, (keys, values), None).attend([])
    scores = (query * 8).float() @ keys.float().mT * 80**-0.5
    scores[:, :, 0, -1] = -torch.inf
    torch.testing.assert_close(found[0, :, 0, :30], scores.softmax(-1)[0, 0], rtol=1e-4, atol=1e-6)


def test_logits_of_what_has_no_embedding_are_no_guess() -> None:
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    width = model.config.vocab_size
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 3 * width, bias=False)
    with torch.no_grad():
        model.lm_head.weight[:width] = 0
    ids = prompt(model, 1, 60)
    plain = DynamicCache(config=model.config)
    with SpecCache(model, **ALL) as cache, torch.no_grad():
        for one in (ids, *ids[:, :4].split(1, 1)):
            found, expected = (model(one, past_key_values=each).logits[:, -1] for each in (cache, plain))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
