"""Turns after the first: measured budgets, embeddings, padding between turns and on the right, masks of a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import PAD, SMALL, Decoded, assert_exact, generate, prompt, tiny
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import PromptError

EXACT: dict[str, Any] = {"exact": True, "engine": "memory", **SMALL}
ALL: dict[str, Any] = {"num_selected": 512, "reuse_capacity": 40, "engine": "memory", **SMALL}
MODES = pytest.mark.parametrize("fields", [EXACT, ALL, {**EXACT, "exact": "bitwise"}], ids=["exact", "all", "bitwise"])


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def one_by_one(model: Any, cache: Any, mask: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
    """Logits (B, V) of four steps of one token, behind what `mask` (B, T) tells of; `last` (B, 1): latest positions."""
    logits = []
    for token in prompt(model, 2, 4, 12).split(1, 1):
        mask, last = torch.cat([mask, torch.ones_like(token)], 1), last + 1
        single = {"attention_mask": mask, "position_ids": last}
        logits.append(model(token, past_key_values=cache, **single).logits[:, -1])
    return logits


@MODES
def test_a_second_turn_of_embeddings(fields: dict[str, Any]) -> None:
    """`generate(inputs_embeds=...)` with the whole conversation: the first turn's own tokens are among it."""
    model = tiny("llama")
    embed = model.get_input_embeddings()

    def turns(cache: Any) -> Decoded:
        with torch.no_grad():
            embeds = embed(prompt(model, 2, 56))
            results = []
            for seed in (8, 9, 10):
                out = model.generate(
                    inputs_embeds=embeds,
                    past_key_values=cache,
                    max_new_tokens=8,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
                results.append(Decoded(out.sequences, torch.stack(out.logits)))
                embeds = torch.cat([embeds, embed(out.sequences), embed(prompt(model, 2, 5, seed))], 1)
        return Decoded(torch.cat([one.tokens for one in results]), torch.cat([one.logits for one in results]))

    expected = turns(dynamic(model))
    with DiskSwapCache(model, **fields) as cache:
        assert_exact(expected, turns(cache))


def test_embeddings_that_are_held_already_are_refused() -> None:
    model = tiny("llama")
    with DiskSwapCache(model, **EXACT) as cache, torch.no_grad():
        embeds = model.get_input_embeddings()(prompt(model, 1, 40))
        model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=4, do_sample=False)
        held = cache.get_seq_length()
        with pytest.raises(PromptError, match=f"the prompt has 40 tokens and the cache already holds {held}"):
            model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == held


@MODES
def test_padding_between_turns(fields: dict[str, Any]) -> None:
    """Two questions padded on their left, over one history: a step begins with padding, at position 0."""
    model = tiny("llama")
    ids, more = prompt(model, 2, 56), prompt(model, 2, 9, 8)
    mask = torch.ones(2, 65, dtype=torch.long)
    mask[0, 56:58] = 0
    mask[1, 56:61] = 0
    more = more.masked_fill(mask[:, 56:] == 0, PAD)
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)

    def turns(cache: Any) -> Decoded:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            first = {"attention_mask": mask, "position_ids": places[:, 56:]}
            logits = [model(more, past_key_values=cache, **first).logits[:, -1]]
            logits += one_by_one(model, cache, mask, places[:, -1:])
        return Decoded(more, torch.stack(logits))

    expected = turns(dynamic(model))
    with DiskSwapCache(model, **fields) as cache:
        assert_exact(expected, turns(cache))


@MODES
def test_a_second_turn_padded_on_the_right(fields: dict[str, Any]) -> None:
    model = tiny("llama")
    ids, more = prompt(model, 2, 56), prompt(model, 2, 9, 8)
    mask = torch.ones(2, 65, dtype=torch.long)
    mask[0, 63:] = 0
    mask[1, 59:] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)

    def turns(cache: Any) -> Decoded:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            pieces = []
            for start, stop in ((56, 63), (63, 65)):
                piece = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop]}
                pieces.append(model(more[:, start - 56 : stop - 56], past_key_values=cache, **piece).logits)
            logits = [torch.stack([pieces[0][0, -1], pieces[0][1, 2]])]
            logits += one_by_one(model, cache, mask, places.amax(1, keepdim=True))
        return Decoded(more, torch.stack(logits))

    expected = turns(dynamic(model))
    with DiskSwapCache(model, **fields) as cache:
        assert_exact(expected, turns(cache))


@MODES
def test_a_tree_whose_first_token_is_masked(fields: dict[str, Any]) -> None:
    """A mask (B, 1, q, T) of which the first query sees nothing of itself, at position 0: two branches follow."""
    model = tiny("llama")
    ids, branch = prompt(model, 1, 56), prompt(model, 1, 5, 8)
    own = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]).bool()
    mask = torch.cat([torch.ones(5, 56, dtype=torch.bool), own], 1)[None, None]
    places = torch.tensor([[0, 56, 57, 56, 57]])
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def tree(cache: Any, given: torch.Tensor) -> Decoded:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            logits = model(branch, past_key_values=cache, attention_mask=given, position_ids=places).logits
        return Decoded(branch, logits[:, 1:])

    for given in (mask, additive):
        expected = tree(dynamic(model), given)
        with DiskSwapCache(model, **fields) as cache:
            assert_exact(expected, tree(cache, given))


def test_a_prompt_that_begins_anew_is_still_refused() -> None:
    """Positions from 0 over a history, with and without padding; `use_cache=False` is named where it is the reason."""
    model = tiny("llama")
    ids = prompt(model, 2, 40)
    mask = torch.ones(2, 80, dtype=torch.long)
    with DiskSwapCache(model, **EXACT) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        for given in (None, mask, mask.index_fill(1, torch.arange(40, 50), 0)):
            places = torch.arange(40).expand(2, -1)
            if given is not None:
                places = (given[:, 40:].cumsum(1) - 1).clamp(min=0)
            with pytest.raises(PromptError, match="starts at position 0") as caught:
                model(ids, past_key_values=cache, attention_mask=given, position_ids=places)
            assert "use_cache" not in str(caught.value)
        assert cache.get_seq_length() == 40
        cache.reset()
        with pytest.raises(PromptError, match="use_cache=False"):
            generate(model, cache, ids, max_new_tokens=3, use_cache=False)
