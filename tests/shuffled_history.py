"""A history in no order: what leaves the tail is shuffled, each row in a way of its own, and units hold different
numbers of tokens. What the base promises has to hold on it as on a history in the order of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_offload_cache.config import SelectiveConfig
from hf_offload_cache.core import SelectiveCache, SelectiveLayer
from hf_offload_cache.fetch import Choice, Extents
from hf_offload_cache.history import Block, PositionHistory, RecordFormat, Sealed
from hf_offload_cache.predictors import Predictor, Query
from hf_offload_cache.stores import aligned_empty


class ShuffledHistory(PositionHistory):
    """A unit has room for `group_size` tokens, and holds from one to as many. `places` (rows, units, group_size): the
    positions of what each unit holds, -1 behind them."""

    def __init__(self, storage: Any, form: RecordFormat, rows: int, device: torch.device, config: Any, *rest: Any):
        super().__init__(storage, form, rows, device, config, *rest)
        self.storage, self.config = storage, config
        self.places = np.empty((rows, 0, form.group_size), dtype=np.int64)

    @property
    def sealed_tokens(self) -> int:
        return self.length - self.recent.shape[1]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        group, tail = self.form.group_size, self.recent
        entries = tail.new_empty(self.rows, keys.shape[2], self.form.entry_width)
        entries = torch.cat([tail, self.form.entries(keys, values, entries)], 1)
        count = max(0, entries.shape[1] - self.config.num_recent) // group * group
        begin = self.sealed_tokens
        generator = np.random.default_rng(begin)  # the same for a fork, and for a context that was opened
        if count:
            units = -(-count // (group - 1))
            records = torch.zeros(self.rows, units, group, self.form.entry_width, dtype=self.form.dtype)
            places = np.full((self.rows, units, group), -1)
            for row in range(self.rows):
                sizes = np.roll(np.full(units, count // units) + (np.arange(units) < count % units), row)
                order = np.split(generator.permutation(count), np.cumsum(sizes)[:-1])
                for unit, tokens in enumerate(order):
                    records[row, unit, : len(tokens)] = entries[row, torch.from_numpy(tokens)]
                    places[row, unit, : len(tokens)] = begin + tokens
            self.write(self.table.append(units), records)
            self.places = np.concatenate([self.places, places], 1)
        self.tail.replace(entries[:, count:])
        self.length += keys.shape[2]
        new = [self.form.split(entries[:, :count])] if count else []
        return Sealed(self.units, self.sealed_tokens, new, self.stored)

    def write(self, ids: np.ndarray, entries: torch.Tensor) -> None:
        records = aligned_empty(ids.size, self.form.record_bytes)
        typed = records.view(self.form.dtype)
        typed[:] = 0
        typed[:, : self.form.payload_width] = entries.reshape(ids.size, -1)
        self.storage.prefetcher.write(self.store, ids.reshape(-1), records)

    def stored(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield self.whole(self.sealed_tokens)

    def extents(self, units: np.ndarray) -> Extents:
        found = np.take_along_axis(self.places, np.maximum(units, 0)[:, :, None], 1)
        return Extents(super().extents(units).records, count=np.where(units < 0, 0, (found >= 0).sum(-1)))

    def positions(self, units: np.ndarray) -> np.ndarray:
        found = np.take_along_axis(self.places, np.maximum(units, 0)[:, :, None], 1)
        return np.where(units[:, :, None] < 0, -1, found).reshape(len(units), -1)

    def blocks(self, stop: int | None = None) -> Iterator[Block]:
        stop = self.length if stop is None else stop
        step = max(1, self.config.block_tokens // self.form.group_size)
        for first in range(0, self.units, step):
            units = np.arange(first, min(first + step, self.units))[None].repeat(self.rows, 0)
            places = self.positions(units)
            places[places >= stop] = -1
            ids = self.table.records(units).reshape(-1)
            for records in self.storage.stream(self.store, ids, len(ids), self.device):
                entries = self.form.payload(records).reshape(self.rows, -1, self.form.entry_width)
                yield Block(*self.form.split(entries), places)
        latest = np.arange(self.sealed_tokens, self.length)
        latest = np.where(latest < stop, latest, -1)[None].repeat(self.rows, 0)
        yield Block(*self.form.split(self.recent), latest)

    def truncate(self, length: int) -> np.ndarray | None:
        """What remains is put in anew where a unit was touched."""
        if length >= self.sealed_tokens:
            self.tail.drop_last(self.length - length)
            self.length = length
            return None
        keys, values = self.whole(length)
        self.storage.prefetcher.flush(self.store)
        freed = self.table.truncate(0)
        self.places, self.length = self.places[:, :0], 0
        self.tail.drop_last(self.tail.length)
        self.append(keys, values)
        return freed

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        self.places = self.places[rows.cpu().numpy()]

    def capture(self) -> dict[str, Any]:
        fields = {name: getattr(self.form, name) for name in RecordFormat.__dataclass_fields__}
        tree = {"form": fields, "table": torch.from_numpy(self.table.ids), "tail": self.recent, "length": self.length}
        return {**tree, "places": torch.from_numpy(self.places.copy())}

    @classmethod
    def restore(
        cls, storage: Any, tree: dict[str, Any], parts: Sequence[Any], device: torch.device, config: Any, name: str
    ) -> ShuffledHistory:
        form, tail = RecordFormat(**tree["form"]), tree["tail"]
        store = storage.layer_store(parts, form.record_bytes, name)
        history = cls(storage, form, tail.shape[0], device, config, name, store)
        history.table = type(history.table).of(store, tree["table"].numpy())
        history.places = tree["places"].numpy()
        history.tail.replace(tail)
        history.length = tree["length"]
        return history


class EveryOther(Predictor):
    """A predictor that keeps nothing: every other unit, from a place that wanders with the rows."""

    def ready(self, units: int) -> bool:
        self.units = units
        return True

    def select(self, query: Query, budget: int, guess: bool) -> Choice:
        rows = query.recent().shape[0]
        every = np.stack([np.arange(row % 2, self.units, 2)[: self.units // 2] for row in range(rows)])
        return Choice(every[:, -budget:])

    def truncate(self, units: int) -> None:
        self.units = units


class ShuffledLayer(SelectiveLayer):
    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> ShuffledHistory:
        return ShuffledHistory(self.shared.storage, form, rows, device, self.shared.config, self.name)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[Any], device: torch.device) -> ShuffledHistory:
        return ShuffledHistory.restore(self.shared.storage, tree, parts, device, self.shared.config, self.name)

    def make_predictor(self) -> EveryOther:
        return EveryOther()


class ShuffledCache(SelectiveCache):
    config_class = SelectiveConfig
    layer_class = ShuffledLayer
