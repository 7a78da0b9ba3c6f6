"""A choice in, entries out, for one history's records: from tiers, from prefetches, and from the store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .areas import Areas, ByteRows, Filled, Staging, records_soon
from .choice import Choice, Estimate, Estimates, Extents, Fetched, Source, valid_entries
from .reads import AreaReads, EarlyLook, Missing
from .replica_link import Link
from .storage import Storage
from .tier import Tier, distinct, importance_of, keep, keep_in, kept_of, take_resident


class Fetcher:
    """Fetches one history's records to its device. Knows only records: no layer, budget or padding.

    Asks the tiers in order, the fastest first. It reads records that no tier has, and keeps them in all tiers. A gather
    that raises has changed nothing, except that tiers keep what was read before. For the thread that runs the model.

    Args:
        tiers: fastest first; closed by the fetcher.
        most_records: maximum records a row that a usual step needs, which areas are allocated for; a gather may need
            more.
        layer_idx: line of the timeline that shows waits; None: none does.
        looks: areas for `begin_look`; None: it does nothing.
        link: the link that reads some records as replicas; None: none are.
    """
    def __init__(
        self, storage: Storage, areas: Areas, tiers: Sequence[Tier], most_records: int, layer_idx: int | None = None,
        looks: Areas | None = None, link: Link | None = None,
    ) -> None:  # fmt: skip
        self._storage, self._areas, self.tiers = storage, areas, list(tiers)
        self.most_records = most_records
        self.read_at_once = most_records
        """Records a row that a gather reads at a time; its area is this large, and more are read in parts."""
        self._several = len(self.tiers) > 1
        self._missing, self._reads = Missing(storage, areas, layer_idx, link), AreaReads(storage, areas, layer_idx)
        self._weighs, self.layer_idx = link is not None, layer_idx
        self._in_use: dict[Tier, np.ndarray] = {}  # by tiers that keep what is read: slots of the gather's records
        if any(tier.keeps_reads for tier in tiers):
            self._missing.keep_reads(self._keep_read)
        self._early = None if looks is None else EarlyLook(storage, looks, layer_idx)
        self.latest: Choice | None = None
        """The latest gathered choice; None after a change of the rows."""
        self.closed = self._at_work = False
        storage.account.spare(self)

    # --- prefetching -------------------------------------------------------------------------------------------

    @property
    def guess(self) -> Choice | None:
        """The choice that is being prefetched, if any."""
        return None if self._missing.ahead is None else self._missing.ahead.choice

    def ahead(self, history: Source, choice: Choice, others: Choice | None = None) -> None:
        """Prefetch the records of `choice` that no tier has, and those of `others` while there is room.

        Does nothing if no area is free. If it raises, nothing has changed; a failed read is dropped by the gather. May
        outlive the step.
        """
        if self._missing.ahead is not None:
            self.drop_ahead()
        more = None if others is None else partial(self._absent, history, others)
        room = history.rows * min(records_soon(history.records), self.most_records)
        self._missing.begin_ahead(history, choice, room, *self._absent(history, choice), more)

    def _absent(self, history: Source, choice: Choice) -> tuple[np.ndarray, np.ndarray | None]:
        """The records of a choice that no tier has, ascending, and their importance."""
        records = history.extents(choice.units).records.reshape(-1)
        absent = records >= 0
        for tier in self.tiers:
            absent &= tier.locate(records) < 0
        missing, which = distinct(records[absent])
        return missing, importance_of(choice.importance, absent, missing.size, which) if self._weighs else None

    def not_held(self, records: np.ndarray) -> np.ndarray:
        """Mask of `records` (n,) that are in no tier, (n,) bool; a record of -1 is none."""
        absent = records >= 0
        for tier in self.tiers:
            absent &= tier.locate(records) < 0
        return absent

    def drop_ahead(self) -> None:
        """Wait for the prefetch and drop it, with its error if it failed."""
        self._missing.drop_ahead()

    def drop_reads(self) -> None:
        """As `drop_ahead`, for all reads in flight."""
        self.drop_ahead()
        if self._early is not None:
            self._early.drop()

    # --- gather ------------------------------------------------------------------------------------------------

    def gather(
        self, history: Source, choice: Choice, estimate: Estimate | None = None, most_estimates: int = 0
    ) -> Fetched:
        """The entries of `choice`, row by row and unit by unit, followed by `history.recent`, and by the entries that
        `estimate` returns, at most `most_estimates` a row. It is called while records are read.

        Waits for the prefetch, reads missing records, and keeps what was read. A choice that is gathered again counts
        once. Raises `StoreError` or `BudgetError` with nothing changed.
        """
        self._at_work = True
        try:
            form, recent, extra, filled = history.form, history.recent, history.extra_entries, self._areas.filled
            latest = recent.shape[1]
            if filled is not None and filled.by is self and filled.units is choice.units:
                extents = filled.extents
            else:
                extents = history.extents(choice.units)
                if filled is None or not (
                    filled.by is self and np.array_equal(filled.extents.records, extents.records)
                ):
                    filled = None
            if filled is None:
                behind = latest + most_estimates + (0 if extra is None else extra[1].shape[1])
                filled, estimates = self._fill_view(history, extents, choice, behind, estimate)
            else:
                estimates = None if estimate is None else estimate()
            last = 0 if estimates is None else estimates.entries.shape[1]
            width = extents.records.shape[1]
            present = int(np.count_nonzero(extents.records >= 0))
            runs = extents.count is not None or extents.first is not None
            if choice is not self.latest:
                counters = self._storage.counters
                counters.units_selected += present
                counters.units_resident += filled.resident
                counters.units_ready += filled.resident + filled.ready
            chosen = width * form.group_size
            plain = present == extents.records.size and choice.keep is None and not runs
            valid = None if plain else valid_entries(choice, extents, form.group_size, present)
            if extra is not None:
                filled.view.entries[:, chosen : chosen + extra[1].shape[1]] = extra[0]
                valid = np.ones((history.rows, chosen), dtype=bool) if valid is None else valid
                valid, chosen = np.concatenate([valid, extra[1] >= 0], 1), chosen + extra[1].shape[1]
            if choice.keep is not None or extra is not None:
                assert valid is not None
                fetched = kept_of(form, recent, filled.view, valid, self._areas, last)
            else:
                entries = filled.view.entries[:, : chosen + latest + last]
                entries[:, chosen : chosen + latest] = recent
                fetched = Fetched(entries, chosen, valid)
            if estimates is not None:
                fetched.entries[:, fetched.entries.shape[1] - last :] = estimates.entries
                fetched.estimates = estimates
            self._areas.filled, self.latest = None, choice
            whole = filled.view.entries[:, : width * form.group_size].unflatten(1, (width, form.group_size))
            fetched.records = whole
            return fetched
        finally:
            self._at_work = False

    def bring(self, history: Source, choice: Choice) -> torch.Tensor:
        """The entries (rows, M, entries a record, entry width) of the units of `choice`, for a predictor; -1: zeros.

        Valid until the next gather of any fetcher of the cache; a gather of the same units uses them. Waits, reads,
        keeps and raises as `gather` does."""
        extents, extra = history.extents(choice.units), history.extra_entries
        behind = history.recent.shape[1] + (0 if extra is None else extra[1].shape[1])
        self._at_work = True
        try:
            filled = self._areas.filled = self._fill_view(history, extents, choice, behind)[0]
        finally:
            self._at_work = False
        width, group = extents.records.shape[1], history.form.group_size
        return filled.view.entries[:, : width * group].unflatten(1, (width, group))

    def _fill_view(
        self, history: Source, extents: Extents, choice: Choice, latest: int, estimate: Estimate | None = None
    ) -> tuple[Filled, Estimates | None]:
        """The view filled with the records of `extents`, which are those of `choice`, and room for `latest` entries a
        row behind them; and what `estimate` returns. The records come from tiers, from the prefetch, and from the
        store. While they are read, resident ones are copied and `estimate` is called."""
        form, records, (rows, width) = history.form, extents.records.reshape(-1), extents.records.shape
        behind, room = -(-latest // form.group_size), rows * min(records_soon(history.records), self.most_records)
        at_once = min(room, rows * self.read_at_once)
        view = self._areas.view(rows, width, behind, form, history.device, room + rows * behind)
        present = records >= 0
        count = present.nonzero()[0].size
        if count < records.size:
            view.payloads.tensor[torch.from_numpy(view.target[~present])] = 0
        hits, absent = [], present
        for tier in self.tiers:
            lies_in = tier.locate(records)
            hits.append((tier, lies_in))
            absent = absent & (lies_in < 0)
            if tier.keeps_reads:
                self._in_use[tier] = lies_in[lies_in >= 0]
        places, ready, estimates = absent.nonzero()[0], 0, None

        def meanwhile() -> None:
            nonlocal estimates
            take_resident(hits, view)
            if estimate is not None:
                estimates = estimate()

        if places.size:
            missing, which = distinct(records[places])
            matter = importance_of(choice.importance, absent, missing.size, which) if self._weighs else None
            target = view.target[places]
            ready = self._missing.bring(history, view, target, missing, which, matter, at_once, meanwhile)
            if not self._several:
                for tier, lies_in in hits:
                    keep_in(tier, lies_in, places, missing, which, view)
        else:
            if self._missing.ahead is not None:
                self.drop_ahead()
            meanwhile()
        if self._several:  # faster tiers also keep what a slower one had
            keep(hits, records, view)
        if form.bits is not None:
            view.unpack()
        return Filled(self, choice.units, extents, view, count - places.size, ready), estimates

    def _keep_read(self, records: np.ndarray, area: Staging, form: Any) -> None:
        """Let tiers that keep what is read keep the first records of an area."""
        for tier, in_use in self._in_use.items():
            new = (tier.locate(records) < 0).nonzero()[0]
            tier.keep(records[new], in_use, area.host_payloads(records.size, form), new)

    def look(self, history: Source, extents: Extents, *, again: bool = False) -> torch.Tensor:
        """The payloads (rows, E, payload width) of the records of `extents`, for a predictor; -1: zeros.

        Valid until the next call. Tiers and the prefetch stay as they are. With `again`, a look that was begun early is
        kept for the next look. Raises as `gather` does."""
        room = history.rows * min(records_soon(history.records), self.most_records)
        return self._reads.look(history, extents, room, self._early, again=again)

    def begin_look(self, history: Source, extents: Extents) -> None:
        """Prefetch for the probable next `look`, if an area is free. If it raises, nothing has changed; the look
        repeats a failed read. May outlive the step."""
        if self._early is not None:
            self._early.begin(history, extents)

    # --- changes -----------------------------------------------------------------------------------------------

    def rows_changed(self) -> None:
        """Drop what was selected for the history's former rows. Tiers stay valid."""
        self.latest = self._areas.filled = None
        self.drop_reads()

    def stale(self, records: np.ndarray) -> None:
        """Prepare for `records` being rewritten: ends reads in flight, and drops the latest view. The tiers' copies are
        valid until `renew`."""
        self._areas.filled = None
        self.drop_reads()

    def renew(self, records: np.ndarray, payloads: torch.Tensor, gone: np.ndarray) -> None:
        """Update distinct `records` (n,), rewritten to `payloads` (n, payload width); those in `gone` are empty now."""
        for tier in self.tiers:
            if gone.size:
                tier.forget(gone)
        try:
            for tier in self.tiers:
                tier.renew(records, ByteRows(payloads))
        except BaseException:  # the records are read again
            for tier in self.tiers:
                tier.forget(records)
            raise

    def forget(self, records: np.ndarray) -> None:
        """Drop all copies of `records`, which were freed."""
        self.rows_changed()
        for tier in self.tiers:
            tier.forget(records)

    @property
    def tables_nbytes(self) -> int:
        return sum([tier.tables_nbytes for tier in self.tiers])

    def free_memory(self) -> None:
        """As `Spare.free_memory`: frees everything and closes, unless it is gathering or prefetching."""
        if not self._at_work and self._missing.ahead is None:
            self.close()

    def close(self) -> None:
        """Close the tiers, after waiting for prefetches. Idempotent."""
        self.closed = True
        self.rows_changed()
        for tier in self.tiers:
            tier.close()
        self.tiers = []
