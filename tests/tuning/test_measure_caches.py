"""All caches measured in one memory on a tiny model, and the cache that is chosen by it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, generate, prompt, tiny
from long_llama import long_model
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import ClusterCache, DiskSwapCache, measure_caches, offload_cache, registry
from hf_offload_cache.errors import BudgetError, ConfigError, UnsupportedModelError
from hf_offload_cache.methods.cluster import cache as cluster
from hf_offload_cache.model import Geometry, Seam
from hf_offload_cache.tuning import TURN, compare_plans, identity_of, measured_caches, shape_of, together, without_seams
from hf_offload_cache.tuning import measure_caches as measuring
from hf_offload_cache.tuning.which_cache import check_fields

CONTEXT, STEPS = 1200, 12
FULL = CONTEXT * 3 * 2 * 2 * 16 * 4
"""Bytes of the text's keys and values: layers, both, heads, width, bytes."""
TEXT = torch.randint(1, 99, (CONTEXT + 100,), generator=torch.Generator().manual_seed(0))
NAMES = ["DynamicCache", *registry.CACHES]
MEMORY = "9/10"
"""In which all of them fit so short a text."""


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model()


def measured(model: Any, path: Path, **others: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_context": CONTEXT, "texts": [TEXT], "samples": 1, "steps": STEPS, "progress": False}
    return measure_caches(model, memory=MEMORY, path=path, **asked, **others)


@pytest.fixture(scope="module")
def sparse(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[tuple[Any, Any, int]]]:
    """What is measured, and of each forward meanwhile its model, its cache and how many tokens it was given."""
    seen: list[tuple[Any, Any, int]] = []

    own, call = copy.deepcopy(model), torch.nn.Module.__call__

    def noting(called: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((called, kwargs["past_key_values"], kwargs["input_ids"].shape[1]))
        return call(called, *args, **kwargs)

    folder = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:  # no hook, which would keep guesses away
        patch.setattr(type(own), "__call__", noting, raising=False)
        found = measured(own, folder, num_selected=16, engine="mapped")
    seen = [one for one in seen if one[0].device.type != "meta"]  # twins are asked for shapes
    assert list(folder.iterdir()) == []
    return json.loads(json.dumps(found, allow_nan=False)), seen


@pytest.fixture
def table(sparse: tuple[dict[str, Any], Any], tmp_path: Path) -> Path:
    place = tmp_path / "table.json"
    place.write_text(json.dumps(sparse[0]))
    return place


# --- what is measured ----------------------------------------------------------------------------------------------


def test_exact_caches_are_at_no_distance(model: Any, tmp_path: Path) -> None:
    exact = measured(model, tmp_path, exact=True)
    assert exact["refused"] == [] and [cell["cache"] for cell in exact["cells"]] == NAMES
    assert all(cell["kl"] < 1e-5 and abs(cell["perplexity"] - 1) < 1e-3 for cell in exact["cells"])


def test_sparse_caches_are_at_some(sparse: tuple[dict[str, Any], Any]) -> None:
    cells = {cell["cache"]: cell for cell in sparse[0]["cells"]}
    assert list(cells) == NAMES and max(cell["kl"] for cell in cells.values()) > 1e-5
    assert all(cell["tokens"] == CONTEXT and cell["seconds"] > 0 for cell in cells.values())
    assert {cell["memory"] for cell in cells.values()} == {"1", f"{FULL * 9 // 10}/{FULL}"}
    assert (cells["DynamicCache"]["kl"], cells["DynamicCache"]["perplexity"]) == (0.0, 1.0)


def test_prefilled_in_pieces_and_decoded_in_turns(sparse: tuple[dict[str, Any], list[tuple[Any, Any, int]]]) -> None:
    """No forward has more than 1,024 tokens; each open cache takes `TURN` steps, forth and then back."""
    found, seen = sparse
    caches = list(dict.fromkeys(cache for _, cache, _ in seen))
    classes = ["DynamicCache", *(place.split(":")[1] for place in registry.CACHES.values())]
    assert [type(cache).__name__ for cache in caches] == classes and found["turns"] == [NAMES]
    prefills, steps = seen[: 2 * len(caches)], seen[2 * len(caches) :]
    assert [(cache, count) for _, cache, count in prefills] == [
        (cache, count) for cache in caches for count in (1024, CONTEXT - STEPS - 1024)
    ]
    turns = [*(cache for cache in caches for _ in range(TURN)),
             *(cache for cache in reversed(caches) for _ in range(STEPS - TURN))]  # fmt: skip
    assert [(cache, count) for _, cache, count in steps] == [(cache, 1) for cache in turns]
    plain, *others = dict.fromkeys(called for called, _, _ in seen)
    assert {called for called, cache, _ in seen if cache is caches[0]} == {plain} and len(others) == 1
    weights = [[parameter.data_ptr() for parameter in one.parameters()] for one in (plain, *others)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_full_cache_that_memory_does_not_hold_is_left_out(
    sparse: tuple[dict[str, Any], Any], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are as far from an exact cache as from it; those that together are more take no turns."""
    monkeypatch.setattr(measuring, "free_memory", lambda device: 2 * FULL - 2)
    found = measured(model, tmp_path, num_selected=16, engine="mapped")
    assert found["reference"] == "an exact OffloadCache" and sparse[0]["reference"] == "DynamicCache"
    assert found["refused"] == ["DynamicCache: needs 900.0 KiB, half of this machine's free memory is 900.0 KiB"]
    assert [name for names in found["turns"] for name in names] == NAMES[1:] and len(found["turns"]) > 1
    assert [cell["cache"] for cell in found["cells"]] == NAMES[1:]
    for one, other in zip(found["cells"], sparse[0]["cells"][1:], strict=True):
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-4, rel=0.05)
        assert one["perplexity"] == pytest.approx(other["perplexity"], abs=1e-3)


def test_as_many_together_as_fit() -> None:
    needs = {"a": 5, "b": 4, "c": 2, "d": 11, "e": 1}
    assert together(needs, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert together(needs, None) == [["a", "b", "c", "d", "e"]]
    assert together(needs, 0) == [["a"], ["b"], ["c"], ["d"], ["e"]]


def seams(model: Any) -> int:
    """Hooks of ours: transformers leaves its own on a model that was asked for attention weights."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return sum(isinstance(hook, Seam) for hook in hooks)


def test_a_twin_without_seams(model: Any) -> None:
    """Attaching to the model changes nothing on it; a model over several devices has none."""
    own = copy.deepcopy(model)
    twin = without_seams(own)
    with DiskSwapCache(own, engine="memory"):
        assert (seams(twin), seams(own) > 0) == (0, True)
        names = [str(one.config._attn_implementation) for one in (twin, own)]
        assert names == ["sdpa", "sdpa"]
    own.hf_device_map = {"": 0}
    assert without_seams(own) is not own
    own.hf_device_map = {"model": 0, "lm_head": "cpu"}
    assert without_seams(own) is own


# --- what is chosen by it ------------------------------------------------------------------------------------------


def test_chosen_by_what_was_measured(table: Path, model: Any, tmp_path: Path) -> None:
    cells = measured_caches(table)
    assert cells == json.loads(table.read_text())["cells"] == measured_caches(table, identity_of(model))
    best = min(cells[1:], key=lambda cell: cell["kl"])["cache"]
    asked: dict[str, Any] = {"num_selected": 16, "measured": table, "path": tmp_path}
    with offload_cache(model, MEMORY, CONTEXT, **asked) as cache:
        assert registry.name_of(type(cache).__name__) == best
        assert cache.why.startswith(f"{best}: at {CONTEXT:,} tokens and ")
        generate(model, cache, prompt(model, length=300), max_new_tokens=4)
        report = cache.report()
    assert report.peak_memory_bytes <= cache.config.memory
    fastest = min(cells[1:], key=lambda cell: cell["seconds"])["cache"]
    with offload_cache(model, MEMORY, CONTEXT, goal="speed", **asked) as cache:
        assert registry.name_of(type(cache).__name__) == fastest
    assert list(tmp_path.iterdir()) == [table]


def test_sizes_are_compared_in_bytes(table: Path) -> None:
    sizes = {"write_queue": 1 << 20, "host_memory": 2 << 20}
    check_fields({"write_queue": "1MiB", "host_memory": "2MiB"}, table, sizes)
    with pytest.raises(ConfigError, match=r"'write_queue': 1048576}, and these are {'write_queue': 2097152}"):
        check_fields({"write_queue": "1MiB"}, table, {"write_queue": "2MiB"})


def test_a_table_of_other_fields_is_refused(table: Path, model: Any, tmp_path: Path) -> None:
    told = r"was measured with the fields {'num_selected': 16}, and these are {'num_recent': 8}: give the same ones"
    with pytest.raises(ConfigError, match=told):
        offload_cache(model, MEMORY, CONTEXT, measured=table, path=tmp_path, num_recent=8, engine="memory")


def test_a_table_says_what_it_is_of(table: Path, model: Any) -> None:
    found = json.loads(table.read_text())
    assert found["model"] == identity_of(model)
    assert found["model"]["layers"] == "3 of 4 heads, 2 x 16 keys and 2 x 16 values"
    assert (found["model"]["name"], found["model"]["dtype"]) == ("LlamaForCausalLM", "float32")
    assert found["fields"] == {"num_selected": 16, "engine": "mapped"}
    assert (found["machine"]["device"], found["machine"]["torch_threads"]) == ("cpu", 1)
    assert "mapped" in found["machine"]["store"]


@pytest.mark.parametrize(
    ("seed", "changed", "told"),
    [
        (1, {}, "weights was"),
        (0, {"num_key_value_heads": 4}, "layers was 3 of 4 heads, 2 x 16 keys and 2 x 16 values, here it is 3 of 4 "),
        (0, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope was"),
    ],
)
def test_a_table_of_another_model_is_refused(
    seed: int, changed: dict[str, Any], told: str, table: Path, tmp_path: Path
) -> None:
    fields = {**COMMON, "max_position_embeddings": 8192, **changed}
    other = build(LlamaForCausalLM, LlamaConfig(**fields, name_or_path="other/model"), seed)
    both = r"was measured with LlamaForCausalLM, and this is LlamaForCausalLM \(other/model\): "
    with pytest.raises(ConfigError, match=both + told):
        offload_cache(other, MEMORY, CONTEXT, measured=table, path=tmp_path)


def test_without_weights_the_shape_is_compared(table: Path, model: Any) -> None:
    geometry = Geometry.of(model)
    assert measured_caches(table, shape_of("this one", geometry))
    half = Geometry.of(copy.deepcopy(model).to(torch.bfloat16))
    with pytest.raises(ConfigError, match="LlamaForCausalLM, and this is this one: dtype was float32, here it is bfl"):
        measured_caches(table, shape_of("this one", half))
    table.write_text(json.dumps({"cells": []}))
    with pytest.raises(ConfigError, match="does not name its model: measure this one"):
        measured_caches(table, shape_of("this one", geometry))


def test_what_the_caller_names_stays(model: Any, tmp_path: Path) -> None:
    with offload_cache(model, MEMORY, CONTEXT, num_recent=8, exact=True, path=tmp_path) as cache:
        assert (cache.config.num_recent, cache.config.exact) == (8, True)
    with DiskSwapCache(model, path=tmp_path) as cache:
        assert cache.why == ""


def test_what_was_measured_with_other_fields_is_said(model: Any, tmp_path: Path) -> None:
    with offload_cache(model, MEMORY, CONTEXT, num_recent=8, engine="memory", path=tmp_path) as cache:
        assert cache.why.endswith("measured without the fields {'num_recent': 8}: `tune --compare` measures with them")
    with offload_cache(model, MEMORY, CONTEXT, engine="memory", path=tmp_path) as cache:
        assert "measured without" not in cache.why
    with offload_cache(model, MEMORY, CONTEXT, exact=True, path=tmp_path) as cache:
        assert type(cache) is DiskSwapCache
        first = "disk-swap: the first that fits: exact caches all give the same output\n"
        assert cache.why.startswith(first) and "KL" not in cache.why and "measured without" not in cache.why
    with offload_cache(model, MEMORY, CONTEXT, exact=False, num_sinks=4, path=tmp_path) as cache:
        assert "KL" in cache.why and "measured without" not in cache.why  # as they are by default
    with offload_cache(model, "4MiB", 4096, path=tmp_path) as cache:
        usual = cache.config.num_selected
        queue = f"{cache.config.write_queue}B"
    assert usual == 560
    with offload_cache(model, "4MiB", 4096, write_queue=queue, path=tmp_path) as cache:
        assert "measured without" not in cache.why  # the same bytes
    for count, told in ((usual, False), (400, True)):  # 400 are the class's default, not a budget's
        with offload_cache(model, "4MiB", 4096, num_selected=count, path=tmp_path) as cache:
            assert ("measured without the fields {'num_selected': 400}" in cache.why) is told


def test_the_context_is_the_models_where_it_is_left_out(model: Any, tmp_path: Path) -> None:
    with offload_cache(model, memory="1/2", path=tmp_path) as cache:
        assert cache.config.max_context == model.config.max_position_embeddings
        assert cache.config.memory == Geometry.of(model).full_kv_bytes(cache.config.max_context, 1) // 2
    endless = build(BloomForCausalLM, BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=2))
    with pytest.raises(ConfigError, match="max_context must be given"):
        offload_cache(endless, memory="1/2")


def test_a_cache_that_lacks_a_package_is_no_choice(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"faiss, which is not installed: pip install 'hf-offload-cache\[cluster\]'"):
        ClusterCache(model, path=tmp_path)
    with offload_cache(model, MEMORY, CONTEXT, path=tmp_path) as cache:
        assert "cluster: left out: ClusterCache needs faiss" in cache.why
    asked = (Geometry.of(model), None, CONTEXT, 1, {})
    plans = compare_plans(*asked, installed=True)
    assert [plan.name for plan in plans if plan.plan is None] == ["cluster"]
    assert all(plan.plan is not None for plan in compare_plans(*asked))  # what it would hold


def test_bad_requests(model: Any, tmp_path: Path) -> None:
    for name in ("max_context", "max_batch"):
        with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, got 0"):
            offload_cache(model, "1/2", **{"max_context": CONTEXT, name: 0})
    with pytest.raises(UnsupportedModelError, match="nothing to offload"):
        offload_cache(tiny("mistral_sliding"), "1/2", CONTEXT)
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
    with pytest.raises(ConfigError, match="trace cannot be set: caches open at the same time do not share it"):
        measured(model, tmp_path, trace=str(tmp_path / "trace"))
