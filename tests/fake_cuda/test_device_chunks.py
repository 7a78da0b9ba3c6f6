"""Steps of `AbstractTreeCache` on a device that reads records by itself: twins of kernels, on a device that only
counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import Counts, Fake, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, AbstractTreeConfig
from hf_offload_cache.core import device_step
from hf_offload_cache.core.plan import layer_kinds
from hf_offload_cache.fetch import Choice, Fetcher
from hf_offload_cache.fetch.choice import DeviceChoice, InSlots
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.abstract_tree import DevicePredictor, bounds, likely, predictor
from hf_offload_cache.model import Geometry

TOKENS, STEPS, LAYERS, CHUNK = 640, 10, COMMON["num_hidden_layers"], 8
Put = Callable[[torch.Tensor], torch.Tensor]
FIELDS = {"max_context": TOKENS + 128, "num_selected": 32, "engine": "memory", "chunk_size": CHUNK, "early_steps": 0}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "8 bits": {"entry_bits": 8},
    "all that is read": {"num_opened": 32},
    "a dense layer, resident": {"dense_layers": 1},
    "no slots, no sinks": {"reuse_capacity": 0, "num_sinks": 0},
    "early steps, then others": {"early_steps": STEPS // 2},
}


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


def fed(model: Any, cache: Any, ids: torch.Tensor, put: Put = Fake, **given: Any) -> torch.Tensor:
    """Logits (B, t, vocabulary) of all `ids` (B, t) in one forward."""
    with torch.no_grad():
        return values_of(model(put(ids), past_key_values=cache, **given).logits)


def decoded(model: Any, cache: Any, ids: torch.Tensor, put: Put = Fake) -> torch.Tensor:
    """Logits of each step after a prompt of `TOKENS` tokens."""
    fed(model, cache, ids[:, :TOKENS], put, logits_to_keep=1)
    return torch.cat([fed(model, cache, part, put) for part in ids[:, TOKENS:].split(1, 1)], 1)


@functools.cache
def exact_steps(rows: int) -> torch.Tensor:
    """What `decoded` gives with full attention behind a prompt of so many rows: (B, STEPS, vocabulary)."""
    model, host = llama(), DynamicCache(config=llama().config)
    return decoded(model, host, prompt(model, rows, TOKENS + STEPS), lambda given: given)


@contextmanager
def a_device(rows: int = 1, seed: int | None = None, **fields: Any) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts. `seed`: of its streams."""
    given = {**FIELDS, "max_batch": rows, **fields}
    with on_the_device(llama(), seed) as (model, counts), AbstractTreeCache(model, **given) as cache:
        cache.storage.pinned = True
        yield model, cache, counts


def of_slots(cache: Any) -> list[Any]:
    return [layer.device_slots for layer in cache.selective]


