"""Allocation of what outlives a step."""

from __future__ import annotations

import torch

from ..memory.account import MemoryAccount


def lasting_empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised tensor that may be written to in any mode.

    One made under `torch.inference_mode` may not be written to after it.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


class Workspace:
    """Memory for what one call computes and the next may overwrite, so that a step allocates nothing. One thread's.

    Its bytes are held in `account` under `owner` until `release`. It grows to the largest thing asked for.
    """

    def __init__(self, account: MemoryAccount, owner: str) -> None:
        self._account = account
        self._owner = owner
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._asked: object = None
        self._taken = self._bytes

    def take(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor, valid until the next `take`."""
        asked = shape, dtype, device
        if asked == self._asked:  # layer after layer takes the same
            return self._taken
        count = 1
        for size in shape:
            count *= size
        needed = count * dtype.itemsize
        if self._bytes.numel() < needed or self._bytes.device != device:
            self._account.hold(self._owner, needed - self._bytes.numel())
            self._drop()  # the old memory goes before the new one comes
            self._bytes = lasting_empty(needed, dtype=torch.uint8, device=device)
        self._taken = self._bytes[:needed].view(dtype).view(shape)
        self._asked = asked
        return self._taken

    def release(self) -> None:
        """Give the memory back; `take` may follow."""
        self._account.release(self._owner, self._bytes.numel())
        self._drop()

    def _drop(self) -> None:
        self._bytes = self._taken = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._asked = None
