"""Caches that are fed, changed, forked, saved and opened in any order, against what was given to each."""

from __future__ import annotations

import copy
import functools
import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import COMMON, SMALL, TOLERANCE, build
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache
from hf_offload_cache.kernels.low_bit import pack_replicas
from hf_offload_cache.methods.abstract_tree import ChunkHistory
from hf_offload_cache.methods.cluster import in_order
from hf_offload_cache.stores import aligned_empty
from hf_offload_cache.testing import open_descriptors

SPARSE = {**SMALL, "num_selected": 32, "reuse_capacity": 16, "rank": 8, "block_tokens": 64}
TREE: dict[str, Any] = {
    **SMALL, "num_selected": 32, "num_opened": 64, "reuse_capacity": 16, "block_tokens": 64, "dense_layers": 1,
    "dense_chunk_size": 8, "early_steps": 3, "host_slots": "8KiB",
}  # fmt: skip
PACKED: dict[str, Any] = {
    **TREE, "group_size": 64, "block_tokens": 128, "num_selected": 64, "num_opened": 128, "dense_layers": 0,
    "compress": 1.0,
}  # fmt: skip
"""With replicas, as which everything travels: so forks read what the cache does that they were made of."""
CLUSTERS: dict[str, Any] = {
    **SMALL, "num_selected": 32, "reuse_capacity": 512, "block_tokens": 64, "cluster_size": 8, "append_buffer": 6,
    "join_every": 8,
}  # fmt: skip
"""With slots for much of it: what a crop or a split makes void is still in one."""
LONG = 530
"""Tokens that a sparse cache begins with: more than the 512 that an adapter is made of."""
MOST_CACHES, MOST_ROWS, MOST_TOKENS = 4, 4, 900
ENGINES = ("auto", "mapped", "memory")


