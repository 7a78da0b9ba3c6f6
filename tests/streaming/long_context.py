"""A text of many chunks, what is published of it, and forwards of one chunk that leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import prompt
from long_llama import long_model
from nothing_left import no_threads_and_descriptors
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, StreamReport, publish_context, stream_context
from hf_offload_cache.streaming import NAME, StreamManifest, loader

CONTEXT, SIZE, MORE = 640, 64, 40
TOKENS = 128
"""Of a short text."""


def ids() -> torch.Tensor:
    return prompt(long_model(), 1, CONTEXT + MORE)


def short(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (1, TOKENS + 1), generator=torch.Generator().manual_seed(seed))


def published(
    url: Any, folder: Path, cls: Any = DiskSwapCache, tokens: torch.Tensor | None = None, model: Any = None,
    **options: Any,
) -> StreamManifest:  # fmt: skip
    """The manifest of a context that is published at `url` then: of `CONTEXT` tokens, prefilled chunk by chunk, or of
    `tokens`, prefilled whole."""
    with cls(model or long_model(), path=folder) as cache, torch.no_grad():
        for part in ids()[:, :CONTEXT].split(SIZE, 1) if tokens is None else (tokens,):
            (model or long_model())(part, past_key_values=cache)
        return publish_context(cache, url, **{"level": "lossless", "chunk_tokens": SIZE, **options})


def publish_short(url: Any, folder: Path, seed: int = 0, **options: Any) -> StreamManifest:
    return published(url, folder, tokens=short(seed)[:, :TOKENS], **options)


def streamed_short(url: Any, folder: Path, seed: int = 0, **options: Any) -> StreamReport:
    with stream_context(url, long_model(), short(seed), path=folder, silence=5, **options) as cache:
        assert cache.get_seq_length() == TOKENS and cache.stream_report is not None
        return cache.stream_report


def answers(cache: Any, model: Any = None, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of the last tokens of the text, of which the cache has the first ones."""
    tokens = ids() if tokens is None else tokens
    with torch.no_grad():
        found = (model or long_model())(tokens[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -MORE:]
    return found  # type: ignore[no-any-return]


def is_right(cache: Any, model: Any = None, tokens: torch.Tensor | None = None) -> None:
    """It answers as a prefill does."""
    plain = DynamicCache(config=(model or long_model()).config)
    found, expected = (answers(held, model, tokens) for held in (cache, plain))
    last = min(found.shape[1], expected.shape[1])
    torch.testing.assert_close(found[:, -last:], expected[:, -last:], rtol=1e-3, atol=1e-3)


def manifest_at(place: Path) -> StreamManifest:
    return StreamManifest.parse((place / NAME).read_bytes(), "")


def change_manifest(place: Path, **update: Any) -> None:
    (place / NAME).write_bytes(manifest_at(place).model_copy(update=update).dumped())


@contextlib.contextmanager
def short_forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Columns of one chunk; no thread and no descriptor is left, but for a moment what was given up."""
    monkeypatch.setattr(loader, "LEAST_TOKENS", SIZE)
    with no_threads_and_descriptors():
        yield
