"""Sums of what owners plan: phases apart, owners apart, what layers have of their own and what they share."""

from __future__ import annotations

import pytest
import torch
from fake_device import fake_cuda

from hf_offload_cache.core import device_step
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.memory import DryRun, LayerPlan, MemoryAccount, MemoryPlan, Planned
from hf_offload_cache.memory.account import host_side, staged
from hf_offload_cache.methods import spec
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class


def plain(planned: Planned) -> tuple[dict[str, int], dict[str, int]]:
    """Without the owners of nothing."""
    prefill, decode = ({k: v for k, v in part.items() if v} for part in (planned.prefill, planned.decode))
    return prefill, decode


ONE = Planned({"tail": 10, "packing": 4}, {"tail": 10})
OTHER = Planned({"tail": 1}, {"tail": 12, "staging": 7})


def test_both_are_held() -> None:
    assert plain(ONE + OTHER) == ({"tail": 11, "packing": 4}, {"tail": 22, "staging": 7})
    assert plain(Planned() + ONE) == plain(ONE)
    assert plain(Planned.always({"ids": 3})) == ({"ids": 3}, {"ids": 3})


def test_one_at_a_time_is_the_larger_of_each_owner() -> None:
    assert plain(Planned.largest_of([ONE, OTHER])) == ({"tail": 10, "packing": 4}, {"tail": 12, "staging": 7})


def test_so_many_times() -> None:
    assert plain(Planned.sum_of([(ONE, 3)])) == ({"tail": 30, "packing": 12}, {"tail": 30})
    assert plain(Planned.sum_of([(ONE, 0)])) == ({}, {})


def test_layers_add_up_and_what_they_share_does_not() -> None:
    first = LayerPlan(Planned.always({"tail": 10}), Planned({"stream": 8}, {"staging": 5}), 100)
    second = LayerPlan(Planned.always({"tail": 1}), Planned({"stream": 20}, {"staging": 2, "scores": 9}), 7)
    planned, store_bytes = LayerPlan.of_layers([(first, 3), (second, 2)], Planned({"moving rows": 6, "stream": 1}))
    assert plain(planned) == (
        {"tail": 32, "stream": 20, "moving rows": 6},
        {"tail": 32, "staging": 5, "scores": 9},
    )
    assert store_bytes == 314


def test_no_layer_takes_nothing() -> None:
    planned, store_bytes = LayerPlan.of_layers([], Planned())
    assert (plain(planned), store_bytes) == (({}, {}), 0)


def test_a_dry_run_counts_what_constructors_ask_for_and_allocates_nothing() -> None:
    run = DryRun()
    tensor = run.empty("tail", 1 << 20, 1 << 20, dtype=torch.float16)
    assert tensor.is_meta and tensor.shape == (1 << 20, 1 << 20)
    run.keeps("tables", 7)
    run.passes("packing", prefill=5, decode=2)
    run.passes("packing", prefill=3, decode=4)
    run.passes("packing", prefill=1, decode=1, together=True)
    run.moves(9)
    assert run.passing("packing") == (6, 5)
    run.decoding()
    run.free("slots", run.empty("slots", 3, dtype=torch.int32))
    run.empty("slots", 2, dtype=torch.int32)
    plan, tail = run.plan(11), 2 << 40
    assert plain(plan.own) == ({"tail": tail, "tables": 7}, {"tail": tail, "tables": 7, "slots": 8})
    assert plain(plan.shared) == ({"packing": 6, "moving rows": 9}, {"packing": 5, "moving rows": 9})
    assert plan.store_bytes == 11


def test_an_account_allocates_and_books_in_one() -> None:
    account = MemoryAccount(100)
    tensor = account.empty("tail", 4, 5, dtype=torch.float32)
    assert (account.by_owner["tail"], tensor.shape) == (80, (4, 5))
    with pytest.raises(BudgetError, match="slots needs 24 bytes"):
        account.empty("slots", 6, dtype=torch.float32)
    with pytest.raises(RuntimeError):  # a device that has not so much
        MemoryAccount().empty("tail", 1 << 60, dtype=torch.float32)
    account.free("tail", tensor[1:2])  # the memory behind it
    assert account.current == 0 and account.peak == 80


def test_an_account_has_a_limit_for_each_side() -> None:
    """Records and what reads fill there are the host's; either side is full by itself, and says so."""
    account = MemoryAccount(100, 50, host_side("cuda", False))
    account.hold("slots", 90)
    account.hold("records in memory", 30)
    account.hold_all(staged("staging", "cuda"), 10)
    assert (account.current, account.host_bytes, account.peak, account.host_peak) == (140, 40, 100, 40)
    assert account.has_room(10, "tables") and not account.has_room(11, "tables") and not account.has_room(1)
    for owner, nbytes, words in (
        ("scores", 1, "memory: scores needs 1 bytes of device memory in addition to the 100 in use (slots 90 B, "),
        ("host slots", 11, "host_memory: host slots needs 11 bytes of host memory in addition to the 40 in use ("),
    ):
        with pytest.raises(BudgetError) as caught:
            account.hold(owner, nbytes)
        assert str(caught.value).startswith(words) and f"raise {words.partition(':')[0]}, or" in str(caught.value)
    account.release("staging", 10)
    account.hold("tables", 5)
    with pytest.raises(BudgetError, match="staging, host needs 6"):  # then the device's half is not booked either
        account.hold_all(staged("staging", "cuda"), 6)
    account.release("tables", 5)
    assert (account.by_owner["staging"], account.current, account.host_bytes) == (0, 130, 40)
    account.observe("records in memory", 60)  # which nobody can refuse
    assert (account.host_bytes, account.host_peak) == (70, 70)
    account.release("records in memory", 60)
    account.reset_peaks()
    assert (account.current, account.host_bytes, account.peak, account.host_peak) == (100, 10, 90, 10)


