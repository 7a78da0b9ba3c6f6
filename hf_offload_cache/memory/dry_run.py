"""A layer's plan: its own constructors, run on an account that only counts."""

from __future__ import annotations

import math
from typing import Any

import torch

from .account import MemoryAccount, host_side, staged
from .plan import LayerPlan, Planned


class DryRun(MemoryAccount):
    """An account that only counts: a layer's constructors run on it, and their tensors take no memory.

    Each part's `rehearse` makes the part as large as it can become, and declares its temporary memory here. `plan` adds
    both up, so the line that allocates memory also plans it.

    `device_type`: of the device that attention runs on. `alone`: steps run on it without the host.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__(host=host_side(device_type, False))
        self.device_type, self.alone = device_type, False
        self._prefill: dict[str, int] = {}
        self._decode: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._lasting: dict[str, int] | None = None

    def empty(
        self, owner: str, *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", pinned: bool = False
    ) -> torch.Tensor:
        """As `MemoryAccount.empty`, on the meta device."""
        self.by_owner[owner] += math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")

    @property
    def on_device(self) -> int:
        """Bytes of all owners but those of the host side."""
        return sum([nbytes for owner, nbytes in self.by_owner.items() if owner not in self.host])

    def keeps(self, owner: str, nbytes: int) -> None:
        """Add `nbytes` to `owner` that `empty` does not allocate."""
        self.by_owner[owner] += nbytes

    def stores(self, store: Any, records: int) -> None:
        """Add `records`, allocated at once, to `store`, a dry run's."""
        store.records += records

    def passes(self, owner: str, *, prefill: int = 0, decode: int = 0, together: bool = False) -> None:
        """Declare `owner`'s temporary memory: its maximum in a prefill and in a decoding step. Layers use it in turns.

        Several declarations count as the largest; those in use `together` count as their sum.
        """
        for held, nbytes in ((self._prefill, prefill), (self._decode, decode)):
            before = held.get(owner, 0)
            held[owner] = before + nbytes if together else max(before, nbytes)

    def stages(self, owner: str, *, prefill: int = 0, decode: int = 0, together: bool = False) -> None:
        """As `passes`, for memory that reads fill: see `staged`."""
        for one in staged(owner, self.device_type):
            self.passes(one, prefill=prefill, decode=decode, together=together)

    def moves(self, nbytes: int) -> None:
        """Declare a change of rows, which needs `nbytes` twice, one part after the other."""
        self.passes("moving rows", prefill=nbytes, decode=nbytes)

    def passing(self, owner: str) -> tuple[int, int]:
        """Bytes that `owner` has declared for a prefill and for a decoding step."""
        return self._prefill.get(owner, 0), self._decode.get(owner, 0)

    def decoding(self) -> None:
        """Begin with the parts that exist only while steps select. A prefill frees them first."""
        self._lasting = dict(self.by_owner)

    def waits(self, owner: str, nbytes: int) -> None:
        """Add `nbytes` to `owner` that each layer has only until steps select."""
        self._waiting[owner] = self._waiting.get(owner, 0) + nbytes

    def plan(self, store_bytes: int) -> LayerPlan:
        """The sum of all that was made and declared; `store_bytes` is the size of the records."""
        lasting = dict(self.by_owner if self._lasting is None else self._lasting)
        for owner, nbytes in self._waiting.items():
            lasting[owner] = lasting.get(owner, 0) + nbytes
        return LayerPlan(Planned(lasting, self.by_owner), Planned(self._prefill, self._decode), store_bytes, self.alone)
