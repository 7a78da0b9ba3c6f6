"""KV caches on disk or in host memory for transformers models: `generate(..., past_key_values=DiskSwapCache(model))`.

Names are imported when first asked for, so that importing the package neither loads torch nor runs anything. A cache
and its configuration are found where the registry says; all else stands in `_HOME`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import registry

if sys.platform == "win32":
    raise ImportError("hf_offload_cache needs Linux or macOS, and this is Windows: use it on one of these")

if TYPE_CHECKING:
    from .batch.ray_data import AnswerDocuments as AnswerDocuments
    from .batch.ray_data import answer_documents as answer_documents
    from .config import OffloadConfig as OffloadConfig
    from .contexts.library import ContextLibrary as ContextLibrary
    from .contexts.verify import verify as verify
    from .core.cache import OffloadCache as OffloadCache
    from .interop.chosen_cache import offload_cache as offload_cache
    from .interop.graphed_step import graphed_step as graphed_step
    from .interop.offload import offload as offload
    from .interop.offload import offload_all as offload_all
    from .methods.abstract_tree.cache import AbstractTreeCache as AbstractTreeCache
    from .methods.abstract_tree.cache import AbstractTreeConfig as AbstractTreeConfig
    from .methods.abstract_tree.calibrate_chunks import calibrate_chunks as calibrate_chunks
    from .methods.cluster.cache import ClusterCache as ClusterCache
    from .methods.cluster.cache import ClusterConfig as ClusterConfig
    from .methods.disk_swap.adapter import Adapter as Adapter
    from .methods.disk_swap.cache import DiskSwapCache as DiskSwapCache
    from .methods.disk_swap.cache import DiskSwapConfig as DiskSwapConfig
    from .methods.disk_swap.tuning.calibrate import calibrate as calibrate
    from .methods.spec.cache import SpecCache as SpecCache
    from .methods.spec.cache import SpecConfig as SpecConfig
    from .model.attach import detach as detach
    from .report.report import CacheReport as CacheReport
    from .report.report import StreamReport as StreamReport
    from .streaming.publish import publish_context as publish_context
    from .streaming.stream_context import stream_context as stream_context
    from .tuning.measure_caches import measure_caches as measure_caches
    from .tuning.tuner import tune as tune

_HOME = {
    "Adapter": "methods.disk_swap.adapter",
    "AnswerDocuments": "batch.ray_data",
    "CacheReport": "report.report",
    "ContextLibrary": "contexts.library",
    "OffloadCache": "core.cache",
    "OffloadConfig": "config",
    "StreamReport": "report.report",
    "answer_documents": "batch.ray_data",
    "calibrate": "methods.disk_swap.tuning.calibrate",
    "calibrate_chunks": "methods.abstract_tree.calibrate_chunks",
    "detach": "model.attach",
    "graphed_step": "interop.graphed_step",
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
