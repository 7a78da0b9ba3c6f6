"""All caches measured in one memory on a tiny model, and the cache that is chosen by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import generate, prompt
from long_llama import long_model

from hf_offload_cache import DiskSwapCache, measure_caches, offload_cache, registry
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.tuning.which_cache import measured_caches

CONTEXT = 1200
TEXT = torch.randint(1, 99, (CONTEXT + 100,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model()


def test_measured_and_chosen(model: Any, tmp_path: Path) -> None:
    """An exact configuration is at no distance, a sparse one at some; a table of them chooses, and says why."""
    options: dict[str, Any] = {"max_context": CONTEXT, "texts": [TEXT], "samples": 1, "steps": 10, "path": tmp_path}
    exact = measure_caches(model, memory="9/10", exact=True, **options)
    assert exact["refused"] == [] and [cell["cache"] for cell in exact["cells"]] == ["DynamicCache", *registry.CACHES]
    assert all(cell["kl"] < 1e-5 and abs(cell["perplexity"] - 1) < 1e-3 for cell in exact["cells"])
    sparse = measure_caches(model, memory="1/2", num_selected=16, **options)
    assert max(cell["kl"] for cell in sparse["cells"]) > 1e-5
    assert all(cell["tokens"] == CONTEXT and cell["seconds"] > 0 for cell in sparse["cells"])
    table = tmp_path / "table.json"
    table.write_text(json.dumps(sparse, allow_nan=False))
    assert measured_caches(table) == sparse["cells"]
    best = min(sparse["cells"][1:], key=lambda cell: cell["kl"])["cache"]
    with offload_cache(model, "1/2", CONTEXT, measured=table, path=tmp_path) as cache:
        assert registry.name_of(type(cache).__name__) == best
        assert cache.why.startswith(f"{best}: at {CONTEXT:,} tokens and ")
        generate(model, cache, prompt(model, length=300), max_new_tokens=4)
        report = cache.report()
    assert report.peak_memory_bytes <= cache.config.memory
    fastest = min(sparse["cells"][1:], key=lambda cell: cell["seconds"])["cache"]
    with offload_cache(model, "1/2", CONTEXT, goal="speed", measured=table, path=tmp_path) as cache:
        assert registry.name_of(type(cache).__name__) == fastest
    assert list(tmp_path.iterdir()) == [table]


def test_what_the_caller_names_stays(model: Any, tmp_path: Path) -> None:
    with offload_cache(model, "9/10", CONTEXT, num_recent=8, exact=True, path=tmp_path) as cache:
        assert (cache.config.num_recent, cache.config.exact) == (8, True)
    with DiskSwapCache(model, path=tmp_path) as cache:
        assert cache.why == ""


def test_bad_requests(model: Any, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="no cache fits"):
        offload_cache(model, 2000, CONTEXT)
    with pytest.raises(ConfigError, match="goal must be one of"):
        offload_cache(model, "1/2", CONTEXT, goal="best")
    with pytest.raises(BudgetError, match="no cache fits"):
        measure_caches(model, memory=2000, max_context=CONTEXT, texts=[TEXT])
    with pytest.raises(ConfigError, match="max_context must be a whole number"):
        measure_caches(model, memory="1/2", max_context=0, texts=[TEXT])
    with pytest.raises(ConfigError, match="texts: one must have"):
        measure_caches(model, memory="1/2", max_context=CONTEXT, texts=[TEXT[:30]])
