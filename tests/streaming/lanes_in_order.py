"""Which lane of `stream_context` is first, for tests that are not to depend on it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hf_offload_cache.streaming import stream_context as module
from hf_offload_cache.streaming.cells import Cells, State


def stream_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing begins when the network has brought all that it can."""
    teach = module._teach

    def teach_late(*args: Any) -> None:
        teach(*args)
        while args[-1].cells.open:
            time.sleep(0.005)

    monkeypatch.setattr(module, "_teach", teach_late)


def compute_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the network before something above the first layer was computed."""
    claim = Cells.claim
    monkeypatch.setattr(Cells, "claim", lambda cells: claim(cells) if cells.of_state()[State.COMPUTED] else None)


def compute_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the network."""
    monkeypatch.setattr(Cells, "claim", lambda cells: None)
