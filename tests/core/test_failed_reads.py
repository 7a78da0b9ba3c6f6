"""A read or an allocation that fails in decoding: a guess is dropped, a step is lost; the context stays."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_cache import Gathers
from harness import Decoded, assert_exact, prompt
from long_models import LENGTH, follow, long_tiny, singles, sparse, step
from pairwise import in_full

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.errors import BudgetError, StoreError, StoreFullError
from hf_offload_cache.fetch import Fetcher, Prefetcher, Storage
from hf_offload_cache.testing import FaultyStore

STEPS = 8
FIELDS: dict[str, Any] = {"reuse_capacity": 0}
"""Every step has something to read."""


class Failing:
    """Reads of the prefetcher, of which the next `times` within `where` fail as they are waited for."""

    def __init__(self, patch: pytest.MonkeyPatch, where: str) -> None:
        self.times, self.failed, self.within = 0, 0, False
        read, call = Prefetcher.read, getattr(Fetcher, where)

        def watched(fetcher: Fetcher, *args: Any, **kwargs: Any) -> Any:
            before, self.within = self.within, True
            try:
                return call(fetcher, *args, **kwargs)
            finally:
                self.within = before

        def reading(prefetcher: Prefetcher, store: Any, ids: Any, out: torch.Tensor, **kwargs: Any) -> Any:
            ticket = read(prefetcher, store, ids, out, **kwargs)
            if self.within and len(ids) and self.times:
                self.times -= 1
                self.failed += 1
                ticket.wait()
                out.fill_(0xFF)  # NaN, if anybody took it

                def fail() -> float:
                    raise StoreError(errno.EIO, "layer 1: read was made to fail")

                ticket.wait = fail  # type: ignore[method-assign]
            return ticket

        patch.setattr(Fetcher, where, watched)
        patch.setattr(Prefetcher, "read", reading)


@pytest.mark.parametrize("times", [2, *in_full((1, 3))])
def test_a_guess_that_fails_is_dropped(
    times: int, monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers
) -> None:
    """The step is right, to the bit, and so are those that follow: what was guessed is read again."""
    model = long_tiny("llama")
    parts = singles(model, 2, STEPS)
    with sparse(model, **FIELDS) as cache, sparse(model, **FIELDS) as twin:
        for held in (cache, twin):
            step(model, held, prompt(model, 2, LENGTH))
        expected = follow(model, twin, parts)
        reads = Failing(monkeypatch, "ahead")
        first = follow(model, cache, parts[:2])
        reads.times = times
        rest = follow(model, cache, parts[2:])
        assert reads.failed == times
        assert torch.equal(expected.logits, torch.cat([first.logits, rest.logits]))
        assert cache.get_seq_length() == LENGTH + STEPS
    assert len(checked_gathers) == 2 * 3 * STEPS


@pytest.mark.parametrize("layer", [1, *in_full((0, 2))])
def test_a_read_that_fails_loses_its_step_alone(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers
) -> None:
    """It is taken back, the same token again gives what it gives an undisturbed cache, and the context is saved."""
    model = long_tiny("llama")
    parts = singles(model, 2, STEPS)
    fields = {**FIELDS, "look_ahead": False, "path": tmp_path, "engine": "mapped"}
    with sparse(model, **fields) as cache, sparse(model, **fields) as twin:
        for held in (cache, twin):
            step(model, held, prompt(model, 2, LENGTH))
        expected = follow(model, twin, parts)
        first = follow(model, cache, parts[:3])
        with monkeypatch.context() as patch:
            reads, number = Failing(patch, "gather"), 0
            gather = Fetcher.gather

            def counted(fetcher: Fetcher, *args: Any) -> Any:
                nonlocal number
                number += 1
                reads.times = int(number == layer + 1)
                return gather(fetcher, *args)

            patch.setattr(Fetcher, "gather", counted)
            with pytest.raises(StoreError, match="made to fail"):
                step(model, cache, parts[3])
            assert reads.failed == 1
        assert [held.length for held in cache.offloaded] == [LENGTH + 3] * 3
        assert cache.input_ids.shape == (2, LENGTH + 3)
        cache.save(tmp_path / "context")
        rest = follow(model, cache, parts[3:])
        assert_exact(expected, Decoded(expected.tokens, torch.cat([first.logits, rest.logits])))
        with DiskSwapCache.open(tmp_path / "context", model, engine="mapped", look_ahead=False) as opened:
            assert opened.get_seq_length() == LENGTH + 3
            again = follow(model, opened, parts[3:])
            assert_exact(Decoded(expected.tokens, expected.logits[3:]), Decoded(expected.tokens, again.logits))
    assert len(checked_gathers) >= 3 * (2 * STEPS + 5)


@pytest.mark.parametrize("number", [0, 3, *in_full((1, 2))])
def test_an_allocation_beyond_the_budget_loses_its_step_alone(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers
) -> None:
    """The `number`-th allocation of the first step that selects is refused. Nothing is held too often afterwards."""
    model = long_tiny("llama")
    parts = singles(model, 2, STEPS)
    fields: dict[str, Any] = {"reuse_capacity": 40, "look_ahead": False, "path": tmp_path, "engine": "mapped"}
    with sparse(model, **fields) as cache, sparse(model, **fields) as twin:
        for held in (cache, twin):
            step(model, held, prompt(model, 2, LENGTH))
        expected = follow(model, twin, parts)
        account, hold, asked = cache.storage.account, cache.storage.account.hold, []

        def refusing(owner: str, nbytes: int) -> None:
            if nbytes and owner in ("reuse slots", "staging", "selection", "scores"):
                asked.append(owner)
                if len(asked) == number + 1:
                    raise BudgetError("memory is 1 byte and this would make it 2: nothing was taken")
            hold(owner, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(account, "hold", refusing)
            with pytest.raises(BudgetError, match="nothing was taken"):
                step(model, cache, parts[0])
        assert len(asked) == number + 1
        assert [held.length for held in cache.offloaded] == [LENGTH] * 3
        cache.save(tmp_path / "context")
        assert_exact(expected, follow(model, cache, parts))
        held, plain = (dict(one.storage.account.by_owner) for one in (cache, twin))
        for owner in ("reuse slots", "selection", "staging", "scores"):
            assert held.get(owner, 0) <= plain.get(owner, 0), owner
    assert {owner: size for owner, size in account.by_owner.items() if size} == {}
    assert len(checked_gathers) >= 2 * 3 * STEPS


def test_a_write_that_failed_is_not_dropped_with_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_tiny("llama")
    fields = {"reuse_capacity": 0, "engine": "direct", "path": tmp_path, "num_selected": 2048}
    faulty: list[FaultyStore] = []
    new_store = Storage._new_store

    def wrapped(storage: Storage, *arguments: Any) -> Any:
        faulty.append(FaultyStore(new_store(storage, *arguments), "write", 10**6, errno.ENOSPC))
        return faulty[-1]

    monkeypatch.setattr(Storage, "_new_store", wrapped)
    with sparse(model, **fields) as cache:
        step(model, cache, prompt(model, 1, LENGTH))
        follow(model, cache, singles(model, 1, 2))
        cache.storage.prefetcher.flush()
        for store in faulty:
            store._failing = range(store.calls + 1, store.calls + 2)
        with pytest.raises(StoreFullError, match=r"layer \d: .*No space left"):  # of the write that ended first
            follow(model, cache, singles(model, 1, 12))