@functools.cache
def model() -> Any:
    fields = {**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    return build(LlamaForCausalLM, LlamaConfig(**fields))


def random_ids(seed: int, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, COMMON["vocab_size"], (rows, length), generator=generator)


class Held:
    """What a cache was given and still has to hold: ids (B, T), and of each layer keys and values (B, H, T, D)."""

    def __init__(self) -> None:
        self.ids = torch.empty(0, 0, dtype=torch.int64)
        self.layers: dict[int, list[torch.Tensor]] = {}

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def take(self, layer_idx: int, *new: torch.Tensor) -> None:
        old = self.layers.get(layer_idx)
        parts = [part.detach().clone() for part in new]
        joined = parts if old is None else [torch.cat(pair, 2) for pair in zip(old, parts, strict=True)]
        self.layers[layer_idx] = joined

    def take_ids(self, ids: torch.Tensor) -> None:
        self.ids = torch.cat([self.ids, ids], 1) if self.rows else ids

    def crop(self, length: int) -> None:
        self.ids = self.ids[:, :length]
        self.layers = {at: [part[:, :, :length] for part in parts] for at, parts in self.layers.items()}

    def select(self, rows: torch.Tensor) -> None:
        self.ids = self.ids[rows]
        self.layers = {at: [part[rows] for part in parts] for at, parts in self.layers.items()}


def compact_keys(cache: Any) -> list[torch.Tensor]:
    """Copies of what each layer selects by. Taken without `capture`, after which the keys are kept from changes."""
    if isinstance(cache, ClusterCache):
        parts = [layer.history.clustered.partition for layer in cache.selective if layer.is_initialized]
        return [torch.from_numpy(part.centroids.copy()) for part in parts if part.clusters]
    if isinstance(cache, AbstractTreeCache):
        return [abstracts(layer) for layer in cache.selective if layer.is_initialized and layer.predictor.units]
    fitted = [layer.predictor.fitted.keys for layer in cache.layers if layer.predictor]
    return [keys._rows.data.clone() for keys in fitted if keys is not None]


def abstracts(layer: Any) -> torch.Tensor:
    """What an adaptive tree judges the chunks of a layer by, (rows, chunks, 2, 1, D): from memory, or read back."""
    predictor, history = layer.predictor, layer.history
    pages = history.pages if isinstance(history, ChunkHistory) else None
    if pages is None:
        return predictor._held[:, : predictor.units].clone()
    records, read = pages.extents().records, []
    for row in records:
        taken = aligned_empty(len(row), history.form.record_bytes)
        layer.shared.storage.prefetcher.read(history.store, row, taken).wait()
        read.append(history.form.payload(taken).view(len(row), history.form.group_size, history.form.entry_width))
    joined = pages.joined(torch.stack(read)) if read else pages.joined(torch.empty(0, 0, 1, 1))
    return joined.unflatten(2, (2, 1, history.form.key_dim))


class Caches(RuleBasedStateMachine):
    """The rules. A subclass says how the first cache comes, and what else is compared."""

    cache_class: Any = DiskSwapCache

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.descriptors = open_descriptors()
        self.folder = Path(tempfile.mkdtemp())
        self.caches: list[tuple[DiskSwapCache, Held]] = []
        self.saved: dict[str, Held] = {}
        self.untouched: set[int] = set()  # caches, by id, that were given nothing since they were frozen
        self.changed: set[int] = set()  # caches, by id, that the last rule was to change
        self.compact: dict[int, list[torch.Tensor]] = {}  # compact keys of each, as they were then

    # --- helpers ----------------------------------------------------------------------------------------------------

    def add(self, cache: DiskSwapCache, held: Held) -> None:
        """From now on, what its layers are given is kept in `held`."""
        update = cache.update

        def watched(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
            held.take(layer_idx, keys, values)
            return update(keys, values, layer_idx, *rest, **more)

        cache.update = watched  # type: ignore[method-assign]
        self.caches.append((cache, held))

    def look(self, number: int) -> tuple[DiskSwapCache, Held]:
        """One of the caches, which is not to be changed."""
        return self.caches[number % len(self.caches)]

    def pick(self, number: int) -> tuple[DiskSwapCache, Held]:
        cache, held = self.look(number)
        self.changed.add(id(cache))
        return cache, held

    def feed(self, cache: DiskSwapCache, held: Held, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model()(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        held.take_ids(ids)
        self.untouched.discard(id(cache))
        return logits

    def settle(self, cache: Any, rows: torch.Tensor) -> None:
        """What waited to be stored until rows are repeated is stored."""

    def frozen(self, *caches: DiskSwapCache) -> None:
        self.untouched.update(id(cache) for cache in caches)

    # --- rules ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), count=st.integers(1, 21), rows=st.integers(1, 2), seed=st.integers(0, 99))
    def update(self, number: int, count: int, rows: int, seed: int) -> None:
        cache, held = self.pick(number)
        if held.length + count <= MOST_TOKENS:
            self.feed(cache, held, random_ids(seed, held.rows or rows, count))

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), count=st.integers(1, 40), positive=st.booleans())
    def crop(self, number: int, count: int, positive: bool) -> None:
        cache, held = self.pick(number)
        keep = held.length - count
        if keep > 0:
            cache.crop(keep if positive else -count)
            held.crop(keep)

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), count=st.integers(20, 60), seed=st.integers(0, 99))
    def crop_and_refill(self, number: int, count: int, seed: int) -> None:
        """Other tokens take the places of old ones, in memory that a fork may share."""
        cache, held = self.pick(number)
        if count < held.length:
            cache.crop(-count)
            held.crop(held.length - count)
            self.feed(cache, held, random_ids(seed, held.rows, count))

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), seed=st.integers(0, 99))
    def reorder(self, number: int, seed: int) -> None:
        cache, held = self.pick(number)
        if held.rows:
            rows = torch.randint(0, held.rows, (held.rows,), generator=torch.Generator().manual_seed(seed))
            cache.reorder_cache(rows)
            held.select(rows)

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), repeats=st.integers(1, 3))
    def repeat(self, number: int, repeats: int) -> None:
        cache, held = self.pick(number)
        if 0 < held.rows * repeats <= MOST_ROWS:
            rows = torch.arange(held.rows).repeat_interleave(repeats)
            self.settle(cache, rows)
            cache.storage.prefetcher.flush()  # what was queued before takes its room now
            own = cache.own_disk_bytes
            cache.batch_repeat_interleave(repeats)
            held.select(rows)
            assert cache.own_disk_bytes <= own, "repeating rows stores something"

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), seed=st.integers(0, 99), mask=st.booleans())
    def choose(self, number: int, seed: int, mask: bool) -> None:
        cache, held = self.pick(number)
        if held.rows:
            order = torch.randperm(held.rows, generator=torch.Generator().manual_seed(seed))
            rows = order[: 1 + seed % held.rows]
            if mask:
                chosen = torch.zeros(held.rows, dtype=torch.bool)
                chosen[rows] = True
                cache.batch_select_indices(chosen)
                held.select(chosen.nonzero().reshape(-1))
            else:
                cache.batch_select_indices(rows)
                held.select(rows)

    @precondition(lambda self: 0 < len(self.caches) < MOST_CACHES)
    @rule(number=st.integers(0, 3), deep=st.booleans())
    def fork(self, number: int, deep: bool) -> None:
        cache, held = self.look(number)
        if deep:
            watched = cache.__dict__.pop("update")
            twin = copy.deepcopy(cache)
            cache.update = watched  # type: ignore[method-assign]
        else:
            twin = cache.fork()
        self.add(twin, copy.deepcopy(held))
        self.frozen(cache, twin)
        records = [sum(store.disk_bytes for store in each.storage.stores) for each in (twin, cache)]
        assert records[0] == records[1]  # tables beside them have room of their own

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), name=st.sampled_from("ab"))
    def save(self, number: int, name: str) -> None:
        cache, held = self.look(number)
        if not held.length:
            with pytest.raises(ValueError, match="nothing"):
                cache.save(self.folder / name, overwrite=True)
            return
        if name in self.saved:
            with pytest.raises(FileExistsError):
                cache.save(self.folder / name)
        cache.save(self.folder / name, overwrite=name in self.saved)
        self.saved[name] = copy.deepcopy(held)
        self.frozen(cache)

    @precondition(lambda self: self.saved and len(self.caches) < MOST_CACHES)
    @rule(number=st.integers(0, 1), engine=st.sampled_from(ENGINES))
    def open(self, number: int, engine: str) -> None:
        name = sorted(self.saved)[number % len(self.saved)]
        cache = self.cache_class.open(self.folder / name, model(), engine=engine)
        self.add(cache, copy.deepcopy(self.saved[name]))
        self.frozen(cache)

    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 1))
    def remove(self, number: int) -> None:
        name = sorted(self.saved)[number % len(self.saved)]
        shutil.rmtree(self.folder / name)  # under whoever has it open
        del self.saved[name]

    @precondition(lambda self: len(self.caches) > 1)
    @rule(number=st.integers(0, 3))
    def close(self, number: int) -> None:
        cache, held = self.pick(number)
        cache.close()
        assert cache.storage.account.current == 0
        self.caches = [pair for pair in self.caches if pair[0] is not cache]
        self.untouched.discard(id(cache))
        self.compact.pop(id(cache), None)  # another one may have this id later

    @precondition(lambda self: self.caches)
    @rule(number=st.integers(0, 3), unlikely=st.integers(0, 3))
    def reset(self, number: int, unlikely: int) -> None:
        cache, held = self.pick(number)
        if unlikely == 0:
            cache.reset()
            held.__init__()  # type: ignore[misc]
            self.untouched.discard(id(cache))

    @precondition(lambda self: 0 < len(self.caches) < MOST_CACHES)
    @rule(number=st.integers(0, 3), token=st.integers(5, 190), engine=st.sampled_from(ENGINES))
    def one_step_alike(self, number: int, token: int, engine: str) -> None:
        """A cache, its fork, and what it saved and another opened give the same logits, to the last bit."""
        cache, held = self.pick(number)
        if not 0 < held.length < MOST_TOKENS:
            return
        ids = torch.full((held.rows, 1), token)
        self.feed(cache, held, ids)  # of what the first step after a prefill decides, forks have to know
        cache.save(self.folder / "passing", overwrite=True)
        opened = self.cache_class.open(self.folder / "passing", model(), engine=engine)
        with cache.fork() as twin, opened as third:
            if cache.selecting is not None:
                padded = [one.selecting.padded for one in (cache, twin, third)]
                assert padded[0] == padded[1] == padded[2]
            expected = [self.feed(one, Held(), ids) for one in (twin, third)]
        self.frozen(cache)
        shutil.rmtree(self.folder / "passing")
        found = self.feed(cache, held, ids)
        assert torch.equal(found, expected[0]), "a fork goes on in another way"
        assert torch.equal(found, expected[1]), "an opened context goes on in another way"

    # --- what holds always ------------------------------------------------------------------------------------------

    @invariant()
    def holds_what_it_was_given(self) -> None:
        for cache, held in self.caches:
            assert cache.tokens == held.length
            if not held.length:
                continue
            assert torch.equal(cache.input_ids, held.ids)
            assert bool(cache.attention_mask.all()) and cache.attention_mask.shape == held.ids.shape
            for layer_idx, parts in held.layers.items():
                layer = cache.layers[layer_idx]
                assert (layer.length, layer.batch) == (held.length, held.rows)
                for found, expected in zip(layer.whole(), parts, strict=True):
                    assert torch.equal(found, expected), f"layer {layer_idx} holds something else"

    @invariant()
    def nobody_else_changed(self) -> None:
        """What is selected by is shared between forks until one of them changes."""
        for cache, _ in self.caches:
            keys = compact_keys(cache)
            before = self.compact.get(id(cache), keys)
            if id(cache) not in self.changed:
                assert len(before) == len(keys), "compact keys came or went"
                assert all(torch.equal(*pair) for pair in zip(before, keys, strict=True)), "another cache changed them"
            self.compact[id(cache)] = keys
        self.changed.clear()

    @invariant()
    def books_are_right(self) -> None:
        for cache, _ in self.caches:
            account = cache.storage.account
            assert cache.memory_bytes == sum(account.by_owner.values()) <= account.peak
            assert min(account.by_owner.values(), default=0) >= 0, account.by_owner
            assert 0 <= cache.own_disk_bytes <= cache.disk_bytes or cache.storage.engine == "memory"
            if id(cache) in self.untouched:
                assert cache.own_disk_bytes == 0, "something is stored that nobody gave it"

    def teardown(self) -> None:
        try:
            for cache, held in self.caches:
                if held.length:
                    self.last_step(cache, held)
        finally:
            for cache, _ in self.caches:
                cache.close()
                cache.__dict__.pop("update", None)
            shutil.rmtree(self.folder)
        assert {cache.storage.account.current for cache, _ in self.caches} <= {0}
        self.caches.clear()
        gc.collect()
        assert open_descriptors() == self.descriptors

    def last_step(self, cache: DiskSwapCache, held: Held) -> None:
        """One more step, and what is compared then."""


