"""Whether a forward is one of the model that a cache was made for."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .gradients import checkpointing_modules
from .inner_model import is_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnModel:
    """The model of a cache, held weakly, with the models that are parts of it (a text model in a larger one)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._ref = weakref.ref(model)
        self._parts = weakref.WeakSet(module for module in model.modules() if is_model(module))
        self._checkpointing = [weakref.ref(module) for module in checkpointing_modules(model)]

    def __call__(self) -> PreTrainedModel | None:
        """The model, while it lives."""
        return self._ref()

    def includes(self, model: torch.nn.Module) -> bool:
        """Whether `model` is the cache's own, a part of it, or has it as a part: a step of one runs the other."""
        own = self._ref()
        return model in self._parts or (own is not None and any(module is own for module in model.modules()))

    def checkpoints_gradients(self) -> bool:
        """Whether some decoder block would be given no cache now, because it trains and checkpoints gradients."""
        for ref in self._checkpointing:
            module = ref()
            if module is not None and module.training and module.gradient_checkpointing:
                return True
        return False

    def stranger(self) -> PreTrainedModel | None:
        """The model whose forward the caller runs in, if it runs in one and none around it is the cache's own.

        Looks through the callers' frames: an `update` is not told who calls. None where no model is among them (a cache
        that is driven by hand), and where nobody can tell.
        """
        found: PreTrainedModel | None = None
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(caller, torch.nn.Module) and is_model(caller):
                if caller in self._parts:
                    return None
                found = caller if found is None else found
            frame = frame.f_back  # type: ignore[assignment]
        return found


def model_text(model: Any) -> str:
    """A model as a message names it: its class and, if it has one, the name that it was loaded by."""
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{type(model).__name__} {path!r}" if path else f"{type(model).__name__} (at {id(model):#x})"
