"""What a decoding step of each cache copies to and from a CUDA device, and how often it waits, on a device that only
counts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_device import CUDA, Counts, Fake, fake_cuda, moved, on_the_device, values_of
from harness import COMMON, build, fresh, prompt
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.core import device_step
from hf_offload_cache.fetch import Storage, storage
from hf_offload_cache.fetch.write_queue import WriteBatch
from hf_offload_cache.history import PositionHistory, RecordFormat, records
from hf_offload_cache.kernels import low_bit, on_a_device
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.stores import memory

TOKENS, STEPS, LAYERS = 300, 4, COMMON["num_hidden_layers"]
ATTENDED, OF_TAILS = 2, {"cluster": 1}
"""Launches of attention in a piece that attends to one block, and to itself with the tail; and those of an earlier tail
that is a block by itself."""
MOST = {"disk-swap": (0, 4, 1), "cluster": (0, 7, 2), "spec": (3, 2, 4), "abstract-tree": (0, 3, 0)}
"""The most copies to the host and to the device, and waits for the device, a layer and step. A step's own come on
top."""

WITHOUT = on_a_device._kernel
"""As it is without the counting device: the twin, where kernels do not run."""


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


def steps(
    model: Any, cache: Any, put: Callable[[torch.Tensor], torch.Tensor], counts: Counts, tokens: int = TOKENS
) -> list[torch.Tensor]:
    """Logits of the prompt's last token, and of each step after it. `counts` begin with the steps."""
    ids = prompt(model, 1, tokens + STEPS)
    with torch.no_grad():
        logits = [model(put(ids[:, :tokens]), past_key_values=cache, logits_to_keep=1).logits]
        counts.clear()
        for place in range(tokens, tokens + STEPS):
            logits.append(model(put(ids[:, place : place + 1]), past_key_values=cache).logits)
    return [values_of(one) for one in logits]


@functools.cache
def expected(tokens: int = TOKENS) -> list[torch.Tensor]:
    """The logits of a `DynamicCache` on the CPU."""
    model = llama()
    return steps(model, DynamicCache(config=model.config), lambda ids: ids, Counts(), tokens)


def test_a_plain_cache_copies_nothing() -> None:
    """The instrument itself: a step of `DynamicCache` launches kernels and copies nothing; the logits are right."""
    wanted = expected()  # on the CPU
    with on_the_device(llama()) as (model, counts):
        found = steps(model, DynamicCache(config=model.config), Fake, counts)
        assert counts.launches["model"] > 20 * LAYERS * STEPS
        assert not (counts.to_device or counts.to_host or counts.syncs)
    torch.testing.assert_close(found, wanted)


def test_windows_next_to_offloaded_layers_are_the_models_own() -> None:
    """Their keys and values are cut from longer tensors, and copied: each from its own memory on the device."""
    wanted = steps(fresh("gemma3"), DynamicCache(config=fresh("gemma3").config), lambda ids: ids, Counts())
    on_device = on_the_device(fresh("gemma3"), 0)
    with on_device as (model, counts), cache_class("disk-swap")(model, engine="memory") as cache:
        found = steps(model, cache, Fake, counts)
        assert cache.layers[0].is_sliding and cache.layers[0].keys.shape[2] < 20
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_nothing_of_the_device_is_left() -> None:
    before = torch.tensor, torch.Tensor.pin_memory, dict(vars(torch.cuda))
    with pytest.raises(ZeroDivisionError), fake_cuda():
        assert torch.tensor([1.0], device="cuda").device == CUDA and torch.cuda.is_available()
        raise ZeroDivisionError
    assert (torch.tensor, torch.Tensor.pin_memory, dict(vars(torch.cuda))) == before


def test_an_operator_gets_tensors_of_one_side() -> None:
    """As of a device that computes, and a list that indexes goes there."""
    with fake_cuda():
        there, here = Fake(torch.arange(6.0)), torch.ones(6)
        assert there[[4, 1]].tolist() == [4, 1] and (there + 1.0).tolist()[0] == 1
        for mixed in (lambda: there + here, lambda: there.mul_(here), lambda: torch.cat([there, here])):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "disk-swap, 8 bits": ("disk-swap", {"entry_bits": 8, "remainder": True}),
    "disk-swap, heads apart": ("disk-swap", {"entry_bits": 8, "heads_apart": True}),
    "cluster, 8 bits": ("cluster", {"entry_bits": 8}),
    "abstract-tree, 8 bits": ("abstract-tree", {"entry_bits": 8, "reuse_capacity": 32}),
    "spec": ("spec", {}),
}


