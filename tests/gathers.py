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

from hf_offload_cache.fetch.selection_buffer import SelectionBuffer
from hf_offload_cache.history.position_history import History


@dataclass
class Gathers:
    """What was gathered while the check was on."""

    calls: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """(layer, groups (B, M)) of every gather that was found right."""

    def __len__(self) -> int:
        return len(self.calls)


def read_back(history: History) -> tuple[torch.Tensor, torch.Tensor]:
    """`history.whole()` in one block: what is stored is compared here, after every gather, not how it is streamed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_step", max(1, history.num_groups))
        return history.whole()


@contextlib.contextmanager
def checking(strict: bool = True) -> Iterator[Gathers]:
    """Every gather is compared, to the bit, with the history read back whole and with a copy of what came in.

    `strict`: the groups are also distinct, ascending and sealed.
    """
    seen = Gathers()
    copies: dict[int, tuple[History, torch.Tensor, torch.Tensor]] = {}
    append, select_rows, truncate, gather = (
        History.append,
        History.select_rows,
        History.truncate,
        SelectionBuffer.gather,
    )

    def held(history: History) -> tuple[torch.Tensor, torch.Tensor] | None:
        kept = copies.get(id(history))
        return None if kept is None or kept[0] is not history else kept[1:]

    def watched_append(history: History, keys: torch.Tensor, values: torch.Tensor) -> Any:
        old = held(history)
        result = append(history, keys, values)
        both = (keys.detach().clone(), values.detach().clone())
        if old is not None:
            both = (torch.cat([old[0], both[0]], 2), torch.cat([old[1], both[1]], 2))
        if old is not None or history.length == keys.shape[2]:
            copies[id(history)] = (history, *both)
        return result

    def watched_select(history: History, rows: torch.Tensor) -> Any:
        result = select_rows(history, rows)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][rows], old[1][rows])
        return result

    def watched_truncate(history: History, length: int) -> Any:
        result = truncate(history, length)
        if (old := held(history)) is not None:
            copies[id(history)] = (history, old[0][:, :, :length], old[1][:, :, :length])
        return result

    def watched_gather(buffer: SelectionBuffer, layer: Any, groups: np.ndarray) -> torch.Tensor:
        entries = gather(buffer, layer, groups)
        history = layer.history
        chosen = np.array(groups)
        if strict:
            assert chosen.shape[0] == layer.batch
            assert (np.diff(chosen, axis=1) > 0).all()
            assert chosen.size == 0 or 0 <= chosen.min() <= chosen.max() < history.num_groups
        columns = layer._columns(groups)[:, None, :, None]
        got = history.form.split(entries)
        own = held(history)
        for truth in [read_back(history)] + ([] if own is None else [own]):
            for part, whole in zip(got, truth, strict=True):
                assert whole.shape[2] == layer.length
                assert torch.equal(part, whole.gather(2, columns.expand(-1, whole.shape[1], -1, whole.shape[3])))
        seen.calls.append((layer.layer_idx, chosen))
        return entries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "append", watched_append)
        patch.setattr(History, "select_rows", watched_select)
        patch.setattr(History, "truncate", watched_truncate)
        patch.setattr(SelectionBuffer, "gather", watched_gather)
        yield seen


@contextlib.contextmanager
def selections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, np.ndarray]]]:
    """What is gathered: (layer, groups (B, M)) of every layer and step."""
    seen: list[tuple[Any, np.ndarray]] = []
    gather = SelectionBuffer.gather

    def watched(buffer: SelectionBuffer, layer: Any, groups: np.ndarray) -> torch.Tensor:
        entries = gather(buffer, layer, groups)
        seen.append((layer, np.array(groups)))
        keys, values = read_back(layer.history)
        columns = layer._columns(groups)[:, None, :, None]
        got = layer.history.form.split(entries)
        for part, whole in zip(got, (keys, values), strict=True):
            assert torch.equal(part, whole.gather(2, columns.expand(-1, whole.shape[1], -1, whole.shape[3])))
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(SelectionBuffer, "gather", watched)
        yield seen
