"""How a layer makes its query of the residual stream: found by trying what its modules offer.

Which norm, which projection, which rotary embedding is not looked up by architecture: what gives the query that the
model itself then used is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_FOUND = 0.999
"""Cosine similarity from which a recomputed tensor counts as the model's own (bf16 rounding stays above 0.9999)."""


@dataclass(frozen=True)
class QueryRecipe:
    """The way from a residual stream to a query. Holds names, no modules."""

    norm: str
    """The block's norm; "" for none."""
    projection: Projection
    scale: float

    def modules(self, block: torch.nn.Module, attention: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules that `query` calls."""
        norm = [block.get_submodule(self.norm)] if self.norm else []
        return [*norm, *self.projection.modules(attention)]

    def query(
        self, block: torch.nn.Module, attention: torch.nn.Module, hidden: torch.Tensor, rotary: Any
    ) -> torch.Tensor | None:
        """The query (B, H, 1, D) for `hidden` (B, 1, hidden) under the rotary cosines and sines of its position."""
        normed = block.get_submodule(self.norm)(hidden) if self.norm else hidden
        query = self.projection(attention, normed, rotary)
        return None if query is None else query * self.scale


def find_recipe(
    block: torch.nn.Module,
    attention: torch.nn.Module,
    residual: torch.Tensor,
    normed: torch.Tensor,
    rotary: Any,
    query: torch.Tensor,
) -> QueryRecipe | None:
    """How `query` (B, H, 1, D) was made of the stream `residual`, which went into `attention` as `normed` (both
    (B, 1, hidden)); None where nothing that was tried makes it."""
    norm = next((name for name, part in _norms(block) if _scale_between(normed, part, residual) is not None), None)
    if norm is None:
        return None
    for projection in _projections(attention, *query.shape[1:4:2]):
        scale = _scale_between(query, projection, attention, normed, rotary)
        if scale is not None:
            return QueryRecipe(norm, projection, scale)
    return None


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


def _projections(attention: torch.nn.Module, heads: int, dim: int) -> Iterator[Projection]:
    for rotate in ("all", "part", "none"):
        for linear in ("q_proj", "query", "wq", "qkv_proj", "query_key_value"):
            if isinstance(getattr(attention, linear, None), torch.nn.Module):
                yield Projection(linear, heads, dim, rotate, interleaved=False)
                yield Projection(linear, heads, dim, rotate, interleaved=True)


@dataclass(frozen=True)
class Projection:
    """normed (B, 1, hidden) through one projection, the query norm if there is one, and the rotary embedding.

    A fused projection has the queries first, or `interleaved`: query, key and value head by head. The rotary embedding
    turns "all" of a head, the "part" that its cosines are wide, or "none".
    """

    linear: str
    heads: int
    dim: int
    rotate: str
    interleaved: bool

    def modules(self, attention: torch.nn.Module) -> list[torch.nn.Module]:
        """Modules that the projection calls."""
        norm = _query_norm(attention)
        return [getattr(attention, self.linear), *([] if norm is None else [norm])]

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
        norm = _query_norm(attention)
        if norm is not None:
            width = getattr(norm, "weight", query).shape[-1]
            query = norm(query) if width == self.dim else norm(query.flatten(-2)).view_as(query)
        query = query.transpose(1, 2)
        if self.rotate == "none" or rotation is None:
            return query
        turning = self.dim if self.rotate == "all" else min(rotary[0].shape[-1], self.dim)
        turned = rotation(query[..., :turning], query[..., :turning], *rotary)[0]
        return turned if turning == self.dim else torch.cat([turned, query[..., turning:]], -1)


def _query_norm(attention: torch.nn.Module) -> Any:
    return getattr(attention, "q_norm", None) or getattr(attention, "q_layernorm", None)
