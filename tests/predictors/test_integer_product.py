"""Products of whole numbers: the same by integers and by float32, whatever a processor has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.methods.disk_swap import compact_keys, multiplied, rounded

CPU = torch.device("cpu")


def bytes_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Whole numbers of 8 bits, the extremes among them."""
    made = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    made[:, ::7] = 127
    return made


@pytest.fixture(params=[True, False], ids=["integers", "float32"])
def bytes_are_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    fast: bool = request.param
    monkeypatch.setattr(compact_keys, "multiplies_bytes", lambda: fast)
    return fast


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "rank", "count"), [(9, 24, 1), (9, 24, 5000), (1, 160, 700), (3, 1024, 65)])
def test_a_product_is_exact(heads: int, rank: int, count: int, transposed: bool, bytes_are_fast: bool) -> None:
    queries, components = bytes_of(heads, rank, 0), bytes_of(rank, count, 1)
    if transposed:
        components = components.t().contiguous().t()
    memory = torch.zeros(4 * heads * count + 8, dtype=torch.uint8)
    found = multiplied(queries, components, memory)
    assert torch.equal(found.long(), queries.long() @ components.long())
    assert found.dtype == (torch.int32 if bytes_are_fast else torch.float32)
    assert found.data_ptr() == memory.data_ptr() and not memory[-8:].any()


def test_the_largest_sums_are_exact(bytes_are_fast: bool) -> None:
    queries = torch.tensor([[127], [-127]], dtype=torch.int8).expand(-1, 1024).contiguous()
    found = multiplied(queries, torch.full((1024, 3), -128, dtype=torch.int8), torch.zeros(24, dtype=torch.uint8))
    assert found.tolist() == [[-127 * 128 * 1024] * 3, [127 * 128 * 1024] * 3]


def test_sums_beyond_what_float32_has_are_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd one above 2 ** 24, which float32 does not have."""
    monkeypatch.setattr(compact_keys, "multiplies_bytes", lambda: False)
    queries, components = torch.full((1, 1043), 127, dtype=torch.int8), torch.full((1043, 1), 127, dtype=torch.int8)
    queries[0, -1] = components[-1] = 1
    total = int(multiplied(queries, components, torch.zeros(4, dtype=torch.uint8)))
    assert total == 1042 * 127 * 127 + 1 != int(torch.tensor(total, dtype=torch.float32))


def test_queries_are_rounded_in_units_of_their_largest() -> None:
    weights = np.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    queries, unit, used = rounded(weights, CPU)
    assert queries.tolist() == [[32, -127, 64], [0, 0, 0]]
    assert unit[0, 0] == np.float32(2) / np.float32(127) and used.tolist() == queries.tolist()


@pytest.mark.parametrize("faster", ["integers", "float32"])
def test_the_faster_way_is_taken(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, product = [0.0], torch._int_mm

    def integers(*given: Any, **more: Any) -> torch.Tensor:
        clock[0] += 1.0 if faster == "integers" else 3.0
        return product(*given, **more)

    def widened(queries: torch.Tensor, components: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert queries.device.type == components.device.type == "cpu"
        clock[0] += 2.0
        return out

    monkeypatch.setattr(compact_keys.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "_int_mm", integers)
    monkeypatch.setattr(compact_keys, "_widened", widened)
    compact_keys.multiplies_bytes.cache_clear()
    try:
        with torch.device("meta"):
            assert compact_keys.multiplies_bytes() is (faster == "integers")
        done = clock[0]
        compact_keys.multiplies_bytes()
        assert clock[0] == done
    finally:
        compact_keys.multiplies_bytes.cache_clear()
