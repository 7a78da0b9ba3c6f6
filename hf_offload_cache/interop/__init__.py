"""Caches of this library for code that calls `generate` itself: pipelines and servers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offload import FLOOR as FLOOR
    from .offload import beyond_share as beyond_share
    from .offload import budgets as budgets
    from .offload import request_cache as request_cache
    from .reuse import LEAST as LEAST
    from .reuse import opened_within as opened_within

_HOME = {
    "FLOOR": "offload",
    "LEAST": "reuse",
    "beyond_share": "offload",
    "budgets": "offload",
    "opened_within": "reuse",
    "request_cache": "offload",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
