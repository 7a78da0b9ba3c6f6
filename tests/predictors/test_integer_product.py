"""Products of whole numbers: the same by integers and by float32, whatever a processor has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.predictors import integer_product
from hf_offload_cache.predictors.integer_product import multiplied, rounded

CPU = torch.device("cpu")


def bytes_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Whole numbers of 8 bits, the extremes among them."""
    made = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    made[:, ::7] = 127
    return made


@pytest.fixture(params=[True, False], ids=["integers", "float32"])
def bytes_are_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    fast: bool = request.param
    monkeypatch.setattr(integer_product, "multiplies_bytes", lambda: fast)
    return fast


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "rank", "count"), [(9, 24, 1), (9, 24, 5000), (1, 160, 700), (3, 1024, 65)])
def test_a_product_is_exact(heads: int, rank: int, count: int, transposed: bool, bytes_are_fast: bool) -> None:
    """In the memory that it is given; several pieces among them, and the largest sums that there can be."""
    queries, components = bytes_of(heads, rank, 0), bytes_of(rank, count, 1)
    if transposed:
        components = components.t().contiguous().t()
    memory = torch.zeros(4 * heads * count + 8, dtype=torch.uint8)
    found = multiplied(queries, components, memory)
    assert torch.equal(found.long(), queries.long() @ components.long())
    assert found.dtype == (torch.int32 if bytes_are_fast else torch.float32)
    assert found.data_ptr() == memory.data_ptr() and not memory[-8:].any()


def test_sums_beyond_what_float32_has_are_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd one above 2 ** 24, which float32 does not have."""
    monkeypatch.setattr(integer_product, "multiplies_bytes", lambda: False)
    queries, components = torch.full((1, 1043), 127, dtype=torch.int8), torch.full((1043, 1), 127, dtype=torch.int8)
    queries[0, -1] = components[-1] = 1
    total = int(multiplied(queries, components, torch.zeros(4, dtype=torch.uint8)))
    assert total == 1042 * 127 * 127 + 1 != int(torch.tensor(total, dtype=torch.float32))


def test_queries_are_rounded_in_units_of_their_largest() -> None:
    weights = np.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    queries, unit, used = rounded(weights, CPU)
    assert queries.tolist() == [[32, -127, 64], [0, 0, 0]]
    assert unit[0, 0] == np.float32(2) / np.float32(127) and used.tolist() == queries.tolist()


def test_which_is_tried_once() -> None:
    """And is one of both; a second look takes nothing."""
    integer_product.multiplies_bytes.cache_clear()
    first: Any = integer_product.multiplies_bytes()
    assert first in (True, False) and integer_product.multiplies_bytes() is first
    assert integer_product.multiplies_bytes.cache_info().hits == 1
