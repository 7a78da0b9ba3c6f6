"""Every gather of a sparse cache held against what was put in, while a test runs.

`checking` keeps a copy of all that comes in, moved along with every change; `selections` records what was gathered. The
fixture `checked_gathers` is `checking` for a whole test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.core import SelectiveLayer
from hf_offload_cache.fetch import Choice, Fetched, Fetcher
from hf_offload_cache.history import PositionHistory

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (rows, Hk, T, D)."""


@dataclass
class Gathers:
    """What was gathered while the check was on."""

    calls: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """(layer, units (rows, M)) of every gather that was found right."""

    def __len__(self) -> int:
        return len(self.calls)


def read_back(history: PositionHistory) -> Pair:
    """`history.whole()` in one block: what is stored is compared here, after every gather, not how it is streamed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_step", max(1, history.units))
        return history.whole()


def assert_gathered(history: PositionHistory, choice: Choice, fetched: Fetched, truths: list[Pair]) -> None:
    """What was fetched is, to the bit, what each of `truths` has at the places of the choice, and the latest entries
    behind it; `valid` names the entries that are there and are kept, and is missing only where all are."""
    places = history.positions(choice.units)
    there = places >= 0
    if choice.keep is not None:
        there = there & choice.keep.reshape(there.shape)
        assert (there.sum(1).max(initial=0) == fetched.chosen) and fetched.kept is not None
        order = np.argsort(~there, 1, kind="stable")[:, : fetched.chosen]  # those that are kept, in order
        places, there = np.take_along_axis(places, order, 1), np.take_along_axis(there, order, 1)
        assert np.array_equal(fetched.kept[there], order[there])
        places = np.where(there, places, -1)
    if fetched.valid is None:
        assert there.all()
    else:
        assert np.array_equal(fetched.valid, there)
    recent = np.arange(history.units * history.form.group_size, history.length)
    assert fetched.chosen == places.shape[1]
    assert fetched.entries.shape[:2] == (history.rows, places.shape[1] + len(recent))
    places = np.concatenate([places, np.broadcast_to(recent, (len(places), len(recent)))], 1)
    index = torch.from_numpy(places.clip(min=0)).to(history.device)[:, None, :, None]
    seen = torch.from_numpy(places >= 0).to(history.device)[:, None, :, None]
    for truth in truths:
        for part, whole in zip(history.form.split(fetched.entries), truth, strict=True):
            assert whole.shape[2] == history.length
            expected = whole.gather(2, index.expand(-1, whole.shape[1], -1, whole.shape[3]))
            assert part.isfinite().all()
            assert torch.equal(part.where(seen, 0), expected.where(seen, 0))


def assert_units(history: PositionHistory, choice: Choice) -> None:
    """Distinct, ascending and sealed units in each row, and behind them, in rows that want fewer, -1."""
    assert choice.units.shape[0] == history.rows
    for row in choice.units:
        named = row[row >= 0]
        assert (row[: len(named)] == named).all()
        assert (np.diff(named) > 0).all()
        assert not len(named) or named.max() < history.units


@contextlib.contextmanager
def checking(strict: bool = True) -> Iterator[Gathers]:
    """Every gather is compared, to the bit, with the history read back whole and with a copy of what came in.

    `strict`: the units are also distinct, ascending and sealed.
    """
    seen = Gathers()
    copies: dict[int, tuple[PositionHistory, torch.Tensor, torch.Tensor]] = {}
    append, select_rows, truncate, gather = (
        PositionHistory.append,
        PositionHistory.select_rows,
        PositionHistory.truncate,
        Fetcher.gather,
    )

    def held(history: PositionHistory) -> Pair | None:
        kept = copies.get(id(history))
        return None if kept is None or kept[0] is not history else kept[1:]

    def watched_append(history: PositionHistory, keys: torch.Tensor, values: torch.Tensor) -> Any:
        old = held(history)
        result = append(history, keys, values)
        both = (keys.detach().clone(), values.detach().clone())
        if old is not None:
            both = (torch.cat([old[0], both[0]], 2), torch.cat([old[1], both[1]], 2))
        if old is not None or history.length == keys.shape[2]:
            copies[id(history)] = (history, *both)
        return result

    def watched_select(history: PositionHistory, rows: torch.Tensor) -> Any:
        result = select_rows(history, rows)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][rows], old[1][rows])
        return result

    def watched_truncate(history: PositionHistory, length: int) -> Any:
        result = truncate(history, length)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][:, :, :length], old[1][:, :, :length])
        return result

    def watched_gather(fetcher: Fetcher, history: Any, choice: Choice) -> Fetched:
        fetched = gather(fetcher, history, choice)
        assert fetcher.latest is choice
        if strict:
            assert_units(history, choice)
        own = held(history)
        assert_gathered(history, choice, fetched, [read_back(history)] + ([] if own is None else [own]))
        assert fetcher.layer_idx is not None
        seen.calls.append((fetcher.layer_idx, np.array(choice.units)))
        return fetched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PositionHistory, "append", watched_append)
        patch.setattr(PositionHistory, "select_rows", watched_select)
        patch.setattr(PositionHistory, "truncate", watched_truncate)
        patch.setattr(Fetcher, "gather", watched_gather)
        yield seen


@contextlib.contextmanager
def selections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, np.ndarray]]]:
    """What is gathered: (layer, units (rows, M)) of every layer and step; each gather is what is stored."""
    seen: list[tuple[Any, np.ndarray]] = []
    told = SelectiveLayer.fetched

    def watched(layer: Any, choice: Choice, fetched: Fetched) -> None:
        seen.append((layer, np.array(choice.units)))
        assert_gathered(layer.history, choice, fetched, [read_back(layer.history)])
        told(layer, choice, fetched)

    with monkeypatch.context() as patch:
        patch.setattr(SelectiveLayer, "fetched", watched)
        yield seen
