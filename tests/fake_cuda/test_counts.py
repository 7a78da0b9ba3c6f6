"""Launches, waits and blocking copies of a layer of each cache on a device, in a prefill and in a step, against limits.
A count above its limit is a strict expected failure, so that a fix must remove the mark. That of the waits of a prefill
is not strict: a few depend on whether other threads are done."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fake_device import Counts, Fake, fake_cuda, on_the_device, values_of
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache.core import SelectiveCache
from hf_offload_cache.methods.cluster import ClusterPredictor
from hf_offload_cache.registry import CACHES, cache_class

LAYERS, STEPS, SETTLES, MOST_JOINING = 2, 4, 4, 72
"""Layers of a model; steps that are counted, after as many that fill slots; and steps until tokens have joined clusters
and these have settled, the others included."""


class Case(NamedTuple):
    heads: int
    key_heads: int
    dim: int
    rows: int
    tokens: int
    piece: int


CASES = {
    "SmolLM2's heads, one row": Case(9, 3, 64, 1, 1536, 512),
    "SmolLM2's heads, eight rows": Case(9, 3, 64, 8, 1024, 512),
    "Llama's heads, eight rows": Case(32, 8, 128, 8, 1024, 1024),
    "SmolLM2's heads, a long prompt": Case(9, 3, 64, 1, 12000, 3072),
}
MOST = {"prefill": (300, 4, 0), "step": (8, 0, 0)}
"""The most launches, waits and blocking copies of a layer, beyond those with `DynamicCache`. A call as a whole may wait
once more, for a look at a mask that all layers share. In the counted steps of `ClusterCache` no tokens join clusters:
see `JOINING`."""
WITHIN = 380
"""The most launches of a layer of `DiskSwapCache` in a prefill of a long prompt within half its memory."""
FITTING = 36
"""The most launches of a fit of a layer's estimates of `ClusterCache`."""
JOINING = 200
"""The most launches of a layer beyond a usual step's, where tokens join clusters or clusters settle. They settle in
parts: of eight rows of Llama's in three."""


SEALING, MOST_SEALING = 3, 18
"""The most launches of a layer of `DiskSwapCache` beyond a usual step's, where it seals a group: for the record, its
address and its codes. To count the mass that it has estimated takes none. And steps until one does both."""
LOOKS = "model/masks.py:seen_before"
"""Where a step looks at a mask, once for all layers."""


@dataclass(frozen=True)
class Cost:
    """Cost of one layer in a prefill or a step."""

    launches: float
    waits: float
    copies: float
    """Blocking copies to and from memory that is not pinned."""


