"""Steps of `ClusterCache` on a device that reads records by itself: kernels' twins, on a device that only counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import Counts, Fake, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import ClusterCache, ClusterConfig
from hf_offload_cache.core import device_step
from hf_offload_cache.core.plan import layer_kinds
from hf_offload_cache.fetch import device_slots
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.cluster import ClusteredEntries, DeviceClusters, arrivals
from hf_offload_cache.model import Geometry

TOKENS, STEPS, LAYERS = 500, 21, COMMON["num_hidden_layers"]
FIELDS: dict[str, Any] = {
    "max_context": 1200, "max_batch": 2, "num_selected": 64, "engine": "memory", "num_recent": 8,
    "join_every": 8, "append_buffer": 8,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dropped": {},
    "estimated": {"remainder": True},
    "8 bits": {"entry_bits": 8, "cluster_size": 30},
    "joined and settled in one step": {"group_size": 1, "join_every": 1},
    "no slots, no sinks": {"reuse_capacity": 0, "num_sinks": 0, "append_buffer": 30},
}


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 2048}))


def host(given: torch.Tensor) -> torch.Tensor:
    return given


def fed(model: Any, cache: Any, ids: torch.Tensor, put: Any, **given: Any) -> torch.Tensor:
    """Logits (B, t, vocabulary) of all `ids` (B, t) in one forward."""
    with torch.no_grad():
        return values_of(model(put(ids), past_key_values=cache, **given).logits)


def of_slots(cache: Any) -> list[Any]:
    return [layer.device_slots for layer in cache.selective]


@pytest.fixture(autouse=True)
def clusters_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's clusters differ from a processor's, so that steps could not be compared. And on a processor layers
    take turns to settle."""
    monkeypatch.setattr(arrivals, "MOST_CHANNELS", 0)
    prepare = ClusterCache.prepare

    def together(cache: Any, model: Any) -> None:
        prepare(cache, model)
        for layer in cache.selective:
            layer.turn = 0

    monkeypatch.setattr(ClusterCache, "prepare", together)


