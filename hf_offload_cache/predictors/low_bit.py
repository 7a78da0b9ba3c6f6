"""Tokens judged by a copy of their keys in a few bits (SpeCache, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import not_whole
from ..history.base import Sealed
from ..memory.account import MemoryAccount
from ..memory.plan import LayerPlan, Planned
from ..kernels.low_bit import BLOCK
from .low_bit_copy import LowBitCopy, fitting_bytes
from .low_bit_form import LowBitForm

LOYALTY = 4
"""What is held counts so many times as much when the next is chosen: among shares that are alike it does not matter
much which tokens are as they were stored, and reads are saved."""


class LowBitPredictor:
    """Holds the copy, which attention goes over, and says what of it matters most. See `Learner`.

    Args:
        reserve: tokens a row that the copy is to have room for at once; 0: it grows.
    """

    def __init__(
        self, form: LowBitForm, rows: int, num_sinks: int, device: torch.device, account: MemoryAccount, name: str,
        reserve: int = 0,
    ) -> None:  # fmt: skip
        self.copy, self._num_sinks, self._name = LowBitCopy(form, rows, device, account, reserve), num_sinks, name

    @staticmethod
    def planned(
        form: LowBitForm, tokens: int, rows: int, heads: int, queries: int, scores: int, device_type: str = "cpu"
    ) -> LayerPlan:
        """What `rows` rows of `tokens` tokens take, `queries` of `heads` heads each in a step, and `scores` of each
        head for all tokens at a time."""
        held = form.nbytes(rows, tokens)
        moving = {"moving rows": held} if rows > 1 else {}
        many, few = (fitting_bytes(form, rows * min(tokens, count), device_type) for count in (tokens, form.group))
        scored = LowBitPredictor.scored_bytes(form, tokens, rows, heads, queries, scores)
        decode = {**moving, "fitting": few, "scores": max(0, scored - few)}  # one after the other
        return LayerPlan(Planned.always({"low-bit copy": held}), Planned({**moving, "fitting": many}, decode))

    @staticmethod
    def scored_bytes(form: LowBitForm, tokens: int, rows: int, heads: int, queries: int, scores: int) -> int:
        """While attention goes over `tokens` tokens: see `planned`; and a block of a head, unpacked, and its scores."""
        key_heads, block = form.entry.num_key_heads, min(tokens, BLOCK)
        width = max(form.entry.key_dim, form.value_group) * 4 + form.entry.key_dim * 4 // form.group
        spread = max(form.entry.key_dim, form.value_group) // 4 if form.bits == 1 else 0
        unpacked = block * (width + spread + 4 * queries * heads // key_heads)
        among = rows * key_heads * (tokens + 2)  # of each token whether it is held
        return rows * 4 * (tokens + 1) * (heads * scores + key_heads * queries) + among + unpacked

    def ready(self, units: int) -> bool:
        return self.copy.tokens == units * self.copy.form.entry.group_size

    def learn(self, sealed: Sealed, queries: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Of what it has learned all but these."""
        assert self.copy.tokens + sealed.fresh == sealed.tokens, "tokens are missing"
        self.copy.append(sealed.parts, sealed.tokens)

    def most(
        self, shares: torch.Tensor, visible: torch.Tensor | None, count: int, held: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tokens (rows, heads, m) int64 that have most of `shares` (rows, heads, tokens) of the attention, which
        are changed; at most `count`, the first ones that are `visible`, (B or 1, T) bool, among them. Those that are
        `held`, (rows, heads, n), -1: none, count `LOYALTY` times."""
        sinks, count = min(self._num_sinks, shares.shape[2]), min(count, shares.shape[2])
        if not count:
            return shares.new_zeros(*shares.shape[:2], 0, dtype=torch.int64)
        if held is not None:
            times = torch.ones_like(held, dtype=shares.dtype).masked_fill_(held >= 0, LOYALTY)  # none of them twice
            shares.scatter_reduce_(2, held.clamp(min=0), times, "prod")
        if visible is None:
            shares[:, :, :sinks] = torch.inf
        else:
            begin = visible[:, : shares.shape[2]].to(shares.device).int().argmax(1)
            first = (begin[:, None] + torch.arange(sinks, device=shares.device)).clamp(max=shares.shape[2] - 1)
            shares.scatter_(2, first[:, None].expand(len(shares), shares.shape[1], -1), torch.inf)
        found = shares.topk(count, 2, sorted=False).indices
        if visible is None:
            return found
        seen = visible[:, : shares.shape[2]].to(shares.device)  # what is hidden is none, however few there are
        of_row = torch.arange(len(shares), device=shares.device)[:, None, None] % len(seen)
        return torch.where(seen[of_row, found], found, -1)

    def truncate(self, units: int) -> None:
        self.copy.truncate(units * self.copy.form.entry.group_size)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.copy.select_rows(rows)

    def lesson(self) -> dict[str, Any] | None:
        return None

    def capture(self) -> dict[str, Any]:
        return self.copy.capture()

    def restore(self, tree: dict[str, Any]) -> None:
        tokens = tree["units"] * self.copy.form.entry.group_size
        if tokens % self.copy.form.group:
            raise not_whole(self._name, f"{tokens} tokens are no whole groups of {self.copy.form.group}")
        self.copy.restore(tree, tokens, self._name)

    @property
    def tables_nbytes(self) -> int:
        return 0

    def close(self) -> None:
        self.copy.close()
