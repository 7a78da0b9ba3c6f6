"""Progress on stderr: a bar on a terminal, a widget in a notebook, one line elsewhere."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from hf_offload_cache.report import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def to(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> io.StringIO | None:
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(
    ("unit", "done", "total", "line"),
    [
        ("tokens", 4096, 8192, "work: 4,096 of 8,192 tokens in "),
        ("layers", 3, None, "work: 3 layers in "),
        ("B", 1536, 3 << 20, "work: 1.5 KiB of 3.0 MiB in "),
        ("", 0.5, 1.0, "work: 50% in "),
    ],
)
def test_one_line_without_a_terminal(
    unit: str, done: float, total: float | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = to(monkeypatch, io.StringIO())
    with Progress("work", total, unit) as bar:
        for so_far in (done / 4, done):
            bar.update(so_far)
        assert stream.getvalue() == ""
    bar.close()
    bar.update(done)
    assert stream.getvalue().startswith(line) and stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith(" s\n")
    stream = to(monkeypatch, io.StringIO())
    with Progress("work", unit="cells") as bar:  # the total and the name may come later
        bar.update(1, 7, "other work")
        bar.update(2)
    assert stream.getvalue().startswith("other work: 2 of 7 cells in ")


def test_a_bar_on_a_terminal_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = to(monkeypatch, Terminal())
    threads = threading.active_count()
    with Progress("work", 8, "tokens") as bar:
        assert "work:   0%" in stream.getvalue() and "0/8" in stream.getvalue()
        monkeypatch.setattr(bar._bar, "mininterval", 0)
        bar.update(2)
        bar.update(6, name="more")
        assert "more:  75%" in stream.getvalue() and "6/8" in stream.getvalue()
        bar.print("a line")
        assert threading.active_count() == threads
    shown = stream.getvalue()
    assert "a line\n" in shown and shown.endswith("\r") and shown.count("\n") == 1
    bar.update(8)
    bar.close()
    assert stream.getvalue() == shown


def test_a_bar_is_removed_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = to(monkeypatch, Terminal())
    with pytest.raises(KeyError), Progress("work", unit="B") as bar:
        assert stream.getvalue() == ""
        bar.update(0, 4 << 20)
        monkeypatch.setattr(bar._bar, "mininterval", 0)
        bar.update(1 << 20)
        assert "1.00M/4.00M" in stream.getvalue()
        raise KeyError
    assert stream.getvalue().endswith("\r")
    stream = to(monkeypatch, Terminal())
    with Progress("work", 1.0) as bar:  # a share has no numbers
        monkeypatch.setattr(bar._bar, "mininterval", 0)
        bar.update(0.25)
    assert "work:  25%" in stream.getvalue() and "0.25" not in stream.getvalue()


def test_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that was asked for, if nothing was done, if stderr is closed or nobody reads it."""
    stream, terminal, closed = io.StringIO(), Terminal(), Terminal()
    closed.close()
    for there, shown, done in ((stream, False, 1), (terminal, False, 1), (stream, True, None), (None, True, 1),
                               (closed, True, 1), (Broken(), True, 1)):  # fmt: skip
        to(monkeypatch, there)
        with Progress("work", 2, "tokens", shown=shown) as bar:
            if done is not None:
                bar.update(done)
    assert stream.getvalue() == terminal.getvalue() == ""


def test_stderr_may_be_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        to(monkeypatch, stream)
        with Progress("work", 2, "tokens") as bar:
            stream.close()
            bar.update(1)


def test_a_widget_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tqdm's own class for notebooks, whose widgets are an extra of Jupyter's."""
    import tqdm.auto
    from tqdm.notebook import tqdm_notebook

    shown: list[tuple[str, float, float]] = []

    class Widget(tqdm_notebook):
        def __init__(self, **fields: object) -> None:
            self.n, self.total, self.name = 0.0, 0.0, ""

        def set_description(self, name: str, refresh: bool) -> None:
            self.name = name

        def update(self, more: float) -> None:
            self.n += more
            shown.append((self.name, self.n, self.total))

        def close(self) -> None:
            shown.append(("closed", self.n, self.total))

    stream = to(monkeypatch, io.StringIO())
    monkeypatch.setattr(tqdm.auto, "tqdm", Widget)
    with Progress("work", 2, "tokens") as bar:
        bar.update(1)
    assert shown == [("work", 0, 2), ("work", 1, 2), ("closed", 1, 2)]
    assert stream.getvalue() == ""
