"""Reports of caches: counters, the report, the timeline, progress."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .counters import Counters as Counters
    from .progress import Progress as Progress
    from .progress import PromptProgress as PromptProgress
    from .report import CacheReport as CacheReport
    from .report import StreamReport as StreamReport
    from .report import least_size_text as least_size_text
    from .trace import NO_TIMELINE as NO_TIMELINE
    from .trace import Timeline as Timeline
    from .trace import Trace as Trace

_HOME = {
    "CacheReport": "report",
    "Counters": "counters",
    "NO_TIMELINE": "trace",
    "Progress": "progress",
    "PromptProgress": "progress",
    "StreamReport": "report",
    "Timeline": "trace",
    "Trace": "trace",
    "least_size_text": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
