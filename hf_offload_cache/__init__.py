"""KV caches on disk or in host memory for transformers models: `generate(..., past_key_values=DiskSwapCache(model))`.

Names are imported when first asked for, so that importing the package neither loads torch nor runs anything. A cache
and its configuration are found where the registry says; all else stands in `_HOME`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import registry

if TYPE_CHECKING:
    from .batch.ray_data import AnswerDocuments as AnswerDocuments
    from .batch.ray_data import answer_documents as answer_documents
    from .caches.abstract_tree import AbstractTreeCache as AbstractTreeCache
    from .caches.abstract_tree import AbstractTreeConfig as AbstractTreeConfig
    from .caches.adapter import Adapter as Adapter
    from .caches.cluster import ClusterCache as ClusterCache
    from .caches.cluster import ClusterConfig as ClusterConfig
    from .caches.disk_swap import DiskSwapCache as DiskSwapCache
    from .caches.disk_swap import DiskSwapConfig as DiskSwapConfig
    from .caches.spec import SpecCache as SpecCache
    from .caches.spec import SpecConfig as SpecConfig
    from .config import OffloadConfig as OffloadConfig
    from .contexts.library import ContextLibrary as ContextLibrary
    from .contexts.verify import verify as verify
    from .core.offload_cache import OffloadCache as OffloadCache
    from .interop.chosen_cache import offload_cache as offload_cache
    from .interop.offload import offload as offload
    from .interop.offload import offload_all as offload_all
    from .model.attach import detach as detach
    from .report.cache_report import CacheReport as CacheReport
    from .report.stream_report import StreamReport as StreamReport
    from .streaming.publish import publish_context as publish_context
    from .streaming.stream_context import stream_context as stream_context
    from .tuning.calibrate import calibrate as calibrate
    from .tuning.calibrate_budgets import calibrate_budgets as calibrate_budgets
    from .tuning.calibrate_chunks import calibrate_chunks as calibrate_chunks
    from .tuning.measure_caches import measure_caches as measure_caches
    from .tuning.tuner import tune as tune

_HOME = {
    "Adapter": "caches.adapter",
    "AnswerDocuments": "batch.ray_data",
    "CacheReport": "report.cache_report",
    "ContextLibrary": "contexts.library",
    "OffloadCache": "core.offload_cache",
    "OffloadConfig": "config",
    "StreamReport": "report.stream_report",
    "answer_documents": "batch.ray_data",
    "calibrate": "tuning.calibrate",
    "calibrate_budgets": "tuning.calibrate_budgets",
    "calibrate_chunks": "tuning.calibrate_chunks",
    "detach": "model.attach",
    "measure_caches": "tuning.measure_caches",
    "offload": "interop.offload",
    "offload_all": "interop.offload",
    "offload_cache": "interop.chosen_cache",
    "publish_context": "streaming.publish",
    "stream_context": "streaming.stream_context",
    "tune": "tuning.tuner",
    "verify": "contexts.verify",
}

__all__ = sorted([*_HOME, *registry.exported()])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module = f"{__name__}.{_HOME[name]}" if name in _HOME else registry.exported().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