@contextmanager
def a_device(seed: int | None = None, **fields: Any) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts. `seed`: of its streams."""
    with on_the_device(llama(), seed) as (model, counts), ClusterCache(model, **{**FIELDS, **fields}) as cache:
        cache.storage.pinned = True
        yield model, cache, counts


def decoded(model: Any, cache: Any, ids: torch.Tensor, put: Any, tokens: int = TOKENS) -> torch.Tensor:
    """Logits of each step after a prompt of `tokens` tokens."""
    fed(model, cache, ids[:, :tokens], put, logits_to_keep=1)
    return torch.cat([fed(model, cache, part, put) for part in ids[:, tokens:].split(1, 1)], 1)


def test_a_limit_changes_no_logits() -> None:
    """Nor clusters, if later pieces of a prompt attend to blocks of the same size. These are longer on a device without
    a limit, and sums over other blocks are rounded differently. The prompt's are those of `DynamicCache`: in a block,
    key heads have different numbers of entries."""
    ids, found = prompt(llama(), 1, 304), []
    expected = fed(llama(), DynamicCache(), ids[:, :288], host)
    for limit in (None, "64MiB"):
        with a_device(memory=limit, block_tokens=32, max_context=320) as (model, cache, _):
            parts = [*ids[:, :288].split(96, 1), *ids[:, 288:].split(1, 1)]
            logits = torch.cat([fed(model, cache, part, Fake) for part in parts], 1)
            found.append((logits, [layer.history.clustered.labels for layer in cache.selective]))
    (free, labels), (limited, others) = found
    assert torch.equal(free, limited) and all(map(np.array_equal, labels, others))
    torch.testing.assert_close(free[:, :288], expected, rtol=1e-4, atol=1e-4)
    assert all(own.max() > 8 for own in labels)


@pytest.mark.parametrize(("way", "rows", "seed"), [(way, 1 + index % 2, index) for index, way in enumerate(WAYS)])
def test_steps_on_a_device_compute_what_those_on_the_host_do(way: str, rows: int, seed: int) -> None:
    """Also while clusters grow and are split. The host waits for nothing, unless tokens join in each step: then for the
    keys of clusters to split. Nothing is copied to or from memory that is not pinned."""
    fields, plain = WAYS[way], llama()
    tokens = 1060 if "remainder" in fields else TOKENS
    ids = prompt(plain, rows, tokens + STEPS)
    with ClusterCache(plain, **{**FIELDS, **fields}) as cache:
        on_host = decoded(plain, cache, ids, host, tokens)
        expected, clusters = cache.report(), [layer.history.clustered for layer in cache.selective]
        labels = [(own.labels.copy(), own.stored.copy()) for own in clusters]
    with a_device(seed, **fields) as (model, cache, counts):
        fed(model, cache, ids[:, :tokens], Fake, logits_to_keep=1)
        steps, waits = [], []
        for part in ids[:, tokens:].split(1, 1):
            steps.append(fed(model, cache, part, Fake))
            waits.append(counts.syncs.total())
            assert not counts.blocking or len(steps) == 1
            counts.clear()
        assert max(waits[1:]) <= (LAYERS if "one step" in way else 0)
        assert all(slots is not None and slots._uses.any() for slots in of_slots(cache))
        for layer, (of_tokens, stored) in zip(cache.selective, labels, strict=True):
            layer.history.place()  # what the last step has left for the next one
            own = layer.history.clustered
            assert np.array_equal(own.labels, of_tokens) and np.array_equal(own.stored, stored)
        report = cache.report()
    torch.testing.assert_close(torch.cat(steps, 1), on_host, rtol=1e-4, atol=1e-4)
    assert report.selected_fraction == pytest.approx(expected.selected_fraction, rel=0.03)
    for name in ("estimated_mass", "lost_mass"):
        ours, theirs = getattr(report, name), getattr(expected, name)
        assert ours == theirs if theirs is None else ours == pytest.approx(theirs, rel=1e-3)
    assert (report.estimated_mass is not None) == fields.get("remainder", False)
    assert report.hit_rate is not None and report.hit_rate > (0 if "no slots" in way else 0.3)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_in_which_tokens_join_clusters_waits_for_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the next one, in which the host learns of it, and in which clusters settle and are split. The writer's
    thread is not waited for either: the device fills the records in place. What the device knows of the clusters in
    between is what the host finds later."""
    joining, settled, split = 0, 0, 0
    monkeypatch.setattr(ClusteredEntries, "points", None)  # keys are sent ahead
    with a_device() as (model, cache, counts):
        ids, usual = prompt(model, rows, TOKENS + 40), 0
        fed(model, cache, ids[:, : TOKENS + 1], Fake, logits_to_keep=1)
        layers, account = [layer.history.clustered for layer in cache.selective], cache.storage.account
        of_device = [layer.predictor.on_device for layer in cache.selective]
        fed(model, cache, ids[:, TOKENS + 1 : TOKENS + 2], Fake)
        for part in ids[:, TOKENS + 2 :].split(1, 1):
            counts.clear()
            before = [own.sealed for own in layers], sum(own.partition.used.sum() for own in layers)
            buffered = sum(own.buffer.counts.sum() for own in layers)
            copies = cache.storage._copies.copy()
            fed(model, cache, part, Fake)
            assert not counts.syncs and not counts.blocking
            assert not copies and not cache.storage._copies
            usual = usual or counts.launches.total()
            assert counts.launches.total() <= usual + 45 * LAYERS
            split += sum(own.partition.used.sum() for own in layers) > before[1]
            if layers[0].sealed == before[0][0]:
                settled += sum(own.buffer.counts.sum() for own in layers) < buffered
                continue
            joining += 1
            width = layers[0].form.key_width * 4 + 4
            joined = sum(own.partition.rows for own in layers) * (layers[0].sealed - before[0][0])
            sent = joined * width + sum(there._sent_bytes for there in of_device)
            assert account.by_owner["stream buffers, host"] == sent
            for layer, own, there in zip(cache.selective, layers, of_device, strict=True):
                assert own.late and own.partition.counts.sum() == rows * COMMON["num_key_value_heads"] * before[0][0]
                centroids, tables = map(values_of, there.latest)
                layer.history.place()
                assert np.array_equal(tables[0].numpy(), own.partition.counts)
                np.testing.assert_allclose(centroids.numpy(), own.partition.centroids, rtol=2e-3, atol=1e-5)
                counted = [np.bincount(labels, minlength=own.partition.clusters) for labels in own.labels]
                assert np.array_equal(own.partition.counts, counted)
            assert account.by_owner["stream buffers, host"] == sent - joined * width
        assert joining > 2 and settled > 2 and split > 1, (joining, settled, split)
        assert not account.by_owner["packing"]


