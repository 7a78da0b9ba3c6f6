"""The next layer's query, guessed one layer early from the residual stream (KVSwap, section 3.3, "Online prediction").

How a model makes a query of a residual stream (which norm, which projection, which rotary embedding) is not looked up
by architecture. It is found once a layer, during prefill, by trying what the modules offer and keeping what gives the
query that the model itself then used. Where nothing does, there is no guess; nothing but prefetching depends on it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_FOUND = 0.999
"""Cosine similarity from which a recomputed tensor counts as the model's own (bf16 rounding stays above 0.9999)."""


@dataclass
class _Sight:
    """What was last seen of one layer: tensors of the latest token, and how its query is made."""

    block: weakref.ref[torch.nn.Module] | None = None
    attention: weakref.ref[torch.nn.Module] | None = None
    residual: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    rotary_from: int | None = None
    rotated: bool = False
    norm: str | None = None
    project: _Projection | None = None
    scale: float = 1.0
    learned: bool = False


@dataclass
class LookAhead:
    """One a cache. All tensors are (B, 1, hidden) of the latest token, on the layer's device, kept for one step."""

    source: str = "attended"
    """"attended": the residual stream after the previous layer's attention; "input": before it (the paper's)."""
    sights: dict[int, _Sight] = field(default_factory=dict)

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        sight = self.sights.setdefault(layer_idx, _Sight())
        sight.residual = hidden[:, -1:].detach().clone()
        if sight.block is None:
            sight.block = weakref.ref(block)

    def enter_attention(
        self, layer_idx: int, attention: torch.nn.Module, hidden: torch.Tensor, rotary: Any
    ) -> None:
        sight = self.sights.setdefault(layer_idx, _Sight())
        if sight.attention is None:
            sight.attention = weakref.ref(attention)
        sight.rotary = rotary if isinstance(rotary, tuple) and len(rotary) == 2 else None
        if not sight.learned:
            sight.normed = hidden[:, -1:].detach().clone()

    def learn(self, layer_idx: int, query: torch.Tensor) -> None:
        """Find how this layer's query (B, H, q, D), just made, comes from what was seen on the way to it."""
        sight = self.sights.get(layer_idx)
        if sight is None or sight.learned or sight.attention is None:
            return
        sight.learned = True
        normed, sight.normed = sight.normed, None
        block = sight.block() if sight.block is not None else None
        attention = sight.attention()
        if block is None or attention is None or sight.residual is None or normed is None:
            return
        sight.rotated = sight.rotary is not None
        if sight.rotary is not None:
            earlier = [i for i, other in self.sights.items() if i < layer_idx and _same(other.rotary, sight.rotary)]
            sight.rotary_from = min(earlier, default=None)
        rotary = None if sight.rotary is None else tuple(part[:, -1:] for part in sight.rotary)
        target = query[:, :, -1:].detach()
        for name, norm in _norms(block):
            if _scale_between(normed, norm, sight.residual) is not None:
                sight.norm = name
                break
        for project in _projections(attention, *target.shape[1:4:2]):
            scale = _scale_between(target, project, attention, normed, rotary)
            if scale is not None:
                sight.project, sight.scale = project, scale
                break

    def predict(self, layer_idx: int, attention_output: torch.Tensor) -> torch.Tensor | None:
        """The query (B, H, 1, D) that layer `layer_idx` will probably ask with, from the layer before it, whose
        attention has just added `attention_output` (B, 1, hidden); None where there is nothing to guess from."""
        sight, previous = self.sights.get(layer_idx), self.sights.get(layer_idx - 1)
        if sight is None or previous is None or sight.project is None or previous.residual is None:
            return None
        block = sight.block() if sight.block is not None else None
        attention = sight.attention() if sight.attention is not None else None
        if block is None or attention is None or sight.norm is None:
            return None
        rotary = None if sight.rotary_from is None else self.sights[sight.rotary_from].rotary
        if sight.rotated and rotary is None:
            return None
        hidden, before = previous.residual, None if previous.block is None else previous.block()
        with torch.no_grad():
            if self.source == "attended":
                if before is not None and hasattr(before, "post_feedforward_layernorm"):  # it norms what it adds
                    attention_output = before.get_submodule("post_attention_layernorm")(attention_output)
                hidden = hidden + attention_output[:, -1:].to(hidden.device)
            normed = block.get_submodule(sight.norm)(hidden) if sight.norm else hidden
            query = sight.project(attention, normed, rotary)
        return None if query is None else query * sight.scale

    def end_step(self) -> None:
        """Let go of the step's tensors."""
        for sight in self.sights.values():
            sight.residual = sight.rotary = sight.normed = None


def _same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one[0] is other[0]


def _scale_between(target: torch.Tensor, attempt: Callable[..., Any], *arguments: Any) -> float | None:
    """The factor that takes what `attempt` gives for `arguments` to `target` where they are parallel, else None."""
    try:
        with torch.no_grad():
            candidate = attempt(*arguments)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None  # modules tried on what they were not made for may fail in any of these ways
    if not isinstance(candidate, torch.Tensor) or candidate.shape != target.shape:
        return None
    a, b = candidate.float().flatten(), target.float().flatten()
    if torch.nn.functional.cosine_similarity(a, b, dim=0) < _FOUND:
        return None
    return float(a @ b / (a @ a))


def _norms(block: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Direct children that keep the hidden size and have one weight vector: norms, in order of definition."""
    for name, child in block.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 1 and not list(child.children()):
            yield name, child
    yield "", torch.nn.Identity()


def _projections(attention: torch.nn.Module, heads: int, dim: int) -> Iterator[_Projection]:
    for rotate in ("all", "part", "none"):
        for linear in ("q_proj", "query", "wq", "qkv_proj", "query_key_value"):
            if isinstance(getattr(attention, linear, None), torch.nn.Module):
                yield _Projection(linear, heads, dim, rotate, interleaved=False)
                yield _Projection(linear, heads, dim, rotate, interleaved=True)


@dataclass(frozen=True)
class _Projection:
    """normed (B, 1, hidden) through one projection, the query norm if there is one, and the rotary embedding.

    A fused projection has the queries first, or `interleaved`: query, key and value head by head. The rotary embedding
    turns "all" of a head, the "part" that its cosines are wide, or "none".
    """

    linear: str
    heads: int
    dim: int
    rotate: str
    interleaved: bool

    def __call__(self, attention: torch.nn.Module, normed: torch.Tensor, rotary: Any) -> torch.Tensor | None:
        rotation = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if self.rotate != "none" and (rotary is None or rotation is None):
            return None
        flat = getattr(attention, self.linear)(normed)
        if self.interleaved:
            if flat.shape[-1] != 3 * self.heads * self.dim:
                return None
            query = flat.unflatten(-1, (self.heads, 3 * self.dim))[..., : self.dim]
        else:
            if flat.shape[-1] < self.heads * self.dim:
                return None
            query = flat[..., : self.heads * self.dim].unflatten(-1, (self.heads, self.dim))
        norm = getattr(attention, "q_norm", None) or getattr(attention, "q_layernorm", None)
        if norm is not None:
            width = getattr(norm, "weight", query).shape[-1]
            query = norm(query) if width == self.dim else norm(query.flatten(-2)).view_as(query)
        query = query.transpose(1, 2)
        if self.rotate == "none" or rotation is None:
            return query
        turning = self.dim if self.rotate == "all" else min(rotary[0].shape[-1], self.dim)
        turned = rotation(query[..., :turning], query[..., :turning], *rotary)[0]
        return turned if turning == self.dim else torch.cat([turned, query[..., turning:]], -1)
