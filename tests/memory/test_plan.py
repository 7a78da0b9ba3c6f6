"""Sums of what owners plan: phases apart, owners apart, what layers have of their own and what they share."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.errors import BudgetError
from hf_offload_cache.memory import DryRun, LayerPlan, MemoryAccount, MemoryPlan, Planned


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


def test_the_worst_moment_of_a_plan() -> None:
    plan = MemoryPlan.of(Planned({"a": 5, "b": 0}, {"a": 3, "c": 4}), disk_bytes=9, full_kv_bytes=50, weight_bytes=70)
    assert (plan.prefill, plan.decode) == ({"a": 5}, {"a": 3, "c": 4})
    assert (plan.prefill_bytes, plan.decode_bytes, plan.peak_bytes) == (5, 7, 7)
    assert plan.to_dict() == {
        "prefill": {"a": 5}, "decode": {"a": 3, "c": 4}, "disk_bytes": 9, "full_kv_bytes": 50, "weight_bytes": 70,
        "host_bytes": 0, "prefill_bytes": 5, "decode_bytes": 7, "peak_bytes": 7, "needless": None,
    }  # fmt: skip


def test_what_is_apart_is_in_no_sum() -> None:
    held = Planned({"a": 5, "stored": 30}, {"a": 3, "stored": 40})
    plan = MemoryPlan.of(held, disk_bytes=0, full_kv_bytes=50, weight_bytes=70, apart={"stored"})
    assert (plan.prefill, plan.decode, plan.peak_bytes, plan.host_bytes) == ({"a": 5}, {"a": 3}, 5, 40)