def test_copies_for_changes_that_the_host_makes_later_are_booked() -> None:
    """Of the numbers of entries that a step has kept, until its clusters settle."""
    with a_device() as (model, cache, _):
        ids = prompt(model, 1, TOKENS + 40)
        fed(model, cache, ids[:, : TOKENS + 1], Fake, logits_to_keep=1)
        account, settling = cache.storage.account, 0
        for part in ids[:, TOKENS + 1 :].split(1, 1):
            sealed = cache.selective[0].history.clustered.sealed
            fed(model, cache, part, Fake)
            layers = [(layer.history.clustered, layer.predictor) for layer in cache.selective]
            if not layers[0][0].late or layers[0][0].sealed > sealed:
                continue
            settling += 1
            kept = sum(predictor.kept.nbytes + predictor.on_device._sent_bytes for _, predictor in layers)
            assert account.by_owner["stream buffers, host"] == kept
            most = sum(DeviceClusters.most_sent(own) for own, _ in layers)
            assert kept <= most
        assert settling > 2


LATE = {
    "crop": lambda cache: cache.crop(TOKENS - 40),
    "rows": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "one row twice": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "positions": lambda cache: [one.history.positions(np.zeros((one.history.rows, 1), int)) for one in cache.selective],
    "all": lambda cache: [layer.whole() for layer in cache.selective],
    "freeze": lambda cache: [layer.history.freeze() for layer in cache.selective],
    "candidates": None,
}


