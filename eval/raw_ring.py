"""The raw reference for reads by io_uring: as little as it takes, and nothing of the library."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from types import TracebackType

import numpy as np

_ENTRY = np.dtype(
    [("opcode", "u1"), ("skip", "V3"), ("fd", "i4"), ("offset", "u8"), ("address", "u8"), ("length", "u4"),
     ("skip2", "V4"), ("number", "u8"), ("skip3", "V24")]
)  # fmt: skip
_COMPLETION = np.dtype([("number", "u8"), ("result", "i4"), ("flags", "u4")])


class RawRing:
    """One thread's ring, for batches of equal reads; nothing in flight between calls. Needs x86 ordering of memory.

    Raises `OSError` when the kernel gives none.
    """

    def __init__(self, entries: int = 1024) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.argtypes, self._call.restype = [ctypes.c_long] * 7, ctypes.c_long
        parameters = ctypes.create_string_buffer(120)
        self._fd = self._call(425, entries, ctypes.addressof(parameters), 0, 0, 0, 0)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "io_uring_setup failed")
        words = struct.unpack("30I", parameters.raw)
        self._entries, completions, sq, cq = words[0], words[1], words[10:20], words[20:30]
        first = mmap.mmap(self._fd, sq[6] + self._entries * 4, mmap.MAP_SHARED, offset=0)
        second = mmap.mmap(self._fd, cq[5] + completions * 16, mmap.MAP_SHARED, offset=0x8000000)
        third = mmap.mmap(self._fd, self._entries * 64, mmap.MAP_SHARED, offset=0x10000000)
        self._sq, self._cq = (memoryview(part)[: len(part) // 4 * 4].cast("I") for part in (first, second))
        self._sq_tail, self._cq_head, self._cq_tail = sq[1] // 4, cq[0] // 4, cq[1] // 4
        np.frombuffer(first, np.uint32, self._entries, sq[6])[:] = np.arange(self._entries)
        self._queue = np.frombuffer(third, _ENTRY)
        self._done = np.frombuffer(second, _COMPLETION, completions, cq[5])

    def read(self, file: int, offsets: np.ndarray, address: int, length: int, depth: int = 1024) -> None:
        """Read `length` bytes at each of `offsets` to `address` and on, at most `depth` at once, and wait for all."""
        count, put, taken = len(offsets), 0, 0
        entries = np.zeros(count, _ENTRY)
        entries["opcode"], entries["fd"], entries["length"] = 22, file, length
        entries["offset"] = offsets
        entries["address"] = address + np.arange(count) * length
        depth = min(depth, self._entries)
        while taken < count:
            wave = min(count - put, depth - (put - taken))
            if wave:
                tail = self._sq[self._sq_tail]
                self._queue[(tail + np.arange(wave)) % self._entries] = entries[put : put + wave]
                self._sq[self._sq_tail] = (tail + wave) & 0xFFFFFFFF
                put += wave
            wanted = put - taken if put == count else min(depth // 4, put - taken)
            if self._call(426, self._fd, wave, wanted, 1, 0, 0) < 0:
                raise OSError(ctypes.get_errno(), "io_uring_enter failed")
            head, tail = self._cq[self._cq_head], self._cq[self._cq_tail]
            found = (tail - head) & 0xFFFFFFFF
            if not (self._done["result"][(head + np.arange(found)) % len(self._done)] == length).all():
                raise OSError("a read failed or was short")
            self._cq[self._cq_head] = tail
            taken += found

    def __enter__(self) -> RawRing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)