class Exact(Caches):
    @initialize(engine=st.sampled_from(ENGINES), exact=st.sampled_from([True, "bitwise"]))
    def begin(self, engine: str, exact: Any) -> None:
        cache = DiskSwapCache(model(), **{**SMALL, "exact": exact, "engine": engine})
        self.add(cache, Held())

    def last_step(self, cache: DiskSwapCache, held: Held) -> None:
        """As the model answers without a cache of ours."""
        ids = torch.full((held.rows, 1), 23)
        with torch.no_grad():
            whole = torch.cat([held.ids, ids], 1)
            expected = model()(whole, past_key_values=DynamicCache(config=model().config)).logits[:, -1]
        found = self.feed(cache, held, ids)
        assert float((found - expected).abs().max() / expected.std()) < TOLERANCE


class Sparse(Caches):
    """Begins with a fork of a long context: prefilled once an engine."""

    first: dict[str, tuple[DiskSwapCache, Held]]

    @initialize(engine=st.sampled_from(ENGINES))
    def begin(self, engine: str) -> None:
        first, held = self.first[engine]
        self.add(first.fork(), copy.deepcopy(held))

    def last_step(self, cache: DiskSwapCache, held: Held) -> None:
        """It still selects."""
        layer = cache.layers[0]
        before = cache.storage.counters.units_selected
        self.feed(cache, held, torch.full((held.rows, 1), 23))
        if layer.history.units > 60 and layer.predictor is not None and layer.predictor.fitted.keys is not None:
            selected = (cache.storage.counters.units_selected - before) / held.rows / len(cache.layers)
            assert 0 <= selected <= 24, "all is read"  # none where the layers go on with what they chose


