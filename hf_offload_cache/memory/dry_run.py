"""A plan of a layer: its own constructors, on an account that only counts."""

from __future__ import annotations

import math
from typing import Any

import torch

from .account import MemoryAccount
from .plan import LayerPlan, Planned


class DryRun(MemoryAccount):
    """An account that only counts. A layer's constructors run on it: their tensors take no memory.

    Each part's `rehearse` makes the part as large as it may become, and declares here what it holds for a while.
    `plan` sums that up. So one line says what is allocated and what is planned.
    """

    def __init__(self) -> None:
        super().__init__()
        self._prefill: dict[str, int] = {}
        self._decode: dict[str, int] = {}
        self._lasting: dict[str, int] | None = None

    def empty(
        self, owner: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """As `MemoryAccount.empty`, on the meta device."""
        self.by_owner[owner] += math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")

    def keeps(self, owner: str, nbytes: int) -> None:
        """`owner` holds `nbytes` more, which `empty` does not make."""
        self.by_owner[owner] += nbytes

    def stores(self, store: Any, records: int) -> None:
        """`store`, a dry run's, holds `records` more, taken at once."""
        store.records += records

    def passes(self, owner: str, *, prefill: int = 0, decode: int = 0, together: bool = False) -> None:
        """`owner` holds at most so much for a while, in a prefill and in a step of decoding; layers do so in turns.

        Several declarations count as the largest, or, if they are held `together`, as their sum.
        """
        for held, nbytes in ((self._prefill, prefill), (self._decode, decode)):
            before = held.get(owner, 0)
            held[owner] = before + nbytes if together else max(before, nbytes)

    def moves(self, nbytes: int) -> None:
        """A change of rows holds `nbytes` twice, one part after the other."""
        self.passes("moving rows", prefill=nbytes, decode=nbytes)

    def passing(self, owner: str) -> tuple[int, int]:
        """What `owner` has declared for a prefill and for a step of decoding."""
        return self._prefill.get(owner, 0), self._decode.get(owner, 0)

    def decoding(self) -> None:
        """From here on parts are made that exist only while steps select: a prefill gives them back first."""
        self._lasting = dict(self.by_owner)

    def plan(self, store_bytes: int) -> LayerPlan:
        """All that was made and declared; `store_bytes` is the size of the records."""
        lasting = self.by_owner if self._lasting is None else self._lasting
        return LayerPlan(Planned(lasting, self.by_owner), Planned(self._prefill, self._decode), store_bytes)
