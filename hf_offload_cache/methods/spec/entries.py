"""What a layer of `SpecCache` holds as it was stored, beside its copy: how it is chosen, comes and goes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from ...errors import BudgetError
from ...stores.base import FreezableStore
from .chosen_entries import ChosenEntries, Entries
from .config import SpecConfig
from .copy import LowBitPredictor
from .entry_reads import EntryReads
from .plan import SpecPlan
from .top_up import TopUp

_LEAST_ROOM = 10
"""There is room for two to the power of this many chosen entries, as far as so many are wanted."""


class SpecEntries(SpecPlan):
    """The side of `SpecLayer` that holds what was chosen."""

    config: SpecConfig
    predictor: LowBitPredictor | None
    top_up = TopUp(False)
    """Set by the cache."""

    def _clear(self) -> None:
        super()._clear()
        self.chosen: ChosenEntries | None = None
        self._entry_reads: EntryReads | None = None

    @property
    def tables_nbytes(self) -> int:
        return super().tables_nbytes + (0 if self._entry_reads is None else self._entry_reads.pinned.nbytes)

    def _held(self) -> ChosenEntries:
        history, most = self.history, 1 << max(_LEAST_ROOM, (self.held - 1).bit_length())  # there are no more to choose
        count = min(self.config.chosen, most)
        if self.chosen is None:
            own = count, history.device, self.shared.storage.account
            self.chosen = ChosenEntries(history.form, history.rows, *own)
        elif self.chosen.count < count:
            self.chosen.grow(count)
        return self.chosen

    @property
    def _reads(self) -> EntryReads:
        assert self.selecting is not None
        if self._entry_reads is None or self._entry_reads.areas is not self.selecting.areas:
            self._entry_reads = EntryReads(self.shared.storage, self.selecting.areas)
        return self._entry_reads

    def _bring(self, absent: torch.Tensor) -> list[Entries]:
        """The entries of these tokens, which are read, or were ahead."""
        return self._reads.bring(self.fetcher, self.history, absent)

    def wanted_of(self, shares: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """The tokens that have most of these shares, of which those in memory count four times."""
        assert self.predictor is not None
        return self.predictor.most(shares, visible, self.config.chosen, self._held().entries.tokens)

    def _fetch(self, wanted: torch.Tensor, *, at_once: bool) -> None:
        """These tokens are for the next step: they are begun to be read; `at_once`: those that are held may go."""
        counters, counts = self.shared.storage.counters, None
        if at_once:
            counts = self._reads.pinned.exchange(self.history, self._held(), wanted)
        if counts is None:
            self._reads.ahead(self.fetcher, self.history, self._want(wanted))
        else:
            selected, came = counts.unbind()
            counters.later(units_selected=selected, units_resident=selected - came, units_ready=selected)

    def _want(self, wanted: torch.Tensor) -> torch.Tensor:
        """These tokens are to be collected: those of them that are absent."""
        absent = self._held().want(wanted)
        there = (wanted >= 0).sum()
        resident = there - (absent >= 0).sum()
        self.shared.storage.counters.later(units_selected=there, units_resident=resident, units_ready=resident)
        return absent

    def collect(self) -> None:
        """Let what was chosen be in `chosen`. Raises as a gather; it is to be collected then."""
        chosen = self.chosen
        if chosen is not None and chosen.absent is not None:
            chosen.take(self._bring(chosen.absent))

    def collect_soon(self) -> None:
        """As `collect`, before attention asks; what fails is left to the step that wants it."""
        absent = None if self.chosen is None else self.chosen.absent
        with contextlib.suppress(OSError, BudgetError):
            self.collect()
            if absent is not None and not self.history.store.in_memory:
                self.shared.storage.counters.later(units_ready=(absent >= 0).sum())

    # --- changes -----------------------------------------------------------------------------------------------

    def drop_chosen(self) -> None:
        """What was chosen is of no more use: it is given back."""
        if self.chosen is not None:
            self.chosen.close()
            self.chosen = None

    def truncated(self, units: int) -> None:
        self._settle()
        super().truncated(units)
        tokens = units * self.history.form.group_size
        if self.chosen is not None:
            self.chosen.truncate(tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        self._settle()
        super().select_rows(rows)
        if self.chosen is not None:
            self.chosen.select_rows(rows)

    def dropped(self, records: np.ndarray) -> None:
        self._settle()
        super().dropped(records)

    def freeze(self) -> Sequence[FreezableStore]:
        self._settle()
        return super().freeze()

    def _settle(self) -> None:
        """No record is read behind the back of the current stream; where records lie is looked up anew."""
        if self.chosen is not None:
            self.chosen.settle()
        if self._entry_reads is not None:
            self._entry_reads.pinned.forget()

    def close(self) -> None:
        self._settle()
        self.drop_chosen()
        super().close()