class Tree(Sparse):
    """Layers that differ, abstracts in memory or on the disk, early steps, and slots in host memory."""

    cache_class = AbstractTreeCache

    @invariant()
    def replicas_are_of_the_records(self) -> None:
        """Each record has one."""
        for cache, _ in self.caches:
            for layer in cache.selective:
                if not layer.is_initialized or layer.history.replicas is None or not layer.history.units:
                    continue
                history, replicas = layer.history, layer.history.replicas
                records = np.unique(history.table.ids).astype(np.int64)
                ids = replicas.locate(records)
                assert (ids >= 0).all() and len(np.unique(ids)) == len(ids)
                kept, packed = (aligned_empty(len(ids), of.record_bytes) for of in (history.form, replicas))
                for store, some, out in ((history.store, records, kept), (replicas.store, ids, packed)):
                    cache.storage.prefetcher.read(store, some, out).wait()
                expected = torch.zeros_like(packed)
                pack_replicas(replicas.form.layout, history.form.payload(kept), expected)
                assert torch.equal(packed, expected)

    @invariant()
    def abstracts_are_of_the_keys(self) -> None:
        for cache, held in self.caches:
            for layer in cache.selective if held.length else ():
                if layer.predictor is None or not layer.predictor.ready(layer.history.units) or not layer.history.units:
                    continue
                group, keys = layer.history.form.group_size, layer.rows.fold(layer.whole()[0])
                parts = keys[:, :, : layer.history.units * group].unflatten(2, (-1, group))
                expected = torch.stack([parts.amin(3), parts.amax(3)], 1).permute(0, 3, 1, 2, 4)
                assert torch.equal(abstracts(layer), expected), f"{layer.name} is judged by something else"

    def last_step(self, cache: Any, held: Held) -> None:
        """It still selects: of half the tokens in one layer and twice 16 chunks in the other, of two heads."""
        before = cache.storage.counters.units_selected
        self.feed(cache, held, torch.full((held.rows, 1), 23))
        if all(layer.can_choose() for layer in cache.selective):
            selected = (cache.storage.counters.units_selected - before) / held.rows
            most = sum(layer.rows.heads * layer.budget for layer in cache.selective)
            whole = sum(layer.rows.heads * layer.history.units for layer in cache.selective)
            assert bool(selected) == bool(whole) and selected <= max(most, 1)
            assert selected < whole or held.length < 200, "all is read"