ROWS, PROMPT, PIECE, FED = 2, 1152, 576, 10
"""Of a padded batch; `FED`: steps, so many that a choice between near equals weighs little."""


def padded(model: Any, cache: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Logits of the last token of each call: a prompt in pieces, in a padded batch, and steps after it."""
    ids = prompt(model, ROWS, PROMPT + FED)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    found = []
    with torch.no_grad():
        for start, stop in itertools.pairwise([*range(0, PROMPT, PIECE), *range(PROMPT, PROMPT + FED + 1)]):
            given = {"attention_mask": put(mask[:, :stop]), "logits_to_keep": 1}
            found.append(values_of(model(put(ids[:, start:stop]), past_key_values=cache, **given).logits))
    return torch.cat(found, 1)


def padded_by(way: str, model: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    name, fields = WAYS[way]
    sizes = {"max_context": 1200, "max_batch": ROWS, "num_selected": 128}
    with tempfile.TemporaryDirectory() as folder, cache_class(name)(model, path=folder, **sizes, **fields) as cache:
        return padded(model, cache, put)


@functools.cache
def padded_on_host(way: str | None) -> torch.Tensor:
    """By a `DynamicCache` if there is no way."""
    model = llama()
    if way is None:
        return padded(model, DynamicCache(config=model.config), lambda given: given)
    return padded_by(way, model, lambda given: given)


SEEDS = (0,)
"""Of the order in which a device's streams run."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS)
def test_steps_on_a_device_are_as_close_as_on_the_host(way: str, seed: int) -> None:
    """Selective steps, with maps that the prompt fits: sums differ in their order, and so do choices between near
    equals, but not their distance from `DynamicCache`."""
    exact, on_host = padded_on_host(None), padded_on_host(way)
    with on_the_device(llama(), seed) as (model, _):
        on_device = padded_by(way, model, Fake)
    calls = PROMPT // PIECE
    torch.testing.assert_close(on_device[:, :calls], on_host[:, :calls], rtol=1e-3, atol=1e-3)
    wrong, expected = (float((found - exact)[:, calls:].square().mean().sqrt()) for found in (on_device, on_host))
    assert wrong == pytest.approx(expected, rel=0.2) and expected > 1e-4


@pytest.mark.parametrize("name", CACHES)
def test_blocks_of_a_device_are_planned(name: str, tmp_path: Path) -> None:
    """A piece attends to a history that is longer than a block on a CPU, in one block, within the plan."""
    (tokens, piece), cls = (3900, 1300), cache_class(name)
    ids = prompt(llama(), 1, tokens)
    with on_the_device(llama()) as (model, counts), torch.no_grad():
        with cls(model, path=tmp_path, num_selected=64, max_context=tokens) as cache:
            for part in ids.split(piece, 1):
                counts.clear()
                model(Fake(part), past_key_values=cache, logits_to_keep=1)
            plan = cls.plan(Geometry.of(model), cache.config, tokens, 1)
            short = cls.plan(Geometry.of(model), dataclasses.replace(cache.config, block_tokens=1024), tokens, 1)
            account = cache.storage.account
            owner = "stream buffers"
            assert short.prefill[owner] < account.by_owner[owner] <= plan.prefill[owner]
            assert account.peak <= plan.prefill_bytes
        assert counts.launches["model/stream_attention.py:_fused"] == (ATTENDED + OF_TAILS.get(name, 0)) * LAYERS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CACHES)
