"""A text of many chunks, and forwards of one chunk that leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import prompt
from long_llama import long_model
from nothing_left import no_threads_and_descriptors

from hf_offload_cache import DiskSwapCache, publish_context
from hf_offload_cache.streaming import loader

CONTEXT, SIZE, MORE = 640, 64, 40


def ids() -> torch.Tensor:
    return prompt(long_model(), 1, CONTEXT + MORE)


def published_in(folder: Path) -> Path:
    """Where a context of `CONTEXT` tokens lies then, in chunks of `SIZE`, each prefilled by itself."""
    with DiskSwapCache(long_model(), path=folder) as cache:
        with torch.no_grad():
            for part in ids()[:, :CONTEXT].split(SIZE, 1):
                long_model()(part, past_key_values=cache)
        publish_context(cache, str(folder / "published"), level="lossless", chunk_tokens=SIZE)
    return folder / "published"


@contextlib.contextmanager
def short_forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Columns of one chunk; no thread and no descriptor is left, but for a moment what was given up."""
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    with no_threads_and_descriptors():
        yield
