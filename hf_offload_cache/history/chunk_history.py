"""All tokens of one layer, and on the disk beside them an abstract of each chunk of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import StoreError
from ..fetch.storage import Storage
from ..stores.base import Store
from .abstract_pages import AbstractPages, check_pages
from .position_history import PositionHistory
from .record_format import RecordFormat


class ChunkHistory(PositionHistory):
    """A `PositionHistory` whose store also has `pages`: what a predictor puts there moves, and is kept in contexts,
    with the units that it is of."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        try:
            self.pages = AbstractPages(self._storage, self.store, self.form, self.rows, self.device, self._name)
        except BaseException:
            self.tail.close()
            raise

    @property
    def tables_nbytes(self) -> int:
        return super().tables_nbytes + self.pages.table.nbytes

    # --- contexts ----------------------------------------------------------------------------------------------

    def named(self, count: int) -> np.ndarray:
        return super().named(count) | self.pages.table.named(count)

    def move(self, store: Store) -> None:
        super().move(store)
        self.pages.move(store)

    def capture(self) -> dict[str, Any]:
        whole = self.pages.units == self.units  # else who puts them there has to begin anew
        return {**super().capture(), "pages": self.pages.capture() if whole else None}

    @classmethod
    def check(cls, tree: dict[str, Any], form: RecordFormat, ids: np.ndarray, records: int, name: str) -> None:
        rows, units = ids.shape
        if tree.get("pages") is not None:
            check_pages(form, tree["pages"], rows, units, records, name)

    @classmethod
    def restore(cls, storage: Storage, tree: dict[str, Any], *given: Any) -> ChunkHistory:
        history = super().restore(storage, tree, *given)
        assert isinstance(history, ChunkHistory)
        if tree.get("pages") is not None:
            history.pages.restore(tree["pages"])
        return history

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. Where a page that is to be cut cannot be read back, no abstract is left, and who puts
        them there begins anew: the history itself is cut."""
        freed, dropped = super().truncate(length), None
        if self.units < self.pages.units:
            try:
                dropped = self.pages.truncate(self.units)
            except StoreError:
                dropped = self.pages.clear()
        if dropped is None or not dropped.size:
            return freed
        return dropped if freed is None else np.concatenate([freed, dropped])

    def sweep(self, always: bool = False) -> np.ndarray | None:
        freed = super().sweep(always)
        if freed is None:
            return None
        return np.concatenate([freed, self.pages.table.sweep()])

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        self.pages.select_rows(rows)

    def close(self) -> None:
        self.pages.close()
        super().close()
