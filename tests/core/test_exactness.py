"""`exact=True` gives the tokens and logits of `DynamicCache`, over models and ways of decoding.

In the default run each model and each way of decoding occurs; `make test-all` crosses all of them.

The last tests turn the harness on caches that are broken on purpose: it has to notice every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness
import pytest
import torch
from harness import (
    CASES,
    SMALL,
    CropsTooMuch,
    Decoded,
    NoReorder,
    OnlyNewTokens,
    StaleGroup,
    assert_exact,
    broken,
    compare,
    generate,
    prompt,
    reference,
    tiny,
)
from pairwise import combinations, in_full
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache

MODELS = ("llama", "qwen3", "gemma3", "mistral", "phi3", "opt", "gpt_neox", "gpt_oss", "deepseek_v2")
SELECTS_ALL: dict[str, Any] = {**SMALL, "num_selected": 512, "reuse_capacity": 64}
"""Fields of a sparse cache whose selection is larger than any history of these tests."""


def run(name: str, case: str, **fields: Any) -> tuple[Decoded, dict[str, int]]:
    """The case with a `DiskSwapCache`, and its report's layer counts; the model is as before afterwards."""
    model = tiny(name)
    with harness.unchanged(model), DiskSwapCache(model, **fields) as cache:
        return CASES[case](model, cache), dict(cache.report().layers)


# ---------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize(
    ("name", "case"), combinations(MODELS, CASES.keys(), times=2, always=lambda name, case: case == "padded_beams")
)
def test_streamed_is_exact(name: str, case: str) -> None:
    """Streamed in blocks of 16: same tokens, logits within the tolerance."""
    decoded, layers = run(name, case, exact=True, **SMALL)
    assert_exact(reference(name, case), decoded)
    assert sum(layers.values()) == tiny(name).config.num_hidden_layers
    assert layers["unknown" if name == "deepseek_v2" else "tagged"] > 0, layers


@pytest.mark.parametrize(("name", "case"), combinations(MODELS, CASES.keys()))
def test_bitwise_is_bitwise(name: str, case: str) -> None:
    """The model's own attention over a whole layer: every bit of every logit."""
    decoded, _ = run(name, case, exact="bitwise", **SMALL)
    assert_exact(reference(name, case), decoded, bitwise=True)


@pytest.mark.parametrize("name", [*MODELS[::2], *in_full(MODELS[1::2])])
def test_a_history_of_one_block_is_bitwise(name: str) -> None:
    decoded, _ = run(name, "greedy", exact=True, group_size=4, num_recent=8, block_tokens=1024)
    assert_exact(reference(name, "greedy"), decoded, bitwise=True)


# ---------------------------------------------------------------------------------------------- sizes and types


def both(name: str, fields: dict[str, Any], input_ids: torch.Tensor, **options: Any) -> tuple[Decoded, Decoded]:
    """`generate` with `DynamicCache` and with ours."""
    model = tiny(name)
    expected = generate(model, DynamicCache(config=model.config), input_ids, **options)
    with DiskSwapCache(model, **fields) as cache:
        return expected, generate(model, cache, input_ids, **options)


@pytest.mark.parametrize(
    ("length", "fields"),
    combinations(
        (1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33), {"exact": {"exact": True, **SMALL}, "sparse": SELECTS_ALL}
    ),
)
def test_lengths_around_the_edges_of_groups_and_blocks(length: int, fields: dict[str, Any]) -> None:
    """Prompts that end before, on and after the edge of a group, the tail and a block."""
    assert_exact(*both("llama", fields, prompt(tiny("llama"), 2, length), max_new_tokens=18))


