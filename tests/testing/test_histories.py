"""Every history that there is does what `HistoryTests` asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from shuffled_history import ShuffledHistory

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.fetch import Storage
from hf_offload_cache.history import PositionHistory, RecordFormat
from hf_offload_cache.testing import HistoryTests

CPU = torch.device("cpu")


class TestPositionHistory(HistoryTests):
    kind: type[PositionHistory] = PositionHistory

    def make_history(self, storage: Storage, form: RecordFormat, rows: int, config: OffloadConfig) -> PositionHistory:
        return self.kind(storage, form, rows, CPU, config, "layer 0")

    def restore_history(
        self, storage: Storage, tree: dict[str, Any], parts: Sequence[Any], config: OffloadConfig
    ) -> PositionHistory:
        return self.kind.restore(storage, tree, parts, CPU, config, "layer 0")


class TestShuffledHistory(TestPositionHistory):
    kind = ShuffledHistory


class _LosesRows(PositionHistory):
    def select_rows(self, rows: torch.Tensor) -> None:
        self.tail.select_rows(rows)
        self.rows = len(rows)


class _KeepsTooMuch(PositionHistory):
    def truncate(self, length: int) -> Any:
        return super().truncate(min(self.length, length + 1))


class _SharesItsTail(PositionHistory):
    def whole(self, stop: int | None = None) -> Any:
        keys, values = super().whole(stop)
        return keys.roll(1, 2), values


@pytest.mark.parametrize(
    ("kind", "test"),
    [(_LosesRows, "select_rows"), (_KeepsTooMuch, "truncate"), (_SharesItsTail, "what_came_in_comes_out")],
)
def test_the_suite_notices(kind: type[PositionHistory], test: str) -> None:
    suite = TestPositionHistory()
    suite.kind = kind
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        getattr(suite, f"test_{test}")()
