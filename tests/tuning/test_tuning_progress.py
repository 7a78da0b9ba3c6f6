"""The progress of tuning, and the clock of its parts."""

from __future__ import annotations

import io
import sys

import pytest

from hf_offload_cache.tuning.sample import Progress


def test_parts_share_the_time_and_one_line_says_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(100.0) as bar:
        bar.begin("disk", 0.25)
        assert 20 < bar.seconds_left <= 25
        bar.begin("model, ", 0.75)
        assert 70 < bar.seconds_left <= 75
        bar.within(1, 3)(0.5, "step")
        assert bar._bar._name == "model, 2 of 3, step" and bar._bar._done == pytest.approx(0.25 + 0.75 * 0.5)
    assert sys.stderr.getvalue().startswith("tuning: 100% in ")  # type: ignore[attr-defined]


def test_a_failure_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(KeyError), Progress(100.0) as bar:
        bar.begin("disk", 0.5)
        bar.begin("model", 0.5)
        raise KeyError
    assert sys.stderr.getvalue().startswith("tuning: 50% in ")  # type: ignore[attr-defined]


def test_no_progress_if_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(1.0, shown=False) as bar:
        bar.begin("disk", 1.0)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
