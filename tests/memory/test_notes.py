"""What is said of a plan: by the warnings of `for_budget` and others, in the report, in the console and its JSON."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, DiskSwapConfig, OffloadCache, offload, offload_cache, registry
from hf_offload_cache.console.main import main
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.memory import MemoryPlan, Planned
from hf_offload_cache.model import Geometry
from hf_offload_cache.model import place as tested_version

SMOL = Geometry.uniform(30, 9, 3, 64)
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "max_position_embeddings": 32768}


def least_of(make: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        make()
    found = re.search(r"need at least ([\d,]+)", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.fixture(scope="module")
def model() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, **WIDE, "num_hidden_layers": 2}))


def warned(make: Any) -> tuple[Any, list[str]]:
    """What `make` made, and each warning that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("name", registry.CACHES)
def test_what_for_budget_warns_of_is_in_the_report(model: Any, name: str) -> None:
    cls = registry.cache_class(name)
    if (missing := cls.missing()) is not None:
        pytest.skip(missing)
    least = least_of(lambda: cls.for_budget(model, "4KiB", max_context=8000))
    cache, said = warned(lambda: cls.for_budget(model, least, max_context=8000))
    with cache:
        assert said or name == "spec"  # whose copy takes so much that its blocks are wide, and nothing is lost
        assert cache.report().warnings[: len(said)] == said


def test_the_warning_names_the_callers_line(model: Any) -> None:
    least = least_of(lambda: DiskSwapCache.for_budget(model, "4KiB", max_context=8000))
    with pytest.warns(UserWarning) as caught:
        DiskSwapCache.for_budget(model, least, max_context=8000).close()
    assert {Path(one.filename).name for one in caught} == {Path(__file__).name}


