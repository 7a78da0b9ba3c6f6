"""A bar on stderr while a prompt is prefilled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class PrefillBar:
    """A bar on stderr while the prompt is prefilled; gone before the first text, which goes to stdout."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # stdout is the answer's alone; a stderr that is no terminal gets no bar
        self._bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
        )
        # generate runs the last tokens of the prompt itself
        self._task = self._bar.add_task("prefill, tokens", total=total)

    def __enter__(self) -> PrefillBar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def update(self, tokens_done: int) -> None:
        self._bar.update(self._task, completed=tokens_done)

    def print_text(self, text: str) -> None:
        self._remove()
        print(text, end="", flush=True)

    def _remove(self) -> None:
        if self._bar.live.is_started:  # stopping twice prints an empty line
            self._bar.stop()
