"""Two lanes at work together: cells that arrive while others are added, and state fitted elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lanes_in_order import compute_all, compute_from
from long_context import CONTEXT, SIZE, ids, manifest_at, published
from long_llama import long_model
from static_server import served

from hf_offload_cache import stream_context
from hf_offload_cache.methods.disk_swap import fitted_keys
from hf_offload_cache.streaming import Cells, ComputingSpeed, Extras, Loader, State

pytestmark = pytest.mark.usefixtures("one_chunk_at_a_time")


@contextlib.contextmanager
def streamed_while_held_back(
    place: Path, tmp_path: Path, name: str, go: threading.Event | None = None, **fields: Any
) -> Iterator[Any]:
    """A cache of what is published there, but for the object `name`, which comes once `go` is set, at the latest when
    all else is there."""
    go = go or threading.Event()
    with served(place) as server:
        server.fault = lambda asked, data: (go.wait(60), data)[1] if asked == name else data
        with stream_context(server.url, long_model(), ids(), path=tmp_path, **fields) as cache:
            go.set()
            yield cache


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With how many tokens what is chosen by was found out."""
    found, fit = list[int](), fitted_keys.fit_coding
    monkeypatch.setattr(
        fitted_keys, "fit_coding", lambda keys, tokens, *more: (found.append(tokens), fit(keys, tokens, *more))[1]
    )
    return found


@pytest.mark.parametrize(("taking", "computed"), [(1e6, 0), (0.0, 1)])
def test_what_comes_while_the_rest_is_taken_in_is_not_computed(
    taking: float, computed: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All has come but one cell, just above the first layer."""
    speed, asked = ComputingSpeed(), threading.Event()
    if taking:
        speed.note_taking(1, taking)
    monkeypatch.setattr(ComputingSpeed, "of", lambda model: speed)
    claim, goes_on = Cells.claim, Cells.goes_on

    def claim_but_the_last(cells: Cells) -> Any:
        return None if cells.of_state()[State.FREE] == 1 and not asked.is_set() else claim(cells)

    def computing_asks(cells: Cells, *place: int) -> bool:
        more = goes_on(cells, *place)
        if not taking or place[2]:  # where it is computed, nobody else may have it before
            return more
        asked.set()
        return more

    def all_but_one(loader: Loader) -> bool:
        states = loader.cells.of_state()
        return states[State.FREE] + states[State.STREAMING] <= 1 and loader._lane.bandwidth is not None

    for name, changed in (("claim", claim_but_the_last), ("goes_on", computing_asks)):
        monkeypatch.setattr(Cells, name, changed)
    compute_from(monkeypatch, all_but_one)
    with served(place) as server, stream_context(server.url, long_model(), ids(), path=tmp_path) as cache:
        report = cache.stream_report
        assert report is not None and not report.trouble
        assert (report.computed, report.streamed) == (computed, report.cells - computed)


def test_a_last_chunk_that_seals_nothing_leaves_no_layer_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fitted state never comes, and behind the last whole chunk lies one token."""
    manifest = published(tmp_path / "published", tmp_path, tokens=ids()[:, : CONTEXT + 1])
    claim, last = Cells.claim, CONTEXT // SIZE

    def claim_the_last_chunk(cells: Cells) -> Any:
        return claim(cells) if cells.of_state()[State.FREE] > last * (cells.layers - 1) else None

    monkeypatch.setattr(Cells, "claim", claim_the_last_chunk)
    with streamed_while_held_back(tmp_path / "published", tmp_path, manifest.fitted.name) as cache:
        assert cache.get_seq_length() == CONTEXT + 1
        assert all(layer.predictor.ready(layer.history.units) for layer in cache.offloaded)


def test_what_is_of_no_use_is_not_waited_for(
    place: Path, tmp_path: Path, fitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache with other fields finds out what it chooses by with its first column that is long enough."""
    speed = ComputingSpeed()
    monkeypatch.setattr(ComputingSpeed, "of", lambda model: speed)
    compute_all(monkeypatch)
    with streamed_while_held_back(place, tmp_path, manifest_at(place).fitted.name, summary_bytes=16):
        assert fitted and min(fitted) < CONTEXT - SIZE


@pytest.mark.parametrize("comes", ["before the last column", "never"])
def test_what_is_to_come_is_not_found_out(
    comes: str, place: Path, tmp_path: Path, fitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's keys are made compact by the state fitted where the context was published."""
    go, look = threading.Event(), Extras.look
    compute_all(monkeypatch)

    def look_late(extras: Extras, lane: Any) -> None:
        if comes != "never" and lane.cells.of_state()[State.COMPUTED] >= lane.cells.layers:
            go.set()
            for _ in range(1000):
                if not lane.pending_objects:
                    break
                time.sleep(0.01)
        look(extras, lane)

    monkeypatch.setattr(Extras, "look", look_late)
    with streamed_while_held_back(place, tmp_path, manifest_at(place).fitted.name, go) as cache:
        assert cache.stream_report is not None and cache.stream_report.computed == cache.stream_report.cells
        layers = cache.offloaded
        assert all(layer.predictor.ready(layer.history.units) for layer in layers)
        assert len(fitted) == (0 if comes != "never" else len(layers))
        assert len(set(fitted)) <= 1 and all(one > CONTEXT - 2 * SIZE for one in fitted)
