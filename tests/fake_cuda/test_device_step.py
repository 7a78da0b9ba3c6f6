"""Steps of `DiskSwapCache` on a device that reads records by itself: kernels' twins, on a device that only counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import CUDA, Counts, Fake, fake_cuda, on_the_device, values_of
from harness import COMMON, build, prompt
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import SelectiveLayer, TokenLog
from hf_offload_cache.fetch import device_slots
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.disk_swap import fitted_keys
from hf_offload_cache.methods.spec import ChosenEntries
from hf_offload_cache.model import Geometry

TOKENS, PIECE, STEPS, LAYERS = 1280, 1280, 18, COMMON["num_hidden_layers"]
Put = Callable[[torch.Tensor], torch.Tensor]
WAYS: dict[str, dict[str, Any]] = {
    "dropped": {"remainder": False},
    "default": {},
    "8 bits": {"entry_bits": 8},
    "heads apart": {"heads_apart": True},
    "no slots, no sinks": {"reuse_capacity": 0, "num_sinks": 0},
}


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 8192}))


def host(given: torch.Tensor) -> torch.Tensor:
    return given


def fed(model: Any, cache: Any, ids: torch.Tensor, put: Put, **given: Any) -> torch.Tensor:
    """Logits (B, t, vocabulary) of all `ids` (B, t) in one forward."""
    with torch.no_grad():
        return values_of(model(put(ids), past_key_values=cache, **given).logits)


def decoded(model: Any, cache: Any, ids: torch.Tensor, put: Put, tokens: int = TOKENS) -> torch.Tensor:
    """Logits of each step after a prompt of `tokens` tokens in pieces."""
    for piece in ids[:, :tokens].split(PIECE, 1):
        fed(model, cache, piece, put, logits_to_keep=1)
    return torch.cat([fed(model, cache, part, put) for part in ids[:, tokens:].split(1, 1)], 1)


@contextmanager
def a_device(rows: int = 1, seed: int | None = None, **fields: Any) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts. `seed`: of its streams."""
    with on_the_device(llama(), seed) as (model, counts):
        sizes = {"max_context": TOKENS + 128, "max_batch": rows, "num_selected": 128, "engine": "memory"}
        with DiskSwapCache(model, **{**sizes, **fields}) as cache:
            cache.storage.pinned = True
            yield model, cache, counts


def of_slots(cache: Any) -> list[Any]:
    return [layer.device_slots for layer in cache.selective]


