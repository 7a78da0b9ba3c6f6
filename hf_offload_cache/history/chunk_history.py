"""All tokens of one layer, and on the disk beside them an abstract of each chunk of their keys, or a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import StoreError, not_whole
from ..fetch.storage import Storage
from ..stores.base import Store
from ..stores.freezable import FreezableStore
from .abstract_pages import AbstractPages, check_pages
from .base import Sealed
from .position_history import PositionHistory
from .record_format import RecordFormat
from .replica_format import ReplicaFormat
from .replicas import Replicas


class ChunkHistory(PositionHistory):
    """A `PositionHistory` that may have `pages` in its store, and `replicas` of its records in another.

    What a predictor puts into `pages` moves, and is kept in contexts, with the units that it is of. `config` is an
    `OffloadConfig` that says in `keeps_pages` and `keeps_replicas` which of them there are.
    """

    def __init__(
        self, storage: Storage, form: RecordFormat, rows: int, device: torch.device, config: Any, name: str,
        store: Store | None = None,
    ) -> None:  # fmt: skip
        super().__init__(storage, form, rows, device, config, name, store)
        self.pages: AbstractPages | None = None
        self.replicas: Replicas | None = None
        self._keeps_replicas: bool = config.keeps_replicas
        self._written: list[np.ndarray] = []
        try:
            if config.keeps_pages:
                self.pages = AbstractPages(storage, self.store, form, rows, device, name)
            if store is None:
                self._make_replicas()
        except BaseException:
            self.tail.close()
            raise

    def _make_replicas(self) -> None:
        replica = ReplicaFormat.of(self.form) if self._keeps_replicas else None
        if replica is not None:
            self.replicas = Replicas(self._storage, replica, self._name)

    @property
    def tables_nbytes(self) -> int:
        pages = 0 if self.pages is None else self.pages.table.nbytes
        return super().tables_nbytes + pages + (0 if self.replicas is None else self.replicas.tables_nbytes)

    # --- in ----------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        if self.replicas is None:
            return super().append(keys, values)
        self._written.clear()
        try:
            return super().append(keys, values)
        except Exception:
            if not self._storage.torn:  # the records are free again
                for records in self._written:
                    self.replicas.forget(records)
            raise

    def _write(self, ids: np.ndarray, entries: torch.Tensor) -> torch.Tensor:
        payloads = super()._write(ids, entries)
        if self.replicas is not None:
            self._written.append(ids.reshape(-1))
            self.replicas.write(ids.reshape(-1), payloads)
        return payloads

    # --- contexts ----------------------------------------------------------------------------------------------

    def named(self, count: int) -> np.ndarray:
        named = super().named(count)
        return named if self.pages is None else named | self.pages.table.named(count)

    def move(self, store: Store) -> None:
        super().move(store)
        if self.pages is not None:
            self.pages.move(store)

    def freeze(self) -> Sequence[FreezableStore]:
        replicas = () if self.replicas is None else self.replicas.freeze()
        return [*super().freeze(), *replicas]

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        if self.replicas is None:
            return super().live(parts)
        count = len(parts) - self._replica_parts
        return [*super().live(parts[:count]), *self.replicas.live(parts[count:])]

    @property
    def _replica_parts(self) -> int:
        """Of frozen stores, how many are the replicas'."""
        assert self.replicas is not None
        return len(getattr(self.replicas.store, "parts", ()))

    def capture(self) -> dict[str, Any]:
        whole = self.pages is not None and self.pages.units == self.units  # else who puts them there has to begin anew
        tree = {**super().capture(), "pages": self.pages.capture() if self.pages is not None and whole else None}
        return tree if self.replicas is None else {**tree, "replicas": self.replicas.capture(self._replica_parts)}

    @classmethod
    def check(cls, tree: dict[str, Any], form: RecordFormat, ids: np.ndarray, records: int, name: str) -> None:
        rows, units = ids.shape
        if tree.get("pages") is not None:
            check_pages(form, tree["pages"], rows, units, records, name)

    @classmethod
    def restore(
        cls, storage: Storage, tree: dict[str, Any], parts: Sequence[FreezableStore], *given: Any
    ) -> ChunkHistory:
        captured, own = tree.get("replicas"), len(parts)
        if captured is not None:
            count = captured["parts"]
            if type(count) is not int or not 0 <= count <= own:
                raise not_whole(given[-1], f"{count!r:.80} of its {own} files are replicas")
            own -= count
        history = super().restore(storage, tree, parts[:own], *given)
        assert isinstance(history, ChunkHistory)
        if history.pages is not None and tree.get("pages") is not None:
            history.pages.restore(tree["pages"])
        if captured is None:
            history._make_replicas()
        elif history._keeps_replicas:
            history.replicas = Replicas.restore(storage, captured, history.form, parts[own:], history._name)
        else:
            for part in parts[own:]:
                part.close()
        return history

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. Where a page that is to be cut cannot be read back, no abstract is left, and who puts
        them there begins anew: the history itself is cut."""
        freed, dropped = super().truncate(length), None
        self._forget(freed)
        if self.pages is not None and self.units < self.pages.units:
            try:
                dropped = self.pages.truncate(self.units)
            except StoreError:
                dropped = self.pages.clear()
        if dropped is None or not dropped.size:
            return freed
        return dropped if freed is None else np.concatenate([freed, dropped])

    def sweep(self, always: bool = False) -> np.ndarray | None:
        freed = super().sweep(always)
        self._forget(freed)
        if freed is None or self.pages is None:
            return freed
        return np.concatenate([freed, self.pages.table.sweep()])

    def _forget(self, freed: np.ndarray | None) -> None:
        if freed is not None and freed.size and self.replicas is not None:
            self.replicas.forget(freed)

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        if self.pages is not None:
            self.pages.select_rows(rows)

    def close(self) -> None:
        if self.pages is not None:
            self.pages.close()
        if self.replicas is not None:
            self.replicas.close()
        super().close()
