"""What kinds of rotary embeddings a model has."""

from __future__ import annotations

from typing import Any

_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds whose frequencies depend on the last position of a forward."""


def rotary_kinds(model: Any) -> set[str]:
    """As transformers names them; none: positions are learnt, or something else."""
    kinds = [kind for module in model.modules() if (kind := getattr(module, "rope_type", None)) is not None]
    return {one for kind in kinds for one in (kind.values() if isinstance(kind, dict) else [kind])}


def length_dependent(model: Any) -> str | None:
    """Why keys of one forward are not those of another of another length; None: they are."""
    found = sorted(rotary_kinds(model) & _BY_LENGTH)
    return f"its rotary embedding ({found[0]}) depends on how many tokens there are" if found else None