class Clustered(Sparse):
    """Clusters that are joined, split, shared and read from contexts, whose means are in memory or on the disk."""

    cache_class = ClusterCache

    def settle(self, cache: Any, rows: torch.Tensor) -> None:
        """What waits for clusters that rows are to share."""
        for layer in cache.selective:
            if layer.is_initialized:
                layer.settle_rows(rows)

    @invariant()
    def nobody_else_changed(self) -> None:
        """Tables are each cache's own. One that is frozen settles what waits, which may split clusters."""

    @invariant()
    def clusters_are_of_the_keys(self) -> None:
        """Each has as many keys as it says, of that mean; none lies where another does."""
        for cache, held in self.caches:
            for layer in cache.selective if held.length else ():
                own, keys = layer.history.clustered, layer.rows.fold(layer.whole()[0])
                points = keys.transpose(1, 2).flatten(2).float().numpy()
                pages = in_order(own.page_counts)
                ids = own.pages.records(*pages)
                for row in range(layer.history.rows):
                    counts = np.bincount(own.labels[row], minlength=own.partition.clusters)
                    assert np.array_equal(counts, own.partition.counts[row])
                    assert len(np.unique(ids[pages[0] == row])) == int((pages[0] == row).sum())
                    sums = np.zeros((len(counts), points.shape[2]), dtype=np.float32)
                    np.add.at(sums, own.labels[row], points[row, : own.sealed])
                    means = sums[counts > 0] / counts[counts > 0, None]
                    np.testing.assert_allclose(own.partition.centroids[row][counts > 0], means, rtol=5e-3, atol=5e-3)

    def last_step(self, cache: Any, held: Held) -> None:
        """It still selects: of many clusters some, each of which may lie in one record more than its tokens need."""
        before = cache.storage.counters.units_selected
        self.feed(cache, held, torch.full((held.rows, 1), 23))
        if all(layer.can_choose() for layer in cache.selective):
            selected = (cache.storage.counters.units_selected - before) / held.rows
            most = sum(
                layer.rows.heads * layer.most_records(layer.config, layer.history.form.group_size, layer.budget)
                for layer in cache.selective
            )
            whole = sum(layer.rows.heads * layer.history.records for layer in cache.selective)
            assert bool(selected) == bool(whole) and selected <= max(most, 1)
            assert selected < whole or held.length < 200, "all is read"