@pytest.mark.parametrize(("way", "rows", "seed"), [(way, 1 + index % 2, index) for index, way in enumerate(WAYS)])
def test_steps_on_a_device_are_as_close_as_on_the_host(
    way: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wait for nothing, the writer included."""
    ids, fields = prompt(llama(), rows, TOKENS + STEPS), WAYS[way]
    exact = decoded(llama(), DynamicCache(config=llama().config), ids, host)
    sizes = {"max_context": TOKENS + 128, "max_batch": rows, "num_selected": 128, "engine": "memory"}
    plain = llama()
    with DiskSwapCache(plain, **sizes, **fields) as cache:
        on_host = decoded(plain, cache, ids, host)
        expected = cache.report()
    with a_device(rows, seed, **fields) as (model, cache, counts):
        for piece in ids[:, :TOKENS].split(PIECE, 1):
            fed(model, cache, piece, Fake, logits_to_keep=1)
        steps = []
        for part in ids[:, TOKENS:].split(1, 1):
            steps.append(fed(model, cache, part, Fake))
            if len(steps) == 1:  # which frees the prefill's buffers
                counts.clear()
                monkeypatch.setattr(cache.storage.prefetcher, "flush", None)
        assert not counts.syncs and not counts.blocking
        monkeypatch.undo()
        assert all(layer.history.units > (TOKENS - 32) // 16 for layer in cache.selective)  # some were sealed
        assert all(slots is not None for slots in of_slots(cache))
        report = cache.report()
    on_device = torch.cat(steps, 1)
    wrong, usual = (float((found - exact).square().mean().sqrt()) for found in (on_device, on_host))
    assert wrong == pytest.approx(usual, rel=0.1) and usual > 1e-4
    assert report.selected_fraction == expected.selected_fraction
    for name in ("estimated_mass", "lost_mass"):
        ours, theirs = getattr(report, name), getattr(expected, name)
        assert ours == theirs if theirs is None else ours == pytest.approx(theirs, rel=0.05)
    assert (report.estimated_mass is not None) == fields.get("remainder", True)


@pytest.mark.parametrize(
    ("planned", "pieces", "fits"),
    [(TOKENS + 128, 2, [TOKENS]), (None, 2, [TOKENS // 2, TOKENS]), (TOKENS // 2 + 128, 1, [TOKENS // 2])],
)
def test_a_prompt_in_pieces_is_fitted_once_if_its_length_is_planned(
    planned: int | None, pieces: int, fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, by each layer; the first piece alone is fitted at once if it is nearly all that is planned."""
    sizes, counted = list[int](), fitted_keys.fit_coding

    def fit_coding(keys: Any, tokens: int, *rest: Any) -> Any:
        sizes.append(tokens)
        return counted(keys, tokens, *rest)

    monkeypatch.setattr(fitted_keys, "fit_coding", fit_coding)
    prompt_ids = prompt(llama(), 1, TOKENS)
    with a_device(max_context=planned) as (model, cache, _):
        for piece in prompt_ids[:, :planned].split(TOKENS // 2, 1)[:pieces]:
            fed(model, cache, piece, Fake, logits_to_keep=1)
        cache.end_prompt()
    assert sizes == [tokens - 32 for tokens in fits for _ in range(LAYERS)]  # without the tail


@pytest.mark.parametrize("rows", [1, 3])
def test_queries_of_a_fit_are_asked_on_the_device_as_on_the_host(rows: int) -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(rows, 2, 600, 32).bfloat16(), torch.randn(4 * rows, 6, 32)
    coding = fitted_keys.fit_coding(lambda: [keys], 600, 2, None, 8, query[None, 0, :, None].expand(rows, -1, 40, -1))

    def asking(coding: Any) -> list[torch.Tensor]:
        compact = fitted_keys.CodedKeys(coding, 2, rows, MemoryAccount(), None)
        there = Fake(query) if compact.device == CUDA else query
        return [values_of(one) for one in compact.asking(there, 0.25)]

    wanted = asking(coding)
    with fake_cuda() as counts:
        on_device = replace(coding, **{name: Fake(getattr(coding, name)) for name in ("mean", "keys", "key_scale")})
        found = asking(on_device)
        assert not counts.syncs
    torch.testing.assert_close(found, wanted)
    assert found[0].shape == (4 * rows, 6, coding.rank) and found[1].shape == (4 * rows, 6, 1)


def test_ids_leave_a_device_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, in order, with padding, also after changes; until then nothing is copied."""
    given = torch.arange(200).view(2, 100)
    padding = torch.zeros(2, 1, dtype=torch.bool)
    with fake_cuda() as counts:
        log = TokenLog(MemoryAccount(None))
        log.append(given[:, :4], 0)
        for at in range(4, 60):
            log.append(Fake(given[:, at : at + 1]), at)
        assert log.length == 60 and not counts.to_host and not log.padded
        assert torch.equal(log.ids, given[:, :60]) and counts.syncs.total() == 1
        log.append(Fake(given[:, 60:61]), 60, Fake(padding))
        assert log.padded and not log.has_padding() and not log.padded
        log.append(Fake(given[:, 61:62]), 61, Fake(~padding))
        assert log.has_padding() and not log.visible[:, 61].any() and torch.equal(log.ids, given[:, :62])
        log.append(Fake(given[:, 50:51]), 50)  # over what is there
        log.append(Fake(given[:, 51:52]), 51)
        log.select_rows(torch.tensor([1, 1]))
        assert torch.equal(log.ids, given[[1, 1], :52]) and not log.padded
        log.append(Fake(given[:1, :3]), 0)  # another batch, and several at once
        log.truncate(2)
        assert log.ids.tolist() == [[0, 1]]
        ids = Fake(torch.tensor([[7]]))
        log.append(ids, 2)
        ids.fill_(8)  # the caller's own
        assert log.ids.tolist() == [[0, 1, 7]]
        monkeypatch.setattr(TokenLog, "_MOST_THERE", 4)
        counts.clear()
        for at in range(3, 9):
            log.append(Fake(given[:1, at : at + 1]), at)
        assert counts.syncs.total() == 1  # at the fifth
        log.append(Fake(given[:1, 9:15]), 9)  # too many
        assert counts.syncs.total() == 3 and log.ids[0, 3:].tolist() == list(range(3, 15))


def test_the_report_counts_what_was_read() -> None:
    """Units in slots before are hits; others are read, once."""
    ids = prompt(llama(), 1, TOKENS + STEPS)
    with a_device(reuse_capacity=0) as (model, cache, _):
        decoded(model, cache, ids, Fake)
        report, history = cache.report(), cache.selective[0].history
        record = history.form.payload_bytes
        selected = cache.storage.counters.units_selected
        assert selected == STEPS * LAYERS * of_slots(cache)[0].count
        missed = selected - cache.storage.counters.units_resident
        assert 0 < missed < selected and report.hit_rate == pytest.approx(1 - missed / selected)
        read = sum(layer.history.store.reads for layer in cache.selective)
        before = report.bytes_read
        assert missed <= read
        cache.storage.reset_counters()
        fed(model, cache, ids[:, -1:], Fake)
        again = cache.report()
        assert again.bytes_read % record == 0 and again.bytes_read < before


def test_everything_is_selected_where_it_fits() -> None:
    """A step that selects all units equals attention to all."""
    ids = prompt(llama(), 1, 300 + STEPS)
    exact = decoded(llama(), DynamicCache(config=llama().config), ids, host, 300)
    with a_device(num_selected=512) as (model, cache, _):
        found = decoded(model, cache, ids, Fake, 300)
        assert all(slots is not None for slots in of_slots(cache))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_what_a_device_cannot_do_goes_over_the_host_and_back() -> None:
    """Candidates, and rows with padding. Steps after them are right, too."""
    ids = prompt(llama(), 2, TOKENS + STEPS)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    with a_device(2) as (model, cache, _):
        usual = decoded(model, cache, ids[:, : TOKENS + 1], Fake)
        assert all(of_slots(cache))
        for place, width in ((TOKENS + 1, 3), (TOKENS + 4, 1)):
            fed(model, cache, ids[:, place : place + width], Fake)
            assert all(slots is None for slots in of_slots(cache)) == (width > 1)
        cache.crop(-3)
        ours = [fed(model, cache, ids[:, place : place + 1], Fake) for place in range(TOKENS + 2, TOKENS + 5)]
    exact = decoded(llama(), DynamicCache(config=llama().config), ids, host)
    wrong = [float((one - exact[:, 2 + at : 3 + at]).square().mean().sqrt()) for at, one in enumerate(ours)]
    expected = float((usual - exact[:, :1]).square().mean().sqrt())
    assert max(wrong) < 1.3 * expected
    with a_device(2) as (model, cache, _):
        for piece in itertools.pairwise((0, TOKENS, TOKENS + 1)):
            fed(model, cache, ids[:, slice(*piece)], Fake, attention_mask=Fake(mask[:, : piece[1]]), logits_to_keep=1)
        assert of_slots(cache) == [None] * LAYERS


def test_slots_are_made_again_after_a_crop_and_for_other_rows() -> None:
    """The same numbers then name other units: a cache that was cropped and reordered computes what a fresh one does."""
    first, other = prompt(llama(), 2, TOKENS + 64), prompt(llama(), 2, TOKENS + 64).flip(0)
    with a_device(2) as (model, cache, _):
        decoded(model, cache, first[:, : TOKENS + 4], Fake)
        cache.crop(-(TOKENS // 2 + 4))
        cache.reorder_cache(torch.tensor([1, 0]))
        assert of_slots(cache) == [None] * LAYERS
        fed(model, cache, other[:, TOKENS // 2 : TOKENS], Fake, logits_to_keep=1)
        ours = torch.cat([fed(model, cache, part, Fake) for part in other[:, TOKENS : TOKENS + 4].split(1, 1)], 1)
    exact = decoded(llama(), DynamicCache(config=llama().config), other[:, : TOKENS + 4], host)
    with a_device(2) as (model, cache, _):
        usual = decoded(model, cache, other[:, : TOKENS + 4], Fake)
    wrong, expected = (float((found - exact).square().mean().sqrt()) for found in (ours, usual))
    assert wrong < 1.3 * expected


def test_slots_are_booked_and_freed() -> None:
    ids = prompt(llama(), 1, TOKENS + 4)
    with a_device() as (model, cache, _):
        account = cache.storage.account
        decoded(model, cache, ids, Fake)
        assert account.by_owner["reuse slots"] == sum(slots.data.nbytes for slots in of_slots(cache))
        count, fields = of_slots(cache)[0].count, cache.config
        group = cache.selective[0].history.form.group_size
        assert count == sum(-(-some // group) for some in (128, fields.num_sinks, fields.reuse_capacity, 4))
        of_slots(cache)[0].free_memory()  # as if it were needed elsewhere
        assert account.by_owner["reuse slots"] == sum(slots.data.nbytes for slots in of_slots(cache)[1:])
        fed(model, cache, ids[:, -1:], Fake)
        assert not of_slots(cache)[0].closed
    assert not account.by_owner.get("reuse slots") and account.current == 0


@pytest.mark.parametrize("context", [TOKENS + 32, TOKENS + 48])
def test_lines_of_codes_begin_where_a_device_loads_16_bytes(context: int) -> None:
    """And their memory is planned."""
    ids = prompt(llama(), 1, TOKENS + 2)
    with a_device(max_context=context) as (model, cache, _):
        decoded(model, cache, ids, Fake)
        for layer in cache.selective:
            codes = layer.predictor.fitted.keys.codes
            assert codes.stride(1) % 16 == 0 and codes.shape[2] <= codes.stride(1) < codes.shape[2] + 32
        planned = type(cache).plan(Geometry.of(model), cache.config, context, 1).decode["compact keys"]
        nbytes = layer.predictor.fitted.keys.coding.nbytes
        most = cache.selective[0].predictor.rules.summary_bytes or 8
        assert cache.storage.account.by_owner["compact keys"] <= planned
        assert planned == LAYERS * codes.stride(1) * layer.history.form.group_size * max(nbytes, most)


def test_a_read_that_could_not_begin_leaves_no_slot_that_says_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is repeated, and is right."""
    ids = prompt(llama(), 1, TOKENS + 4)
    with a_device() as (model, cache, _):
        expected = decoded(model, cache, ids, Fake)
    with a_device() as (model, cache, _):
        decoded(model, cache, ids[:, : TOKENS + 3], Fake)

        def refused(*_: Any) -> None:
            raise MemoryError("no room for a kernel")

        monkeypatch.setattr(device_slots, "bring", refused)
        with pytest.raises(MemoryError):
            fed(model, cache, ids[:, -1:], Fake)
        monkeypatch.undo()
        assert any(slots is not None and slots.closed for slots in of_slots(cache))
        found = fed(model, cache, ids[:, -1:], Fake)
    torch.testing.assert_close(found, expected[:, -1:])


def test_an_entry_that_could_not_be_read_is_not_resident() -> None:
    """Of `SpecCache`, whose tokens are exchanged before their entries are read, too."""

    def exchanged(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens.copy_(wanted), wanted

    def refused(*_: Any) -> None:
        raise MemoryError("no room for a kernel")

    with fake_cuda():
        chosen = ChosenEntries(RecordFormat(2, 8, 2, 8, torch.float32, 4), 1, 4, CUDA, MemoryAccount())
        with pytest.raises(MemoryError):
            chosen.exchange(Fake(torch.arange(8).view(1, 2, 4)), exchanged, refused, torch.cuda.Stream())
        assert chosen.empty and chosen.tokens.tolist() == [[[-1] * 4] * 2]


def test_slots_that_a_budget_has_hold_a_complete_choice_or_the_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit plans no slots for a choice of each layer beside those of `reuse_capacity`."""
    monkeypatch.setattr(DiskSwapCache, "lend_slots", lambda *_: None)
    ids = prompt(llama(), 1, TOKENS + 2)
    for reuse, there in ((160, True), (16, False)):
        with a_device(memory="64MiB", max_batch=1, reuse_capacity=reuse) as (model, cache, _):
            decoded(model, cache, ids, Fake)
            assert all((slots is not None) == there for slots in of_slots(cache))
            if there:
                planned = type(cache).plan(Geometry.of(model), cache.config, TOKENS + 128, 1).decode["reuse slots"]
                assert cache.storage.account.by_owner["reuse slots"] == planned


def test_memory_that_is_not_pinned_goes_over_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(llama(), 1, TOKENS + 4)
    with a_device() as (model, cache, _):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, *_: False)
        decoded(model, cache, ids, Fake)
        assert of_slots(cache) == [None] * LAYERS and not any(layer.on_device for layer in cache.selective)


def test_a_budget_holds_on_a_device() -> None:
    ids = prompt(llama(), 1, TOKENS + 8)
    with on_the_device(llama()) as (model, _):
        memory = "16MiB"
        fields = {"max_context": TOKENS + 8, "engine": "memory"}
        with pytest.raises(Exception, match="memory"):
            DiskSwapCache.for_budget(model, "64KiB", **fields)
        with DiskSwapCache.for_budget(model, memory, **fields) as cache:
            cache.storage.pinned = True
            decoded(model, cache, ids, Fake)
            assert isinstance(cache.selective[0], SelectiveLayer) and all(of_slots(cache))
            assert cache.storage.account.peak <= 16 * 2**20
