"""Reads that are in flight when their ring is closed or forgotten: the kernel may still write to their memory."""

from __future__ import annotations

import atexit
import ctypes
import errno
import threading
import time
from collections.abc import Callable

from ..deadline import Deadline, has_passed
from ..descriptor import Descriptor
from ..process import Process
from .batch import Batch
from .queues import WRAP, Queues, Waiter


class OrphanedReads:
    """What they need until they end: the ring's descriptor and queues, and the batches, which hold the memory."""

    def __init__(self, descriptor: Descriptor, memory: Queues, waiter: Waiter, batches: list[Batch]) -> None:
        self.descriptor = descriptor
        self.interrupt: KeyboardInterrupt | None = None
        """One that came while the memory was waited for, to be raised when that is given back."""
        self._memory = memory
        self._waiter = waiter
        self._batches = batches

    def wait(self, expires: float | None) -> bool:
        """Block until nothing is in flight, or until `expires`; whether nothing is."""
        memory = self._memory
        sq, cq = memory.sq, memory.cq
        while True:
            try:
                tail = cq[memory.cq_tail]
                cq[memory.cq_head] = tail  # nobody asks for results any more
                in_flight = (sq[memory.sq_head] - tail) & WRAP  # submitted and not completed
                if in_flight == 0:
                    return True
                if has_passed(expires):
                    return False
                if self._waiter.wait(0, in_flight, expires) < 0 and ctypes.get_errno() != errno.EINTR:
                    time.sleep(0.001)
            except KeyboardInterrupt as error:  # the kernel is still writing to memory that would be given back
                self.interrupt = error
                continue

    def wait_and_close(self) -> None:
        """Block until nothing is in flight, however long that takes, and give all of it back."""
        self.wait(None)
        self.close()

    def close(self) -> None:
        """Give the descriptor and the batches back. Nothing may be in flight."""
        self._batches.clear()
        self.descriptor.close()


def close_when_done(
    orphans: OrphanedReads, deadline: Deadline, process: Process, exit_handler: Callable[[], None]
) -> KeyboardInterrupt | None:
    """Close a ring once nothing is in flight; also when it is deleted, and at the end of the interpreter.

    Reads that do not end in time are left to a daemon thread; if none can be started, the ring stays as it is until the
    process ends. `exit_handler` is the ring's own, which is no longer needed. Returns an interrupt that was raised
    meanwhile, for a caller that can raise it: a garbage collection cannot.
    """
    atexit.unregister(exit_handler)
    if not process.is_here or orphans.wait(deadline.expires()):
        orphans.close()
        return orphans.interrupt
    keeper = threading.Thread(target=orphans.wait_and_close, name="hf_offload_cache-ring", daemon=True)
    try:
        if not deadline.at_exit:  # no thread outlives the interpreter
            keeper.start()
            return orphans.interrupt
    except RuntimeError:  # the system gives no more threads
        pass
    # The kernel may write to the memory as long as the process lives: one reference more keeps it that long.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(orphans))
    return orphans.interrupt