@pytest.mark.parametrize(("way", "rows", "seed"), [(way, 1 + index % 2, index) for index, way in enumerate(WAYS)])
def test_steps_on_a_device_choose_what_those_on_the_host_do(
    way: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wait for nothing, the writer included."""
    ids, fields = prompt(llama(), rows, TOKENS + STEPS), WAYS[way]
    exact = exact_steps(rows)
    plain = llama()
    with AbstractTreeCache(plain, **{**FIELDS, "max_batch": rows, **fields}) as cache:
        on_host = decoded(plain, cache, ids, lambda given: given)
        expected = cache.report()
    with a_device(rows, seed, **fields) as (model, cache, counts):
        fed(model, cache, ids[:, :TOKENS], logits_to_keep=1)
        steps = []
        for part in ids[:, TOKENS:].split(1, 1):
            steps.append(fed(model, cache, part))
            if len(steps) == 1:  # which frees the prefill's buffers
                counts.clear()
                monkeypatch.setattr(cache.storage.prefetcher, "flush", None)
        assert not counts.syncs and not counts.blocking
        monkeypatch.undo()
        assert any(layer.history.units > (TOKENS - 32) // CHUNK for layer in cache.selective)  # some were sealed
        assert all(slots is not None and slots._uses.any() for slots in of_slots(cache))
        report = cache.report()
    on_device = torch.cat(steps, 1)
    torch.testing.assert_close(on_device, on_host, rtol=1e-4, atol=1e-4)  # of equal chunks both choose the first
    assert float((on_host - exact).square().mean().sqrt()) > 1e-4
    assert report.selected_fraction == pytest.approx(expected.selected_fraction, rel=0.01)


class Compared:
    """Lets each choice on a device follow the host's on the same query, and counts the rows that differ."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choices = self.fewer = 0
        self.looks = 0
        choose = DevicePredictor.choose_on_device

        def compared(made: DevicePredictor, query: Any, budget: int, looks: bool) -> Any:
            decision, expected = choose(made, query, budget, looks), made.select(query, budget, False)
            if isinstance(decision, DeviceChoice):
                assert isinstance(expected, Choice)
                self.same_units(decision, expected)
                return decision
            assert not isinstance(expected, Choice)
            return self.looked(made, decision, expected)

        monkeypatch.setattr(DevicePredictor, "choose_on_device", compared)

    def same_units(self, ours: DeviceChoice, host: Choice) -> None:
        units = values_of(ours.units).numpy()
        padded = np.full(units.shape, -1)
        padded[:, : host.units.shape[1]] = host.units
        assert np.array_equal(units, padded)
        self.choices += 1
        self.fewer += bool((units < 0).any())

    def looked(self, made: Any, decision: Any, expected: Any) -> Generator[DeviceChoice, InSlots, DeviceChoice]:
        ours, asked = next(decision), next(expected)
        self.same_units(ours, asked)
        there = yield ours
        rows, count = asked.units.shape
        data, slots = values_of(there.data), values_of(there.slots)[:, :count].long()
        payloads = torch.stack([one[place.clamp(min=0)] for one, place in zip(data, slots, strict=True)])
        entries = made.form.unpacked(payloads.flatten(0, 1)).reshape(rows, count, *(-1, made.form.entry_width))
        with pytest.raises(StopIteration) as end:
            expected.send(Fake(entries))
        with pytest.raises(StopIteration) as last:
            decision.send(there)
        keep = values_of(last.value.value.keep).numpy()
        assert np.array_equal(keep[:, :count], end.value.value.keep) and not keep[:, count:].any()
        assert keep.sum((1, 2)).max() <= last.value.value.attended
        self.looks += 1
        return last.value.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("judge", [likely, bounds])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"entry_bits": 8, "num_sinks": 20}, {"num_opened": 32}, {"dense_layers": 3, "dense_chunk_size": 2},
        {"chunk_size": 2, "num_selected": 24, "num_sinks": 1},
    ],
    ids=["default", "8 bits", "complete", "dense", "small"],
)  # fmt: skip
def test_choices_of_a_models_queries_are_the_hosts(
    fields: dict[str, Any], judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and tokens, each step and layer, in float32, ties to the first. Small chunks have close bounds."""
    monkeypatch.setattr(DevicePredictor, "judges_by", staticmethod(judge))
    ids = prompt(llama(), 2, TOKENS + 3)
    with a_device(2, **fields) as (model, cache, _):
        compared = Compared(monkeypatch)
        decoded(model, cache, ids)
        assert all(of_slots(cache)) and compared.choices == 3 * LAYERS
        complete = "num_opened" in fields or "dense_layers" in fields
        assert compared.looks == (0 if complete else 3 * LAYERS)
        assert (compared.fewer > 0) == (fields.get("chunk_size") == 2)  # some count with all their tokens


@pytest.mark.parametrize("num_sinks", [0, 4])
@pytest.mark.parametrize("heads", [1, 4])
def test_queries_that_are_nan_choose_as_on_the_host(
    heads: int, num_sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's defect stays its own: chunks and tokens that exist are attended to, by the heads that have scores."""
    ids, made = prompt(llama(), 1, TOKENS + 2), llama()
    with torch.no_grad():
        made.model.layers[1].self_attn.q_proj.weight[: heads * 16] = torch.nan
    monkeypatch.setitem(globals(), "llama", lambda: made)
    with a_device(chunk_size=64, num_sinks=num_sinks) as (model, cache, _):
        compared = Compared(monkeypatch)
        decoded(model, cache, ids)
        assert all(of_slots(cache)) and compared.choices == compared.looks == 2 * LAYERS and not compared.fewer


@pytest.mark.parametrize(
    "fields", [{"abstracts": "disk"}, {"compress": 0.5}, {}], ids=["abstracts on disk", "replicas", "too many tokens"]
)
def test_what_a_device_cannot_do_goes_over_the_host(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not fields:
        monkeypatch.setattr(predictor, "MOST_UNITS", 128)
    ids = prompt(llama(), 1, TOKENS + 3)
    plain, sizes = llama(), {**FIELDS, "chunk_size": 64, **fields}
    with AbstractTreeCache(plain, **sizes) as cache:
        expected = decoded(plain, cache, ids, lambda given: given)
    with a_device(**sizes) as (model, cache, _):
        found = decoded(model, cache, ids)
        assert of_slots(cache) == [None] * LAYERS
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_padding_and_candidates_go_over_the_host_and_back() -> None:
    ids = prompt(llama(), 2, TOKENS + 6)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    with a_device(2) as (model, cache, _):
        decoded(model, cache, ids[:, : TOKENS + 1])
        for place, width in ((TOKENS + 1, 3), (TOKENS + 4, 1)):
            fed(model, cache, ids[:, place : place + width])
            assert all(slots is None for slots in of_slots(cache)) == (width > 1)
        device = [layer.selecting.padded for layer in cache.selective]
        assert not any(device)
    with a_device(2) as (model, cache, _):
        for stop in (TOKENS, TOKENS + 1):
            part = ids[:, TOKENS if stop > TOKENS else 0 : stop]
            fed(model, cache, part, attention_mask=Fake(mask[:, :stop]), logits_to_keep=1)
        assert of_slots(cache) == [None] * LAYERS


def test_slots_are_those_of_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`host_slots` are not made: records are in host memory. A resident layer has slots for all its chunks, reads each
    once, and nothing before it is chosen."""
    monkeypatch.setattr(Fetcher, "bring", None)
    ids = prompt(llama(), 1, TOKENS + 4)
    with a_device(host_slots="1MiB", dense_layers=1) as (model, cache, _):
        decoded(model, cache, ids)
        account = cache.storage.account
        assert account.by_owner["reuse slots"] == sum(slots.data.nbytes for slots in of_slots(cache))
        assert not account.by_owner.get("host slots")
        resident, other = (layer.history for layer in cache.selective[:2])
        assert of_slots(cache)[0].count >= resident.units > of_slots(cache)[1].count
        cache.report()  # which counts what was read
        assert resident.rows * cache.selective[0].budget <= resident.store.reads <= resident.rows * resident.units
        assert other.store.reads > 0


def most_held(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes that each owner holds from now on, of those that hold some."""
    hold, most = MemoryAccount.hold, dict[str, int]()

    def held(account: MemoryAccount, owner: str, nbytes: int) -> None:
        hold(account, owner, nbytes)
        most[owner] = max(most.get(owner, 0), account.by_owner[owner])

    monkeypatch.setattr(MemoryAccount, "hold", held)
    return most


def test_a_step_takes_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays within a budget, with slots for a complete choice."""
    ids = prompt(llama(), 2, TOKENS + 4)
    with on_the_device(llama()) as (model, _):
        fields = {**FIELDS, "max_batch": 2, "early_steps": 2, "chunk_size": 64}
        with AbstractTreeCache.for_budget(model, "16MiB", **fields) as cache:
            cache.storage.pinned = True
            fed(model, cache, ids[:, :TOKENS], logits_to_keep=1)
            most = most_held(monkeypatch)
            for part in ids[:, TOKENS:].split(1, 1):
                fed(model, cache, part)
            assert all(of_slots(cache)) and cache.storage.account.peak <= 16 * 2**20
            kind, given = layer_kinds(Geometry.of(model), cache.config, 2)[0]
            planned = AbstractTreeCache.layer_class.plan(kind, given, cache.config.max_context)
    assert planned.alone and {"scores", "judging"} <= most.keys()
    for owner in ("scores", "judging"):
        assert 0 < most[owner] <= planned.shared.decode[owner], owner


def steps_alone(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each later call of a layer's step runs on the device alone."""
    own, done = device_step.attend_on_device, list[bool]()

    def counted(layer: Any, call: Any) -> Any:
        output = own(layer, call)
        done.append(output is not None)
        return output

    monkeypatch.setattr(device_step, "attend_on_device", counted)
    return done


def test_a_budget_plans_steps_on_a_device_where_slots_hold_a_complete_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the host's buffers, and for early steps, which open twice as many chunks. No step waits. Less memory has
    fewer slots, and these buffers."""
    ids, done = prompt(llama(), 1, TOKENS + 5), steps_alone(monkeypatch)
    monkeypatch.setattr(AbstractTreeCache, "lend_slots", lambda *_: None)
    fields = {**FIELDS, "max_context": 4096, "early_steps": 2, "look_ahead": False}
    with on_the_device(llama()) as (model, counts):
        with AbstractTreeCache.for_budget(model, "1/2", **fields) as cache:
            decoded(model, cache, ids[:, : TOKENS + 1])
            cache.storage.prefetcher.flush()
            counts.clear()
            most = most_held(monkeypatch)
            for part in ids[:, TOKENS + 1 :].split(1, 1):
                fed(model, cache, part)
            assert done == [True] * (5 * LAYERS) and not counts.syncs and not counts.blocking
            account, config = cache.storage.account, cache.config
            planned = AbstractTreeCache.plan(Geometry.of(model), config, 4096, 1)
            assert account.peak <= account.limit and account.pressed == 0
            kind, given = layer_kinds(Geometry.of(model), config, 1)[0]
            alone = AbstractTreeCache.layer_class.plan(kind, given, 4096).shared.decode
            assert all(0 < most[owner] <= alone[owner] for owner in ("scores", "judging"))
            assert planned.decode["reuse slots"] >= account.by_owner["reuse slots"]
            assert not account.by_owner["selection"] and config.reuse_capacity >= config.most_tokens_fetched(4096)
            assert all(layer.history.records > layer.budget for layer in cache.selective)
        kinds = layer_kinds(Geometry.of(model), config, 1)
        for reuse, alone in ((config.tokens_fetched(4096), True), (64, False)):
            (kind, given), *_ = ((kind, replace(given, reuse_capacity=reuse)) for kind, given in kinds)
            plan = AbstractTreeCache.layer_class.plan(kind, given, 4096)
            assert plan.alone == alone == ("selection" not in plan.shared.decode)
            assert ("selection" in plan.over_host.shared.decode) if alone else plan.over_host is None


def test_what_slots_do_not_hold_goes_over_the_host_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early steps, candidates and watched steps take the memory of slots that hold the other steps' choices, and give
    it back."""
    ids, done = prompt(llama(), 2, TOKENS + 16), steps_alone(monkeypatch)
    own = {**FIELDS, "max_batch": 2, "early_steps": 2, "reuse_capacity": 128, "look_ahead": False}
    config = AbstractTreeConfig.load(None, {**own, "memory": "1GiB"})
    geometry = replace(Geometry.of(llama()), device="cuda")
    plan = AbstractTreeCache.plan(geometry, config, config.max_context, 2)
    plan_of, context = AbstractTreeCache.layer_class.plan, config.max_context
    assert all(plan_of(*kind, context).alone for kind in layer_kinds(geometry, config, 2))
    with on_the_device(llama()) as (model, _), AbstractTreeCache(model, **own, memory=plan.peak_bytes) as cache:
        cache.given = frozenset({"reuse_capacity"})  # nothing is lent
        fed(model, cache, ids[:, :TOKENS], logits_to_keep=1)
        cache.storage.release_stream_buffers()
        cache.storage.account.limit = plan.decode_bytes  # what is planned for steps is all that there is
        cache.storage.reset_counters()
        cache.activate_past_recording()
        at = TOKENS
        for width, alone in ((1, False), (1, False), (1, True), (3, False), (1, True), (1, True)):
            done.clear()
            fed(model, cache, ids[:, at : at + width])
            at += width
            assert done == [alone] * LAYERS
            assert all((slots is not None and not slots.closed) == alone for slots in of_slots(cache))
            assert cache.storage.account.peak <= plan.decode_bytes
            assert (cache.storage.account.by_owner["selection"] > 0) != alone
        cache.selecting.watch = lambda *_: None
        fed(model, cache, ids[:, at : at + 1])
        assert of_slots(cache) == [None] * LAYERS and cache.storage.account.peak <= plan.decode_bytes


def test_a_choice_that_no_slots_hold_leaves_the_hosts_slots_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step goes over the host, again and again, with the same slots."""
    monkeypatch.setattr(AbstractTreeCache, "lend_slots", lambda *_: None)
    ids = prompt(llama(), 1, TOKENS + 3)
    with a_device(memory="64MiB", reuse_capacity=16) as (model, cache, _):
        decoded(model, cache, ids[:, : TOKENS + 1])
        assert of_slots(cache) == [None] * LAYERS
        fetchers = [layer.fetcher for layer in cache.selective]
        for part in ids[:, TOKENS + 1 :].split(1, 1):
            fed(model, cache, part)
        assert [layer.fetcher for layer in cache.selective] == fetchers and not any(one.closed for one in fetchers)
