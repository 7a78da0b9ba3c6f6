"""Decoding steps in a CUDA graph, on a device that only counts. Groups have four tokens: each fourth step seals one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import Counts, Fake, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache, graphed_step
from hf_offload_cache.core import SelectiveCache
from hf_offload_cache.errors import PromptError, UnsupportedModelError
from hf_offload_cache.fetch import device_slots
from hf_offload_cache.interop import graphed_step as graphs
from hf_offload_cache.methods.spec import FusedAttention
from hf_offload_cache.model import Geometry

TOKENS, STEPS = 664, 19
"""So many that the third group that is sealed is beyond the room of the codes."""
PREPARES, SEALS = "the step prepares a graph", "the step seals a group of tokens"
FIELDS: dict[type[SelectiveCache], dict[str, Any]] = {
    DiskSwapCache: {"num_selected": 128, "group_size": 4},
    AbstractTreeCache: {"num_selected": 32, "chunk_size": 8, "early_steps": 0},
    SpecCache: {"num_selected": 20, "num_recent": 32, "quant_group": 32},
    ClusterCache: {"num_selected": 64, "num_recent": 8, "join_every": 8, "group_size": 8, "max_context": 1200},
}
"""The usual ones of these tests."""
WAYS: list[tuple[type[SelectiveCache], dict[str, Any], tuple[int, int, int]]] = [
    (DiskSwapCache, {}, (4, 2, 1)),
    (DiskSwapCache, {"entry_bits": 8, "heads_apart": True}, (4, 2, 1)),
    (DiskSwapCache, {"remainder": False, "num_sinks": 0, "reuse_capacity": 0}, (4, 2, 1)),
    (AbstractTreeCache, {"entry_bits": 8}, (2, 2, 1)),
    (AbstractTreeCache, {"reuse_capacity": 0, "num_sinks": 0}, (2, 2, 1)),
    (AbstractTreeCache, {"num_opened": 32}, (2, 2, 1)),
    (AbstractTreeCache, {"early_steps": 6, "dense_layers": 1}, (2, 3, 2)),
    (SpecCache, {}, (1, 2, 1)),
    (SpecCache, {"bits": 1, "num_sinks": 0, "max_context": TOKENS + 64}, (1, 1, 1)),
    (SpecCache, {"num_selected": 0}, (1, 2, 0)),
    (ClusterCache, {"entry_bits": 8, "cluster_size": 30}, (2, 1, 5)),
    (ClusterCache, {"reuse_capacity": 0, "num_sinks": 0, "append_buffer": 30}, (2, 1, 5)),
]
"""With so many steps that seal, that prepare a graph, and for which clusters change, slots are made, or there is no
guess."""
CHANGED, SETTLES = "clusters have changed", "the step settles clusters"
OTHERS = {"slots are made", "there is no guess of the next token", CHANGED, SETTLES}
Step = Callable[[torch.Tensor], Any]


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


@contextmanager
def a_device(
    seed: int | None = None, cls: type[SelectiveCache] = DiskSwapCache, **fields: Any
) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts. `seed`: of its streams."""
    fields = {"engine": "memory", **FIELDS[cls], **fields}
    with on_the_device(llama(), seed) as (model, counts), cls(model, **fields) as cache:
        yield model, cache, counts


def prefilled(model: Any, cache: Any, rows: int = 1) -> torch.Tensor:
    """The first token (B, 1) after a prompt."""
    ids = prompt(model, rows, TOKENS)
    with torch.no_grad():
        return values_of(model(Fake(ids), past_key_values=cache, logits_to_keep=1).logits).argmax(2)


def eager(model: Any, cache: Any) -> Step:
    return lambda token: model(token, past_key_values=cache)