def test_a_step_copies_and_waits_so_often(name: str, seed: int, tmp_path: Path) -> None:
    """Everything is selected: the logits are those of a `DynamicCache`, by the branches for CUDA."""
    wanted = expected()  # on the CPU
    with on_the_device(llama(), seed) as (model, counts):
        with cache_class(name)(model, path=tmp_path, max_context=512, num_selected=512) as cache:
            found = steps(model, cache, Fake, counts)
        copies, waits = counts.to_host.total(), counts.syncs.total()
        assert 0 < counts.to_device.total() <= MOST[name][1] * LAYERS * STEPS, counts.to_device
        assert counts.to_host["core/token_log.py:append"] <= STEPS
        assert copies <= (MOST[name][0] * LAYERS + 2) * STEPS, counts.to_host
        assert waits <= (MOST[name][2] * LAYERS + 5) * STEPS, counts.syncs
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_an_exact_step_streams_pinned_memory_and_waits_for_nothing(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks a layer straight from where records lie, in steps and in the pieces of a prompt. From the disk, they
    are read first."""
    monkeypatch.setattr(storage, "_LEAST_RUN", 1)
    waits, fields = {}, {"exact": True, "block_tokens": 64, "max_context": 512}
    ids = prompt(llama(), 1, TOKENS)
    for engine in ("memory", "mapped"):
        made = cache_class("disk-swap")
        with on_the_device(llama(), seed) as (model, counts), made(model, tmp_path, engine=engine, **fields) as cache:
            found, copies, copied = steps(model, cache, Fake, counts), counts.to_device, counts.to_device_bytes
            sealed = sum(layer.history.units * layer.history.form.record_bytes for layer in cache.offloaded)
            assert 4 * LAYERS * STEPS <= copies["fetch/areas.py:_copy"] <= 5 * LAYERS * STEPS
            assert 0.9 * sealed * STEPS < copied["fetch/areas.py:_copy"] <= sealed * STEPS
            waits[engine] = counts.syncs.total(), counts.blocking.total()
            cache.reset()
            counts.clear()
            with torch.no_grad():
                for piece in ids.split(100, 1):
                    last = model(Fake(piece), past_key_values=cache, logits_to_keep=1).logits
            assert copies["fetch/areas.py:_copy"] and not counts.blocking
        torch.testing.assert_close([*found, values_of(last)], [*expected(), expected()[0]], rtol=1e-3, atol=1e-3)
    assert waits["memory"] == (0, 0) and waits["mapped"][0] > 0 == waits["mapped"][1]


@pytest.mark.parametrize("name", CACHES)
def test_a_device_without_kernels_runs_torchs_operations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of compute capability 7.5, whose models have float16, with steps that select. The report says so."""
    tokens = 600 if name == "disk-swap" else TOKENS  # to fewer it fits no codes
    sizes: dict[str, Any] = {"max_context": 1024, "max_batch": 1, "engine": "memory", "num_selected": 64}
    sizes |= {"num_recent": 32, "quant_group": 32, "num_selected": 20} if name == "spec" else {}
    found: list[list[torch.Tensor]] = []
    with cache_class(name)(plain := llama().half(), path=tmp_path, **sizes) as cache:
        found.append(steps(plain, cache, lambda ids: ids, Counts(), tokens))
    with on_the_device(llama().half()) as (model, counts), monkeypatch.context() as patch:  # undone before the device's
        patch.setattr(on_a_device, "_kernel", WITHOUT)
        patch.setattr(on_a_device, "_has_marked", lambda: False)
        WITHOUT.cache_clear()
        with cache_class(name)(model, path=tmp_path, **sizes) as cache:
            found.append(steps(model, cache, Fake, counts, tokens))
            assert cache.report().steps == f"3 of 3 over the host: {device_step.NO_KERNELS}"
        WITHOUT.cache_clear()
    exact = torch.cat([one.float() for one in expected(tokens)], 1)
    wrong = [float((torch.cat(one, 1).float() - exact).square().mean().sqrt()) for one in found]
    assert wrong[1] == pytest.approx(wrong[0], rel=0.2) and wrong[0] > 1e-4


@pytest.mark.filterwarnings("ignore:torch is built for ROCm")
@pytest.mark.parametrize("name", CACHES)
def test_rocm_attends_to_blocks_by_plain_operations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in pieces, and steps; the report has the note that nobody tried it."""
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    fields = EVERYTHING | {"engine": "memory"}
    with on_the_device(llama()) as (model, counts), cache_class(name)(model, path=tmp_path, **fields) as cache:
        ids = prompt(model, 1, TOKENS + STEPS)
        with torch.no_grad():
            found = [
                values_of(model(Fake(part), past_key_values=cache, logits_to_keep=1).logits)
                for part in ids.split([TOKENS // 2, TOKENS - TOKENS // 2, *[1] * STEPS], 1)
            ]
        assert not counts.launches["model/stream_attention.py:_fused"]
        assert any("ROCm 6.4.1" in note for note in cache.report().warnings)
    torch.testing.assert_close(found[1:], expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("refuses", [False, True], ids=["pinned", "refused"])
@pytest.mark.parametrize("name", CACHES)
def test_records_in_host_memory_are_pinned(
    name: str, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every cache, those of an opened context too. A system that pins nothing gives plain memory: tokens are the
    same, and the report says so."""
    wanted, empty = expected(), torch.empty  # on the CPU
    pinned: set[int] = set()

    def asked(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and refuses:
            raise RuntimeError("CUDA error: out of memory")
        made = empty(*shape, **options)
        if pin_memory:
            pinned.add(made.untyped_storage().data_ptr())
        return made

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in pinned

    def check(cache: Any) -> None:
        report, stores = cache.report(), cache.storage.stores
        notes = [warning for warning in report.warnings if "not pinned" in warning]
        assert all(store.in_memory and store.memory_bytes > 0 for store in stores) and len(stores) == LAYERS
        assert all(store.pageable_bytes == (store.memory_bytes if refuses else 0) for store in stores)
        assert len(notes) == refuses and report.disk_bytes == 0

    with on_the_device(llama()) as (model, counts):
        monkeypatch.setattr(torch, "empty", asked)
        monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
        copied = functools.partial(asked, pin_memory=True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: copied(one.shape, dtype=one.dtype).copy_(one))
        fields: dict[str, Any] = {"engine": "memory", "num_selected": 512, "path": tmp_path}
        with cache_class(name)(model, **fields) as cache:
            found = steps(model, cache, Fake, counts)
            check(cache)
            cache.save(tmp_path / "saved")
        with cache_class(name).open(tmp_path / "saved", model, **fields) as opened:
            check(opened)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


EVERYTHING = {"max_context": 512, "num_selected": 512}


@pytest.mark.parametrize("name", CACHES)
def test_without_pinned_memory_the_logits_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system pins no more: plain memory takes its place, and copies wait."""
    wanted, refused, plain = expected(), list[int](), torch.empty

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            refused.append(1)
            raise RuntimeError("CUDA error: out of memory")
        return plain(*sizes, **options)

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        refused.append(1)
        raise RuntimeError("CUDA error: out of memory")

    with on_the_device(llama()) as (model, counts):
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        with cache_class(name)(model, path=tmp_path, engine="direct", **EVERYTHING) as cache:
            torch.testing.assert_close(steps(model, cache, Fake, counts), wanted, rtol=1e-3, atol=1e-3)
        monkeypatch.undo()
    assert refused


class Batches(list[WriteBatch]):
    """The batches that writers get from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        init = WriteBatch.__init__
        noted = lambda batch, *args: [init(batch, *args), self.append(batch)][0]  # noqa: E731
        monkeypatch.setattr(WriteBatch, "__init__", noted)


@pytest.mark.parametrize(("group", "bits", "seed"), [(16, None, None), (15, None, 2), (16, 8, 3)])
def test_several_rows_are_written_in_place(
    group: int, bits: int | None, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device packs them together, in as many launches as one row, and copies each row's records into their store.
    Scattered ones go through the writer's queue. A unit that leaves the latest tokens later takes one launch, and stays
    if it cannot be written. If there is no memory for that either, the storage is torn."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 20 * 8192)
    monkeypatch.setattr(records, "CHUNK_BYTES", 16 * 8192)
    batches, tokens, launches = Batches(monkeypatch), 1236, []
    form = RecordFormat(2, 64, 2, 64, torch.bfloat16, group, bits)
    config = OffloadConfig(engine="memory", num_recent=32, group_size=group)
    for rows in (1, 3):
        made = torch.Generator().manual_seed(rows)
        both = [torch.randn(rows, 2, tokens, 64, generator=made).bfloat16() for _ in range(2)]
        with fake_cuda(seed) as counts:
            storage = Storage(config, None, "cuda")
            history = PositionHistory(storage, form, rows, CUDA, config, "layer 0")
            batches.clear()
            history.append(*(Fake(each[:, :, :1000]) for each in both))
            launches.append(counts.launches.total())
            assert sum(len(batch.ids) for batch in batches) == rows * history.units and len(batches) > rows
            assert all(batch.nbytes == 0 and (np.diff(batch.ids) == 1).all() for batch in batches)
            assert max(len(batch.ids) for batch in batches) > 8
            free = history.store.capacity - rows * history.units
            history.store.free(history.store.allocate(free + 400)[free::2])
            batches.clear()
            history.append(*(Fake(each[:, :, 1000:1200]) for each in both))
            assert batches and all(batch.nbytes == len(batch.ids) * form.record_bytes for batch in batches)
            units, costs, refusing = history.units, list[int](), mock.patch.object(storage.prefetcher, "write")
            for at in range(1200, tokens):
                token = [Fake(each[:, :, at : at + 1]) for each in both]
                if history.room < 1:
                    with refusing as refused, pytest.raises(MemoryError):
                        refused.side_effect = MemoryError
                        history.append(*token)
                    assert (history.length, history.recent.shape[1]) == (at, at - history.units * group)
                counts.clear()
                history.append(*token)
                costs.append(counts.launches.total())
            assert history.units > units and not storage.torn and counts.syncs.total() == 0
            assert set(costs) == {1, 2} and costs.count(2) == history.units - units
            storage.catch_up(history.store, CUDA)
            stored = [values_of(each) for each in history.whole()]
            while history.room:
                history.append(*token)
            no_memory = mock.patch.object(history.tail, "take_back", side_effect=torch.OutOfMemoryError)
            with refusing as refused, no_memory, pytest.raises(torch.OutOfMemoryError):
                refused.side_effect = MemoryError
                history.append(*token)
            assert storage.torn  # its tokens are lost
            storage.close()
        close = {"rtol": 0.02, "atol": 0.02} if bits else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(stored, both, **close)
    assert launches[0] == launches[1]


@pytest.mark.parametrize("name", CACHES)
def test_layers_on_a_host_and_on_a_device(name: str, tmp_path: Path) -> None:
    """As `device_map` spreads them: each layer's cache is on its device, and the logits are right."""
    wanted, model = expected(), llama()

    def sent(module: torch.nn.Module, *given: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: one if isinstance(one, Fake) else Fake(one), given)

    fields = EVERYTHING | ({"speculative": False} if name == "spec" else {})
    with fake_cuda() as counts:
        for part in (*model.model.layers[LAYERS // 2 :], model.model.norm, model.lm_head):
            moved(part).register_forward_pre_hook(sent, with_kwargs=True)
        with cache_class(name)(model, path=tmp_path, **fields) as cache:
            found = steps(model, cache, lambda ids: ids, counts)
            devices = [layer.device.type for layer in cache.offloaded]
    assert devices == ["cpu"] * (LAYERS // 2) + ["cuda"] * (LAYERS - LAYERS // 2)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("installed", "capability", "hip", "runs"),
    [
        pytest.param(True, (8, 0), None, True, id="ampere"),
        pytest.param(True, (7, 5), None, False, id="turing"),
        pytest.param(False, (9, 0), None, False, id="no Triton"),
        pytest.param(True, (1, 0), "6.4", True, id="rocm"),
    ],
)
def test_kernels_run_where_triton_compiles_for_the_device(
    installed: bool, capability: tuple[int, int], hip: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a device runs their twins."""
    monkeypatch.setattr(on_a_device, "_triton", lambda: installed)
    monkeypatch.setattr(on_a_device, "TWINS", {})
    monkeypatch.setattr(on_a_device, "on_its_device", lambda kernel: kernel)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def halved(rows: torch.Tensor) -> str:
        return "twin"

    module = type("module", (), {"halved": lambda rows: "kernel"})
    monkeypatch.setattr(on_a_device.importlib, "import_module", lambda name: module)
    on_a_device._is_recent.cache_clear()
    on_a_device._kernel.cache_clear()
    try:
        assert on_a_device.has_step(CUDA, 128) is runs
        assert not on_a_device.has_step(CUDA, 512) and not on_a_device.has_step(torch.device("cpu"))
        assert on_a_device._kernel(halved)(torch.ones(1)) == ("kernel" if runs else "twin")
    finally:
        on_a_device._is_recent.cache_clear()
        on_a_device._kernel.cache_clear()


def test_a_device_without_kernels_packs_and_unpacks_as_the_host() -> None:
    """Twins of `low_bit` run on its tensors."""
    torch.manual_seed(0)
    layout, keys, values = low_bit.ReplicaLayout(48, 8), torch.randn(2, 1, 64, 24), torch.randn(2, 1, 64, 11)
    rows = torch.zeros(2, 1, 2, 24, 20, dtype=torch.uint8), torch.zeros(2, 1, 2, 64, 8, dtype=torch.uint8)
    replicas, out = torch.zeros(5, layout.nbytes + 6, dtype=torch.uint8), torch.full((7, 48), torch.nan).bfloat16()
    low_bit.pack_replicas(layout, 3 * torch.randn(5, 48), replicas)
    places = torch.tensor([4, 0, 1]), torch.tensor([6, 1, 0])
    found = []
    for there in (False, True):
        with fake_cuda() if there else contextlib.nullcontext():
            pack, unpack = (on_a_device.TWINS[f"low_bit.{name}"][0] for name in ("pack", "unpack_replicas"))
            given: list[Any] = [one.clone() for one in (keys, values, *rows, replicas, out, *places)]
            keys_there, values_there, *both, stored, into, which, target = map(Fake, given) if there else given
            pack(keys_there, values_there, 4, False, *both)
            unpack(layout, stored, which, into, target)
            found.append([values_of(one) for one in (*both, into)])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    assert not found[0][2][[6, 1, 0]].isnan().any() and found[0][2][[2, 3, 4, 5]].isnan().all()
