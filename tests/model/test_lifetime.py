"""An attached model is freed with its last reference: nothing of ours refers to it in a circle."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from harness import CASES, SMALL, fresh
from pairwise import combinations

from hf_offload_cache.registry import CACHES, cache_class


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Only counts of references free anything in here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("method", "closed", "fields"),
    combinations(CACHES.keys(), (False, True), {"exact": {"exact": True}, "sparse": {"num_selected": 16}}, strength=2),
)
def test_a_model_is_freed_at_once(method: str, closed: bool, fields: dict) -> None:
    model = fresh("llama")
    cache = cache_class(method)(model, engine="memory", **SMALL, **fields)
    CASES["greedy"](model, cache)
    if closed:
        cache.close()
    gone = weakref.ref(model)
    del model
    assert gone() is None
    with pytest.raises(RuntimeError, match=r"model of this cache is gone"):
        _ = cache.model
    cache.close()


def test_a_model_without_us_is_freed_at_once() -> None:
    model = fresh("llama")
    gone = weakref.ref(model)
    del model
    assert gone() is None
