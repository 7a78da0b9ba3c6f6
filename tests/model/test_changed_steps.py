"""A cache that changes the model's call and its output: a second token a step that `generate` never sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
from harness import CASES, SMALL, assert_exact, fresh, prompt, reference, tiny, unchanged
from pairwise import in_full
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.model import Attachable, release
from hf_offload_cache.model.attach import attach


class SecondToken:
    """Feeds one more token with every single one, then forgets it and takes its logits off."""

    steps = 0
    widths: tuple[int, ...] = ()
    appended = False

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        self.appended = bool(self.get_seq_length()) and ids is not None and ids.shape[1] == 1  # type: ignore
        if not self.appended:
            super().begin_step(model, kwargs)  # type: ignore
            return None
        changed = {**kwargs, "input_ids": torch.cat([ids, (ids + 1) % 190], 1)}
        if kwargs.get("logits_to_keep"):
            changed["logits_to_keep"] = kwargs["logits_to_keep"] + 1
        if mask is not None and mask.ndim == 2:
            changed["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if positions is not None:
            changed["position_ids"] = torch.cat([positions, positions[..., -1:] + 1], -1)
        super().begin_step(model, changed)  # type: ignore
        return changed

    def end_step(self, output: Any) -> Any | None:
        super().end_step(output)  # type: ignore
        if not self.appended:
            return None
        self.steps += 1
        self.widths += (output.logits.shape[1],)
        self.crop(-1)  # type: ignore
        output.logits = output.logits[:, :-1]
        return output


class SecondDynamic(SecondToken, DynamicCache, Attachable):
    """With transformers' own layers."""


class SecondOffloaded(SecondToken, DiskSwapCache):
    """With ours."""


@pytest.fixture(params=["dynamic", "exact", "bitwise"])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """model -> such a cache, attached."""
    tokens: list[tuple[Any, int]] = []

    def made(model: Any) -> Any:
        if request.param == "dynamic":
            cache = SecondDynamic(config=model.config)
            cache.activate_past_recording()
            tokens.append((model, attach(model, cache)))
            return cache
        mode = "bitwise" if request.param == "bitwise" else True
        cache = SecondOffloaded(model, exact=mode, engine="memory", **SMALL)
        cache.activate_past_recording()
        return cache

    yield made
    for model, token in tokens:
        release(model, token)


CHANGED = ("greedy", "sample", "beams", "left_padding", "padded_beams", "chunked_prefill", "padded_chunked_prefill")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("llama", case) for case in CHANGED[::2]),
        *in_full(("llama",), CHANGED[1::2]),
        *(pytest.param("gemma3", case, marks=harness.RECORDED_WINDOWS) for case in ("greedy", "padded_beams")),
    ],
)
def test_generate_never_sees_the_second_token(name: str, case: str, make: Any) -> None:
    """The tokens and all logits are those of `DynamicCache`; each decode step did carry two."""
    model = tiny(name)
    cache = make(model)
    assert_exact(reference(name, case), CASES[case](model, cache))
    assert cache.steps >= harness.NEW - 1
    assert set(cache.widths) == {2}
    if isinstance(cache, DiskSwapCache):
        cache.close()


def test_arguments_by_position_and_an_output_that_is_replaced() -> None:
    """The verbs are given every argument by name, also those given by position; what they return is what counts."""
    model = fresh("llama")
    ids, mask = prompt(model, 2, 9), torch.ones(2, 9, dtype=torch.long)
    seen: list[dict[str, Any]] = []

    class Replacing(DynamicCache, Attachable):
        def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
            seen.append(kwargs)
            return {**kwargs, "input_ids": kwargs["input_ids"][:, :5], "attention_mask": None}

        def end_step(self, output: Any) -> Any:
            return output.logits

    with unchanged(model), torch.no_grad():
        cache = Replacing(config=model.config)
        token = attach(model, cache)
        logits = model(ids, mask, past_key_values=cache)
        release(model, token)
        expected = model(ids[:, :5]).logits
    assert torch.equal(logits, expected)
    assert seen[0].keys() == {"input_ids", "attention_mask", "past_key_values"}
    assert seen[0]["input_ids"] is ids
    assert seen[0]["attention_mask"] is mask
