"""What a test must not leave behind in its process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def no_threads_and_descriptors() -> Iterator[None]:
    """As many as before at the end; but for a moment threads of what has ended or was given up."""
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    for _ in range(100):
        if threading.active_count() <= threads:
            break
        time.sleep(0.05)
    assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= descriptors
