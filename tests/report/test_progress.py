"""Progress on stderr: a bar on a terminal, a widget in a notebook, one line elsewhere."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
import torch
from long_llama import long_model

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.report import Progress, progress


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


def test_lines_with_the_time_left_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = to(monkeypatch, io.StringIO())
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with Progress("read", 4096, "tokens", every=5) as bar:
        for done in range(512, 4097, 512):
            now[0] += 2
            bar.update(done)
    assert stream.getvalue().splitlines() == [
        "read: 1,536 of 4,096 tokens in 6.0 s, about 10 s left",
        "read: 3,072 of 4,096 tokens in 12.0 s, about 4 s left",
        "read: 4,096 of 4,096 tokens in 16.0 s",
    ]
    terminal = to(monkeypatch, Terminal())
    with Progress("read", 4, "tokens", every=0) as bar:
        bar.update(2)
        assert "about" not in terminal.getvalue()  # the bar has it
    to(monkeypatch, Broken())
    with Progress("read", 4, "tokens", every=0) as bar:
        bar.update(2)


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


class Shown(Progress):
    """Notes what each bar shows."""

    bars: list[Shown]

    def __init__(self, name: str, total: float | None = None, unit: str = "", shown: bool = True) -> None:
        super().__init__(name, total, unit, shown)
        self.values: list[float] = []
        self.total = total
        self.is_closed = False
        self.bars.append(self)

    def update(self, done: float, total: float | None = None, name: str | None = None) -> None:
        self.values.append(done)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    monkeypatch.setattr(Shown, "bars", [], raising=False)
    monkeypatch.setattr(progress, "Progress", Shown)
    return Shown.bars


def text(tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) * 7 % 150 + 5)[None]


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_of_generate_has_one_bar(exact: bool, bars: list[Shown], tmp_path: Path) -> None:
    """Its tokens advance with each layer, in one forward or in several; a turn counts its new ones, a step none."""
    model = long_model()
    options = {"max_new_tokens": 4, "do_sample": False}
    with DiskSwapCache(model, path=tmp_path, progress=True, exact=exact) as cache:
        model.generate(text(400), past_key_values=cache, **options)
        assert [(bar.total, bar.values, bar.is_closed) for bar in bars] == [(400, [133, 266, 400, 400], True)]
        bars.clear()
        more = torch.cat([cache.input_ids, text(87)], 1)
        model.generate(more, past_key_values=cache, prefill_chunk_size=50, **options)
        assert [(bar.total, bar.is_closed) for bar in bars] == [(87, True)]
        assert bars[0].values == [16, 33, 50, 50, 62, 74, 87, 87]


def test_a_forward_of_a_prompt_has_a_bar_of_its_own(bars: list[Shown], tmp_path: Path) -> None:
    """As in a loop that reads a prompt in pieces; one that fails leaves none."""
    model = long_model()
    with torch.no_grad(), DiskSwapCache(model, path=tmp_path, progress=True, max_context=700) as cache:
        for piece in text(600).split(400, 1):
            model(piece, past_key_values=cache)
        assert [(bar.total, bar.values[-1], bar.is_closed) for bar in bars] == [(400, 400, True), (200, 200, True)]
        model(text(1), past_key_values=cache)
        assert len(bars) == 2 and cache.shared.ends_after is None

        def fail(*_: object) -> None:
            raise KeyError

        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(text(80), past_key_values=cache)
        hook.remove()
        assert bars[2].values == [26, 53] and bars[2].is_closed
        with pytest.raises(RuntimeError, match="an earlier forward was interrupted"):
            model(text(4), past_key_values=cache)
        model(text(4), past_key_values=cache)
        assert all(bar.is_closed for bar in bars) and bars[3].values == [1, 2, 4, 4]


def test_progress_is_off_by_default(bars: list[Shown], tmp_path: Path) -> None:
    model = long_model()
    with DiskSwapCache(model, path=tmp_path) as cache:
        model.generate(text(100), past_key_values=cache, max_new_tokens=2)
    assert bars == []


def test_a_prompts_line_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = to(monkeypatch, io.StringIO())
    with DiskSwapCache(long_model(), path=tmp_path, progress=True) as cache:
        long_model().generate(text(400), past_key_values=cache, max_new_tokens=2, prefill_chunk_size=150)
    assert stream is not None and stream.getvalue().startswith("prompt: 400 of 400 tokens in ")
    assert stream.getvalue().count("\n") == 1
