"""Progress of long work, on stderr: a bar on a terminal, a widget in a notebook, one line at the end elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

from .report import size_text


class Progress:
    """A bar for `total` units of work, for one thread; use it as a context manager.

    Leaving removes the bar, also after an exception. If there is neither a terminal nor a notebook, leaving prints one
    line, for example into a log. Nothing is shown if `shown` is False or stderr is closed. `unit` is a plural, "B" for
    bytes, or "" if `done` is a share of 1. `total` may be given with the first update. `every`: seconds after which an
    update prints a line there too, with the time left; None: only leaving does.
    """

    def __init__(
        self, name: str, total: float | None = None, unit: str = "", shown: bool = True, every: float | None = None
    ) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._stream = sys.stderr if shown and sys.stderr is not None and not sys.stderr.closed else None
        self._bar_class = None if self._stream is None else _bar_class(self._stream)
        self._bar: Any = None
        self._done: float | None = None
        self._started = self._printed = time.perf_counter()
        self._every = every
        self._closed = False

    def __enter__(self) -> Self:
        self._started = self._printed = time.perf_counter()
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
        if self._every is not None and self._bar_class is None and not self._closed:
            self._print_left(done, self._every)

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

    def _print_left(self, done: float, every: float) -> None:
        """Print a line with the time left, if the last one is `every` seconds old and work is left."""
        now, total = time.perf_counter(), self._total or 0
        if self._stream is None or not 0 < done < total or now - self._printed < every:
            return
        self._printed = now
        left = (now - self._started) * (total - done) / done
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._line()}, about {left:.0f} s left", file=self._stream, flush=True)

    def _line(self) -> str:
        seconds = f"in {time.perf_counter() - self._started:.1f} s"
        done, total = self._done or 0, self._total
        if not self._unit:
            return f"{self._name}: {done:.0%} {seconds}"
        parts = [size_text(int(n)) if self._unit == "B" else f"{n:,}" for n in (done, total) if n is not None]
        return f"{self._name}: {' of '.join(parts)}{'' if self._unit == 'B' else f' {self._unit}'} {seconds}"


class PromptProgress:
    """Progress of the prompts that a cache's model reads, layer by layer, with the time left. For the thread that runs
    the model. A prompt in one forward has a bar of its own; `prompt` makes one bar for several forwards."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._bar: Progress | None = None
        self._is_own = False
        """The bar is for one forward."""
        self._done = self._tokens = 0
        """Tokens of the bar's earlier forwards, and of the present one."""

    @contextlib.contextmanager
    def prompt(self, tokens: int) -> Iterator[None]:
        """One bar for `tokens` tokens a sequence, in however many forwards."""
        with Progress("prompt", tokens, "tokens") as bar:
            self._bar, self._done, self._is_own = bar, 0, False
            try:
                yield
            finally:
                self._bar = None

    def begin(self, tokens: int) -> None:
        """A forward of `tokens` tokens a sequence begins."""
        if self._bar is None or self._is_own:
            self.fail()  # one that was interrupted
            self._bar, self._done, self._is_own = Progress("prompt", tokens, "tokens").__enter__(), 0, True
        self._tokens = tokens

    def layer(self, layer_idx: int) -> bool:
        """Layer `layer_idx` has added the forward's tokens. False: the forward goes on (see `Shared.ends_after`)."""
        if self._bar is not None:
            self._bar.update(self._done + self._tokens * (layer_idx + 1) // self._layers)
        return False

    def end(self) -> None:
        """The forward has ended."""
        self._done += self._tokens
        if self._bar is not None:
            self._bar.update(self._done)
        self.fail()

    def fail(self) -> None:
        """Remove the bar of a forward that does not go on."""
        if self._is_own and self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar_class(stream: Any) -> Any:
    """tqdm's bar for a terminal or a notebook, without a thread that outlives it; None if there is neither."""
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    if not stream.isatty() and not issubclass(tqdm, tqdm_notebook):
        return None
    return type("Bar", (tqdm,), {"monitor_interval": 0})