def test_nothing_is_left_where_warnings_are_errors(model: Any) -> None:
    """The tests' own fixture finds threads, descriptors and hooks that were left."""
    least = least_of(lambda: DiskSwapCache.for_budget(model, "4KiB", max_context=8000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="compact keys"):
            DiskSwapCache.for_budget(model, least, max_context=8000)
    assert not hasattr(model, "_forward_pre_hooks") or not model._forward_pre_hooks


def test_what_others_warn_of_is_in_the_report(model: Any, tmp_path: Path) -> None:
    """`offload` for a request below its floor, and `open` with a memory; `offload_cache` is below."""
    ids = torch.arange(5, 45)[None]
    with offload(model, memory="1/100", floor="5MiB", engine="direct") as done:
        _, said = warned(lambda: model.generate(torch.arange(3000)[None] % 190 + 3, max_new_tokens=2, do_sample=False))
    assert any("such requests may use 5MiB" in one for one in said)
    assert done.report is not None and set(said) <= set(done.report.warnings)
    with DiskSwapCache(model) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        cache.save(tmp_path / "saved")
    least = least_of(lambda: DiskSwapCache.open(tmp_path / "saved", model, memory="4KiB", max_context=8000))
    opened, said = warned(lambda: DiskSwapCache.open(tmp_path / "saved", model, memory=least, max_context=8000))
    with opened:
        assert said and opened.report().warnings == said


def test_a_newer_transformers_is_in_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is warned of once a process."""
    monkeypatch.setattr(tested_version.transformers, "__version__", "9.9.0")
    tested_version._warn.cache_clear()
    model = tiny("llama")
    for turn in range(2):
        cache, said = warned(lambda: OffloadCache(model, engine="memory"))
        with cache:
            assert [one for one in cache.report().warnings if "9.9.0" in one]
            assert len([one for one in said if "9.9.0" in one]) == (turn == 0)
    tested_version._warn.cache_clear()


# ---------------------------------------------------------------------------------------------- a slow prefill


@pytest.mark.parametrize(
    ("block", "context", "times"),
    [
        (16, 8192, "2.4"), (48, 8192, "1.5"), (100, 8192, "1.2"), (200, 4096, "1.1"), (256, 32768, None),
        (48, 2000, None),
    ],
)
def test_small_blocks_are_told(block: int, context: int, times: str | None) -> None:
    """By how much a chunked prefill gets slower; not of a short context, and not of the user's own blocks."""
    config = DiskSwapConfig(block_tokens=block, max_context=context, num_recent=8, max_batch=1)
    plan = DiskSwapCache.plan(SMOL, config, context, 1)
    said = [one for one in DiskSwapCache.notes(plan, config, SMOL) if "chunked prefill" in one]
    assert len(said) == (times is not None)
    if times is not None:
        assert f"about {times} times" in said[0] and f"blocks of {block} tokens" in said[0]
    assert not [one for one in DiskSwapCache.notes(plan, config, SMOL, {"block_tokens"}) if "chunked" in one]


@pytest.mark.parametrize("name", registry.CACHES)
def test_the_least_memory_says_that_a_prefill_gets_slower(name: str) -> None:
    cls = registry.cache_class(name)
    least = least_of(lambda: cls.fit(SMOL, 1000, 24_000, 1, {}))
    for memory, slow in ((least, True), (SMOL.full_kv_bytes(24_000, 1) // 2, False)):
        config = cls.fit(SMOL, memory, 24_000, 1, {})
        notes = cls.notes(cls.plan(SMOL, config, 24_000, 1), config, SMOL)
        assert any("a chunked prefill takes about" in one for one in notes) is (slow and config.block_tokens < 256)


# ---------------------------------------------------------------------------------------------- no cache is needed


def test_a_budget_that_is_too_small_says_when_no_cache_is_needed() -> None:
    """The least that a cache takes is more than the full KV, or it is less."""
    for context, needless in ((60, True), (8000, False)):
        with pytest.raises(BudgetError, match="need at least") as refused:
            DiskSwapCache.fit(SMOL, 1000, context, 1, {})
        assert ("no cache is needed: the full KV (DynamicCache) takes 1.3 MiB" in str(refused.value)) is needless


def test_a_plan_that_is_larger_than_the_full_kv_says_so() -> None:
    def plan(held: int, full: int) -> MemoryPlan:
        return MemoryPlan.of(Planned({"a": held}, {"a": held // 2}), 9, full, 70)

    assert plan(1000, 13_000).needless is None and plan(1000, 13_000).share == "1/13.0 of the full KV"
    for held, share in ((1000, "1.0 times the full KV"), (1500, "1.5 times the full KV")):
        told = plan(held, 1000)
        assert told.share == share and told.to_dict()["needless"] == told.needless
        assert told.needless is not None and told.needless.startswith("no cache is needed: this plan takes")


def test_for_budget_and_offload_cache_say_that_no_cache_is_needed() -> None:
    model = tiny("llama")
    words = "no cache is needed: this plan takes"
    cache, said = warned(lambda: DiskSwapCache.for_budget(model, "8MiB", max_context=64))
    with cache:
        assert [one for one in said if words in one] and set(said) <= set(cache.report().warnings)
    chosen, said = warned(lambda: offload_cache(model, "8MiB", max_context=64))
    with chosen:
        assert words in chosen.why and [one for one in said if words in one]
    free, said = warned(lambda: DiskSwapCache.for_budget(build_long(), "1/2", max_context=16_000))
    with free:
        assert not [one for one in said if words in one]


def build_long() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 32768}))


def test_the_console_says_what_a_plan_says(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slower prefill and a cache that is not needed: as notes, in the JSON, and for each cache with `--compare`."""
    folder, file = tmp_path / "model", tmp_path / "plan.json"
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    least = least_of(lambda: DiskSwapCache.fit(Geometry.of(model), 1000, 8000, 1, {"engine": "direct"}))
    asked = ["plan", "--model", str(folder), "--json", str(file), "--set", "engine=direct"]
    assert main([*asked, "--context", "8000", "--memory", str(least), "--cache", "disk-swap"]) == 0
    out, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "note: a chunked prefill takes about" in out and "of the full KV)" in out
    assert any("a chunked prefill" in one for one in written["notes"]) and written["plan"]["needless"] is None
    file.unlink()
    assert main([*asked, "--context", "60"]) == 0
    out, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "times the full KV)" in out and "(1/0." not in out
    assert f"note: {written['plan']['needless']}" in out and written["plan"]["needless"] in written["notes"]
    file.unlink()
    assert main([*asked, "--context", "60", "--compare"]) == 0
    out, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "1/0." not in out and out.count(": no cache is needed: this plan takes") == len(registry.CACHES)
    for one in written["plans"]:
        assert one["plan"]["needless"] in one["notes"]
