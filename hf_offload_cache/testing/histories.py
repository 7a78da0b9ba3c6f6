"""The conformance suite of histories."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..config import OffloadConfig
from ..fetch.areas import Areas
from ..fetch.choice import Choice
from ..fetch.fetcher import Fetcher
from ..fetch.storage import DryStorage, Storage
from ..history.base import History
from ..history.records import RecordFormat

FORM = RecordFormat(2, 8, 2, 4, torch.float32, 4)
CONFIG = OffloadConfig(num_recent=8, block_tokens=16, engine="memory")


def some_keys_and_values(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (rows, 2, tokens, 8) and values (rows, 2, tokens, 4), no two equal."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, FORM.num_key_heads, tokens, FORM.key_dim, generator=generator)
    return keys, torch.randn(rows, FORM.num_value_heads, tokens, FORM.value_dim, generator=generator)


class HistoryTests:
    """Tests for every history. Subclass it as `class TestMyHistory(HistoryTests)`, and implement `make_history` and
    `restore_history`."""

    @abstractmethod
    def make_history(self, storage: Storage, form: RecordFormat, rows: int, config: OffloadConfig) -> History:
        """A new, empty history on the CPU."""

    @abstractmethod
    def restore_history(
        self, storage: Storage, tree: dict[str, Any], parts: Sequence[Any], config: OffloadConfig
    ) -> History:
        """The history that was captured as `tree`, over the frozen `parts`."""

    @contextmanager
    def filled(self, rows: int, pieces: Sequence[int]) -> Iterator[tuple[Storage, History, torch.Tensor, torch.Tensor]]:
        """A storage, a history filled in pieces, and its keys and values."""
        storage = Storage(CONFIG, None)
        try:
            history = self.make_history(storage, FORM, rows, CONFIG)
            keys, values = some_keys_and_values(rows, sum(pieces))
            for part, other in zip(keys.split(list(pieces), 2), values.split(list(pieces), 2), strict=True):
                history.append(part, other)
            yield storage, history, keys, values
        finally:
            storage.close()

    def assert_holds(self, storage: Storage, history: History, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Assert that the history holds exactly keys (rows, Hk, T, Dk) and values: complete, in part, in blocks, and
        unit by unit."""
        length = keys.shape[2]
        assert (history.rows, history.length) == (len(keys), length)
        for stop in {None, 0, 1, length // 2, max(0, length - 1)}:
            found = history.whole(stop)
            for part, came in zip(found, (keys, values), strict=True):
                assert part.is_contiguous() and torch.equal(part, came[:, :, :stop])
        self._assert_blocks(history, keys, values)
        self._assert_units(storage, history, keys, values)
        recent = history.recent.shape[1]
        for part, came in zip(history.form.split(history.recent), (keys, values), strict=True):
            assert torch.equal(part, came[:, :, length - recent :])

    def _assert_blocks(self, history: History, keys: torch.Tensor, values: torch.Tensor) -> None:
        for stop in (keys.shape[2], keys.shape[2] // 3):
            seen = np.zeros((len(keys), stop), dtype=int)
            begin = 0
            for block in history.blocks(stop):
                places = block.positions
                if places is None:
                    places = np.arange(begin, begin + block.keys.shape[2])[None].repeat(len(keys), 0)
                    begin += block.keys.shape[2]
                assert places.max(initial=-1) < stop
                for row, own in enumerate(places):
                    there = np.flatnonzero(own >= 0)
                    np.add.at(seen[row], own[there], 1)
                    assert torch.equal(block.keys[row][:, there], keys[row][:, own[there]])
                    assert torch.equal(block.values[row][:, there], values[row][:, own[there]])
            assert (seen == 1).all(), "every token before `stop` is in exactly one block"

    def _assert_units(self, storage: Storage, history: History, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A gather returns each sealed token once, at its position."""
        units = np.arange(history.units)[None].repeat(history.rows, 0)
        fetcher = Fetcher(storage, Areas(storage.account), [], max(1, history.units))
        try:
            fetched = fetcher.gather(history, Choice(units))
            places = fetched.of_chosen(history.positions(units))
            there = places >= 0 if fetched.valid is None else fetched.valid & (places >= 0)
            assert places.shape == (history.rows, fetched.chosen)
            sealed = history.length - history.recent.shape[1]
            for row in range(history.rows):
                held, where = np.flatnonzero(there[row]), places[row][there[row]]
                assert np.array_equal(np.sort(where), np.arange(sealed))
                for part, came in zip(history.form.split(fetched.entries), (keys, values), strict=True):
                    assert torch.equal(part[row][:, held], came[row][:, where])
        finally:
            fetcher.close()
        if history.units:
            none = np.full((history.rows, 1), -1)
            assert (history.extents(none).records == -1).all()
            extra = np.empty((history.rows, 0)) if history.extra_entries is None else history.extra_entries[1]
            places = history.positions(none)
            assert np.array_equal(places[:, places.shape[1] - extra.shape[1] :], extra)
            assert (places[:, : places.shape[1] - extra.shape[1]] == -1).all()

    def test_what_came_in_comes_out(self) -> None:
        """Bitwise, for any pieces."""
        for rows, pieces in ((1, [3]), (2, [50]), (3, [1] * 30), (2, [7, 1, 33, 1, 1, 20, 4])):
            with self.filled(rows, pieces) as (storage, history, keys, values):
                self.assert_holds(storage, history, keys, values)

    def test_what_is_sealed_is_told(self) -> None:
        """Tokens and keys of new units; everything sealed can be read back."""
        with self.filled(2, [5]) as (_, history, keys, values):
            told, seen = 0, 5
            for tokens in (1, 40, 1, 1, 1, 1, 9):
                more, other = some_keys_and_values(2, tokens, seed=tokens + seen)
                keys = torch.cat([keys, more], 2)
                sealed = history.append(more, other)
                seen += tokens
                new = [part for part in sealed.keys if part.shape[2]]
                assert sealed.units == history.units and sealed.tokens == seen - history.recent.shape[1]
                assert sealed.fresh == sum(part.shape[2] for part in new) == sealed.tokens - told
                assert history.recent.shape[1] >= min(seen, CONFIG.num_recent)
                stored = list(part.clone() for part in sealed.stored_keys())
                assert sum(part.shape[2] for part in stored) == sealed.tokens
                if stored and told < sealed.tokens:
                    came = torch.cat(new, 2).sum((1, 2, 3)), keys[:, :, told : sealed.tokens].sum((1, 2, 3))
                    torch.testing.assert_close(*came, rtol=1e-4, atol=1e-3)
                told = sealed.tokens

    def test_truncate(self) -> None:
        """Within the tail, at its edge, and into sealed units; the history continues from there."""
        for length in (57, 53, 50, 31, 8, 3, 1):
            with self.filled(2, [40, 18]) as (storage, history, keys, values):
                units = history.units
                freed = history.truncate(length)
                assert (freed is None) == (history.units == units and length >= 58 - 8)
                more, other = some_keys_and_values(2, 21, seed=3)
                keys, values = (torch.cat([old[:, :, :length], new], 2) for old, new in ((keys, more), (values, other)))
                history.append(more, other)
                self.assert_holds(storage, history, keys, values)

    def test_select_rows(self) -> None:
        """Rows are reordered, repeated and dropped, then continue separately; unused records can be swept."""
        with self.filled(3, [45]) as (storage, history, keys, values):
            for step, rows in enumerate(([2, 0, 0], [1, 1, 2, 0, 0], [3], [0, 0])):
                history.select_rows(torch.tensor(rows))
                more, other = some_keys_and_values(len(rows), 6, seed=step + 1)
                keys, values = torch.cat([keys[rows], more], 2), torch.cat([values[rows], other], 2)
                history.append(more, other)
                history.sweep(always=step % 2 == 0)
                self.assert_holds(storage, history, keys, values)

    def test_frozen_captured_and_restored(self) -> None:
        """The twin holds the same, and both then continue separately."""
        with self.filled(2, [40, 9]) as (storage, history, keys, values):
            parts = list(history.freeze())
            live = history.live(parts)
            assert [len(one) for one in live] == [part.capacity for part in parts] and all(one.any() for one in live)
            tree, other = history.capture(), Storage(CONFIG, None)
            try:
                twin = self.restore_history(other, tree, [part.share() for part in parts], CONFIG)
                self.assert_holds(other, twin, keys, values)
                for seed, (place, one) in enumerate(((storage, history), (other, twin)), 5):
                    more = some_keys_and_values(2, 30, seed)
                    one.append(*more)
                    one.truncate(60)
                    both = [torch.cat(pair, 2)[:, :, :60] for pair in zip((keys, values), more, strict=True)]
                    self.assert_holds(place, one, *both)
            finally:
                other.close()

    def test_no_more_is_held_than_planned(self) -> None:
        """In a prefill, in steps, and when rows move; and `close` frees everything."""
        for rows in (1, 3):
            dry: Any = DryStorage(CONFIG, "cpu")
            rehearsed = self.make_history(dry, FORM, rows, CONFIG)
            rehearsed.rehearse(dry.account, 200)
            dry.account.keeps("tables", rehearsed.tables_nbytes)
            plan = dry.plan
            with self.filled(rows, [150]) as (storage, history, _, _):
                storage.prefetcher.flush()
                for tokens in (30, 1, 1, 1, 1, 1, 1):
                    history.append(*some_keys_and_values(rows, tokens))
                history.select_rows(torch.arange(rows).flip(0))
                storage.prefetcher.flush()
                names = ("rolling tail", "tables", "moving rows", "packing")
                own = {name: storage.account.by_owner[name] for name in names}
                held = sum(own.values()) + history.tables_nbytes
                assert held > 0
                parts = [{**plan.own.prefill}, {**plan.shared.prefill}]
                assert held <= sum(part.get(name, 0) for part in parts for name in names)
                history.close()
                assert storage.account.by_owner["rolling tail"] == 0 and storage.stores == []