def test_spare_memory_of_a_side_makes_room_there() -> None:
    class Slots:
        def free_memory(self) -> None:
            account.release("host slots", 40)

    account, slots = MemoryAccount(100, 50, host_side("cuda", False)), Slots()
    account.hold("host slots", 40)
    account.spare(slots)
    account.hold("tables", 30)
    assert (account.by_owner["host slots"], account.host_bytes, account.pressed) == (0, 30, 1)
    with pytest.raises(BudgetError, match="tables needs 51"):  # more than the limit: nothing is freed for that
        account.hold("tables", 51)


def test_on_a_cpu_there_is_one_side() -> None:
    account = MemoryAccount(100, None, host_side("cpu", False))
    account.hold_all(staged("staging", "cpu"), 60)
    with pytest.raises(BudgetError, match=r"memory: records in memory needs 41 bytes in addition to the 60"):
        account.hold("records in memory", 41)
    assert (account.current, account.host_bytes) == (60, 0)
    assert host_side("cpu", True) == {"records in memory"} < host_side("cuda", False)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("engine", ["memory", "uring", "mapped"])
def test_a_plan_has_two_sides_on_a_gpu(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same owners as on a CPU, each on one side; what reads fill is on both. Steps without the host have others."""
    cls, sides = cache_class(name), {}
    settings = cls.config_class.load(None, {"engine": engine, "max_context": 4096, "max_batch": 2})
    alone = cls.plan(Geometry.uniform(4, 8, 2, 32, torch.bfloat16, device="cuda"), settings, 4096, 2)
    for own, host in ((alone.prefill, alone.host_prefill), (alone.decode, alone.host_decode)):
        assert not own.keys() & host_side("cuda", False) and host.keys() <= host_side("cuda", False)
    assert name == "spec" or ("selection" in alone.decode) == (engine != "memory")
    monkeypatch.setattr(device_step, "rehearse", lambda *_: False)
    for module in (spec.attention, spec.copy):
        monkeypatch.setattr(module, "plans_step", lambda *_: False)
    for device in ("cpu", "cuda"):
        limits = {"engine": engine, "max_context": 4096, "max_batch": 2}
        config = cls.config_class.load(None, {**limits, "block_tokens": 1024})  # a device's blocks are longer
        sides[device] = cls.plan(Geometry.uniform(4, 8, 2, 32, torch.bfloat16, device=device), config, 4096, 2)
    cpu, cuda = sides["cpu"], sides["cuda"]
    for own, host, there, host_there in (
        (cpu.prefill, cpu.host_prefill, cuda.prefill, cuda.host_prefill),
        (cpu.decode, cpu.host_decode, cuda.decode, cuda.host_decode),
    ):
        assert there.get("staging") == host_there.pop("staging, host", None) == own.get("staging")
        streamed, read = there.get("stream buffers", 0), own.get("stream buffers", 0)
        assert host_there.pop("stream buffers, host", 0) == read
        assert read <= streamed <= read * (1 + 12 / 256), "a kernel that reads records has 12 bytes for each"
        assert not there.keys() & host_there.keys() and {*own, *host} <= {*there, *host_there}
        assert host_there.keys() <= host_side("cuda", False) and {"tables", "token ids"} <= host_there.keys()
        assert not there.keys() & host_side("cuda", False)
    assert ("records in memory" in cuda.host_decode) == (engine != "uring")
    records = cuda.host_bytes if engine == "memory" else cuda.disk_bytes
    assert records > 0.95 * cuda.full_kv_bytes and cuda.peak_bytes + cuda.host_bytes >= cpu.peak_bytes + cpu.host_bytes


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("engine", ["memory", "direct"])
def test_a_plan_for_a_gpu_elsewhere_is_that_of_its_machine(name: str, engine: str) -> None:
    cls, geometry = cache_class(name), Geometry.uniform(4, 8, 2, 32, torch.bfloat16, device="cuda")
    config = cls.config_class.load(None, {"engine": engine, "max_context": 4096, "max_batch": 2})
    elsewhere = cls.plan(geometry, config, 4096, 2)
    with fake_cuda():
        assert cls.plan(geometry, config, 4096, 2) == elsewhere


def test_the_worst_moment_of_a_plan() -> None:
    plan = MemoryPlan.of(Planned({"a": 5, "b": 0}, {"a": 3, "c": 4}), disk_bytes=9, full_kv_bytes=50, weight_bytes=70)
    assert (plan.prefill, plan.decode) == ({"a": 5}, {"a": 3, "c": 4})
    assert (plan.prefill_bytes, plan.decode_bytes, plan.peak_bytes) == (5, 7, 7)
    assert plan.to_dict() == {
        "prefill": {"a": 5}, "decode": {"a": 3, "c": 4}, "disk_bytes": 9, "full_kv_bytes": 50, "weight_bytes": 70,
        "host_prefill": {}, "host_decode": {}, "device": "cpu", "host_bytes": 0,
        "prefill_bytes": 5, "decode_bytes": 7, "peak_bytes": 7, "needless": None,
    }  # fmt: skip


def test_what_is_apart_is_in_no_sum() -> None:
    held = Planned({"a": 5, "stored": 30}, {"a": 3, "stored": 40})
    plan = MemoryPlan.of(held, disk_bytes=0, full_kv_bytes=50, weight_bytes=70, host={"stored"})
    assert (plan.prefill, plan.decode, plan.peak_bytes, plan.host_bytes) == ({"a": 5}, {"a": 3}, 5, 40)
