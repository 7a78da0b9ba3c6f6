"""Offline tuning (KVSwap, section 3.5 and appendix A). Names are imported when first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .solve import Limits
    from .tuned import Tuned
    from .tuner import tune

__all__ = ["Limits", "Tuned", "tune"]

_HOME = {"Limits": "solve", "Tuned": "tuned", "tune": "tuner"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