def decoded(step: Step, token: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, steps) that follow `token` (B, 1), and the logits of each step."""
    tokens, logits = [], []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(values_of(step(Fake(token)).logits))
            tokens.append(token := logits[-1].argmax(2))
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize(
    ("way", "rows", "seed"),
    [
        pytest.param(way, 2 - index % 2, index, marks=[pytest.mark.slow] if index in (2, 4, 5, 9, 11) else [])
        for index, way in enumerate(WAYS)
    ],
)
def test_tokens_are_those_of_eager_steps(way: Any, rows: int, seed: int) -> None:
    """Over all seals and one more capture, in any order of the streams; and what was read is counted."""
    cls, fields, (seals, prepares, made) = way
    with a_device(seed, cls, **fields) as (model, cache, _):
        expected = decoded(eager(model, cache), prefilled(model, cache, rows))
        told = cache.report()
    with a_device(seed, cls, **fields) as (model, cache, _):
        first, step, reasons = prefilled(model, cache, rows), graphed_step(model, cache), []

        def called(token: torch.Tensor) -> Any:
            output = step(token)
            reasons.append(step.reason)
            assert output.past_key_values is cache
            return output

        assert_same(decoded(called, first), expected)
        report = cache.report()
        assert torch.equal(cache.input_ids[:, TOKENS:], torch.cat([first, expected[0][:, :-1]], 1))
        assert cache.tokens == TOKENS + STEPS
    others = sum(reason in OTHERS for reason in reasons)
    assert (reasons.count(SEALS), reasons.count(PREPARES), others) == (seals, prepares, made)
    assert reasons.count(None) == step.replays == STEPS - seals - prepares - made and reasons[-4:].count(None) >= 1
    assert step.captures == prepares
    for name in ("hit_rate", "bytes_read", "selected_fraction", "decode_steps"):
        assert getattr(report, name) == getattr(told, name), name
    for name in ("estimated_mass", "lost_mass"):  # of the steps that seal, in each layer
        ours, theirs = getattr(report, name), getattr(told, name)
        assert (ours is None) == (theirs is None) and (ours is None or ours == pytest.approx(theirs, rel=0.3))


REPLAYS = {DiskSwapCache: 10, AbstractTreeCache: 12, SpecCache: 13, ClusterCache: 10}


@pytest.mark.parametrize(("cls", "replays"), REPLAYS.items())
def test_a_replayed_step_is_one_launch_and_two_copies(cls: type[SelectiveCache], replays: int) -> None:
    """And the copy of its ids; with `SpecCache` the guess is joined to them, and the next one found. With
    `ClusterCache` the first one after a change of clusters copies which entries are buffered. It waits for nothing."""
    expected = {"interop/graphed_step.py:_run": 1, "interop/graphed_step.py:_tell": 1, "core/token_log.py:append": 1}
    if cls is SpecCache:
        expected |= {"methods/spec/cache.py:with_guess": 1, "methods/spec/cache.py:guess_of": 1}
    with a_device(None, cls) as (model, cache, counts):
        first, step = prefilled(model, cache), graphed_step(model, cache)
        launches, replayed = {}, 0
        for _ in range(STEPS):
            counts.clear()
            step(Fake(first))
            if step.reason is None and not counts.syncs:  # a capture waits
                replayed += 1
                assert counts.launches == expected
                copies = {1, 1 + len(cache.selective)} if cls is ClusterCache else {1}
                assert counts.to_device.total() in copies and not counts.to_host
            launches[step.reason] = counts.launches.total(), counts.syncs.total(), counts.blocking.total()
    assert replayed == step.replays - step.captures == replays
    assert launches[None] == (len(expected), 0, 0)
    count, waits, blocking = launches[SEALS]
    most = {SpecCache: 1, ClusterCache: 3 * COMMON["num_hidden_layers"]}  # a mask; keys that join clusters
    assert count > 40 and waits <= most.get(cls, 0) and not blocking


def changed(model: Any, cache: Any, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of two sequences, which change between them."""
    first = prefilled(model, cache, 2)
    parts = [decoded(step, first, 12)]
    for change in (
        lambda: cache.crop(-1),
        lambda: cache.crop(-9),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: eager(model, cache)(Fake(torch.tensor([[5, 6, 7]]))),
    ):
        change()
        first = first[: cache.sequences]
        parts.append(decoded(step, first, 6))
    return tuple(torch.cat([part[at].flatten(0, 1) for part in parts]) for at in range(2))  # type: ignore[return-value]


FURTHER = [pytest.param(cls, marks=pytest.mark.slow) for cls in (AbstractTreeCache, SpecCache)]


