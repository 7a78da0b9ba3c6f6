"""All tokens of one layer, with an abstract of each chunk of keys, or a replica of each record, on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import ConfigError, StoreError
from ...fetch.choice import Extents
from ...fetch.storage import Storage
from ...history.base import Sealed
from ...history.position_history import PositionHistory
from ...history.records import RecordFormat
from ...history.state import Array, State, Table
from ...history.tail import BlockTable
from ...memory.dry_run import DryRun
from ...stores.base import FreezableStore, Store, aligned_empty
from .replicas import ReplicaFormat, Replicas

# Abstracts of a history's units, packed in separate records of its store; the latest ones in memory

class AbstractPages:
    """Abstracts of a history's units on disk: for each unit, in order, a vector of `width` elements, twice the joined
    width of the keys (LeoAM, section 4.3).

    A page is a record of as many abstracts as fit. The partial page is in memory, in the account as "abstracts". An
    error may leave fewer units than were to be added: `units` says how many, and `clear` starts over. For the thread
    that runs the model.
    """

    STATE: ClassVar[State] = State(
        "abstracts",
        "abstracts",
        {"latest": "_count"},
        table=Table("rows pages", torch.int32, low=0, below="records", at="table.ids"),
        open=Array("rows latest width", at="_open"),
    )

    def __init__(
        self, storage: Storage, store: Store, form: RecordFormat, rows: int, device: torch.device, name: str
    ) -> None:
        self.form, self.rows, self.device = form, rows, device
        self.width, self.each = 2 * form.key_width, page_size(form)
        self.table = BlockTable(store, rows)
        self._storage, self._store, self._name, self._account = storage, store, name, storage.account
        self._count = 0
        self._open = self._account.empty("abstracts", rows, self.each, self.width, dtype=form.dtype, device=device)

    def rehearse(self, run: DryRun, units: int) -> None:
        """Take the size of `units` units a row, in a dry run."""
        self.table.rehearse(units // self.each)
        run.stores(self._store, self.rows * (units // self.each))
        if self.rows > 1:
            run.moves(self._open.nbytes)

    @property
    def units(self) -> int:
        """Units with an abstract."""
        return self.table.num_groups * self.each + self._count

    # --- reads and writes --------------------------------------------------------------------------------------

    def append(self, abstracts: torch.Tensor) -> None:
        """Add abstracts (rows, n, width), which are copied. Full pages go to the writer. Raises `StoreFullError`, or an
        earlier write's `StoreError`."""
        added = 0
        while added < abstracts.shape[1]:
            part = min(self.each - self._count, abstracts.shape[1] - added)
            self._open[:, self._count : self._count + part] = abstracts[:, added : added + part]
            self._count += part
            added += part
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
        """All abstracts, (rows, units, width): those of pages (rows, P, payload width), as `extents` names them, and
        those in memory."""
        packed = pages.view(self.form.dtype)[:, :, : self.each * self.width]
        stored = packed.reshape(self.rows, pages.shape[1] * self.each, self.width)
        return torch.cat([stored, self._open[:, : self._count]], 1)

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, units: int) -> np.ndarray | None:
        """Keep the abstracts of the first `units` units. Returns the freed records; None: none was freed. Raises
        `StoreError` with nothing changed."""
        stored = self.table.num_groups * self.each
        if units >= stored:
            self._count = min(self._count, units - stored)
            return None
        full, partial = divmod(units, self.each)
        if partial:
            ids = self.table.ids[:, full].astype(np.int64)
            with self._storage.audited():
                for page in self._storage.stream(self._store, ids, self.rows, self.device):
                    packed = page.view(self.form.dtype)[:, : self.each * self.width]
                    self._open.copy_(packed.reshape(self.rows, self.each, self.width))
        self._count = partial
        return self.table.truncate(full)

    def clear(self) -> np.ndarray:
        """Drop all abstracts. Returns the freed records."""
        self._count = 0
        return self.table.truncate(0)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i the current row `rows[i]`."""
        self.STATE.select_rows(self, rows)
        self.table.select_rows(rows.cpu().numpy())
        self.rows = len(rows)

    def move(self, store: Store) -> None:
        """Use `store` from now on: it has the same records under the same ids."""
        self._store = store
        self.table.move(store)

    def close(self) -> None:
        self.STATE.close(self)

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """All state besides the records: views, valid until the next change."""
        return self.STATE.capture(self)

    def restore(self, tree: dict[str, Any]) -> None:
        """Load the captured state, which `STATE` has checked. Copies."""
        self.table = BlockTable.of(self._store, tree["table"].cpu().numpy())
        self._count = tree["open"].shape[1]
        self._open[:, : self._count] = tree["open"]


def page_size(form: RecordFormat) -> int:
    """Abstracts that fit a record. Raises `ConfigError` if none does."""
    each = 2 * form.key_width * form.dtype.itemsize
    if each > form.payload_bytes:
        tokens = -(-each * form.group_size // form.payload_bytes)
        raise ConfigError(
            f"abstracts='disk' stores abstracts of {each:,} bytes in records, and a chunk of {form.group_size} tokens "
            f"has {form.payload_bytes:,}: use chunk_size={1 << (tokens - 1).bit_length()}, or abstracts='memory'"
        )
    return form.payload_bytes // each


class ChunkHistory(PositionHistory):
    """A `PositionHistory` with optional abstract `pages` in its store, and optional `replicas` of its records in
    another.

    Abstracts move with their units and are saved with them. `config.keeps_pages` and `config.keeps_replicas` say which
    of the two exist.
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

    def rehearse(self, run: DryRun, context: int) -> None:
        super().rehearse(run, context)
        if self.pages is not None:
            self.pages.rehearse(run, self.units)
        if self.replicas is not None:
            self.replicas.rehearse(run, self.rows, self.units, self._piece)

    # --- writes ------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Sealed:
        if self.replicas is None:
            return super().append(keys, values)
        self._written.clear()
        try:
            return super().append(keys, values)
        except Exception:
            if not self._storage.torn:  # the records were freed
                for records in self._written:
                    self.replicas.forget(records)
            raise

    def _longer(self, groups: int, piece: int) -> int:
        return super()._longer(groups, piece) if self.replicas is None else piece  # these are made of as many at a time

    def _write(
        self, ids: np.ndarray, records: torch.Tensor
    ) -> list[tuple[np.ndarray, torch.Tensor, Callable[[], object] | None]]:
        written = super()._write(ids, records)
        if self.replicas is not None:
            for some, payloads, arrived in written:
                if arrived is not None:
                    arrived()
                self._written.append(some)
                self.replicas.write(some, payloads)
        return written

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
        # the replicas' parts follow, with smaller records
        count = sum(part.record_bytes == self.form.record_bytes for part in parts)
        return [*super().live(parts[:count]), *self.replicas.live(parts[count:])]

    def capture(self) -> dict[str, Any]:
        complete = self.pages is not None and self.pages.units == self.units  # else the predictor recomputes them
        tree = {**super().capture(), "pages": self.pages.capture() if self.pages is not None and complete else None}
        return {**tree, "replicas": None if self.replicas is None else self.replicas.STATE.capture(self.replicas)}

    @classmethod
    def check(cls, tree: dict[str, Any], form: RecordFormat, ids: np.ndarray, records: int, name: str) -> None:
        if (captured := tree["pages"]) is not None:
            pages, latest = divmod(ids.shape[1], page_size(form))
            sizes = {"rows": len(ids), "pages": pages, "latest": latest, "width": 2 * form.key_width}
            AbstractPages.STATE.check(captured, name, form.dtype, records=records, **sizes)

    @classmethod
    def restore(
        cls, storage: Storage, tree: dict[str, Any], parts: Sequence[FreezableStore], *given: Any
    ) -> ChunkHistory:
        captured, count = tree["replicas"], len(parts)
        if captured is not None:  # the replicas' parts follow, with smaller records
            size = RecordFormat(**tree["form"]).record_bytes
            count = sum(part.record_bytes == size for part in parts)
        history = super().restore(storage, tree, parts[:count], *given)
        assert isinstance(history, ChunkHistory)
        if history.pages is not None and tree["pages"] is not None:
            history.pages.restore(tree["pages"])
        if captured is None:
            history._make_replicas()
        elif history._keeps_replicas:
            history.replicas = Replicas.restore(storage, captured, history.form, parts[count:], history._name)
        else:
            for part in parts[count:]:
                part.close()
        return history

    # --- changes -----------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> np.ndarray | None:
        """As `History.truncate`. If a page to be cut cannot be read, all abstracts are dropped and the predictor
        recomputes them. The history is truncated anyway."""
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
