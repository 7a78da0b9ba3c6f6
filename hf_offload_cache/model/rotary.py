"""Kinds of a model's rotary embeddings, and the dependence of their frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the last position of a forward; transformers finds the first in longer names."""


def _kinds_of(module: Any) -> list[tuple[str, str]]:
    """Kind, and type of layers that it is for ("": of all), of a module that makes rotary embeddings."""
    kind = getattr(module, "rope_type", None)
    if kind is None:
        return []
    return [(str(one), layers) for layers, one in kind.items()] if isinstance(kind, dict) else [(str(kind), "")]


def _by_length(kind: str) -> str | None:
    return next((one for one in _BY_LENGTH if one in kind), None)


def rotary_kinds(model: Any) -> set[str]:
    """As transformers names them; none: positions are learnt, or something else."""
    return {kind for module in model.modules() for kind, _ in _kinds_of(module)}


def length_dependent(model: Any) -> str | None:
    """Why keys of one forward are not those of another of another length; None: they are."""
    found = sorted(kind for kind in rotary_kinds(model) if _by_length(kind))
    return f"its rotary embedding ({found[0]}) depends on how many tokens there are" if found else None


def state_by_length(module: torch.nn.Module) -> set[str]:
    """Attributes in which a rotary embedding stores the longest text that it has seen."""
    return {
        (f"{layers}_" if layers else "") + name
        for kind, layers in _kinds_of(module)
        if _by_length(kind) == "dynamic"
        for name in ("inv_freq", "max_seq_len_cached")
    }


def stretch(model: Any) -> float:
    """How many times as long as its configuration's positions a text may be: the factor of "dynamic" embeddings, or 1.
    """
    factors = [
        float(_parameters(module.config, layers).get("factor") or 1) if _by_length(kind) == "dynamic" else 1.0
        for module in model.modules()
        for kind, layers in _kinds_of(module)
    ]
    return max(factors, default=1.0)


def _parameters(config: Any, layers: str) -> dict[str, Any]:
    """Of the rotary embedding for a type of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    found: dict[str, Any] = given.get(layers, given) if layers else given
    return found


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """Each kind that depends on the length, and the positions up to which it does not."""
    for module in model.modules():
        for kind, layers in _kinds_of(module):
            if (by := _by_length(kind)) is not None:
                given = _parameters(module.config, layers) if by == "longrope" else {}
                yield by, int(given.get("original_max_position_embeddings") or module.config.max_position_embeddings)


def reason_against_pieces(model: Any, first: int, total: int) -> str | None:
    """The reason why a text of `total` tokens must not go through `model` in several forwards of which the first ends
    after `first` tokens (tokens of earlier turns count): its keys would differ from those of one forward. None: they
    would not.

    With "longrope" a forward that ends beyond the original positions rotates all of its keys by other frequencies, with
    "dynamic" by frequencies of its own length.
    """
    if first >= total:
        return None
    for kind, limit in _limits(model):
        if total > limit and (kind == "dynamic" or first <= limit):
            return (
                f"its rotary embedding ({kind}) depends on the length of the forward, where a text is longer than "
                f"{limit:,} tokens, and this one has {total:,}: in pieces its keys would have several rotations"
            )
    return None