@pytest.mark.parametrize("cls", [DiskSwapCache, ClusterCache, *FURTHER])
def test_a_graph_is_captured_again_after_changes(
    cls: type[SelectiveCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_device(None, cls) as (model, cache, _), torch.no_grad():
        expected = changed(model, cache, eager(model, cache))
    with a_device(None, cls) as (model, cache, _), torch.no_grad():
        step = graphed_step(model, cache)
        assert_same(changed(model, cache, step), expected)
        assert step.captures >= 4 and step.replays > step.captures
    with a_device(None, cls) as (model, cache, _), torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(graphs, "_same", lambda known, parts: bool(known))
        with pytest.raises(RuntimeError, match="freed"):
            changed(model, cache, graphed_step(model, cache))


class Adapted(torch.nn.Module):
    """A module with two adapters, which are switched as PEFT does it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self._active_adapter = inner, ["one"]

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) * (1 if self._active_adapter == ["one"] else -1)


def with_changes(model: Any, cache: Any, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits while a model's modules, adapters, parameters and hooks change."""
    first, found = prefilled(model, cache), []

    def run() -> None:
        found.append(decoded(step, found[-1][0][:, -1:] if found else first, 7))

    run()
    inner = model.model.norm
    model.model.norm = Adapted(inner)
    run()
    model.model.norm._active_adapter = ["two"]
    run()
    inner.weight = torch.nn.Parameter(inner.weight * -2, requires_grad=False)
    run()
    hook = inner.register_forward_hook(lambda module, given, output: output * -1)
    run()
    hook.remove()
    run()
    return tuple(torch.cat([part[at].flatten(0, 1) for part in found]) for at in range(2))  # type: ignore[return-value]


def test_a_changed_model_is_captured_again() -> None:
    with a_device() as (model, cache, _), torch.no_grad():
        expected = with_changes(model, cache, eager(model, cache))
    with a_device() as (model, cache, _), torch.no_grad():
        step = graphed_step(model, cache)
        assert_same(with_changes(model, cache, step), expected)
        assert step.captures >= 6 and step.replays > step.captures
        model.train()
        step(Fake(expected[0][-1:, None]))
        assert step.reason == "the model trains, or returns attention weights"


def test_memory_of_a_graph_is_booked_and_freed() -> None:
    with a_device() as (model, cache, _):
        first, step, account = prefilled(model, cache), graphed_step(model, cache), cache.storage.account
        decoded(step, first, 10)
        logits, layer, units = model.config.vocab_size * 4, cache.selective[0], 320
        least = logits + 8 * (1 + 2 + 3 * len(cache.selective)) + 4 * 4 * units
        assert least < account.by_owner["graphs"] < 100 * least
        assert layer.device_slots.room > layer.history.units and layer.predictor.room >= layer.history.units
        plan = type(cache).plan(Geometry.of(model), cache.config, cache.tokens, 1)
        books = layer.tables_nbytes - layer.history.tables_nbytes
        assert books == layer.device_slots.tables_nbytes > 12 * layer.device_slots.room
        assert account.by_owner["tables"] <= plan.host_decode["tables"]
        other = graphed_step(model, cache)  # a cache has one
        assert not account.by_owner["graphs"]
        decoded(other, first, 6)
        assert account.by_owner["graphs"]
        other.close()
        other.close()
        assert not account.by_owner["graphs"]
        decoded(step, first, 2)
        assert step.reason == "another graphed_step was made" and not account.by_owner["graphs"]
        decoded(other, first, 6)
        assert account.by_owner["graphs"] and other.captures >= 2
    assert account.current == 0


@pytest.mark.parametrize("cls", FIELDS)
def test_graphs_of_each_cache_keep_to_a_budget(cls: type[SelectiveCache]) -> None:
    """And to its plan. Its tensors, those of the layers among them, are booked before they are made."""
    fields = {"memory": "16MiB", "max_context": TOKENS + 64, "reuse_capacity": 0, "graphs": True}
    with a_device(None, cls, **fields) as (model, cache, _):
        first, step, account = prefilled(model, cache), graphed_step(model, cache), cache.storage.account
        own, booked = cache.room_for, list[int]()
        cache.room_for = lambda owner, nbytes: booked.append(nbytes) or own(owner, nbytes)
        decoded(step, first, 1)
        account.reset_peaks()
        decoded(step, first, 9)
        masks = [one._seen for one in step._layers if hasattr(one, "_seen")]
        tensors = [step._ids, step._numbers, *[step._counts] * 3, *masks]
        assert booked[0] == sum(one.nbytes for one in tensors) and len(masks) == 3 * (cls is ClusterCache)
        assert step.replays and account.by_owner["graphs"] > model.config.vocab_size * 4
        plan = cls.plan(Geometry.of(model), cache.config, TOKENS + 64, 1)
        assert account.by_owner["graphs"] <= plan.decode["graphs"] == plan.prefill["graphs"]
        assert account.peak <= account.limit
        step.close()
        assert not account.by_owner["graphs"] and all(getattr(one, "_seen", None) is None for one in step._layers)
    assert account.current == 0


@pytest.mark.parametrize(
    ("spare", "graphs", "fits"), [(40, False, True), (12, False, False), (0, True, True), (0, False, False)]
)
def test_within_a_budget_a_graph_takes_the_memory_of_lent_slots_or_what_is_reserved_or_there_is_none(
    spare: int, graphs: bool, fits: bool
) -> None:
    """`spare`: KiB beyond what a step needs; without any, there are slots for all, and further ones take no memory."""
    fields = {"memory": "16MiB", "max_context": TOKENS + 64, "graphs": graphs}
    with a_device(**fields, reuse_capacity=400 if spare else TOKENS + 64) as (model, cache, _):
        first, step, account = prefilled(model, cache), graphed_step(model, cache), cache.storage.account
        decoded(step, first, 1)
        geometry = Geometry.of(model)
        account.limit = cache._with_slots(geometry, 0) + spare * 1024
        there, elsewhere = (
            DiskSwapCache.plan(replace(geometry, device=device), cache.config, TOKENS + 64, 1).decode
            for device in ("cuda", "cpu")
        )
        assert ("graphs" in there) == graphs and "graphs" not in elsewhere
        cache._lent_for = (0, 0)
        for layer in cache.selective:
            layer.drop_fetcher()
        account.reset_peaks()
        decoded(step, first, 1)
        lent = cache.selecting.lent
        assert lent > 0 and not account.by_owner["graphs"]
        decoded(step, first, 17)
        assert account.peak <= account.limit
        assert bool(step.replays) == bool(account.by_owner["graphs"]) == fits
        assert fits or step.reason in ("the budget has no room for a graph", SEALS)
        assert cache.selecting.lent < lent if fits and spare else cache.selecting.lent == lent
        assert ("activations, which are not counted" in cache.report().steps) == fits


def test_other_calls_are_the_models() -> None:
    with a_device() as (model, cache, _):
        step, ids = graphed_step(model, cache), prompt(model, 1, TOKENS)
        assert step(Fake(ids), logits_to_keep=1).logits.shape[1] == 1 and step.reason == "arguments ['logits_to_keep']"
        assert step(Fake(ids[:, :1])).logits.shape[1] == 1 and step.reason == "slots are made"
        assert step(Fake(ids[:, :2])).logits.shape[1] == 2 and step.reason == "the call has several tokens"
        assert cache.tokens == TOKENS + 3 and not step.replays
    with a_device(num_selected=2048) as (model, cache, _):
        step, first = graphed_step(model, cache), prefilled(model, cache)
        decoded(step, first, 2)
        assert step.reason == "the context is so short that a step attends to all of it"
    with a_device(None, AbstractTreeCache, abstracts="disk") as (model, cache, _):
        step, first = graphed_step(model, cache), prefilled(model, cache)
        decoded(step, first, 2)
        assert step.reason == "layer 0 does not step on a CUDA device with records in pinned host memory"
    no_guess = "there is no guess of the next token"
    for fields, reason in (({"speculative": False}, no_guess), ({"top_up": "always"}, "steps are topped up")):
        with a_device(None, SpecCache, **fields) as (model, cache, _):
            step, first = graphed_step(model, cache), prefilled(model, cache)
            decoded(step, first, 2)
            assert step.reason == reason and not step.replays
    with a_device(exact=True) as (model, cache, _):
        step, first = graphed_step(model, cache), prefilled(model, cache)
        decoded(step, first, 2)
        assert step.reason == "the cache attends to everything"


def test_padded_rows_need_a_mask() -> None:
    with a_device() as (model, cache, _):
        ids, mask = prompt(model, 2, TOKENS), torch.ones(2, TOKENS + 1, dtype=torch.long)
        mask[0, :3] = 0
        step = graphed_step(model, cache)
        step(Fake(ids), attention_mask=Fake(mask[:, :-1]), logits_to_keep=1)
        step(Fake(ids[:, :1]), attention_mask=Fake(mask))
        with pytest.raises(PromptError, match="attention_mask is missing"):
            step(Fake(ids[:, :1]))
        assert cache.tokens == TOKENS + 1


def test_on_a_processor_each_call_is_the_models() -> None:
    model = llama()
    ids, found = prompt(model, 1, TOKENS + 3), []
    for graphed in (False, True):
        with DiskSwapCache(model, engine="memory", look_ahead=False) as cache, torch.no_grad():
            step = graphed_step(model, cache) if graphed else eager(model, cache)
            found.append([step(part).logits for part in ids.split([TOKENS, 1, 1, 1], 1)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert step.reason == "layer 0 does not step on a CUDA device with records in pinned host memory"
    with DiskSwapCache(model) as cache, pytest.raises(ValueError, match="another model"):
        graphed_step(llama(), cache)


@pytest.mark.parametrize("cls", [DiskSwapCache, SpecCache])
def test_a_step_that_cannot_be_captured_says_so_and_adds_nothing(
    cls: type[SelectiveCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_device(None, cls) as (model, cache, _):
        first = prefilled(model, cache)
        expected = decoded(eager(model, cache), first, 6)
    with a_device(None, cls) as (model, cache, _):
        first, step = prefilled(model, cache), graphed_step(model, cache)
        for _, place in zip(range(2), itertools.count()):
            step(Fake(first if not place else expected[0][:, place - 1 : place]))
        # other code's hooks on the model would see a guess
        where, name = (FusedAttention, "attend") if cls is SpecCache else (type(model.model.norm), "forward")
        own: Any = getattr(where, name)
        calls = itertools.count(1)

        def waits(self: Any, *given: Any) -> Any:
            result = own(self, *given)
            if cls is not SpecCache or next(calls) == len(cache.selective):  # after other layers' reads have begun
                assert float((result[0] if cls is SpecCache else result).abs().max()) > 0
            return result

        monkeypatch.setattr(where, name, waits)
        with pytest.raises(UnsupportedModelError, match="cannot be captured as a CUDA graph"):
            step(Fake(expected[0][:, 1:2]))
        monkeypatch.undo()
        assert cache.tokens == TOKENS + 2
        found = decoded(step, expected[0][:, 1:2], 4)
        assert torch.equal(found[0], expected[0][:, 2:])


def test_a_read_that_could_not_begin_leaves_no_slot_that_says_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step that prepares a graph. The step is repeated, and is right."""
    with a_device(reuse_capacity=0) as (model, cache, _):
        first = prefilled(model, cache)
        expected = decoded(eager(model, cache), first, 4)
    with a_device(reuse_capacity=0) as (model, cache, _):
        first, step = prefilled(model, cache), graphed_step(model, cache)
        tokens, _ = decoded(step, first, 1)

        def refused(*_: Any) -> None:
            raise MemoryError("no room for a kernel")

        monkeypatch.setattr(device_slots, "bring", refused)
        with pytest.raises(MemoryError):
            step(Fake(tokens))
        monkeypatch.undo()
        found = decoded(step, tokens, 3)
    assert_same(found, (expected[0][:, 1:], expected[1][:, 1:]))


def test_counts_restart_between_replays() -> None:
    with a_device() as (model, cache, _):
        first, step = prefilled(model, cache), graphed_step(model, cache)
        token = decoded(step, first, 9)[0][:, -1:]
        assert step.reason is None
        cache.storage.reset_counters()
        decoded(step, token, 2)
        counters = cache.storage.counters
        report = cache.report()
        each = sum(layer.budget for layer in cache.selective)
        assert counters.units_selected == 2 * each and counters.decode_steps == 2
        read = sum(layer.history.store.reads for layer in cache.selective)
        assert counters.units_resident == 2 * each - read and report.hit_rate == 1 - read / (2 * each)