def queries(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of a model's attention: one kernel, as it is counted, that computes nothing. With many heads or tokens
    attention and projections take most of these tests' time, and nothing counts their values."""
    return query.clone()


class Run(NamedTuple):
    """A model on the device, without a cache's tokens."""

    cache: Any
    ids: torch.Tensor
    counts: Counts
    fed: Callable[[torch.Tensor], None]


@contextmanager
def a_run(
    name: str | None, case: str, memory: str | None = None, steps: int = SETTLES + STEPS, bits: int | None = None,
    **more: Any,
) -> Iterator[Run]:  # fmt: skip
    """A run of the cache `name` (None: `DynamicCache`) with ids (rows, tokens + steps)."""
    heads, key_heads, dim, rows, tokens, _ = CASES[case]
    torch.manual_seed(0)
    wide, small = case in (LLAMA, LONG), case == LLAMA
    sizes = {"hidden_size": (4 if small else 16) * heads, "vocab_size": 512, "intermediate_size": 64, "head_dim": dim}
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=key_heads, num_hidden_layers=LAYERS,
        max_position_embeddings=16384, **sizes,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.randint(3, 500, (rows, tokens + steps), generator=torch.Generator().manual_seed(0))
    attention = queries if wide else functional.scaled_dot_product_attention
    replaced = mock.patch.object(functional, "scaled_dot_product_attention", attention)
    with replaced, tempfile.TemporaryDirectory() as folder, on_the_device(made) as (model, counts), torch.no_grad():
        cache: Any = DynamicCache(config=config)
        if name is not None:
            most = tokens + max(64, steps)
            fields = {"path": folder, "max_context": most, "max_batch": rows, "num_selected": 64, **more}
            cls = cache_class(name)
            if memory is not None or bits is not None:
                fields["entry_bits"] = bits
            cache = cls(model, **fields) if memory is None else cls.for_budget(model, memory, **fields)

        def fed(part: torch.Tensor) -> None:
            model(Fake(part), past_key_values=cache, logits_to_keep=1)
            if name is not None:  # whether a read meets a queued write, and waits for it, depends on time
                cache.storage.prefetcher.flush()

        counts.clear()  # of the plan
        try:
            yield Run(cache, ids, counts, fed)
            if name is not None and not all(layer.selects for layer in cache.selective):
                raise RuntimeError(f"{name} attends to all of {tokens} tokens")
        finally:
            if name is not None:
                cache.close()


class Joining(NamedTuple):
    """What each step of `ClusterCache` after the counted ones launches in all layers, and how often it waits."""

    joining: list[int]
    """Launches of the steps in which tokens join clusters."""
    settling: list[int]
    """Of those in which clusters settle."""
    split: int
    """Steps in which clusters are split."""
    waits: list[int]


@functools.cache
def run_of(
    name: str | None, case: str, memory: str | None, bits: int | None
) -> tuple[dict[str, Cost], Joining | None]:
    """Cost of a layer of the cache `name` (None: `DynamicCache`), in the prefill and in a step, and of "cluster", but
    for a long prompt, what follows. `memory`: within a budget, with records as without one, so that as many are sealed
    in the steps; `bits`: of entries."""
    tokens, piece = CASES[case][4:]
    found, joins = {}, name == "cluster" and case != LONG
    with a_run(name, case, memory, MOST_JOINING if joins else SETTLES + STEPS, bits) as (cache, ids, counts, fed):

        def cost(calls: int, steps: int = 0) -> Cost:
            launches = counts.launches.total() - (counts.launches[LOOKS] if steps else 0)
            parts = launches, max(0, counts.syncs.total() - calls), counts.blocking.total()
            return Cost(*(part / (max(1, steps) * LAYERS) for part in parts))

        for part in ids[:, :tokens].split(piece, 1):
            fed(part)
        if isinstance(cache, SelectiveCache):
            cache.end_prompt()  # as the first step would
        found["prefill"] = cost(-(-tokens // piece))
        for part in ids[:, tokens : tokens + SETTLES].split(1, 1):
            fed(part)
        counts.clear()
        for part in ids[:, tokens + SETTLES : tokens + SETTLES + STEPS].split(1, 1):
            fed(part)
        found["step"] = cost(STEPS, STEPS)
        return found, joining_of(cache, ids[:, tokens + SETTLES + STEPS :], counts, fed) if joins else None


def joining_of(cache: Any, ids: torch.Tensor, counts: Counts, fed: Callable[[torch.Tensor], None]) -> Joining:
    """What the steps of `ids` (B, t) cost."""
    joining, settling, split, waits = list[int](), list[int](), 0, list[int]()
    layers = [layer.history.clustered for layer in cache.selective]
    for part in ids.split(1, 1):
        before = layers[0].sealed, sum(own.buffer.counts.sum() for own in layers)
        used = sum(own.partition.used.sum() for own in layers)
        counts.clear()
        fed(part)
        waits.append(counts.syncs.total() - counts.syncs[LOOKS] + counts.blocking.total())
        launches = counts.launches.total() - counts.launches[LOOKS]
        split += sum(own.partition.used.sum() for own in layers) > used
        if layers[0].sealed > before[0]:
            joining.append(launches)
        elif sum(own.buffer.counts.sum() for own in layers) < before[1]:
            settling.append(launches)
    return Joining(joining, settling, split, waits)


def cost_of(name: str | None, case: str, memory: str | None = None, bits: int | None = None) -> dict[str, Cost]:
    """As `run_of`, without what follows."""
    return run_of(name, case, memory, bits)[0]


WHAT = ("launches", "waits", "copies")
ONE, EIGHT, LLAMA, LONG = CASES
HOLDS = {
    ("disk-swap", "prefill", "launches"): CASES.keys(),
    ("disk-swap", "prefill", "waits"): CASES.keys(),
    ("disk-swap", "prefill", "copies"): CASES.keys(),
    ("disk-swap", "step", "launches"): CASES.keys(),
    ("disk-swap", "step", "waits"): CASES.keys(),
    ("disk-swap", "step", "copies"): CASES.keys(),
    ("abstract-tree", "prefill", "launches"): CASES.keys(),
    ("abstract-tree", "prefill", "waits"): CASES.keys(),
    ("abstract-tree", "prefill", "copies"): CASES.keys(),
    ("abstract-tree", "step", "launches"): CASES.keys(),
    ("abstract-tree", "step", "waits"): CASES.keys(),
    ("abstract-tree", "step", "copies"): CASES.keys(),
    ("cluster", "prefill", "launches"): CASES.keys(),
    ("cluster", "prefill", "waits"): CASES.keys(),
    ("cluster", "prefill", "copies"): CASES.keys(),
    ("cluster", "step", "launches"): CASES.keys(),
    ("cluster", "step", "waits"): CASES.keys(),
    ("cluster", "step", "copies"): CASES.keys(),
    ("spec", "prefill", "launches"): CASES.keys(),
    ("spec", "prefill", "waits"): CASES.keys(),
    ("spec", "prefill", "copies"): CASES.keys(),
    ("spec", "step", "launches"): CASES.keys(),
    ("spec", "step", "waits"): CASES.keys(),
    ("spec", "step", "copies"): CASES.keys(),
}
"""Cache, phase and what, and the cases in which they cost no more than they may. All else is expected to fail; a fix
adds it here."""


def cases() -> Iterator[Any]:
    for name, case, phase, what in itertools.product(CACHES, CASES, MOST, WHAT):
        by_time = (phase, what) == ("prefill", "waits")  # whether a thread is done before it is waited for
        mark = pytest.mark.xfail(strict=not by_time, raises=AssertionError, reason="costs a device too much")
        holds = case in HOLDS.get((name, phase, what), ())
        marks = [*([] if holds else [mark]), *([pytest.mark.slow] if case == LONG and name != "disk-swap" else [])]
        yield pytest.param(name, case, phase, what, marks=marks, id=f"{name}: {case}, {phase}, {what}")


@pytest.mark.parametrize(("name", "case", "phase", "what"), list(cases()))
def test_a_layer_costs_no_more_than_it_may(name: str, case: str, phase: str, what: str) -> None:
    own, plain = (getattr(cost_of(each, case)[phase], what) for each in (name, None))
    if case in HOLDS.get((name, phase, what), ()) and own - plain > MOST[phase][WHAT.index(what)]:
        again, _ = run_of.__wrapped__(name, case, None, None)
        own = getattr(again[phase], what)  # one wait more or less depends on time
    assert own - plain <= MOST[phase][WHAT.index(what)]


@pytest.mark.parametrize("case", [ONE, EIGHT, LLAMA])
def test_steps_in_which_tokens_join_clusters_wait_for_nothing(case: str) -> None:
    """Nor do those in which the host learns of it, and clusters settle and are split."""
    costs, found = run_of("cluster", case, None, None)
    assert found is not None and found.joining and len(found.settling) >= LAYERS and found.split
    assert not any(found.waits), found.waits
    assert max(found.joining + found.settling) / LAYERS - costs["step"].launches <= JOINING, (found, costs)


def test_a_budget_costs_no_more_than_it_may() -> None:
    """Its plan has room for a fit in parts of more than 128 tokens, which have a fraction of the launches."""
    own, plain = cost_of("disk-swap", LONG, "1/2"), cost_of(None, LONG)
    step, prefill = own["step"], own["prefill"]
    assert (step.waits, step.copies) == (0, 0) and step.launches - plain["step"].launches <= MOST["step"][0]
    assert prefill.launches - plain["prefill"].launches <= WITHIN
    assert prefill.copies == 0 and prefill.waits <= MOST["prefill"][1] + 1  # one more or less depends on time


def test_a_fit_of_estimates_costs_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a budget, of all rows together. It copies no pageable memory."""
    tokens, _ = CASES[LONG][4:]
    launches, waits, learn = list[int](), list[int](), ClusterPredictor.learn
    with a_run("cluster", LONG, "1/2", remainder=True) as (cache, ids, counts, fed):

        def watched(*args: Any) -> None:
            before = counts.launches.total(), counts.syncs.total()
            learn(*args)
            launches.append(counts.launches.total() - before[0])
            waits.append(counts.syncs.total() - before[1])

        monkeypatch.setattr(ClusterPredictor, "learn", watched)
        for part in (ids[:, : tokens // 2], ids[:, tokens : tokens + 1]):
            fed(part)
        assert all(layer.predictor.maps is not None for layer in cache.selective) and not counts.blocking
        assert launches[:LAYERS] == [launches[0]] * LAYERS and launches[0] <= FITTING and waits[:LAYERS] == [1] * LAYERS


@pytest.mark.parametrize("bits", [None, 8])
def test_a_step_that_seals_waits_for_nothing(bits: int | None) -> None:
    tokens, piece = CASES[ONE][4:]
    usual, sealing = 0, list[int]()
    with a_run("disk-swap", ONE, steps=MOST_SEALING, bits=bits) as (cache, ids, counts, fed):
        for part in [*ids[:, :tokens].split(piece, 1), ids[:, tokens : tokens + 1]]:
            fed(part)
        history = cache.selective[0].history
        for part in ids[:, tokens + 1 :].split(1, 1):
            before = history.units
            counts.clear()
            fed(part)
            assert not counts.blocking and counts.syncs.total() == counts.syncs[LOOKS]
            usual = usual or counts.launches.total()
            if history.units > before:
                sealing.append(counts.launches.total())
        assert sealing and max(sealing) - usual <= LAYERS * SEALING, (sealing, usual)


@pytest.mark.parametrize("case", [EIGHT, pytest.param(LLAMA, marks=pytest.mark.slow), LONG])
def test_a_prefill_in_8_bits_costs_no_more_than_it_may(case: str) -> None:
    own, plain = cost_of("disk-swap", case, None, 8)["prefill"], cost_of(None, case)["prefill"]
    assert own.launches - plain.launches <= MOST["prefill"][0]
    assert own.waits - plain.waits <= MOST["prefill"][1] and own.copies == 0


def test_decompositions_wait_to_see_whether_they_succeeded() -> None:
    """As torch's do, unless they return that instead, as one number a matrix. Values are those of the host."""
    made = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    square, linalg = made.mT @ made, torch.linalg
    checked = functools.partial(linalg.cholesky_ex, check_errors=True)
    waiting = linalg.eigh, linalg.eigvalsh, linalg.svd, linalg.eigvals, linalg.cholesky, linalg.inv, linalg.lu_factor
    for solved in (*waiting, checked):
        with fake_cuda() as counts:
            solved(Fake(square))
            assert (counts.syncs.total(), counts.blocking.total()) == (1, 0), solved
            assert counts.launches.total() >= 1
    with fake_cuda() as counts:
        there = Fake(square)
        found = [linalg.cholesky_ex(there).L, linalg.inv_ex(there).inverse, linalg.solve_ex(there, there.mT).result]
        assert counts.syncs.total() == 0
        linalg.solve(there, there)
        assert counts.syncs.total() == 1
        torch.tensor([], device="cuda")  # nothing to copy
        assert counts.syncs.total() == 1
        values = [values_of(one) for one in found]
    expected = [linalg.cholesky(square), linalg.inv(square), torch.eye(4).expand(2, 4, 4)]
    torch.testing.assert_close(values, expected)


def test_the_counts_of_a_plain_cache() -> None:
    """`DynamicCache` waits for nothing, and a step launches as much for eight rows as for one."""
    steps = [cost_of(None, case)["step"] for case in CASES]
    assert all(step.waits == step.copies == 0 for step in steps) and len({step.launches for step in steps}) == 1
    assert steps[0].launches > 20
