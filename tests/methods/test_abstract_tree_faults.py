"""`AbstractTreeCache` whose n-th read, write or allocation fails: a step is lost, and nothing else."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import prompt
from long_llama import long_model

from hf_offload_cache import AbstractTreeCache
from hf_offload_cache.errors import BudgetError, StoreError

LENGTH, STEPS = 1100, 5
FIELDS: dict[str, Any] = {
    "chunk_size": 64, "num_selected": 128, "num_opened": 256, "num_recent": 8, "num_sinks": 3, "early_steps": 2,
    "reuse_capacity": 64, "dense_layers": 1, "resident_layers": 0, "abstracts": "disk", "engine": "mapped",
}  # fmt: skip


def step(cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return long_model()(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def parts(rows: int = 2) -> list[torch.Tensor]:
    return list(prompt(long_model(), rows, STEPS, 11).split(1, 1))


@contextlib.contextmanager
def failing(owner: Any, name: str, number: int, error: Callable[[], Exception]) -> Iterator[list[Any]]:
    """The call `number`, from 1, of the method `name` of `owner` raises; the calls. What is held less than before, or
    of token ids, which come when a step is over, is not refused; nor abstracts in memory, without which a layer attends
    to everything until its next chunk."""
    original, calls = getattr(owner, name), []

    def watched(*given: Any, **fields: Any) -> Any:
        if name == "hold" and (given[1] <= 0 or given[0] in ("token ids", "summaries")):
            return original(*given, **fields)
        calls.append(given)
        if len(calls) == number:
            raise error()
        return original(*given, **fields)

    setattr(owner, name, watched)
    try:
        yield calls
    finally:
        delattr(owner, name)


def broken() -> StoreError:
    return StoreError(errno.EIO, "made to fail")


def assert_all_is_back(cache: Any) -> None:
    for areas in (cache.selecting.areas, cache.selecting.looks):
        assert (areas._borrowed, areas._lent) == ([], 0)


def sweep(
    tmp_path: Path, fields: dict[str, Any], owner_of: Callable[[Any], Any], name: str, error: Callable[[], Exception],
    stride: int, first: list[torch.Tensor] | None = None, alike: bool = True,
) -> tuple[int, int]:  # fmt: skip
    """Every `stride`-th call fails in the steps after a prompt: the step that raises is made once more, and all logits
    are those of an undisturbed cache; unless they need not be `alike`, when the prompt is compared. How many were
    tried, and how many raised."""
    given, number, raised = parts() if first is None else first, 1, 0
    with AbstractTreeCache(long_model(), path=tmp_path, **fields) as prefilled:
        step(prefilled, prompt(long_model(), 2, LENGTH))
        whole = [layer.whole() for layer in prefilled.offloaded]
        with prefilled.fork() as twin:
            expected = [step(twin, part) for part in given]
        while True:
            with prefilled.fork() as cache, failing(owner_of(cache), name, number, error) as calls:
                for part, right in zip(given, expected, strict=True):
                    length = cache.tokens
                    try:
                        found = step(cache, part)
                    except (StoreError, BudgetError):
                        raised += 1
                        assert cache.tokens == length
                        found = step(cache, part)
                    assert torch.equal(found, right) if alike else found.isfinite().all(), (number, name)
                for layer in cache.selective:
                    layer.drop_ahead()
                assert_all_is_back(cache)
                if len(calls) < number:
                    return number, raised
                for layer, came in zip(cache.offloaded, whole, strict=True) if not alike else ():
                    assert all(map(torch.equal, layer.whole(LENGTH), came))
            number += stride


@pytest.mark.parametrize(
    ("look_ahead", "residents"), [pytest.param(False, 0, marks=pytest.mark.slow), (True, 0), (False, 2)]
)
def test_the_nth_read(look_ahead: bool, residents: int, tmp_path: Path) -> None:
    fields = {**FIELDS, "look_ahead": look_ahead, "resident_layers": residents}
    tried, raised = sweep(tmp_path, fields, lambda cache: cache.storage.prefetcher, "read", broken, 1)
    assert tried > (10 if residents else 20) and raised > 3


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fields", [{}, {"compress": 1.0, "chunk_size": 64, "dense_layers": 0}, {"resident_layers": 2}],
    ids=["plain", "int4", "resident"],
)  # fmt: skip
def test_the_nth_allocation(fields: dict[str, Any], stride: int, tmp_path: Path) -> None:
    tried, raised = sweep(
        tmp_path, {**FIELDS, "look_ahead": True, **fields}, lambda cache: cache.storage.account, "hold",
        lambda: BudgetError("memory is 1 byte and this would make it 2: nothing was taken"), stride,
    )  # fmt: skip
    assert tried > 20 and raised > 5 / stride


def test_the_nth_write(tmp_path: Path) -> None:
    many = list(prompt(long_model(), 2, 130, 11).split(26, 1))
    fields = {**FIELDS, "look_ahead": False, "compress": 0.0}
    tried, raised = sweep(tmp_path, fields, lambda cache: cache.storage.prefetcher, "write", broken, 1, many)
    assert tried > 10 and raised > 5


@pytest.mark.parametrize("look_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_nth_read_with_replicas(share: float, look_ahead: bool, tmp_path: Path) -> None:
    fields = {**FIELDS, "dense_layers": 0, "look_ahead": look_ahead, "compress": share}
    tried, _ = sweep(tmp_path, fields, lambda cache: cache.storage.prefetcher, "read", broken, 3, alike=False)
    assert tried > 20