@pytest.mark.parametrize(("change", "seed"), [(change, index) for index, change in enumerate(LATE)])
def test_what_the_host_does_not_know_yet_is_known_before_it_is_needed(change: str, seed: int) -> None:
    """After a step in which tokens have joined clusters, and of one in which some are to settle."""
    ids, found, own = prompt(llama(), 2, TOKENS + 24), [], {"num_recent": 16}
    for there in (False, True):
        put = Fake if there else host
        plain = None if there else llama()
        with a_device(seed, **own) if there else ClusterCache(plain, **{**FIELDS, **own}) as made:
            model, cache = made[:2] if there else (plain, made)
            at, steps, late = TOKENS + 12, [], 0
            steps.append(decoded(model, cache, ids[:, :at], put))
            for _ in range(2):
                late += sum(len(layer.history.clustered.late) for layer in cache.selective)
                if LATE[change] is not None:
                    LATE[change](cache)
                width = 3 if change == "candidates" else 1
                steps.append(fed(model, cache, ids[:, at : at + width], put))
                at += width
            assert late >= LAYERS if there else not late
            for layer in cache.selective:
                layer.history.place()
                assert not layer.history.clustered.late
            found.append((torch.cat(steps, 1), [layer.history.clustered.labels.copy() for layer in cache.selective]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    assert all(map(np.array_equal, found[1][1], found[0][1]))


def test_a_step_over_the_host_knows_what_has_joined_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched step chooses on the host, after the device has assigned its tokens."""
    ids, found, own = prompt(llama(), 2, TOKENS + 13), [], {"num_recent": 16}
    joined, join = list[bool](), DeviceClusters.join
    monkeypatch.setattr(DeviceClusters, "join", lambda *given: joined.append(join(*given)) or joined[-1])
    for there in (False, True):
        put = Fake if there else host
        plain = None if there else llama()
        with a_device(7, **own) if there else ClusterCache(plain, **{**FIELDS, **own}) as made:
            model, cache = made[:2] if there else (plain, made)
            decoded(model, cache, ids[:, : TOKENS + 11], put)
            joined.clear()
            cache.selecting.watch = lambda *_: None
            found.append(fed(model, cache, ids[:, TOKENS + 11 : TOKENS + 12], put))
            assert joined == [True] * (LAYERS if there else 0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_slots_hold_a_choice_that_grows_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step attends to a share of the tokens, which grow while no row has more pages."""
    fields = {"num_selected": None, "selected_share": 0.1, "reuse_capacity": 0, "remainder": False}
    ids, wide, exchanged = prompt(llama(), 1, 507), list[tuple[int, int]](), device_slots.DeviceSlots.exchanged

    def counted(slots: Any, units: torch.Tensor) -> Any:
        wide.append((units.shape[1], slots.count))
        return exchanged(slots, units)

    monkeypatch.setattr(device_slots.DeviceSlots, "exchanged", counted)
    with a_device(**fields) as (model, cache, _):
        decoded(model, cache, ids, Fake, 490)
    assert len({selected for selected, _ in wide}) > 1
    assert all(selected <= count for selected, count in wide)


def test_everything_is_selected_where_it_fits() -> None:
    """A step that selects all pages equals attention to all, buffered entries included."""
    ids = prompt(llama(), 2, 300 + STEPS)
    exact = decoded(llama(), DynamicCache(config=llama().config), ids, host, 300)
    with a_device(num_selected=512, reuse_capacity=700) as (model, cache, _):
        fed(model, cache, ids[:, :300], Fake, logits_to_keep=1)
        steps, waited = [], False
        for part in ids[:, 300:].split(1, 1):
            steps.append(fed(model, cache, part, Fake))
            waited |= any(layer.history.clustered.waiting.any() for layer in cache.selective)
        assert all(of_slots(cache)) and waited
        found = torch.cat(steps, 1)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_what_a_device_cannot_do_goes_over_the_host_and_back() -> None:
    """Candidates, rows with padding, and a crop, after which clusters have other numbers."""
    ids, plain = prompt(llama(), 2, TOKENS + STEPS), llama()
    found = []
    for there in (False, True):
        put = Fake if there else host
        with a_device() if there else ClusterCache(plain, **FIELDS) as made:
            model, cache = made[:2] if there else (plain, made)
            steps = [decoded(model, cache, ids[:, : TOKENS + 9], put)]
            steps.append(fed(model, cache, ids[:, TOKENS + 9 : TOKENS + 12], put))
            assert all(slots is None for slots in of_slots(cache))
            cache.crop(TOKENS // 2)
            cache.reorder_cache(torch.tensor([1, 0]))
            steps += [fed(model, cache, part, put) for part in ids[:, TOKENS // 2 : TOKENS // 2 + 12].split(1, 1)]
            assert all(slots is not None for slots in of_slots(cache)) == there
            found.append(torch.cat(steps, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    with a_device() as (model, cache, _):
        for piece in itertools.pairwise((0, TOKENS, TOKENS + 1)):
            fed(model, cache, ids[:, slice(*piece)], Fake, attention_mask=Fake(mask[:, : piece[1]]), logits_to_keep=1)
        assert of_slots(cache) == [None] * LAYERS


def test_copies_of_centroids_are_booked_planned_and_freed() -> None:
    ids = prompt(llama(), 1, TOKENS + 12)
    with a_device() as (model, cache, _):
        account = cache.storage.account
        decoded(model, cache, ids, Fake)
        booked = 0
        for layer in cache.selective:
            rows, count, dim = layer.history.clustered.partition.centroids.shape
            room = layer.predictor.on_device._centroids.shape[1]
            booked += rows * room * (2 * dim + 4 * 3)
            centroids, tables = layer.predictor.on_device.latest
            own = layer.history.clustered
            assert np.array_equal(centroids.inner.numpy(), own.partition.centroids)
            assert np.array_equal(tables.inner[:2].numpy(), np.stack([own.partition.counts, own.stored]))
            assert tables.inner[2].sum(1).tolist() == [cache.config.num_sinks] * rows
            every = layer.predictor.on_device.memory[1].inner
            assert every.shape[2] == room > count and not every[:, :, count:].any()
        assert account.by_owner["centroids"] == booked > 0
        planned = ClusterCache.plan(Geometry.of(model), cache.config, 1200, 1)
        assert planned.decode["centroids"] >= booked
        cache.selective[0].predictor.close()
        assert account.by_owner["centroids"] < booked
    assert not account.by_owner.get("centroids") and account.current == 0
    assert "centroids" not in ClusterCache.plan(Geometry.of(llama()), cache.config, TOKENS, 1).decode  # on a CPU


@pytest.mark.parametrize("remainder", [False, True])
def test_a_budget_plans_steps_on_a_device_where_slots_hold_a_complete_choice(
    remainder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the host's buffers, and with room to read the clusters that new tokens join. No step waits."""
    ids, own, done = prompt(llama(), 2, TOKENS + STEPS + 1), device_step.attend_on_device, list[bool]()
    monkeypatch.setattr(ClusterCache, "lend_slots", lambda *_: None)

    def counted(layer: Any, call: Any) -> Any:
        output = own(layer, call)
        done.append(output is not None)
        return output

    monkeypatch.setattr(device_step, "attend_on_device", counted)
    fields = {**FIELDS, "look_ahead": False, "remainder": remainder, "cluster_size": 12}
    held, hold = dict[str, int](), MemoryAccount.hold

    def most_held(account: MemoryAccount, owner: str, nbytes: int) -> None:
        hold(account, owner, nbytes)
        held[owner] = max(held.get(owner, 0), account.by_owner[owner])

    with on_the_device(llama()) as (model, counts):
        with ClusterCache.for_budget(model, "6MiB", **fields) as cache:
            fed(model, cache, ids[:, :TOKENS], Fake, logits_to_keep=1)
            account, config, waited = cache.storage.account, cache.config, 0
            planned = ClusterCache.plan(Geometry.of(model), config, config.max_context, 2)
            cache.storage.release_stream_buffers()
            account.limit = planned.decode_bytes
            cache.storage.reset_counters()
            monkeypatch.setattr(MemoryAccount, "hold", most_held)
            for part in ids[:, TOKENS:].split(1, 1):
                cache.storage.prefetcher.flush()
                counts.clear()
                fed(model, cache, part, Fake)
                waited += bool(counts.syncs)
            assert done == [True] * ((STEPS + 1) * LAYERS) and account.pressed == 0
            assert waited == 0
            kind, given = layer_kinds(Geometry.of(model), config, 2)[0]
            alone = ClusterCache.layer_class.plan(kind, given, config.max_context).shared.decode
            assert account.peak <= account.limit
            owners = "scores", "stream buffers", "stream buffers, host", "packing"
            assert all(0 < held[owner] <= alone[owner] for owner in owners)
            assert not account.by_owner["stream buffers"] and not account.by_owner["packing"]
            sent = max_sent(cache)
            assert 0 < sent <= DeviceClusters.most_sent(cache.selective[0].history.clustered)
            assert 0 < account.by_owner["reuse slots"] <= planned.decode["reuse slots"]
            assert not account.by_owner["selection"] and not account.by_owner["staging"]
            assert all(layer.history.records > layer.budget for layer in cache.selective)
        for (kind, given), reuse, alone in ((pair, *way) for pair in layer_kinds(Geometry.of(model), config, 2)
                                            for way in ((config.reuse_capacity, True), (32, False))):  # fmt: skip
            plan = ClusterCache.layer_class.plan(kind, replace(given, reuse_capacity=reuse), config.max_context)
            assert plan.alone == alone == ("selection" not in plan.shared.decode)
            assert alone == (plan.shared.decode["stream buffers"] > 0) == (plan.over_host is not None)


def max_sent(cache: Any) -> int:
    """Bytes of keys that one more settling of all clusters would copy to the host."""
    most = 0
    for layer in cache.selective:
        own, there = layer.history.clustered, layer.predictor.on_device
        layer.history.place()
        own.partition.limits[:] = 0  # all are too wide
        there._send_keys(*(own.waiting > 0).nonzero())
        sent = sum(arriving.wait()[0].nbytes for _, arriving in there._sent)
        assert there._sent_bytes == sent == own.partition.counts[own.waiting > 0].sum() * own.form.key_width * 4
        most = max(most, sent)
        there.close()
        assert not there._sent and not there._sent_bytes
    return most


def test_what_slots_do_not_hold_goes_over_the_host_within_a_budget() -> None:
    """Candidates and watched steps take the memory of slots, and give it back."""
    ids, own = prompt(llama(), 2, TOKENS + 32), {**FIELDS, "reuse_capacity": 512, "look_ahead": False}
    geometry, config = replace(Geometry.of(llama()), device="cuda"), ClusterConfig.load(None, {**own, "memory": "1GiB"})
    plan = ClusterCache.plan(geometry, config, config.max_context, 2)
    plan_of, context = ClusterCache.layer_class.plan, config.max_context
    assert all(plan_of(*kind, context).alone for kind in layer_kinds(geometry, config, 2))
    with on_the_device(llama()) as (model, _), ClusterCache(model, **own, memory=plan.peak_bytes) as cache:
        cache.given = frozenset({"reuse_capacity"})  # nothing is lent
        fed(model, cache, ids[:, :TOKENS], Fake, logits_to_keep=1)
        cache.storage.release_stream_buffers()
        cache.storage.account.limit = plan.decode_bytes  # what is planned for steps is all that there is
        cache.storage.reset_counters()
        cache.activate_past_recording()
        at = TOKENS
        for width in (1, 3, *[1] * 9, 3, 1):
            fed(model, cache, ids[:, at : at + width], Fake)
            at += width
            assert all((slots is not None and not slots.closed) == (width == 1) for slots in of_slots(cache))
            assert cache.storage.account.peak <= plan.decode_bytes
        cache.selecting.watch = lambda *_: None
        fed(model, cache, ids[:, at : at + 1], Fake)
        assert of_slots(cache) == [None] * LAYERS and cache.storage.account.peak <= plan.decode_bytes


def test_centroids_on_disk_go_over_the_host() -> None:
    ids = prompt(llama(), 1, TOKENS + 2)
    with a_device(centroids="disk") as (model, cache, _):
        decoded(model, cache, ids, Fake)
        assert of_slots(cache) == [None] * LAYERS and not cache.storage.account.by_owner.get("centroids")
