"""Cache classes that compare every gather with a copy of the keys and values that were added."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import SelectiveLayer


@dataclass
class Gathers:
    calls: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """(layer, units (rows, M)) of every gather that was found right."""

    def __len__(self) -> int:
        return len(self.calls)


@contextlib.contextmanager
def checking() -> Iterator[Gathers]:
    """Within it every `DiskSwapCache` is a checked one. The fixture `checked_gathers` is this for a whole test."""
    made = checked(DiskSwapCache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskSwapCache, "layer_class", made.layer_class)
        yield Gathers(made.gathers)


@contextlib.contextmanager
def selections() -> Iterator[list[tuple[Any, np.ndarray]]]:
    """As `checking`; (layer, units (rows, M)) of every layer and step."""
    seen: list[tuple[Any, np.ndarray]] = []
    told = SelectiveLayer.fetched

    def watched(layer: Any, choice: Any, fetched: Any) -> None:
        seen.append((layer, np.array(choice.units)))
        told(layer, choice, fetched)

    with checking(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectiveLayer, "fetched", watched)
        yield seen


def named_tokens(history: Any, units: np.ndarray, keep: np.ndarray) -> list[np.ndarray]:
    """Which tokens of each row a choice names, unit by unit, and those that come with every gather."""
    none = np.full((history.rows, 1), -1)
    extra = history.positions(none)
    extra = extra[:, extra.shape[1] - (0 if history.extra_entries is None else history.extra_entries[1].shape[1]) :]
    found: list[list[np.ndarray]] = [[] for _ in range(history.rows)]
    for column in range(units.shape[1]):
        places = history.positions(units[:, column : column + 1])
        for row, own in enumerate(places[:, : places.shape[1] - extra.shape[1]]):
            own = own[own >= 0]
            found[row].append(own[keep[row, column, : len(own)]])
    return [np.concatenate([*parts, last[last >= 0]]) for parts, last in zip(found, extra, strict=True)]


def as_stored(form: Any, both: torch.Tensor) -> torch.Tensor:
    """Keys and values (rows, heads, T, Dk + Dv) as read back from a record, token by token."""
    one, dims = dataclasses.replace(form, group_size=1), [form.key_dim, form.value_dim]
    rows, _, tokens, _ = both.shape
    entries = form.entries(*both.split(dims, 3), both.new_empty(rows, tokens, form.entry_width)).flatten(0, 1)
    records = torch.zeros(len(entries), one.record_bytes, dtype=torch.uint8)
    one.pack(entries[:, None], one.payload(records))
    return torch.cat(form.split(one.unpacked(one.payload(records)).reshape(rows, tokens, -1)), 3)


def checked(cls: type[Any]) -> type[Any]:
    """A subclass of the cache class `cls`, of its name, whose layers keep a copy of what comes in and compare each
    gather with it, to the bit. Every gather that was found right is in the class's `gathers`: (layer, units)."""
    gathers: list[tuple[int, np.ndarray]] = []

    class Layer(cls.layer_class):
        came: torch.Tensor | None = None

        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            returned = super().update(keys, values, *args, **kwargs)
            both = torch.cat([keys, values], -1).detach().to(self.history.form.dtype, copy=True)
            both = both[:, :, : both.shape[2] - self.guessed]
            if self.came is not None:
                both = torch.cat([self.came[:, :, : self.length - both.shape[2]], both], 2)
            self.came = both
            return returned

        def select_rows(self, rows: torch.Tensor) -> None:
            super().select_rows(rows)
            self.came = None if self.came is None else self.came[rows]

        def reset(self) -> None:
            super().reset()
            self.came = None

        def restore(self, *given: Any) -> None:
            super().restore(*given)
            self.came = torch.cat(self.whole(), -1) if self.is_initialized else None

        def fetched(self, choice: Any, fetched: Any) -> None:
            super().fetched(choice, fetched)
            history, units = self.history, choice.units
            inside = units >= 0
            assert units.shape[0] == history.rows and units.max(initial=-1) < history.units
            assert (inside[:, :-1] >= inside[:, 1:]).all() and ((np.diff(units) > 0) | ~inside[:, 1:]).all()
            places = fetched.of_chosen(history.positions(units))
            valid = places >= 0 if fetched.valid is None else fetched.valid & (places >= 0)
            entries, estimates = fetched.entries, fetched.estimates
            if estimates is not None:
                entries, last = entries.tensor_split([entries.shape[1] - estimates.entries.shape[1]], 1)
                assert torch.equal(last, estimates.entries)
            keys, values = history.form.split(entries)
            assert self.came is not None and self.came.shape[2] == self.length
            came = self.rows.fold(self.came)
            stored = came if history.form.bits is None else as_stored(history.form, came)
            recent = np.arange(self.length - history.recent.shape[1], self.length)
            waiting = np.zeros((history.rows, 0)) if history.extra_entries is None else history.extra_entries[1]
            if choice.keep is not None:
                named = named_tokens(history, units, choice.keep)
                assert all(np.array_equal(places[row][valid[row]], named[row]) for row in range(history.rows))
            for row in range(history.rows):
                there = np.concatenate([valid[row], np.ones(len(recent), dtype=bool)])
                where = torch.from_numpy(np.concatenate([places[row], recent])[there])
                both = torch.cat([keys[row], values[row]], -1)[:, torch.from_numpy(there)]
                in_records = torch.from_numpy(~np.isin(where, [*recent, *waiting[row]]))
                assert torch.equal(both[:, in_records], stored[row][:, where[in_records]])
                latest, where = both[:, ~in_records], where[~in_records]  # a crop reads some back
                same = (latest == came[row][:, where]).all(2) | (latest == stored[row][:, where]).all(2)
                assert same.all()
            gathers.append((self.layer_idx, units))

        def attends_to(self, call: Any, stored: Any) -> None:
            """Of `SpecCache`, which gathers nothing: each token once, as it came."""
            super().attends_to(call, stored)
            assert self.came is not None and self.came.shape[2] == self.length
            places = [one.tokens.cpu().numpy() for one in stored]
            for row, head in np.ndindex(*self.came.shape[:2]):
                at = zip(places, stored, strict=True)
                parts = [(own[row, head], one.keys[row, head], one.values[row, head]) for own, one in at]
                named = np.concatenate([tokens[tokens >= 0] for tokens, *_ in parts] or [np.zeros(0, dtype=int)])
                assert len(set(named.tolist())) == len(named) and named.max(initial=-1) < self.predictor.copy.tokens
                for tokens, keys, values in parts:
                    both = torch.cat([keys, values], -1)[torch.from_numpy(tokens >= 0)]
                    assert torch.equal(both, self.came[row, head][torch.from_numpy(tokens[tokens >= 0])])
            gathers.append((self.layer_idx, np.zeros((len(self.came), 0), dtype=np.int64)))

    return type(cls.__name__, (cls,), {"layer_class": Layer, "gathers": gathers})
