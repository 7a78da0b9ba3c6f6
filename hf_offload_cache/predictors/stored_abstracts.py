"""The adaptive tree's predictor with its abstracts on the disk (LeoAM, section 4.3)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from ..config import SelectiveConfig
from ..fetch.choice import Choice, Extents
from ..history.abstract_pages import AbstractPages
from ..history.base import Sealed, in_units
from ..history.record_format import RecordFormat
from ..memory.account import MemoryAccount
from ..memory.plan import LayerPlan, Planned
from .abstract_tree import AbstractTreePredictor
from .base import Decision, Query


class StoredAbstractsPredictor(AbstractTreePredictor):
    """An `AbstractTreePredictor` that puts its abstracts into a history's `pages`, which the history moves, keeps in
    contexts and closes, and asks to look at them for each query. Nothing of them is in memory but the page that is not
    full."""

    def __init__(
        self, form: RecordFormat, rows: int, config: SelectiveConfig, account: MemoryAccount, pages: AbstractPages
    ) -> None:
        super().__init__(form, rows, config, account)
        self._pages = pages

    @classmethod
    def plan(cls, form: RecordFormat, config: SelectiveConfig, chunks: int, rows: int, heads: int) -> LayerPlan:
        whole = super().plan(form, config, chunks, rows, heads)
        prefill, decode = (dict(part) for part in (whole.shared.prefill, whole.shared.decode))
        for part in (prefill, decode):
            part.pop("moving rows", None)
        decode["judging"] = max(decode.get("judging", 0), _looked_bytes(form, rows, chunks))
        return LayerPlan(shared=Planned(prefill, decode))

    def ready(self, units: int) -> bool:
        return self._pages.units == units

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        parts, group = iter(sealed.keys), self.form.group_size
        if self._pages.units + sealed.fresh // group != sealed.units:
            parts = sealed.stored()
            self._pages.clear()
        for keys in in_units(parts, group):
            self._pages.append(self.summarise(keys).flatten(2))
        self.units = self._pages.units

    def select(self, query: Query, budget: int, guess: bool) -> Decision:
        return self._read(query, budget, guess)

    def _read(self, query: Query, budget: int, guess: bool) -> Generator[Extents | Choice, torch.Tensor, Choice]:
        pages, form = self._pages, self.form
        self.units = pages.units
        with self._account.holding("judging", _looked_bytes(form, self.rows, self.units)):
            abstracts = pages.joined((yield pages.extents()))
            abstracts = abstracts.unflatten(2, (2, form.num_key_heads, form.key_dim))
            decision = self.judge(query, budget, guess, abstracts)
            del abstracts
        return decision if isinstance(decision, Choice) else (yield from decision)

    # Rows, units and contexts are the history's.

    def truncate(self, units: int) -> None:
        self.units = self._pages.units

    def select_rows(self, rows: torch.Tensor) -> None:
        self.rows = len(rows)

    def capture(self) -> dict[str, Any]:
        return {"summaries": None}

    def restore(self, tree: dict[str, Any]) -> None:
        self.units = self._pages.units

    def close(self) -> None:
        self.units = 0


def _looked_bytes(form: RecordFormat, rows: int, chunks: int) -> int:
    """All abstracts, as they are looked at and put together."""
    return 2 * rows * (chunks * 2 * form.key_width + form.payload_width) * form.dtype.itemsize
