"""Which lane of `stream_context` is first, for tests that are not to depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hf_offload_cache.streaming import Cells, Loader, State


def compute_from(monkeypatch: pytest.MonkeyPatch, ready: Callable[[Loader], bool]) -> None:
    """Computing begins when `ready` says so."""
    run = Loader.run

    def run_late(loader: Loader) -> None:
        while not ready(loader):
            time.sleep(0.005)
        run(loader)

    monkeypatch.setattr(Loader, "run", run_late)


def stream_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing begins when the network has delivered all that it can, fitted state and active blocks included."""
    compute_from(monkeypatch, lambda loader: not loader.cells.open and not loader._lane.pending_objects)


def compute_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the network before something above the first layer was computed."""
    claim = Cells.claim
    monkeypatch.setattr(Cells, "claim", lambda cells: claim(cells) if cells.of_state()[State.COMPUTED] else None)


def compute_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the network."""
    monkeypatch.setattr(Cells, "claim", lambda cells: None)
