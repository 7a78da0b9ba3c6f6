"""Memory that reads go to, and its way to the device."""

from __future__ import annotations

from typing import Any

import torch

from ..memory.account import MemoryAccount
from ..stores.base import aligned_empty
from .byte_rows import ByteRows


class Staging:
    """Bytes of host memory that reads go to, and on CUDA as many in device memory; looked at as rows of any size.

    The bytes are held in `account` under `owner` until `release`. For the thread that runs the model. Raises
    `BudgetError`, with nothing held.
    """

    def __init__(self, nbytes: int, device: torch.device, account: MemoryAccount, owner: str) -> None:
        self.nbytes = nbytes
        self._cuda = device.type == "cuda"
        self._where = device
        self._account = account
        self._owner = owner
        self._held_bytes = nbytes * self.sides(device.type)
        account.hold(owner, self._held_bytes)
        self._host = aligned_empty(1, nbytes, pinned=self._cuda)[0]
        self._device = self._host
        self._payloads: dict[tuple[int, int, torch.dtype], ByteRows] = {}
        if self._cuda:
            with torch.inference_mode(False):
                self._device = torch.empty_like(self._host, device=device)
            self._stream = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event()

    @staticmethod
    def sides(device_type: str) -> int:
        """How many times what is read is held: in host memory, and on CUDA in the device's too."""
        return 2 if device_type == "cuda" else 1

    def fits(self, nbytes: int, device: torch.device) -> bool:
        """There is room for `nbytes` on their way to `device`."""
        return self.nbytes >= nbytes and self._where == device

    def host_rows(self, count: int, record_bytes: int, first_byte: int = 0) -> torch.Tensor:
        """`count` records from `first_byte` on, uint8 (count, record_bytes), to read into; the same memory at each
        call.

        Blocks until every `upload` before has read it.
        """
        if self._cuda:
            self.wait_uploaded()
        return self._host[first_byte : first_byte + count * record_bytes].view(count, record_bytes)

    def upload(self, count: int, record_bytes: int, first_byte: int = 0) -> torch.Tensor:
        """Bring `count` records to the device: uint8 (count, record_bytes) there, on a CPU the same memory.

        Does not block; what the current stream runs from now on sees them. The copy waits for what the current stream
        was given before, which may still read the old ones.
        """
        part = slice(first_byte, first_byte + count * record_bytes)
        if self._cuda and count:
            current = torch.cuda.current_stream(self._where)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._device[part].copy_(self._host[part], non_blocking=True)
                self._copied.record(self._stream)
            current.wait_event(self._copied)
        return self._device[part].view(count, record_bytes)

    def payloads(self, count: int, form: Any) -> ByteRows:
        """`upload`, looked at as payloads: row i is that of the record i, which is below `count`."""
        if self._cuda:
            self.upload(count, form.record_bytes)
        shape = form.record_bytes, form.payload_width, form.dtype
        if shape not in self._payloads:
            size = self.nbytes // form.record_bytes
            with torch.inference_mode(False):
                records = self._device[: size * form.record_bytes].view(size, form.record_bytes)
                self._payloads[shape] = ByteRows(form.payload(records))
        return self._payloads[shape]

    def wait_uploaded(self) -> None:
        """Block until every `upload` has read its host rows."""
        if self._cuda:
            self._copied.synchronize()

    def release(self) -> None:
        """Give both buffers back, after the copies under way. Idempotent; no call may follow but `release`."""
        self.wait_uploaded()
        self._payloads = {}
        self._host = self._device = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        self._account.release(self._owner, self._held_bytes)
        self._held_bytes = 0
