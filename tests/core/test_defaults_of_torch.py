"""What a user has set of torch: the type and the device of what is made without being told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import prompt
from long_llama import LENGTH, long_model, some

from hf_offload_cache.registry import CACHES, cache_class


@contextlib.contextmanager
def set_by_a_user(what: str) -> Iterator[None]:
    """`torch.set_default_dtype`, or `torch.set_default_device`: what is made on "meta" by mistake holds nothing."""
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    else:
        torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def lived(cls: Any, engine: str, place: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of a prompt, steps, a fork, a context, and changes."""
    place.mkdir()
    model = long_model()
    found: list[torch.Tensor] = []

    def call(cache: Any, tokens: torch.Tensor) -> None:
        found.append(model(tokens, past_key_values=cache, logits_to_keep=1).logits)

    with cls(model, path=place, **{**some(cls), "engine": engine}) as cache, torch.no_grad():
        for part in (*ids.split(500, 1), *ids[:, :3].split(1, 1)):
            call(cache, part)
        cache.save(place / "context")
        with cache.fork() as twin, cls.open(place / "context", model) as opened:
            call(twin, ids[:, :1])
            call(opened, ids[:, :1])
        cache.crop(-50)
        cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices([0, 3])
        call(cache, ids[:, :1])
    return found


@pytest.mark.parametrize(
    ("method", "engine"),
    [pytest.param(method, engine, marks=pytest.mark.slow if (turn + (engine == "memory")) % 2 else [])
     for turn, method in enumerate(CACHES) for engine in ("auto", "memory")],
)  # fmt: skip
def test_nothing_depends_on_it(method: str, engine: str, tmp_path: Path) -> None:
    cls, ids = cache_class(method), prompt(long_model(), 2, LENGTH)
    expected = lived(cls, engine, tmp_path / "before", ids)
    for what in ("dtype", "device"):
        with set_by_a_user(what):
            found = lived(cls, engine, tmp_path / what, ids)
        assert all(torch.equal(own, theirs) for own, theirs in zip(found, expected, strict=True))
