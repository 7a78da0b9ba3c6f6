"""An empty cache filled with one sequence, some of whose keys and values come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, ContextError, PromptError
from ..model.attention_call import AttentionCall
from ..model.geometry import unknown_shapes
from ..model.look_ahead import length_dependent, reason_against_pieces
from .cache import OffloadCache
from .layer import OffloadLayer, Output
from .selective_cache import SelectiveCache
from .selective_layer import SelectiveLayer
from .step import ForwardEnded

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


# Prefill of a prompt, in pieces if the model allows it

PIECE = 1024
"""Tokens of a piece, where nobody says another number."""


def piece_size(
    model: PreTrainedModel, held: int, total: int, chunk: int | None = None, *, until: int | None = None,
    usual: int = PIECE,
) -> int | None:  # fmt: skip
    """Number of tokens per forward for a prompt that ends after `total` tokens, of which `held` were added in earlier
    turns: `chunk`, or `usual` if that is None. None: the prompt goes through the model in one forward. `until`: the
    last position at which the final forward may begin; None: no limit.

    Raises `ConfigError` for a `chunk` below 1, or one with which the prompt would have other keys than in one forward.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"prefill chunk must be at least 1 token, got {chunk}: use {PIECE}")
    size = usual if chunk is None else chunk
    first = held + size if until is None else min(held + size, until)
    reason = None if first <= held else reason_against_pieces(model, first, total)
    if reason is None:
        return size
    if chunk is not None and held + chunk < total:
        raise ConfigError(
            f"a prefill chunk of {chunk:,} tokens is not possible with {type(model).__name__}: {reason}; leave the "
            "prefill chunk out, and the prompt goes through the model in one forward"
        )
    return None


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Run `input_ids` (1, T), a complete prompt or a turn, through the model; the cache then holds T more tokens.

    `chunk`: tokens per forward; None: 1,024, or all of them if the model's keys depend on a forward's length.
    `on_progress` gets the number of finished tokens after each forward, in this thread. Raises `ConfigError`.
    """
    import torch

    every = input_ids.shape[1]
    held = cache.get_seq_length()
    size = piece_size(model, held, held + every, chunk) or every
    with torch.no_grad():  # as `generate` does; tensors of inference mode could not be written to afterwards
        done = 0
        while done < every:
            end = min(every, done + size)
            if every - end == 1 and size > 2:
                end -= 1  # a last piece of one token would be a step, which a cache selects for
            model(input_ids=input_ids[:, done:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = end
            if on_progress is not None:
                on_progress(done)


PromptAttention = Callable[[OffloadLayer, AttentionCall], Output]
"""Attention of several queries of a layer, over what it holds and what the call brings."""


class Filling:
    """Token by token from the front, layer by layer: what is computed runs through the model, and what is not is taken.
    All layers hold the same when `note` is called. For the thread that runs the model.

    Args:
        cache: holds nothing. Raises `PromptError` where it does.
    """

    def __init__(self, cache: OffloadCache) -> None:
        if cache.held():
            raise PromptError(f"the cache holds {cache.held():,} tokens: fill a new one, or reset() it")
        self._cache = cache
        self._taught: tuple[dict[int, Any], list[str]] | None = None

    @staticmethod
    def reason_against(cache: OffloadCache) -> str | None:
        """Why a cache has to be prefilled whole; None: it can be filled in parts."""
        others = [layer for layer in cache.layers if not isinstance(layer, OffloadLayer)]
        if others:
            return f"{len(others)} of {len(cache.layers)} layers keep a window or a state, which is not streamed"
        if len(set((getattr(cache.model, "hf_device_map", None) or {}).values())) > 1:
            return "its layers lie on several devices"
        if cache.has_linear_state:
            return "its layers keep a state beside keys and values, which is not streamed"
        if any(not layer.is_initialized for layer in cache.offloaded) and cache.held():
            return "some of its layers hold nothing of a text"
        return length_dependent(cache.model) or unknown_shapes(cache.model)

    @property
    def model(self) -> torch.nn.Module:
        return self._cache.model

    @property
    def layers(self) -> list[OffloadLayer]:
        return self._cache.offloaded

    def teach(self, lessons: dict[int, Any], states: list[str]) -> None:
        """The fitted state from where the context was made: see `Learner.lesson`; and whether attention was seen to be
        ours there. Layers that hold something learn anew of it; what is of no use to them is in `refused`. Raises
        `ContextError`, with nothing changed."""
        if not isinstance(lessons, dict) or not isinstance(states, list) or len(states) != len(self.layers):
            raise ContextError(f"it is not of {len(self.layers)} layers")
        self._taught = lessons, states
        self._prepare()

    def postpone(self, postponed: bool) -> None:
        """Whether more is to come before layers find out, of all that they hold, what they choose by: unless they are
        given it. Until they have they cannot choose."""
        if isinstance(self._cache, SelectiveCache) and self._cache.selecting is not None:
            self._cache.selecting.postponed = postponed

    def learn_rest(self) -> None:
        """Layers find out what was postponed, where nothing has come since by which they did."""
        for layer in self.layers:
            if isinstance(layer, SelectiveLayer):
                layer.learn_rest()

    @property
    def refused(self) -> list[str]:
        """Why layers learn anew, a line each, as far as they have been given something."""
        return [layer.refused for layer in self.layers if isinstance(layer, SelectiveLayer) and layer.refused]

    def _prepare(self) -> None:
        """Layers begin with what they are taught."""
        if self._taught is None:
            return
        lessons, states = self._taught
        for layer, state in zip(self.layers, states, strict=True):
            if isinstance(layer, SelectiveLayer) and (lesson := lessons.get(layer.layer_idx)) is not None:
                layer.teach(lesson)
            if layer.state == "unknown" and state in ("tagged", "full"):
                layer.state = state

    def compute(
        self, ids: torch.Tensor, goes_on: Callable[[int], bool], attend: PromptAttention | None = None
    ) -> int:
        """Run ids (1, t) through the model behind what is held. `goes_on` is asked when a layer has taken its keys and
        values in, by the layer's index: False ends the forward. `attend` is what layers attend with, where it is not to
        be their own. Returns how many layers have these tokens now."""
        cache, shared, depth = self._cache, self._cache.shared, 0

        def ends(layer_idx: int) -> bool:
            nonlocal depth
            depth = layer_idx + 1
            return not goes_on(layer_idx)

        shared.ends_after, shared.attend_prompt = ends, attend
        try:
            with torch.no_grad():
                cache.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        except ForwardEnded:
            cache.end_part()
            self.layers[depth - 1].learn_alone()
        finally:
            shared.ends_after = shared.attend_prompt = None
        return depth

    def take(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `OffloadLayer.take`; keys (1, Hk, t, D) of any device."""
        device = self._cache.model.device
        self.layers[layer_idx].take(keys.to(device), values.to(device))

    def note(self, ids: torch.Tensor) -> None:
        """All layers hold these ids (1, t) behind what was noted before."""
        for layer in self.layers:
            layer.end_step()
        contents = self._cache.contents
        known = contents.tokens.length
        if (missing := self._cache.held() - known) > 0:  # a forward that ran to its end noted its own
            if not known:
                self._cache.begin_context()
            contents.tokens.append(ids[:, ids.shape[1] - missing :].to("cpu"), known)
            contents.account_live()

    def take_back(self, held: int) -> None:
        """Let all layers hold the first `held` tokens alone."""
        for layer in self.layers:
            if layer.is_initialized and layer.length > held:
                if held:
                    layer.crop(held - layer.length)
                else:
                    layer.reset()
        if not held:
            self._prepare()
