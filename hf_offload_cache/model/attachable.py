"""The verbs that the seams in a model call on the cache that a forward was given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..report.timeline import NO_TIMELINE, Timeline


class Attachable:
    """What a cache does when the model tells where it is; all on the thread that runs the model. By default nothing.

    The seams run outside of what `torch.compile` traces.
    """

    timeline: Timeline = NO_TIMELINE
    """Told by the seams what the model is doing."""

    watches_blocks = True
    """The verbs of blocks and their attention are wanted from now on. A cache that is attached says so with
    `attach.watch_blocks` when it changes that."""

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Before the whole model's forward, with all its arguments by name.

        Returns the arguments to call it with instead, or None to leave the call as it is. `kwargs` stay as they are.
        """
        return None

    def end_step(self, output: Any) -> Any | None:
        """After the whole model's forward; not after one that raised. Returns another output, or None for this one."""
        return None

    def fail_step(self) -> None:
        """After a forward of the whole model that raised an `Exception`, which is on its way out."""

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Before a decoder block, with the residual stream (B, q, hidden)."""

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        """Before its attention, with the normed stream (B, q, hidden) and the rotary cosines and sines, if given."""

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """After its attention, with what it adds to the stream (B, q, hidden)."""

    def check_prompt(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> None:
        """`generate` is about to drop the first of ids (B, P), which the cache should hold; or of embeddings (B, P,
        hidden), where the prompt was given as these."""

    def prepare_step(self, *, first: bool) -> None:
        """`generate` is about to call the model; `first`: with a prompt, or a piece of one."""

    def start_over(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
        """Handle a model that recomputes the keys of all tokens: the step with ids (B, t), or embeddings (B, t,
        hidden), is the first one of the stored text from then on."""

    def conversing(self, *, begins: bool = False) -> AbstractContextManager[None]:
        """Context while `generate` prepares a forward with this cache: state that the model's code stores on the model
        belongs to the cache then. `begins`: the positions of a generation are made."""
        return nullcontext()

    def held(self) -> int:
        """Tokens a sequence held."""
        return 0

    def close(self) -> None:
        """The cache is not to be used any more."""


def cache_among(args: tuple, kwargs: dict[str, Any]) -> Attachable | None:
    """The cache of ours in the arguments of a forward."""
    cache = unwrapped(kwargs.get("past_key_values"))
    if isinstance(cache, Attachable):
        return cache
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Attachable)), None)


def unwrapped(cache: Any) -> Any:
    """`cache`, or its part for self-attention: a decoder with cross-attention (GPT-2's) puts the given cache into an
    `EncoderDecoderCache`, and returns that."""
    return getattr(cache, "self_attention_cache", cache)
