"""Abstracts of a history's units, packed in records of their own in its store; the latest ones in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import not_whole
from ..fetch.choice import Extents
from ..fetch.storage import Storage
from ..memory.buffers import lasting_empty
from ..memory.plan import LayerPlan, Planned
from ..stores.base import Store, aligned_empty
from .block_table import BlockTable
from .record_format import RecordFormat


class AbstractPages:
    """For each unit of a row one vector of `width` elements, twice the joined width of the keys; in the order of units.

    A page is a record of as many as fit; the page that is not full is in memory, in the account as "abstracts". What
    raises leaves fewer units behind than were to be added: `units` says how many, and `clear` begins anew. For the
    thread that runs the model.
    """

    def __init__(
        self, storage: Storage, store: Store, form: RecordFormat, rows: int, device: torch.device, name: str
    ) -> None:
        self.form, self.rows, self.device = form, rows, device
        self.width, self.each = 2 * form.key_width, page_size(form)
        self.table = BlockTable(store, rows)
        self._storage, self._store, self._name = storage, store, name
        self._count = 0
        self._open = self._empty(rows)

    def _empty(self, rows: int) -> torch.Tensor:
        self._storage.account.hold("abstracts", rows * self.each * self.width * self.form.dtype.itemsize)
        return lasting_empty(rows, self.each, self.width, dtype=self.form.dtype, device=self.device)

    @staticmethod
    def planned(form: RecordFormat, units: int, rows: int) -> LayerPlan:
        """What `rows` rows of abstracts of `units` units take, and their records."""
        each = page_size(form)
        page = rows * each * 2 * form.key_width * form.dtype.itemsize
        tables = BlockTable.planned(units // each, rows)
        moving = Planned.always({"moving rows": page} if rows > 1 else {})
        own = Planned.always({"abstracts": page, "tables": tables})
        return LayerPlan(own, moving, rows * (units // each) * form.record_bytes)

    @property
    def units(self) -> int:
        """Of which there are abstracts."""
        return self.table.num_groups * self.each + self._count

    # --- in and out --------------------------------------------------------------------------------------------

    def append(self, abstracts: torch.Tensor) -> None:
        """Add (rows, n, width), which are copied; full pages go to the writer. Raises `StoreFullError`, or an earlier
        write's `StoreError`."""
        taken = 0
        while taken < abstracts.shape[1]:
            part = min(self.each - self._count, abstracts.shape[1] - taken)
            self._open[:, self._count : self._count + part] = abstracts[:, taken : taken + part]
            self._count += part
            taken += part
            if self._count == self.each:
                try:
                    self._write()
                except Exception:
                    self._count -= 1
                    raise

    def _write(self) -> None:
        with self._storage.account.holding("packing", self.rows * self.form.record_bytes):
            records = aligned_empty(self.rows, self.form.record_bytes)
            typed = records.view(self.form.dtype)
            size = self.each * self.width
            typed[:, size:] = 0
            typed[:, :size] = self._open.reshape(self.rows, size)
            ids = self.table.append(1)
            try:
                self._storage.prefetcher.write(self._store, ids.reshape(-1), records)
            except Exception:
                self.table.drop_last(1)
                raise
            self._count = 0

    def extents(self) -> Extents:
        """The records of all full pages, in order."""
        return Extents(self.table.ids.astype(np.int64))

    def joined(self, pages: torch.Tensor) -> torch.Tensor:
        """All abstracts, (rows, units, width): of the pages (rows, P, G, entry width) that `extents` names, and what is
        in memory."""
        packed = pages.flatten(2)[:, :, : self.each * self.width]
        stored = packed.reshape(self.rows, pages.shape[1] * self.each, self.width)
        return torch.cat([stored, self._open[:, : self._count]], 1)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> np.ndarray | None:
        """Keep the abstracts of the first `units` units. Returns the records freed, or None where none was. Raises
        `StoreError` with nothing changed."""
        stored = self.table.num_groups * self.each
        if units >= stored:
            self._count = min(self._count, units - stored)
            return None
        full, rest = divmod(units, self.each)
        if rest:
            ids = self.table.ids[:, full].astype(np.int64)
            with self._storage.audited():
                for page in self._storage.stream(self._store, ids, self.rows, self.device):
                    packed = self.form.payload(page)[:, : self.each * self.width]
                    self._open.copy_(packed.reshape(self.rows, self.each, self.width))
        self._count = rest
        return self.table.truncate(full)

    def clear(self) -> np.ndarray:
        """Keep none. Returns the records freed."""
        self._count = 0
        return self.table.truncate(0)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        old = self._open
        self._open = self._empty(len(rows))
        torch.index_select(old, 0, rows.to(old.device), out=self._open)
        self._storage.account.release("abstracts", old.nbytes)
        self.table.select_rows(rows.cpu().numpy())
        self.rows = len(rows)

    def move(self, store: Store) -> None:
        """The same records are found in `store` from now on, by the same ids."""
        self._store = store
        self.table.move(store)

    def close(self) -> None:
        self._storage.account.release("abstracts", self._open.nbytes)
        self._open = self._open.new_empty(0, *self._open.shape[1:])

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """What is held beside the records: views, valid until the next change."""
        return {"table": torch.from_numpy(self.table.ids), "open": self._open[:, : self._count]}

    def restore(self, tree: dict[str, Any]) -> None:
        """Hold what was captured, which `check_pages` has passed. Copies."""
        self.table = BlockTable.of(self._store, tree["table"].cpu().numpy())
        self._count = tree["open"].shape[1]
        self._open[:, : self._count] = tree["open"]


def check_pages(form: RecordFormat, tree: Any, rows: int, units: int, records: int, name: str) -> None:
    """Raises `ContextError` unless captured pages of `units` units hold together over a store of `records` records."""
    table, latest = (tree.get(part) if isinstance(tree, dict) else None for part in ("table", "open"))
    each, width, wrong = page_size(form), 2 * form.key_width, None
    if not isinstance(table, torch.Tensor) or not isinstance(latest, torch.Tensor):
        wrong = f"they are {type(table)} and {type(latest)}"
    elif table.dtype != torch.int32 or table.shape != (rows, units // each):
        wrong = f"their table is {tuple(table.shape)} {table.dtype}, for {rows} rows of {units} units, {each} a page"
    elif table.numel() and not (int(table.min()) >= 0 and int(table.max()) < records):
        wrong = f"their table names records {int(table.min())} to {int(table.max())} and there are {records}"
    elif latest.dtype != form.dtype or latest.shape != (rows, units % each, width):
        wrong = f"those in memory are {tuple(latest.shape)} {latest.dtype}, of {units} units, {each} a page"
    if wrong:
        raise not_whole(name, f"its abstracts: {wrong}")


def page_size(form: RecordFormat) -> int:
    """Abstracts that fit a record."""
    return max(1, form.payload_width // (2 * form.key_width))
