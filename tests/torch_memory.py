"""The memory that torch holds, as its profiler saw it."""

from __future__ import annotations

from typing import Any

import numpy as np


def most_held(seen: Any, span: str) -> int:
    """Bytes of torch's that were held at a time, at most, within the last span of this name; `seen` by a profiler with
    `profile_memory`."""
    events = seen.profiler.kineto_results.events()
    last = [event for event in events if event.name() == span][-1]
    begun, ended = last.start_ns(), last.start_ns() + last.duration_ns()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    return int(np.cumsum([count for at, count in changes if begun <= at <= ended]).max())
