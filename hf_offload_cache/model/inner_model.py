"""The transformers model under the wrappers that a user may hand over."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def inner_model(model: Any) -> PreTrainedModel:
    """The PreTrainedModel under torch.compile's and PEFT's wrappers. Raises `TypeError`."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner
