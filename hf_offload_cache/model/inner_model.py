"""The transformers model under the wrappers that a user may hand over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from transformers import PreTrainedModel



def is_model(module: Any) -> TypeGuard[PreTrainedModel]:
    """Whether `module` is a PreTrainedModel. What makes a model takes seconds to import: it is not, to plan for one."""
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def inner_model(model: Any) -> PreTrainedModel:
    """The PreTrainedModel under torch.compile's and PEFT's wrappers. Raises `TypeError`."""
    inner = getattr(model, "_orig_mod", model)
    if not is_model(inner) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not is_model(inner):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner
