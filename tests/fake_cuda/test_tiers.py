"""Where the records of a model on a CUDA device lie, and what budgets count on each side, on a device that only
counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import Fake, on_the_device
from harness import COMMON, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import offload_cache
from hf_offload_cache.core import budget
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class

CONTEXT = 2048


@functools.cache
def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 4096}))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model on the device. 64 GiB of host memory are available."""
    has(monkeypatch, 64 * 2**30)
    with on_the_device(build(LlamaForCausalLM, llama().config)) as (model, _):
        yield model


def has(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Let so much host memory be available."""
    monkeypatch.setattr(budget, "free_memory", lambda: free)


def records_of(name: str, model: Any) -> int:
    """Planned bytes of the records in host memory."""
    cls = cache_class(name)
    config = cls.config_class.load(None, {"engine": "memory", "max_context": CONTEXT, "max_batch": 1})
    found: int = cls.plan(Geometry.of(model), config, CONTEXT, 1).host_bytes
    return found


@pytest.mark.parametrize("name", CACHES)
def test_records_lie_in_host_memory_where_they_fit(
    name: str, on_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of what is available are enough for exactly the planned bytes. The report says what was needed."""
    cls, needed = cache_class(name), records_of(name, on_device)
    limits: dict[str, Any] = {"path": tmp_path, "max_context": CONTEXT, "max_batch": 1}
    with cls(on_device, **limits) as cache:
        assert (cache.config.engine, cache.storage.engine) == ("memory", "memory")
        assert cache.report().store.startswith("memory: records stay in host memory; the records need ")
        assert "and 48.00 GiB of host memory may be used, 3/4 of what is available" in cache.report().store
    least = -(-needed * 4 // 3)
    for free, fits in ((least, True), (least - 2, False)):
        has(monkeypatch, free)
        with cls(on_device, **limits) as cache:
            assert (cache.storage.engine == "memory") == fits
            assert "of host memory may be used" in cache.report().store
    for engine in ("memory", "mapped"):
        with cls(on_device, engine=engine, **limits) as cache:
            assert cache.storage.engine == engine


@pytest.mark.parametrize(("free", "limits", "words"), [
    (2**40, {}, "if max_context and max_batch are given and there is room"),
    (2**40, {"max_context": CONTEXT}, "if max_context and max_batch are given and there is room"),
    (None, {"max_context": CONTEXT, "max_batch": 1}, "not known how much host memory is free"),
])  # fmt: skip
def test_what_is_unknown_lies_on_the_disk(
    free: int | None, limits: dict[str, Any], words: str, on_device: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    has(monkeypatch, free)
    with cache_class("disk-swap")(on_device, path=tmp_path, **limits) as cache:
        assert cache.config.engine == "auto" and cache.storage.engine != "memory" and words in cache.report().store


def test_on_a_cpu_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 2**40)
    cls = cache_class("disk-swap")
    with cls(llama(), path=tmp_path, max_context=CONTEXT, max_batch=1) as known, cls(llama(), path=tmp_path) as unknown:
        assert known.report().store == unknown.report().store and ";" not in known.report().store
        assert known.storage.engine != "memory" and not known.storage.pinned


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CACHES)
def test_a_budget_leaves_out_the_records(
    name: str, on_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others keep the budget in a prompt and in steps, wherever the records lie."""
    cls = cache_class(name)
    with cls.for_budget(on_device, "3/2", CONTEXT, path=tmp_path) as cache, torch.no_grad():
        assert cache.storage.engine == "memory" and "the records need" in cache.report().store
        ids = prompt(llama(), 1, 1200)
        on_device(Fake(ids), past_key_values=cache, logits_to_keep=1)
        for step in range(4):
            on_device(Fake(ids[:, step : step + 1]), past_key_values=cache)
        report = cache.report()
        assert report.memory_bytes - report.host_bytes <= report.memory_budget
        assert report.host_bytes >= report.memory_by_owner["records in memory"] > 0
    has(monkeypatch, 2**16)
    with cls.for_budget(on_device, "3/2", CONTEXT, path=tmp_path) as cache:
        assert cache.storage.engine != "memory" and "the records need" in cache.report().store


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_chosen_cache_lies_in_host_memory(on_device: Any, tmp_path: Path) -> None:
    with offload_cache(on_device, "3/2", CONTEXT, path=tmp_path) as cache:
        assert cache.storage.engine == "memory"
