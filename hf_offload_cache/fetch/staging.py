"""Memory that reads go to, and its way to the device."""

from __future__ import annotations

import torch

from ..memory.account import MemoryAccount
from ..stores.base import aligned_empty


class Staging:
    """Rows of host memory that reads go to, and on CUDA the same rows in device memory.

    `host` and `device` are uint8 (count, record_bytes); on a CPU they are one tensor. The bytes are held in `account`
    under `owner` until `release`. For the thread that runs the model.
    """

    def __init__(self, count: int, record_bytes: int, device: torch.device, account: MemoryAccount, owner: str) -> None:
        self._cuda = device.type == "cuda"
        self._account = account
        self._owner = owner
        self._held_bytes = count * record_bytes * (2 if self._cuda else 1)
        account.hold(owner, self._held_bytes)
        self.host = aligned_empty(count, record_bytes, pinned=self._cuda)
        self.device = self.host
        if self._cuda:
            with torch.inference_mode(False):
                self.device = torch.empty_like(self.host, device=device)
            self._stream = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event()

    def upload(self, start: int, stop: int) -> None:
        """Bring rows [start, stop) to `device`; what the current stream runs from now on sees them. Does not block.

        The copy waits for what the current stream was given before, which may still read the old rows.
        """
        if not self._cuda or start == stop:
            return
        current = torch.cuda.current_stream(self.device.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self.device[start:stop].copy_(self.host[start:stop], non_blocking=True)
            self._copied.record(self._stream)
        current.wait_event(self._copied)

    def wait_uploaded(self) -> None:
        """Block until every `upload` has read its `host` rows; call before writing to `host` again."""
        if self._cuda:
            self._copied.synchronize()

    def release(self) -> None:
        """Give both buffers back, after the copies under way. Idempotent; no call may follow but `release`."""
        self.wait_uploaded()
        self.host = self.device = torch.empty(0, dtype=torch.uint8)
        self._account.release(self._owner, self._held_bytes)
        self._held_bytes = 0
