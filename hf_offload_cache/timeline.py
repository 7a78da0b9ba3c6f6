"""What happened when: spans of work and of waiting, as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import threading
from typing import Any


class Timeline:
    """Collects spans. Any thread may add; times are `time.perf_counter()` seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def add(self, track: str, name: str, start: float, stop: float, **details: Any) -> None:
        """A span called `name` on the line `track`, e.g. "compute", "reads", "writes"."""
        with self._lock:
            self._spans.append((track, name, start, stop, details))
