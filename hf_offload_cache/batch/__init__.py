"""Many documents at once: workers of an engine of others, Ray Data, that share contexts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .documents import DocumentError as DocumentError
    from .ray_data import COLUMNS as COLUMNS
    from .shared_contexts import PublishedContexts as PublishedContexts
    from .shared_contexts import SavedContexts as SavedContexts

_HOME = {
    "COLUMNS": "ray_data",
    "DocumentError": "documents",
    "PublishedContexts": "shared_contexts",
    "SavedContexts": "shared_contexts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
