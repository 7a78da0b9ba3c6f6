"""A text of many chunks, and forwards of one chunk that leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from harness import prompt
from long_llama import long_model

from hf_offload_cache.streaming import loader

CONTEXT, SIZE, MORE = 640, 64, 40


def ids() -> torch.Tensor:
    return prompt(long_model(), 1, CONTEXT + MORE)


@contextlib.contextmanager
def short_forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Columns of one chunk; no thread and no descriptor is left, but for a moment what was given up."""
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    for _ in range(100):
        if threading.active_count() <= threads:
            break
        time.sleep(0.05)
    assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= descriptors