@pytest.mark.parametrize(
    "sizes",
    [
        {"group_size": 1, "num_recent": 1, "block_tokens": 16},
        {"group_size": 3, "num_recent": 5, "block_tokens": 17},
        {"group_size": 16, "num_recent": 8, "block_tokens": 16},
        {"group_size": 64, "num_recent": 1, "block_tokens": 64},
        {"group_size": 4, "num_recent": 512, "block_tokens": 16},
        {},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())) or "defaults",
)
def test_odd_sizes(sizes: dict[str, int]) -> None:
    """Sizes that do not divide each other, that are larger than the history, and the defaults."""
    mask = harness.padding(3)
    ids = prompt(tiny("llama"), 3).masked_fill(mask == 0, harness.PAD)
    assert_exact(*both("llama", {"exact": True, **sizes}, ids, attention_mask=mask))


FURTHER: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "guidance": {"guidance_scale": 1.5},
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize(("name", "options"), combinations(("llama", "gemma3"), FURTHER))
def test_further_ways_of_generate(name: str, options: dict[str, Any]) -> None:
    """Options of `generate` that reshape the batch or call the model more than once a step."""
    model = tiny(name)
    ids = prompt(model)
    torch.manual_seed(5)
    expected = generate(model, DynamicCache(config=model.config), ids, **options)
    torch.manual_seed(5)
    with DiskSwapCache(model, exact=True, **SMALL) as cache:
        assert_exact(expected, generate(model, cache, ids, **options))


def test_inputs_embeds() -> None:
    """A prompt of embeddings instead of ids."""
    model = tiny("llama")
    embeds = model.get_input_embeddings()(prompt(model)).detach()
    ids = torch.empty(1, 0, dtype=torch.long)
    assert_exact(*both("llama", {"exact": True, **SMALL}, ids, inputs_embeds=embeds))


@pytest.mark.parametrize("case", ["greedy", "left_padding", "second_turn"])
def test_bitwise_in_bfloat16(case: str) -> None:
    """The promise of identity holds in the type that people use."""
    model = harness.fresh("qwen3").bfloat16()
    expected = CASES[case](model, DynamicCache(config=model.config))
    with DiskSwapCache(model, exact="bitwise", **SMALL) as cache:
        assert_exact(expected, CASES[case](model, cache), bitwise=True)


# ---------------------------------------------------------------------------------------------- the harness itself


@contextmanager
def padding_forgotten(model: Any) -> Iterator[None]:
    """Within it, single-query steps know nothing of the padding."""

    def forget(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        decoding = kwargs["past_key_values"].get_seq_length() > 0
        return args, {key: value for key, value in kwargs.items() if not (decoding and key == "attention_mask")}

    handle = model.register_forward_pre_hook(forget, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


BROKEN = {"greedy": OnlyNewTokens, "second_turn": StaleGroup, "beams": NoReorder, "prompt_lookup": CropsTooMuch}


@pytest.mark.parametrize(("name", "case"), combinations(MODELS, BROKEN.keys()))
def test_the_harness_notices_a_broken_cache(name: str, case: str) -> None:
    """Logits far beyond the tolerance on every model of the matrix."""
    model = tiny(name)
    found = compare(reference(name, case), CASES[case](model, broken(model, BROKEN[case])))
    assert not found.exact and found.deviation > 10 * harness.TOLERANCE, found


@pytest.mark.parametrize(
    ("name", "case"), combinations(MODELS, ("left_padding", "padded_beams", "padded_chunked_prefill"))
)
def test_the_harness_notices_forgotten_padding(name: str, case: str) -> None:
    model, expected = tiny(name), reference(name, case)
    with padding_forgotten(model):
        found = compare(expected, CASES[case](model, DynamicCache(config=model.config)))
    assert not found.exact and found.deviation > 10 * harness.TOLERANCE, found


def test_the_harness_refuses_logits_that_are_not_numbers() -> None:
    """NaN in the result is infinitely far away, NaN in the reference an error."""
    good = Decoded(torch.zeros(1, 2), torch.arange(6.0).view(2, 1, 3))
    bad = Decoded(good.tokens, good.logits.masked_fill(good.logits == 4, float("nan")))
    assert compare(good, bad).deviation == float("inf")
    assert compare(good, good).bitwise and compare(good, good).exact
    with pytest.raises(ValueError, match="not numbers"):
        compare(bad, good)
