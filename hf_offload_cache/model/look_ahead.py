"""The next layer's query, guessed one layer early from the residual stream (KVSwap, section 3.3, "Online prediction").

The recipe for a layer's query is found once, during prefill. Without a recipe there is no guess; only prefetching
depends on it. There is also no guess while hooks of other code are on the modules that it would call, because these
hooks are for the model's own calls.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BudgetError
from ..memory.account import MemoryAccount
from .foreign_hooks import ForeignHooks
from .query_recipe import QueryRecipe, find_recipe

_OWNER = "look-ahead"


@dataclass
class Sight:
    """What was last seen of one layer, and how its query is made."""

    block: weakref.ref[torch.nn.Module] | None = None
    attention: weakref.ref[torch.nn.Module] | None = None
    residual: torch.Tensor | None = None
    """(B, 1, hidden): a copy of the stream's latest token, for one step."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    """The model's own tensors, for one step."""
    rotary_from: int | None = None
    """The layer whose rotary tensors this one's are, where that layer comes first; None: none does."""
    rotated: bool = False
    recipe: QueryRecipe | None = None
    learned: bool = False
    """Whether a recipe was looked for."""
    watchers: ForeignHooks | None = None
    """Of the modules that a guess calls."""


class LookAhead:
    """One a cache, used on the thread that runs the model. Holds copies of the latest token's stream for one step.

    Args:
        account: where the copies are booked, as "look-ahead". What does not fit its budget is not kept, and nothing is
            guessed of it.
        source: "attended": the residual stream after the previous layer's attention; "input": before it (the paper's).
    """

    def __init__(self, account: MemoryAccount, source: str = "attended") -> None:
        self.source = source
        self.sights: dict[int, Sight] = {}
        self._account = account
        self._held = 0
        self._normed: tuple[int, torch.Tensor] | None = None  # of the layer under way, until its query is known

    @staticmethod
    def planned(num_blocks: int, hidden_size: int, itemsize: int, batch: int) -> dict[str, int]:
        """Bytes that will be held at most: the stream before every block, and after one block's norm."""
        return {_OWNER: (num_blocks + 1) * batch * hidden_size * itemsize}

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Before a block, with the stream (B, q, hidden)."""
        sight = self.sights.setdefault(layer_idx, Sight())
        self._drop_normed()
        self._release(sight.residual)  # of a step that did not end
        sight.residual = None
        sight.residual = self._copy(hidden)
        if sight.block is None:
            sight.block = weakref.ref(block)

    def enter_attention(
        self, layer_idx: int, attention: torch.nn.Module, hidden: torch.Tensor, rotary: Any
    ) -> None:
        """Before a block's attention, with the normed stream (B, q, hidden) and the rotary cosines and sines."""
        sight = self.sights.setdefault(layer_idx, Sight())
        if sight.attention is None:
            sight.attention = weakref.ref(attention)
        sight.rotary = rotary if isinstance(rotary, tuple) and len(rotary) == 2 else None
        if not sight.learned:
            self._drop_normed()
            normed = self._copy(hidden)
            self._normed = None if normed is None else (layer_idx, normed)

    def learn(self, layer_idx: int, query: torch.Tensor) -> None:
        """Find how this layer's query (B, H, q, D), just made, comes from what was seen on the way to it."""
        sight = self.sights.get(layer_idx)
        if sight is None or sight.learned or sight.attention is None:
            return
        block = sight.block() if sight.block is not None else None
        attention = sight.attention()
        if block is not None and ForeignHooks([block]).find() is not None:
            self._drop_normed()
            return  # what is tried would be seen
        sight.learned = True
        normed = self._normed[1] if self._normed is not None and self._normed[0] == layer_idx else None
        if block is not None and attention is not None and sight.residual is not None and normed is not None:
            sight.rotated = sight.rotary is not None
            if sight.rotary is not None:
                earlier = [i for i, other in self.sights.items() if i < layer_idx and _same(other.rotary, sight.rotary)]
                sight.rotary_from = min(earlier, default=None)
            rotary = None if sight.rotary is None else tuple(part[:, -1:] for part in sight.rotary)
            latest = query[:, :, -1:].detach()
            sight.recipe = find_recipe(block, attention, sight.residual, normed, rotary, latest)
        del normed
        self._drop_normed()

    def predict(self, layer_idx: int, attention_output: torch.Tensor) -> torch.Tensor | None:
        """The query (B, H, 1, D) that layer `layer_idx` will probably ask with, from the layer before it, whose
        attention has just added `attention_output` (B, 1, hidden); None where there is nothing to guess from."""
        sight, previous = self.sights.get(layer_idx), self.sights.get(layer_idx - 1)
        if sight is None or previous is None or sight.recipe is None or previous.residual is None:
            return None
        block = sight.block() if sight.block is not None else None
        attention = sight.attention() if sight.attention is not None else None
        if block is None or attention is None:
            return None
        rotary = None if sight.rotary_from is None else self.sights[sight.rotary_from].rotary
        if sight.rotated and rotary is None:
            return None
        hidden, before = previous.residual, None if previous.block is None else previous.block()
        adds = None
        if before is not None and hasattr(before, "post_feedforward_layernorm"):  # it norms what it adds
            adds = before.get_submodule("post_attention_layernorm")
        if sight.watchers is None:
            called = sight.recipe.modules(block, attention)
            sight.watchers = ForeignHooks(called if adds is None else [*called, adds])
        if sight.watchers.find() is not None:
            return None
        with torch.no_grad():
            if self.source == "attended":
                if adds is not None:
                    attention_output = adds(attention_output)
                hidden = hidden + attention_output[:, -1:].to(hidden.device)
            return sight.recipe.query(block, attention, hidden, rotary)

    def end_step(self) -> None:
        """Let go of the step's tensors."""
        for sight in self.sights.values():
            sight.residual = sight.rotary = None
        self._normed = None
        self._account.release(_OWNER, self._held)
        self._held = 0

    def _copy(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The latest token alone: a view would keep a whole prompt's activations. None: there is no room."""
        latest = hidden[:, -1:].detach()
        try:
            self._account.hold(_OWNER, latest.nbytes)
        except BudgetError:
            return None
        self._held += latest.nbytes
        return latest.clone()

    def _release(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._account.release(_OWNER, tensor.nbytes)
            self._held -= tensor.nbytes

    def _drop_normed(self) -> None:
        if self._normed is not None:
            (_, normed), self._normed = self._normed, None
            self._release(normed)


def _same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one[0] is other[0]
