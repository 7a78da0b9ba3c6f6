"""The kernel's side of io_uring: system calls, and queues in shared memory."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import select
import sys
import time
from typing import Any

import numpy as np

from ..atomic_file import Descriptor

_SETUP, _ENTER = 425, 426  # system calls, the same on every architecture but the ones refused below
OP_NOP, OP_READ = 0, 22
GETEVENTS, _EXT_ARG = 1, 8  # flags of `enter`
_FEATURE_EXT_ARG = 1 << 8
WRAP = 0xFFFFFFFF  # the counters in the queues are 32 bits wide and run over
_OFFSET_SQ, _OFFSET_CQ, _OFFSET_ENTRIES = 0, 0x8000000, 0x10000000
ENTRY = np.dtype(
    [("opcode", "u1"), ("flags", "u1"), ("priority", "u2"), ("fd", "i4"), ("offset", "u8"), ("address", "u8"),
     ("length", "u4"), ("how", "u4"), ("serial", "u8"), ("unused", "u8", 3)]
)  # fmt: skip
COMPLETION = np.dtype([("serial", "u8"), ("result", "i4"), ("flags", "u4")])
_HEADER_BYTES = 128  # at most, of the counters before a queue


def _fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_uint32) for name in names]


class _SubmissionOffsets(ctypes.Structure):
    _fields_ = [*_fields("head", "tail", "mask", "entries", "flags", "dropped", "array", "r1"), ("r2", ctypes.c_uint64)]


class _CompletionOffsets(ctypes.Structure):
    _fields_ = [*_fields("head", "tail", "mask", "entries", "overflow", "cqes", "flags", "r1"), ("r2", ctypes.c_uint64)]


class Parameters(ctypes.Structure):
    _fields_ = [
        *_fields("sq_entries", "cq_entries", "flags", "thread_cpu", "thread_idle", "features", "wq_fd"),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq", _SubmissionOffsets),
        ("cq", _CompletionOffsets),
    ]


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


class _EnterArgument(ctypes.Structure):
    _fields_ = [
        ("sigmask", ctypes.c_uint64), ("sigmask_size", ctypes.c_uint32), ("pad", ctypes.c_uint32),
        ("time", ctypes.c_uint64),
    ]  # fmt: skip


class Waiter:
    """Waits for completions of the ring `fd`, until a given time. One thread at a time.

    Attributes:
        timed: the kernel waits and submits in one call (5.11); else the ring's descriptor is polled.
    """

    def __init__(self, fd: int, parameters: Parameters) -> None:
        self.timed = bool(parameters.features & _FEATURE_EXT_ARG)
        self._fd = fd
        self._time = _TimeSpec()
        self._held = _EnterArgument(time=ctypes.addressof(self._time))
        self._argument = ctypes.addressof(self._held), ctypes.sizeof(self._held)

    def wait(self, submit: int, wanted: int, expires: float | None) -> int:
        """Call `enter`, which waits for `wanted` completions, or ends earlier: at `expires` (`time.monotonic()`; None:
        no limit), or by a signal. Without `timed` and with a limit, waits until there is one unseen completion."""
        if expires is None:
            return enter(self._fd, submit, wanted, GETEVENTS)
        seconds = expires - time.monotonic()
        if seconds < 0:
            seconds = 0.0
        if self.timed:
            self._time.seconds, self._time.nanoseconds = int(seconds), int(seconds % 1 * 1e9)
            done = enter(self._fd, submit, wanted, GETEVENTS | _EXT_ARG, *self._argument)
            return 0 if done < 0 and ctypes.get_errno() == errno.ETIME else done
        done = enter(self._fd, submit, 0, 0) if submit else 0
        if done >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            poll.poll(seconds * 1e3)
        return done


class Queues:
    """The queues in memory shared with the kernel (`ring_bytes`). Unmapped with the last reference."""

    def __init__(self, fd: int, parameters: Parameters) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        sq, cq = parameters.sq, parameters.cq
        submission = mmap.mmap(fd, sq.array + parameters.sq_entries * 4, flags, offset=_OFFSET_SQ)
        completion = mmap.mmap(
            fd, cq.cqes + parameters.cq_entries * COMPLETION.itemsize, flags, offset=_OFFSET_CQ
        )
        entries = mmap.mmap(fd, parameters.sq_entries * ENTRY.itemsize, flags, offset=_OFFSET_ENTRIES)
        self.sq = memoryview(submission)[: len(submission) // 4 * 4].cast("I")
        self.cq = memoryview(completion)[: len(completion) // 4 * 4].cast("I")
        self.sq_head, self.sq_tail, self.sq_mask = sq.head // 4, sq.tail // 4, self.sq[sq.mask // 4]
        self.cq_head, self.cq_tail, self.cq_mask = cq.head // 4, cq.tail // 4, self.cq[cq.mask // 4]
        self.entries = np.frombuffer(entries, ENTRY)
        self.completions = np.frombuffer(completion, COMPLETION, parameters.cq_entries, cq.cqes)
        order = np.frombuffer(submission, np.uint32, parameters.sq_entries, sq.array)
        order[:] = np.arange(parameters.sq_entries)


def ring_bytes(depth: int) -> int:
    """Upper bound on the memory that a ring of `depth` shares with the kernel: three queues, each in its own pages.

    Newer kernels put two of them into the same pages. The kernel rounds `depth` up to a power of two, and makes the
    completion queue twice as long.
    """
    entries = 1 << max(depth - 1, 0).bit_length()
    maps = (entries * ENTRY.itemsize, entries * 4 + _HEADER_BYTES, 2 * entries * COMPLETION.itemsize + _HEADER_BYTES)
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in maps)


def open_ring(depth: int) -> tuple[Descriptor, Parameters]:
    """Open a new ring. Raises `OSError` with the reason."""
    machine = platform.machine()
    if sys.platform != "linux" or machine.startswith(("alpha", "mips")):
        raise OSError(errno.ENOSYS, f"no io_uring on {sys.platform} {machine}")
    parameters = Parameters()
    descriptor = setup(depth, parameters)
    if descriptor.fd < 0:
        error = _refusal("io_uring")
        descriptor.release()
        raise error
    if enter(descriptor.fd, 0, 0, 0) < 0:  # a sandbox may allow the one call and not the other
        error = _refusal("io_uring_enter")
        descriptor.close()
        raise error
    return descriptor, parameters


def _refusal(call: str) -> OSError:
    """The error to raise for the system call that has just failed."""
    number = ctypes.get_errno()
    reasons = {
        errno.EPERM: "forbidden here, by a container's seccomp profile or by sysctl kernel.io_uring_disabled",
        errno.EACCES: "forbidden here, by a sandbox",
        errno.ENOSYS: "this kernel has none, or a sandbox hides it",
        errno.ENOMEM: "no memory for a ring; see `ulimit -l`",
        errno.EMFILE: "this process has no descriptor left: raise the limit with `ulimit -n`",
    }
    return OSError(number, f"{call} refused: {reasons.get(number, os.strerror(number))}")


def setup(entries: int, parameters: Parameters) -> Descriptor:
    """Call io_uring_setup: a ring, or -1 with `ctypes.get_errno`."""
    return Descriptor(_system_call(), _SETUP, entries, ctypes.addressof(parameters), 0, 0, 0, 0)


def enter(fd: int, submit: int, wanted: int, flags: int, argument: int = 0, argument_bytes: int = 0) -> int:
    """io_uring_enter: the number submitted, or -1 with `ctypes.get_errno`. Other Python threads run meanwhile."""
    return _system_call()(_ENTER, fd, submit, wanted, flags, argument, argument_bytes)


@functools.cache
def _system_call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes, call.restype = [ctypes.c_long] * 7, ctypes.c_long
    return call
