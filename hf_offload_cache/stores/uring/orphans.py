"""What a ring leaves when it is closed or forgotten: reads in flight, and the memory that the kernel writes to."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..deadline import Patience, passed
from ..process import Process
from .queues import WRAP, Queues, Waiter

if TYPE_CHECKING:
    from .ring import Batch


class Remains:
    """Its descriptor and queues, and the batches that hold the memory that is read into."""

    def __init__(self, fd: int, memory: Queues, waiter: Waiter, kept: list[Batch]) -> None:
        self.fd = fd
        self._memory = memory
        self._waiter = waiter
        self._kept = kept

    def wait(self, deadline: float | None) -> bool:
        """Block until nothing is in flight, or until `deadline`; whether nothing is."""
        memory = self._memory
        sq, cq = memory.sq, memory.cq
        while True:
            try:
                tail = cq[memory.cq_tail]
                cq[memory.cq_head] = tail  # nobody asks for results any more
                in_flight = (sq[memory.sq_head] - tail) & WRAP  # submitted and not completed
                if in_flight == 0:
                    return True
                if passed(deadline):
                    return False
                if self._waiter.wait(0, in_flight, deadline) < 0 and ctypes.get_errno() != errno.EINTR:
                    time.sleep(0.001)
            except KeyboardInterrupt:  # the kernel is still writing to memory that would be given back
                continue

    def wait_and_close(self) -> None:
        self.wait(None)
        self.close()

    def close(self) -> None:
        self._kept.clear()
        os.close(self.fd)


def close_when_done(remains: Remains, patience: Patience, process: Process, hurry: Callable[[], None]) -> None:
    """Give a ring back once nothing is in flight; also when it is forgotten, and at the end of the interpreter.

    What does not end in time is left to a daemon thread, or where there can be none stays as it is until the process
    ends. `hurry` is the exit handler of the ring.
    """
    atexit.unregister(hurry)
    if not process.is_here or remains.wait(patience.deadline()):
        remains.close()
        return
    keeper = threading.Thread(target=remains.wait_and_close, name="hf_offload_cache-ring", daemon=True)
    try:
        if not patience.at_exit:  # no thread outlives the interpreter
            keeper.start()
            return
    except RuntimeError:  # the system gives no more threads
        pass
    # The kernel may write to the memory as long as the process lives: one reference more keeps it that long.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(remains))