def run(machine: type[Caches], examples: int) -> None:
    """The first failure is shown as it came: making it smaller would take minutes."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=20, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False, phases=[Phase.generate],
        ),
    )  # fmt: skip


def run_sparse(machine: type[Sparse], fields: dict[str, Any], examples: int) -> None:
    """With the first caches made and closed around it."""

    class Machine(machine):  # type: ignore[misc,valid-type]
        first: dict[str, tuple[Any, Held]] = {}  # noqa: RUF012

    try:
        for engine in ENGINES:
            cache, held = machine.cache_class(model(), **{**fields, "engine": engine}), Held()
            Machine.first[engine] = cache, held
            watcher = Caches()
            watcher.add(cache, held)
            watcher.feed(cache, held, random_ids(1, 1, LONG))
            shutil.rmtree(watcher.folder)
            assert len(compact_keys(cache)) == len(cache.selective) == 2
            cache.fork().close()
        before = [compact_keys(cache) for cache, _ in Machine.first.values()]
        run(Machine, examples)
        after = [compact_keys(cache) for cache, _ in Machine.first.values()]
        assert all(torch.equal(*pair) for pairs in zip(before, after, strict=True) for pair in zip(*pairs, strict=True))
    finally:
        for cache, _ in Machine.first.values():
            cache.close()
            cache.__dict__.pop("update", None)


MACHINES: dict[str, tuple[type[Sparse], dict[str, Any], int]] = {
    "sparse": (Sparse, SPARSE, 6),
    "tree, memory": (Tree, {**TREE, "abstracts": "memory"}, 6),
    "tree, disk": (Tree, {**TREE, "abstracts": "disk"}, 6),
    "replicas, memory": (Tree, {**PACKED, "abstracts": "memory"}, 4),
    "replicas, disk": (Tree, {**PACKED, "abstracts": "disk"}, 4),
    "clusters, memory": (Clustered, {**CLUSTERS, "centroids": "memory"}, 4),
    "clusters, disk": (Clustered, {**CLUSTERS, "centroids": "disk"}, 4),
}
"""What is run, of which fields, and how many examples of it."""


def test_exact() -> None:
    run(Exact, 6)


USUALLY = ("sparse", "tree, disk", "replicas, memory", "clusters, memory")
FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in MACHINES if name not in USUALLY]


@pytest.mark.parametrize("name", [*USUALLY, *FURTHER])
def test_selecting(name: str) -> None:
    run_sparse(*MACHINES[name])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["exact", *MACHINES])
def test_for_long(name: str) -> None:
    if name == "exact":
        run(Exact, 150)
    else:
        machine, fields, few = MACHINES[name]
        run_sparse(machine, fields, 15 * few)
