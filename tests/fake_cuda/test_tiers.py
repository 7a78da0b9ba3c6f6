"""Where the records of a model on a CUDA device lie, and what budgets count on each side, on a device that only
counts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import COUNTS, Fake, on_the_device, values_of
from harness import COMMON, build, prompt
from layered_models import dense_with_indexers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import offload_cache
from hf_offload_cache.core import budget, device_step
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.fetch import ByteRows, FirstIn, HostTier
from hf_offload_cache.kernels import on_a_device
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.model import Geometry, LayerShape
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
        assert cache.report().store.startswith("memory: records stay in host memory; records in host memory need ")
        assert "of it, and 48.00 GiB may be used (3/4 of what is available)" in cache.report().store
    least = -(-needed * 4 // 3)
    for free, fits in ((least, True), (least - 2, False)):
        has(monkeypatch, free)
        with cls(on_device, **limits) as cache:
            assert (cache.storage.engine == "memory") == fits
            assert "records in host memory need" in cache.report().store
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
        assert cache.storage.engine == "memory" and "records in host memory need" in cache.report().store
        ids = prompt(llama(), 1, 1200)
        on_device(Fake(ids), past_key_values=cache, logits_to_keep=1)
        for step in range(4):
            on_device(Fake(ids[:, step : step + 1]), past_key_values=cache)
        report = cache.report()
        assert report.memory_bytes - report.host_bytes <= report.memory_budget
        assert report.host_bytes >= report.memory_by_owner["records in memory"] > 0
    has(monkeypatch, 2**16)
    with cls.for_budget(on_device, "3/2", CONTEXT, path=tmp_path) as cache:
        assert cache.storage.engine != "memory" and "records in host memory need" in cache.report().store


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_chosen_cache_lies_in_host_memory(on_device: Any, tmp_path: Path) -> None:
    with offload_cache(on_device, "3/2", CONTEXT, path=tmp_path) as cache:
        assert cache.storage.engine == "memory"


def run(model: Any, cache: Any, pieces: tuple[int, ...] = (1200,)) -> None:
    """A prompt in pieces and four steps."""
    ids = prompt(llama(), 1, sum(pieces))
    with torch.no_grad():
        for part in ids.split(pieces, 1):
            model(Fake(part), past_key_values=cache, logits_to_keep=1)
        for step in range(4):
            model(Fake(ids[:, step : step + 1]), past_key_values=cache)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("engine", ["memory", "mapped"])
@pytest.mark.parametrize("name", CACHES)
def test_budgets_of_both_sides_hold(name: str, engine: str, on_device: Any, tmp_path: Path) -> None:
    """Of the plan, and of what was used. Bytes of the device count in neither limit of the host, and the reverse."""
    cls, limit = cache_class(name), 16 * 2**20 if engine == "memory" else 2**20
    fields: dict[str, Any] = {"engine": engine, "host_memory": limit, "path": tmp_path}
    with cls.for_budget(on_device, "3/2", CONTEXT, **fields) as cache:
        plan = cls.plan(Geometry.of(on_device), cache.config, CONTEXT, 1)
        assert plan.peak_bytes <= cache.storage.account.limit and plan.host_bytes <= limit
        run(on_device, cache)
        report = cache.report()
        assert (report.device, report.host_budget, report.memory_budget) == ("cuda", limit, cache.config.memory)
        assert report.peak_memory_bytes <= report.memory_budget  # steps use what the plan leaves of it, too
        assert 0 < report.host_peak_bytes <= plan.host_bytes
        host = sum(report.memory_by_owner.get(owner, 0) for owner in {**plan.host_prefill, **plan.host_decode})
        assert report.host_bytes == cache.host_bytes == host <= report.host_peak_bytes
        assert 0 < report.memory_bytes - report.host_bytes <= report.peak_memory_bytes
        printed = str(report)
        for kind in ("device memory", "host memory"):
            assert all(f"{kind} {what}" in printed for what in ("now", "peak", "budget"))
        assert ("on disk" in printed) and (report.disk_bytes > 0) == (engine == "mapped")


def test_records_beyond_the_host_memory_are_refused(on_device: Any, tmp_path: Path) -> None:
    """Without a plan too, before the memory is taken: the step's tokens are not added, and others still are."""
    fields: dict[str, Any] = {"engine": "memory", "host_memory": 13 * 2**20, "path": tmp_path}
    with cache_class("disk-swap")(on_device, **fields) as cache:
        record = 2 * COMMON["num_key_value_heads"] * (COMMON["hidden_size"] // COMMON["num_attention_heads"]) * 4
        tokens = 4 * 2**20 // record
        ids = prompt(llama(), 1, tokens + 600)
        with torch.no_grad():
            on_device(Fake(ids[:, :600]), past_key_values=cache, logits_to_keep=1)
            before = cache.host_bytes
            with pytest.raises(BudgetError, match=r"host_memory: records in memory needs .* of host memory"):
                on_device(Fake(ids[:, 600:]), past_key_values=cache, logits_to_keep=1)
            assert cache.tokens == 600 and cache.host_bytes <= 13 * 2**20 and before > 0
            on_device(Fake(ids[:, 600:610]), past_key_values=cache, logits_to_keep=1)
            cache.reset()
            on_device(Fake(ids[:, :600]), past_key_values=cache, logits_to_keep=1)
        assert cache.tokens == 600


def test_a_host_memory_that_is_too_small(on_device: Any, tmp_path: Path) -> None:
    cls = cache_class("disk-swap")
    fields: dict[str, Any] = {"host_memory": "1MiB", "max_context": CONTEXT, "max_batch": 1, "path": tmp_path}
    with pytest.raises(BudgetError, match=r"host_memory is 1,048,576 bytes, and 1 x 2,048 tokens .* of host memory"):
        cls(on_device, engine="memory", **fields)
    needed = None
    with pytest.raises(BudgetError, match=r"host_memory is 1,048,576 bytes \(1.0 MiB\), which is too small") as caught:
        cls.for_budget(on_device, "3/2", CONTEXT, engine="memory", host_memory="1MiB", path=tmp_path)
    needed = caught.value.needed
    assert caught.value.of_host and 'or pass engine="auto"' in str(caught.value) and needed is not None
    with cls.for_budget(on_device, "3/2", CONTEXT, engine="memory", host_memory=needed, path=tmp_path) as cache:
        assert cache.config.host_memory == needed
    with cls.for_budget(on_device, "3/2", CONTEXT, host_memory="1MiB", path=tmp_path) as cache:
        assert cache.storage.engine != "memory" and "1.0 MiB may be used (host_memory)" in cache.report().store


def test_a_model_on_a_cpu_has_no_host_memory(tmp_path: Path) -> None:
    cls = cache_class("disk-swap")
    for make in (cls, functools.partial(cls.for_budget, memory="3/2", max_context=CONTEXT)):
        with pytest.raises(ConfigError, match=r"on a CPU, where memory limits everything: leave host_memory out"):
            make(llama(), path=tmp_path, host_memory="64GiB")


def test_an_opened_context_keeps_the_budgets(on_device: Any, tmp_path: Path) -> None:
    cls = cache_class("disk-swap")
    with cls(on_device, path=tmp_path) as cache:
        run(on_device, cache)
        cache.save(tmp_path / "saved")
    limits: dict[str, Any] = {"memory": "2MiB", "max_context": CONTEXT, "max_batch": 1, "path": tmp_path}
    for host, engine in ((32 * 2**20, "memory"), (2**20, None)):
        with cls.open(tmp_path / "saved", on_device, host_memory=host, **limits) as opened:
            assert (opened.storage.engine == "memory") == (engine == "memory") and opened.tokens == 1204
            report = opened.report()
            assert report.host_peak_bytes <= host == report.host_budget


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fit_leaves_room_for_the_keys_that_it_streams(on_device: Any, tmp_path: Path) -> None:
    """A fit takes what is free of a budget for larger parts, but not what it reads the earlier pieces' keys through."""
    with cache_class("disk-swap").for_budget(on_device, "2/3", CONTEXT, path=tmp_path) as cache:
        run(on_device, cache, (400, 400, 400))
        report = cache.report()
        assert report.peak_memory_bytes <= report.memory_budget and report.tokens == 1204


FIELDS: dict[str, dict[str, Any]] = {"abstract-tree": {"chunk_size": 16, "dense_layers": 0, "early_steps": 0}}


def where(name: str, model: Any, tmp_path: Path, calls: int = 1, tokens: int = 600, **fields: Any) -> str:
    """The report's line on steps, after a prompt and as many calls of one token."""
    ids, sizes = prompt(llama(), 1, tokens), {"max_context": 700, "max_batch": 1}
    given = {"num_selected": 48, "engine": "memory", **sizes}
    if name == "spec":
        given |= {"num_recent": 32, "quant_group": 32}
    with cache_class(name)(model, tmp_path, **{**given, **FIELDS.get(name, {}), **fields}) as cache, torch.no_grad():
        model(Fake(ids), past_key_values=cache, logits_to_keep=1)
        before = cache.report()
        assert before.steps == "" and "steps" not in before._rows()
        for step in range(calls):
            model(Fake(ids[:, step : step + 1]), past_key_values=cache)
        report = cache.report()
        assert report._rows().get("steps", "") == report.steps
        return report.steps


@pytest.mark.parametrize("name", CACHES)
def test_the_report_says_where_steps_ran(
    name: str, on_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = "3 of 3 over the host: "
    assert where(name, on_device, tmp_path) == "3 of 3 layers on the GPU alone"
    assert where(name, on_device, tmp_path, engine="mapped") == f"{over}{device_step.ON_DISK}"
    if name in ("disk-swap", "spec"):  # the others ask as the first of these does
        unknown = where(name, on_device, tmp_path, engine="auto", max_batch=None)
        assert unknown == f"{over}{device_step.LIMITS_UNKNOWN}"
    if name == "disk-swap":  # it fits no codes to so few tokens, and attends to all
        assert where(name, on_device, tmp_path, tokens=200) == ""
    if name != "spec":  # which is never exact
        assert where(name, on_device, tmp_path, exact=True) == ""
    with monkeypatch.context() as patched:
        patched.setattr(on_a_device, "_has_marked", lambda: False)
        assert where(name, on_device, tmp_path) == f"{over}{device_step.NO_KERNELS}"
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_pinned", lambda self, *_: False)
        assert where(name, on_device, tmp_path) == f"{over}{device_step.NOT_PINNED}"


@pytest.mark.parametrize(("name", "fields", "why"), [
    ("disk-swap", {"memory": "64MiB", "reuse_capacity": 16},
     "the budget has 2 slots a row, and a step may select more records"),
    ("disk-swap", {"summary_dtype": "bfloat16"}, "what chooses is not on the GPU"),
    ("abstract-tree", {"abstracts": "disk"}, "what chooses is not on the GPU"),
    ("cluster", {"centroids": "disk"}, "what chooses is not on the GPU"),
])  # fmt: skip
def test_the_report_says_why_steps_needed_the_host(
    name: str, fields: dict[str, Any], why: str, on_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_class(name), "lend_slots", lambda *_: None)
    assert where(name, on_device, tmp_path, **fields) == f"3 of 3 over the host: {why}"


def test_the_report_says_where_the_latest_step_ran(on_device: Any, tmp_path: Path) -> None:
    """Of several tokens over the host, and then of one on the GPU alone."""
    ids, sizes = prompt(llama(), 1, 600), {"num_selected": 48, "max_context": 700, "max_batch": 1}
    with cache_class("disk-swap")(on_device, tmp_path, engine="memory", **sizes) as cache, torch.no_grad():
        on_device(Fake(ids), past_key_values=cache, logits_to_keep=1)
        cache.activate_past_recording()  # as assisted decoding does
        found = []
        for part in ids[:, :5].split([1, 3, 1], 1):
            on_device(Fake(part), past_key_values=cache)
            found.append(cache.report().steps)
    alone, why = "3 of 3 layers on the GPU alone", "the call has padding, several tokens, or more than a softmax"
    assert found == [alone, f"3 of 3 over the host: {why}", alone]


@pytest.mark.parametrize(("name", "shares"), [("disk-swap", {13: ""}), ("spec", {3: ""}), ("cluster", {
    3: "", 6: "its memory has slots for all that a step may select: raise memory",
    13: "what chooses records is in its memory, not on the disk, and kernels take such heads and fields",
})])  # fmt: skip
def test_a_plan_says_that_steps_need_the_host(name: str, shares: dict[int, str]) -> None:
    cls, geometry = cache_class(name), Geometry.uniform(30, 9, 3, 64, device="cuda")
    for share, why in shares.items():
        memory = geometry.full_kv_bytes(8192, 1) // share
        config = budget.fit_goal(cls, None, geometry, (memory, 8192, 1), {"engine": "memory"})
        note = f"steps of 30 of 30 layers need the host; a GPU alone runs them if {why}"
        assert budget.steps_over_host(cls, geometry, config, 8192, 1) == ([note] if why else [])


OFTEN = {
    "disk-swap": {"reuse_capacity": 32},
    "cluster": {"reuse_capacity": 32},
    "abstract-tree": {"reuse_capacity": 32, "chunk_size": 16, "dense_layers": 0, "early_steps": 0},
    "spec": {},
}


@pytest.mark.parametrize("name", CACHES)
def test_host_memory_keeps_what_was_read_from_the_disk(name: str, on_device: Any, tmp_path: Path) -> None:
    """In pinned memory, on the way to the device: a step reads less, does not wait more, and attends to the same."""
    ids, logits, reads, waits = prompt(llama(), 1, 600), [], [], []
    fields: dict[str, Any] = {"num_selected": 48, "engine": "mapped", "look_ahead": False, **OFTEN[name]}
    for host in (None, "2MiB"):
        with cache_class(name)(on_device, tmp_path, host_slots=host, **fields) as cache, torch.no_grad():
            on_device(Fake(ids), past_key_values=cache, logits_to_keep=1)
            COUNTS.clear()
            steps = [on_device(Fake(ids[:, step : step + 1]), past_key_values=cache) for step in range(8)]
            assert not any("areas" in caller for caller in COUNTS.blocking)
            waits.append(dict(COUNTS.syncs))
            waits[-1].pop("fetch/write_queue.py:copy_rows", None)  # of records not yet written
            uploads = waits[-1].pop("fetch/areas.py:wait_uploaded", 0)  # as many as reads, and there are fewer of these
            assert uploads <= 3 * (len(steps) + 1)  # SpecCache brings the next step's entries after each, the last too
            logits.append([values_of(step.logits) for step in steps])
            reads.append(cache.report().bytes_read)
            kept = [one for layer in cache.selective for one in layer.fetcher.tiers if isinstance(one, HostTier)]
            assert len(kept) == (3 if host else 0) and all(one._data.is_pinned() for one in kept)
            assert cache.storage.account.by_owner["host slots"] == sum(one._data.nbytes for one in kept)
        assert not cache.storage.account.by_owner["host slots"]
    assert all(map(torch.equal, *logits))
    assert reads[1] < reads[0] and waits[1] == waits[0]


def test_what_was_rewritten_leaves_host_memory() -> None:
    """It keeps copies of what the disk has, of the records that it has not, and drops them by its policy."""
    tier = HostTier(2, 4, torch.float32, torch.device("cpu"), MemoryAccount(), policy=FirstIn)
    source = ByteRows(torch.arange(16.0).view(4, 4))
    tier.keep(np.array([3, 5]), np.array([], dtype=np.int64), source, np.array([0, 2]))
    out = ByteRows(torch.zeros(2, 4))
    tier.take(tier.locate(np.array([5, 3])), out, np.arange(2))
    assert out.tensor.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    tier.renew(np.array([5, 7]), ByteRows(torch.ones(2, 4)))
    assert tier.locate(np.array([3, 5, 7])).tolist() == [0, -1, -1]
    tier.keep(np.array([9]), np.array([0]), source, np.array([1]))
    assert tier.locate(np.array([3, 9])).tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CACHES)
def test_a_budget_gives_host_memory_to_what_was_read(name: str) -> None:
    """What the limit leaves, with records on the disk; none with records in host memory, or by the user's choice."""
    cls = cache_class(name)
    geometry, fields = Geometry.uniform(30, 9, 3, 64, device="cuda"), {"engine": "mapped", "host_memory": 2**26}
    memory = geometry.full_kv_bytes(8192, 1) // 4
    config = budget.fit_goal(cls, None, geometry, (memory, 8192, 1), fields)
    plan = cls.plan(geometry, config, 8192, 1)
    assert config.host_slots > 2**25 and 2**25 < plan.host_decode["host slots"] <= plan.host_bytes <= 2**26
    assert 2**26 - plan.host_bytes < 2**20
    for more in ({"host_slots": None}, {"host_memory": 2**34, "engine": "memory"}, {"host_memory": None}):
        config = budget.fit_goal(cls, None, geometry, (memory, 8192, 1), {**fields, **more})
        assert config.host_slots is None


def test_what_an_indexer_chose_is_read_for_a_device(tmp_path: Path) -> None:
    """In pieces and in steps of two rows, with slots on the device, the indexer's keys there too."""
    model, ends = dense_with_indexers(), (40, 80, 81, 82)
    ids, begins = prompt(model, 2, ends[-1]), (0, *ends[:-1])
    with torch.no_grad():
        plain = DynamicCache(config=model.config)
        expected = [model(ids[:, a:b], past_key_values=plain).logits for a, b in zip(begins, ends, strict=True)]
        fields = {"path": tmp_path, "num_recent": 8, "group_size": 4, "reuse_capacity": 40}
        with on_the_device(model) as (there, _), cache_class("disk-swap")(there, **fields) as cache:
            for begin, end, logits in zip(begins, ends, expected, strict=True):
                found = there(Fake(ids[:, begin:end]), past_key_values=cache).logits
                assert (values_of(found) - logits).abs().max() <= 1e-4 * logits.abs().max()
            report = cache.report()
    assert report.chosen_by_model == 3 and report.hit_rate is not None and report.hit_rate > 0
    assert report.memory_by_owner["indexer keys"] > 0 and "indexer keys" not in cache.storage.account.host
    assert report.steps.startswith("3 of 3 over the host: records are not in host memory")


def test_steps_that_read_what_an_indexer_chose_wait_for_nothing() -> None:
    """Of two rows, one of them padded, with records in pinned memory: at most 8 launches of a layer more than with
    `DynamicCache`. A step of several tokens goes over the host, and the next ones go on without it, behind tokens that
    were removed and rows that moved, the last with tokens that another's hook repeats; all within the plan."""
    length, counted, stop, model = 60, [63, 64], 64, dense_with_indexers()
    ids, mask = prompt(model, 2, stop + 5), torch.ones(2, stop + 5, dtype=torch.long)
    mask[1, :45], layers = 0, len(model.model.layers)  # fewer tokens are left than an indexer chooses
    sizes = {"num_recent": 8, "group_size": 4, "reuse_capacity": 40, "max_context": 200, "max_batch": 2}

    def run(model: Any, put: Any, cache: Any, begin: int, *ends: int) -> list[torch.Tensor]:
        found = []
        for end in ends:
            given = {"attention_mask": put(mask[:, :end]), "past_key_values": cache}
            found.append(values_of(model(put(ids[:, begin:end]), **given).logits))
            begin = end
        return found

    def all_steps(*given: Any, counting: Any = lambda: None) -> list[torch.Tensor]:
        cache, found = given[-1], run(*given, 0, length, length + 1, counted[0] - 1)
        counting()
        for end in counted:
            found += run(*given, end - 1, end)
            counting()
        cache.activate_past_recording()
        found += run(*given, stop, stop + 4)
        counting()
        cache.crop(-2)
        found += run(*given, stop + 2, stop + 3)
        cache.reorder_cache(torch.tensor([0, 0]))
        mask[1], ids[1], kept = mask[0], ids[0], (mask[1].clone(), ids[1].clone())
        indexer = given[0].model.layers[1].self_attn.indexer
        hook = indexer.register_forward_hook(lambda _, __, chosen: chosen.masked_fill(chosen % 3 == 0, 5))
        found += run(*given, stop + 3, stop + 4)
        hook.remove()
        mask[1], ids[1] = kept
        return found

    with torch.no_grad():
        expected = all_steps(model, lambda given: given, DynamicCache(config=model.config))
        with on_the_device(dense_with_indexers()) as (there, counts):
            plain = DynamicCache(config=model.config)
            run(there, Fake, plain, 0, length, counted[0] - 1)
            counts.clear()
            run(there, Fake, plain, counted[0] - 1, counted[0])
            launches = counts.launches.total()
        with on_the_device(dense_with_indexers(), 1) as (there, counts), contextlib.ExitStack() as closing:
            cache = closing.enter_context(cache_class("disk-swap")(there, engine="memory", **sizes))
            cache.storage.pinned, seen = True, []

            def look() -> None:
                slots = [layer.device_slots for layer in cache.layers]
                seen.append((counts.launches.total(), counts.syncs.total() + counts.blocking.total(), slots))
                counts.clear()

            found = all_steps(there, Fake, cache, counting=look)
            _, *steps, (_, _, freed) = seen
            own, waits, slots = zip(*steps, strict=True)
            assert (min(own) - launches) / layers <= 8 and not any(waits)  # one of the steps may seal a group
            assert None not in slots[-1] and freed == [None] * layers
            report, plan = cache.report(), cache.plan(Geometry.of(there), cache.config, 200, 2)
            assert report.steps == f"{layers} of {layers} layers on the GPU alone"
            assert report.peak_memory_bytes <= plan.peak_bytes
            assert report.hit_rate is not None and report.hit_rate > 0
            cache.crop(-16)  # later units get the same numbers
            assert [layer.device_slots for layer in cache.layers] == [None] * layers
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_a_budget_has_slots_for_what_an_indexer_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the longest context, in little more than the least budget, and for a short one by what it leaves: a step of
    one token waits for nothing, also if it reads the indexer's keys, which leave the device if slots have no room else.
    Candidates go over the host, and give the memory back."""
    cls, ends = cache_class("disk-swap"), [60, 61, 62, 63, 67, 68, 69]
    layer = LayerShape(16, 1, 512, 1, 64, indexer_bytes=256, most_chosen=512, topk=512)
    many = Geometry(layers=(layer,) * 61, dtype=torch.bfloat16, num_blocks=61, hidden_size=896, device="cuda")
    for part, kept in ((3, None), (4, 0), (12, 0)):
        config = cls.fit(many, many.full_kv_bytes(16384, 1) // part, 16384, 1, {"engine": "memory"})
        assert config.indexer_bits == kept and config.reuse_capacity >= 3 * 512
        assert budget.steps_over_host(cls, many, config, 16384, 1) == []
    shared = dataclasses.replace(many, layers=(layer, *[dataclasses.replace(layer, indexer_bytes=0)] * 60))
    (note,) = budget.steps_over_host(cls, shared, dataclasses.replace(config, indexer_bits=8), 16384, 1)
    assert note == "steps of 1 of 61 layers need the host; a GPU alone runs them if indexer_bits is not 8"
    with on_the_device(dense_with_indexers(), 1) as (there, counts), torch.no_grad():
        ids, geometry, layers = prompt(there, 1, 70), Geometry.of(there), len(there.model.layers)
        complete = 4 * there.config.index_topk
        for bits, lends in ((None, False), (0, True)):
            fields: dict[str, Any] = {"num_recent": 8, "group_size": 4, "candidates": True, "indexer_bits": bits}
            fields["engine"] = "memory"
            with pytest.raises(BudgetError) as caught:
                cls.fit(geometry, 1 << 14, 400, 1, fields)
            limit = caught.value.needed + 4096
            config = cls.fit(geometry, limit, 400, 1, fields)
            assert config.reuse_capacity >= complete
            assert budget.steps_over_host(cls, geometry, config, 400, 1) == []
            if lends:
                config = dataclasses.replace(config, reuse_capacity=8)
                (note,) = budget.steps_over_host(cls, geometry, config, 400, 1)
                assert f"{layers} of {layers} layers need the host" in note and "raise memory" in note
            else:
                monkeypatch.setattr(cls, "lend_slots", lambda *_: None)
            with cls(there, config=config) as cache:
                cache.storage.pinned, begin, waits = True, 0, dict[int, int]()
                for end in ends:
                    if end == 67:
                        cache.activate_past_recording()
                    counts.clear()
                    there(Fake(ids[:, begin:end]), past_key_values=cache)
                    begin, waits[end] = end, counts.syncs.total() + counts.blocking.total()
                    slots = [layer.device_slots for layer in cache.layers]
                    assert [one is None for one in slots] == [end in (60, 67)] * layers
                assert waits[62] == waits[63] == waits[69] == 0 < waits[67]
                assert cache.report().steps == f"{layers} of {layers} layers on the GPU alone"
                assert (cache.selecting.lent > 0) == lends
                account = cache.storage.account
                assert account.peak <= limit and account.pressed == 0
                if lends:  # a longer context needs the memory
                    cache._lend(0)
                    for layer in cache.layers:
                        layer.drop_slots_beyond()
                        assert layer.device_slots is None
                    there(Fake(ids[:, begin:]), past_key_values=cache)
                    assert "over the host: the budget has 2 slots a row" in cache.report().steps
                    cache.config = dataclasses.replace(config, reuse_capacity=0)
                    for tokens in (68, 76, 80):  # fewer than an indexer may choose: there are slots for all of them
                        cache._lent_for = (0, 0)
                        cache.lend_slots(SimpleNamespace(sequences=1, history=tokens - 1, tokens=1))
                        assert cache.selecting.lent >= cache._lent_for[1] == tokens + tokens // 8 < complete
            monkeypatch.undo()
