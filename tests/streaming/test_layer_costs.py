"""What tells the seconds of a sparse forward's layers: a line, or the network where it is better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lanes_in_order import compute_all, compute_from
from long_context import CONTEXT, ids, published
from long_llama import long_model
from static_server import served

from hf_offload_cache import stream_context
from hf_offload_cache.streaming import ComputingSpeed, CostNetwork, LayerCells, LayerCosts

LAYERS, BLOCK, TOKENS = 30, 128, 1024
noise = np.random.default_rng(0)


def column(place: int) -> LayerCells:
    blocks = noise.uniform(1, 8 * (place + 1), LAYERS)
    every = np.ones(LAYERS)
    return LayerCells(TOKENS * every, BLOCK * blocks, place * every, blocks, 0 * every)


def learnt(seconds: Callable[[LayerCells], np.ndarray], columns: int = 12) -> LayerCosts:
    found = LayerCosts()
    for number in range(columns):
        cells = column(number % 4)
        found.note(cells, seconds(cells))
    found.fit()
    return found


def bent(cells: LayerCells) -> np.ndarray:
    """Up to some blocks nothing more is to be done: no line."""
    found: np.ndarray = 0.02 + 0.1 * np.maximum(0.0, cells.blocks - 12) ** 1.5 / 30
    return found


def test_where_a_line_is_wrong_the_network_tells() -> None:
    network = learnt(bent).network
    assert network is not None
    asked = column(3)
    assert np.mean(np.abs(network.seconds(asked) / bent(asked) - 1)) < 0.15


def test_where_a_line_is_right_it_tells() -> None:
    assert learnt(lambda cells: cells.tokens * (1e-5 + 1e-8 * cells.attended)).network is None


def test_little_tells_nothing_and_what_is_known_is_not_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert learnt(bent, columns=3).network is None
    found = learnt(bent)
    monkeypatch.setattr(CostNetwork, "__init__", lambda *args: pytest.fail("there is nothing new"))
    found.fit()


def with_active_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing begins when all has come that comes beside the cells."""
    compute_from(monkeypatch, lambda loader: not loader._lane.beside)


@pytest.fixture
def place(tmp_path: Path, one_chunk_at_a_time: None) -> Path:
    """A published context with active blocks."""
    published(tmp_path / "published", tmp_path, tokens=ids()[:, :CONTEXT], chunk_tokens=128, active_mass=0.1)
    return tmp_path / "published"


def test_sparse_forwards_are_noted_by_layer(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = ComputingSpeed()
    monkeypatch.setattr(ComputingSpeed, "of", lambda model: speed)
    compute_all(monkeypatch)
    with_active_blocks(monkeypatch)
    for _ in range(2):
        with stream_context(str(place), long_model(), ids(), path=tmp_path, sparse=True) as cache:
            report = cache.stream_report
        assert report is not None and report.attended < 1
    columns = list(speed.layers._columns)
    tokens = np.array([cells.tokens[0] for cells, _ in columns])
    assert tokens.sum() == 2 * CONTEXT and not (tokens % 128).any()
    for cells, seconds in columns:
        assert len(seconds) == 2 and (seconds > 0).all()
        assert (cells.blocks == cells.attended / 128).all() and 0 <= cells.load[0] <= 1
    begins = np.cumsum(tokens) - tokens
    middles = (begins % CONTEXT + tokens / 2) / 1024
    np.testing.assert_allclose([cells.place[0] for cells, _ in columns], middles)


def test_what_the_network_says_is_planned_by(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has it that computing takes no time; the network that it takes for ever."""
    speed = ComputingSpeed()
    speed.note(128, 64.0, 1e-3)
    cells = column(1)
    speed.layers.network = CostNetwork(cells, 1e3 * cells.tokens)
    monkeypatch.setattr(ComputingSpeed, "of", lambda model: speed)
    with_active_blocks(monkeypatch)
    with served(place) as server:
        server.pause = 0.01
        with stream_context(server.url, long_model(), ids(), path=tmp_path, sparse=True) as cache:
            report = cache.stream_report
    assert report is not None and (report.computed, report.streamed) == (0, report.cells)
