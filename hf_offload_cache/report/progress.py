"""Progress of long work, on stderr: a bar on a terminal, a widget in a notebook, one line at the end elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Self

from .report import size_text


class Progress:
    """A bar for `total` units of work, for one thread; use it as a context manager.

    Leaving removes the bar, also after an exception. If there is neither a terminal nor a notebook, leaving prints one
    line, for example into a log. Nothing is shown if `shown` is False or stderr is closed. `unit` is a plural, "B" for
    bytes, or "" if `done` is a share of 1. `total` may be given with the first update.
    """

    def __init__(self, name: str, total: float | None = None, unit: str = "", shown: bool = True) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._stream = sys.stderr if shown and sys.stderr is not None and not sys.stderr.closed else None
        self._bar_class = None if self._stream is None else _bar_class(self._stream)
        self._bar: Any = None
        self._done: float | None = None
        self._started = time.perf_counter()
        self._closed = False

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        if self._total is not None:
            self._draw(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, done: float, total: float | None = None, name: str | None = None) -> None:
        """Set the work done so far; `total` and `name` replace those given before."""
        self._name = name or self._name
        self._total = self._total if total is None else total
        self._done = done
        self._draw(done)

    def print(self, text: str) -> None:
        """Print a line to stderr, above the bar."""
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar, or print the line. Further calls, and updates after it, do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        elif self._stream is not None and self._bar_class is None and self._done is not None:
            with contextlib.suppress(OSError, ValueError):  # the line is lost, the work is not
                print(self._line(), file=self._stream, flush=True)

    def _draw(self, done: float) -> None:
        if self._bar_class is None or self._closed:
            return
        if self._bar is None:
            self._bar = self._bar_class(
                desc=self._name, total=self._total, leave=False, file=self._stream, dynamic_ncols=True, miniters=0,
                bar_format=None if self._unit else "{l_bar}{bar}| [{elapsed}<{remaining}]",
                **({"unit": "B", "unit_scale": True, "unit_divisor": 1024} if self._unit == "B" else
                   {"unit": f" {self._unit}"}),
            )  # fmt: skip
        self._bar.total = self._total
        self._bar.set_description(self._name, refresh=False)
        self._bar.update(done - self._bar.n)

    def _line(self) -> str:
        seconds = f"in {time.perf_counter() - self._started:.1f} s"
        done, total = self._done or 0, self._total
        if not self._unit:
            return f"{self._name}: {done:.0%} {seconds}"
        parts = [size_text(int(n)) if self._unit == "B" else f"{n:,}" for n in (done, total) if n is not None]
        return f"{self._name}: {' of '.join(parts)}{'' if self._unit == 'B' else f' {self._unit}'} {seconds}"


def _bar_class(stream: Any) -> Any:
    """tqdm's bar for a terminal or a notebook, without a thread that outlives it; None if there is neither."""
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    if not stream.isatty() and not issubclass(tqdm, tqdm_notebook):
        return None
    return type("Bar", (tqdm,), {"monitor_interval": 0})
