"""Steps on a device that reads records by itself: kernels' twins, on a device that only counts."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import fake_device
import numpy as np
import pytest
import torch
from fake_device import CUDA, QUEUES, Counts, Fake, fake_cuda, on_the_device, values_of
from harness import COMMON, build, prompt
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import DiskSwapCache, SpecCache
from hf_offload_cache.core import SelectiveLayer, TokenLog, device_step
from hf_offload_cache.fetch import device_slots
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.disk_swap import CodedKeys, DiskSwapConfig, fit_coding, fitted_keys
from hf_offload_cache.methods.spec import ChosenEntries, FusedAttention, chosen_entries
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import cache_class
from hf_offload_cache.stores import MemoryStore

TOKENS, PIECE, STEPS, LAYERS = 1280, 1280, 18, COMMON["num_hidden_layers"]
FEW = 10
"""The last of `STEPS`, in one of which a group is sealed."""
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


@functools.cache
def exact_steps(rows: int) -> torch.Tensor:
    """What `decoded` gives with full attention behind a prompt of so many rows: (B, STEPS, vocabulary)."""
    model = llama()
    return decoded(model, DynamicCache(config=model.config), prompt(model, rows, TOKENS + STEPS), host)


@contextmanager
def a_device(
    rows: int = 1, seed: int | None = None, cls: type[Any] = DiskSwapCache, **fields: Any
) -> Iterator[tuple[Any, Any, Counts]]:
    """A model, a cache with its records in pinned host memory, and the device's counts. `seed`: of its streams."""
    with on_the_device(llama(), seed) as (model, counts):
        sizes = {"max_context": TOKENS + 128, "max_batch": rows, "num_selected": 128, "engine": "memory"}
        with cls(model, **{**sizes, **fields}) as cache:
            cache.storage.pinned = True
            yield model, cache, counts


def of_slots(cache: Any) -> list[Any]:
    return [layer.device_slots for layer in cache.selective]


@pytest.mark.parametrize(("way", "rows", "seed"), [(way, 1 + index % 2, index) for index, way in enumerate(WAYS)])
def test_steps_on_a_device_are_as_close_as_on_the_host(
    way: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wait for nothing, the writer included."""
    ids, fields, tokens = prompt(llama(), rows, TOKENS + STEPS), WAYS[way], TOKENS + STEPS - FEW
    exact = exact_steps(rows)[:, -FEW:]
    sizes = {"max_context": TOKENS + 128, "max_batch": rows, "num_selected": 128, "engine": "memory"}
    plain = llama()
    with DiskSwapCache(plain, **sizes, **fields) as cache:
        on_host = decoded(plain, cache, ids, host, tokens)
        expected = cache.report()
    with a_device(rows, seed, **fields) as (model, cache, counts):
        for piece in ids[:, :tokens].split(PIECE, 1):
            fed(model, cache, piece, Fake, logits_to_keep=1)
        sealed, steps = [layer.history.units for layer in cache.selective], list[torch.Tensor]()
        for part in ids[:, tokens:].split(1, 1):
            steps.append(fed(model, cache, part, Fake))
            if len(steps) == 1:  # which frees the prefill's buffers
                counts.clear()
                monkeypatch.setattr(cache.storage.prefetcher, "flush", None)
        assert not counts.syncs and not counts.blocking
        monkeypatch.undo()
        assert all(layer.history.units > units for layer, units in zip(cache.selective, sealed, strict=True))
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


class InEightBits(torch.nn.Module):
    """A linear layer with weights in 8-bit floats, which computes in its input's type."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight.to(states.dtype))


def test_a_model_with_weights_of_8_bits_has_entries_in_8_bits() -> None:
    """Its keys and values have 16, and steps are those of the same weights in 16 bits."""
    found, ids = list[torch.Tensor](), prompt(llama(), 1, 610)
    for rounded in (False, True):
        model = llama().bfloat16()
        for block in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = InEightBits(getattr(block.self_attn, name))
                if rounded:
                    linear.weight = torch.nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
                setattr(block.self_attn, name, linear)
        sizes = {"max_context": 700, "max_batch": 1, "num_selected": 32, "engine": "memory", "entry_bits": 8}
        with on_the_device(model) as (there, counts), DiskSwapCache(there, group_size=4, **sizes) as cache:
            found.append(decoded(there, cache, ids, Fake, 600))
            assert all(layer.history.units > (600 - 32) // 4 for layer in cache.selective)  # steps seal some
            formats = {layer.history.form.dtype for layer in cache.selective}
            assert formats == {torch.bfloat16} and all(of_slots(cache)) and not counts.blocking
    assert torch.equal(*found) and found[0].isfinite().all()


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
    coding = fit_coding(lambda: [keys], 600, 2, None, 8, query[None, 0, :, None].expand(rows, -1, 40, -1))

    def asking(coding: Any) -> list[torch.Tensor]:
        compact = CodedKeys(coding, 2, rows, MemoryAccount(), None)
        there = Fake(query) if compact.device == CUDA else query
        return [values_of(one) for one in compact.asking(there, 0.25)]

    wanted = asking(coding)
    with fake_cuda() as counts:
        on_device = replace(coding, **{name: Fake(getattr(coding, name)) for name in ("mean", "keys", "key_scale")})
        found = asking(on_device)
        assert not counts.syncs
    torch.testing.assert_close(found, wanted)
    assert found[0].shape == (4 * rows, 6, coding.rank) and found[1].shape == (4 * rows, 6, 1)


SPEC_WAYS: list[tuple[dict[str, Any], bool]] = [
    ({}, False), ({"bits": 1, "num_sinks": 0}, True), ({"speculative": False}, False), ({"top_up": "always"}, True),
    ({"num_selected": 0}, False), ({"engine": "direct", "group_size": 4}, True),
]  # fmt: skip
"""Fields, and whether a row is padded."""


@pytest.mark.parametrize(("way", "padded", "seed"), [(*way, index) for index, way in enumerate(SPEC_WAYS)], ids=str)
def test_kernels_attend_and_choose_as_mixed_attention_does(
    way: dict[str, Any], padded: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of `SpecCache`, in any order of the device's streams, within its plan. One of the steps seals a group."""
    tokens, rows, count, small = 253, 2, 5, {"num_recent": 32, "quant_group": 32, "num_selected": 20}
    fields = {"max_context": tokens + 32, **small, **way}
    ids, mask = prompt(llama(), rows, tokens + count), torch.ones(rows, tokens + count, dtype=torch.int64)
    mask[-1, : 100 * padded] = 0
    found = []
    for fused in (True, False):
        with a_device(rows, seed if fused else None, SpecCache, **fields) as (model, cache, _):
            if not fused:
                for asked in ("fits", "plans"):
                    monkeypatch.setattr(FusedAttention, asked, lambda *_: False)
            fed(model, cache, ids[:, :tokens], Fake, attention_mask=Fake(mask[:, :tokens]), logits_to_keep=1)
            steps = []
            for at in range(tokens, tokens + count):
                seen = Fake(mask[:, : at + 1])
                steps.append(fed(model, cache, ids[:, at : at + 1], Fake, attention_mask=seen))
                if at == tokens:
                    cache.storage.account.reset_peaks()
            account, report = cache.storage.account, cache.report()
            planned = cache.plan(Geometry.of(model), cache.config, tokens + 32, rows).decode
            assert account.peak <= sum(nbytes for owner, nbytes in planned.items() if owner not in account.host)
            found.append((torch.cat(steps, 1), report.hit_rate, report.selected_fraction, report.bytes_read))
    torch.testing.assert_close(*(logits for logits, *_ in found), rtol=1e-4, atol=1e-5)
    assert found[0][1:] == found[1][1:] and (found[0][3] > 0) == bool(fields["num_selected"])


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
    exact = exact_steps(2)
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


def beams(model: Any, cache: Any, ids: torch.Tensor, put: Put) -> torch.Tensor:
    """Tokens of a beam search."""
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "use_cache": True}
    return values_of(model.generate(put(ids), past_key_values=cache, **options))


@pytest.mark.parametrize(("way", "seed"), [("8 bits", 4), ("heads apart", 5)])
def test_slots_follow_the_rows_of_a_beam_search(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps choose, read and compute as if slots were dropped at each change, and find more of them."""
    ids, own, changes = prompt(llama(), 1, TOKENS), device_slots.DeviceSlots.select_rows, []
    sizes = {"max_batch": 3, **WAYS[way]}

    def counted(slots: Any, rows: torch.Tensor) -> None:
        before = counts.syncs.total() + counts.blocking.total()
        own(slots, rows)
        changes.append((counts.syncs.total() + counts.blocking.total() - before, slots.closed, rows.tolist()))

    monkeypatch.setattr(device_slots.DeviceSlots, "select_rows", counted)
    with a_device(seed=seed, **sizes) as (model, cache, counts):
        ours, kept = beams(model, cache, ids, Fake), cache.report().hit_rate
        assert not cache.storage.account.by_owner["moving rows"]
    moved = [rows for _, _, rows in changes if len(set(rows)) < len(rows)]
    assert len(changes) > LAYERS and moved and not any(waits or closed for waits, closed, _ in changes)
    monkeypatch.setattr(device_slots.DeviceSlots, "select_rows", lambda slots, rows: slots._free())
    with a_device(seed=seed, **sizes) as (model, cache, counts):
        expected, dropped = beams(model, cache, ids, Fake), cache.report().hit_rate
    assert torch.equal(ours, expected) and kept is not None and dropped is not None and kept > dropped + 0.1


def test_a_beam_search_on_a_device_chooses_the_tokens_of_one_on_the_host() -> None:
    """All tokens are selected, so both are those of full attention. The memory of its changes of rows is planned."""
    ids = prompt(llama(), 1, 500)
    expected = beams(llama(), DynamicCache(config=llama().config), ids, host)
    sizes = {"max_context": 520, "max_batch": 3, "engine": "memory", "num_selected": 520, "reuse_capacity": 520}
    plain = llama()
    with DiskSwapCache(plain, **sizes) as cache:
        assert torch.equal(beams(plain, cache, ids, host), expected)
    planned = DiskSwapCache.plan(replace(Geometry.of(llama()), device="cuda"), DiskSwapConfig(**sizes), 520, 3)
    with a_device(seed=1, **sizes, memory=planned.peak_bytes) as (model, cache, _):
        assert torch.equal(beams(model, cache, ids, Fake), expected)
        assert all(of_slots(cache)) and cache.storage.account.peak <= planned.peak_bytes
        slots, account = of_slots(cache)[0], cache.storage.account
        account.limit = account.current - account.host_bytes  # no room for a change of rows: they are read again
        for _ in range(2):
            slots.select_rows(torch.tensor([0, 0, 1]))
        assert slots.closed and of_slots(cache)[1] is not None and not of_slots(cache)[1].closed


def test_slots_follow_rows_of_different_prompts() -> None:
    """All is selected, so steps after a change of rows are those of full attention, and nothing is read again."""
    ids, order = prompt(llama(), 3, 504), torch.tensor([2, 0, 2])

    def after(model: Any, cache: Any, put: Put) -> torch.Tensor:
        """Logits of the steps behind the change."""
        decoded(model, cache, ids[:, :502], put, 500)
        cache.reorder_cache(put(order))
        return torch.cat([fed(model, cache, part, put) for part in ids[order, 502:].split(1, 1)], 1)

    exact = after(llama(), DynamicCache(config=llama().config), host)
    with a_device(3, 2, num_selected=520) as (model, cache, _):
        found, report = after(model, cache, Fake), cache.report()
        units = 3 * sum(layer.history.units for layer in cache.selective)
        assert all(of_slots(cache)) and report.bytes_read == units * cache.selective[0].history.form.payload_bytes
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


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


@pytest.mark.parametrize("seed", [None, 3])
def test_a_row_that_is_nan_does_not_spoil_others(seed: int | None) -> None:
    """From one token on, whose embedding is NaN: a prompt is fitted, and the other row is as close as on the host."""
    made = llama()
    ids = prompt(made, 2, TOKENS + STEPS).clamp(max=197)
    ids[1, TOKENS // 2] = 198
    exact = decoded(made, DynamicCache(config=made.config), ids[:1], host)
    with torch.no_grad():
        made.model.embed_tokens.weight[198] = torch.nan
    sizes = {"max_context": TOKENS + 128, "max_batch": 2, "num_selected": 128, "engine": "memory"}
    with DiskSwapCache(made, **sizes) as cache, np.errstate(invalid="ignore"):
        found = [decoded(made, cache, ids, host)]
    with on_the_device(made, seed) as (model, _), DiskSwapCache(model, **sizes) as cache:
        cache.storage.pinned = True
        found.append(decoded(model, cache, ids, Fake))
        assert all(slots is not None for slots in of_slots(cache))
    usual, wrong = (float((each[:1] - exact).square().mean().sqrt()) for each in found)
    assert wrong == pytest.approx(usual, rel=0.1) and usual > 1e-4
    assert all(bool(each[1].isnan().all()) for each in found)


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


def test_an_entry_that_could_not_be_read_is_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `SpecCache`, whose tokens are exchanged before their entries are read, too."""

    def refused(*_: Any) -> None:
        raise MemoryError("no room for a kernel")

    monkeypatch.setattr(chosen_entries, "bring", refused)
    with fake_cuda():
        chosen = ChosenEntries(RecordFormat(2, 8, 2, 8, torch.float32, 4), 1, 4, CUDA, MemoryAccount())
        wanted, addresses = Fake(torch.arange(8).view(1, 2, 4)), Fake(torch.zeros(1, 2, dtype=torch.int64))
        with pytest.raises(MemoryError):
            chosen.exchange(wanted, addresses, torch.cuda.Stream())
        assert chosen.empty and chosen.tokens.tolist() == [[[-1] * 4] * 2]


def test_a_cache_that_only_its_finaliser_closes_waits_for_reads_of_a_later_step() -> None:
    """Of `SpecCache`, which reads on a stream of its own: no kernel reads records that are freed."""
    ids, left = prompt(llama(), 1, 203), list[int]()
    close = MemoryStore.close

    def closed(store: MemoryStore) -> None:
        left.append(len(stream.queue))
        close(store)

    with on_the_device(llama(), 0) as (model, _), mock.patch.object(QUEUES.random, "random", return_value=1.0):
        cache = SpecCache(model, engine="memory", num_selected=20, num_recent=32, quant_group=32)
        storage = cache.storage
        for part in ids[:, :202].split([201, 1], 1):
            fed(model, cache, part, Fake)
        stream = storage.reading_stream(CUDA)
        stream.behind = 1000  # it runs what something waits for
        with torch.no_grad():
            model(Fake(ids[:, 202:]), past_key_values=cache)
        assert stream.queue
        with mock.patch.object(MemoryStore, "close", closed):
            del cache
            gc.collect()
        assert storage.closed and left == [0] * LAYERS


def test_slots_that_a_budget_has_hold_a_complete_choice_or_the_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a limit slots are those of `reuse_capacity`; if these hold a choice, nothing is planned for the host."""
    monkeypatch.setattr(DiskSwapCache, "lend_slots", lambda *_: None)
    ids = prompt(llama(), 1, TOKENS + 2)
    for reuse, there in ((160, True), (16, False)):
        with a_device(memory="64MiB", max_batch=1, reuse_capacity=reuse) as (model, cache, _):
            decoded(model, cache, ids, Fake)
            assert all((slots is not None) == there for slots in of_slots(cache))
            layer = cache.selective[0]
            plan = type(layer).plan(layer.kind(LAYERS), layer.config, TOKENS + 128)
            assert (plan.over_host is not None) == plan.alone == there
            assert ("staging" in plan.shared.decode) != there and plan.own.decode["reuse slots"] > 0
            if there:
                assert plan.over_host.shared.decode["staging"] and not plan.over_host.own.decode["reuse slots"]
                planned = LAYERS * plan.own.decode["reuse slots"]
                assert cache.storage.account.by_owner["reuse slots"] == planned


SMOL = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


@pytest.mark.parametrize("context", [4096, pytest.param(8192, marks=pytest.mark.slow)])
def test_a_thirteenth_of_the_full_kv_suffices_for_steps_on_a_device(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's, of every step of a plain decoding, with SmolLM2's heads and layers: none waits. Slots are those of
    the longest context, as nothing is lent. Where slots have room for few tokens, only for the goal of speed."""
    fields = {**COMMON, **SMOL, "num_hidden_layers": 30, "max_position_embeddings": context}
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16).eval().requires_grad_(False)
    tokens, steps, done = 704, 3, list[bool]()
    ids = prompt(model, 1, tokens + steps + 1)
    monkeypatch.setattr(DiskSwapCache, "lend_slots", lambda *_: None)

    def counted(layer: Any, call: Any) -> Any:
        output = own(layer, call)
        done.append(output is not None)
        return output

    own = device_step.attend_on_device
    monkeypatch.setattr(device_step, "attend_on_device", counted)
    with on_the_device(model) as (there, counts):
        made_of: dict[str, Any] = {"memory": "1/13", "max_context": context, "engine": "memory"}
        goal = "speed" if context == 4096 else None
        with DiskSwapCache.for_budget(there, goal=goal, **made_of) as cache:
            decoded(there, cache, ids[:, : tokens + 1], Fake, tokens)
            cache.storage.prefetcher.flush()
            counts.clear()
            for part in ids[:, tokens + 1 :].split(1, 1):
                fed(there, cache, part, Fake)
            assert done == [True] * ((steps + 1) * 30) and not counts.syncs and not counts.blocking
            account, planned = cache.storage.account, type(cache).plan(Geometry.of(there), cache.config, context, 1)
            assert account.peak <= account.limit and account.pressed == 0
            assert planned.decode["reuse slots"] == account.by_owner["reuse slots"]
            assert "selection" not in planned.decode and not account.by_owner["selection"]
            selected, layer = cache.config.num_selected, cache.selective[0]
            assert selected <= cache.config.reuse_capacity and layer.history.records > layer.budget
        if goal is not None:
            with DiskSwapCache.for_budget(there, **made_of) as cache:
                assert cache.config.num_selected >= 400 > selected and cache.config.reuse_capacity < 400


@pytest.mark.parametrize("layers", [1, 12])
def test_what_goes_over_the_host_keeps_within_a_budget_for_steps_on_a_device(layers: int) -> None:
    """Candidates and rows with padding take the memory of slots, and give it back. With one layer, buffers are more
    than slots, and with twelve less. All tokens are selected, so the logits are those of full attention."""
    fields = {**COMMON, "num_hidden_layers": layers, "max_position_embeddings": 8192}
    model, tokens = build(LlamaForCausalLM, LlamaConfig(**fields)), 600
    ids, mask = prompt(model, 2, tokens + 24), torch.ones(2, tokens + 24, dtype=torch.long)
    exact = decoded(model, DynamicCache(config=model.config), ids, host, tokens)
    geometry = replace(Geometry.of(model), device="cuda")
    own = {"num_selected": 640, "reuse_capacity": 640, "max_context": tokens + 24, "max_batch": 2, "engine": "memory"}
    own |= {"look_ahead": False, "remainder": False}
    config = DiskSwapConfig(**own, memory="1GiB")
    plan = DiskSwapCache.plan(geometry, config, tokens + 24, 2)
    assert ("staging" in plan.decode) == (layers == 1)

    def hold_within(cache: Any) -> None:
        """From now on, what is planned for steps is all that there is."""
        cache.storage.release_stream_buffers()
        cache.storage.account.limit = plan.decode_bytes
        cache.storage.reset_counters()

    with on_the_device(model) as (there, _), DiskSwapCache(there, **own, memory=plan.peak_bytes) as cache:
        account, layer = cache.storage.account, cache.selective[0]
        found, at = [], 0

        def step(width: int, alone: bool, **given: Any) -> None:
            nonlocal at
            found.append(fed(there, cache, ids[:, at : at + width], Fake, **given))
            at += width
            assert [slots is not None and not slots.closed for slots in of_slots(cache)] == [alone] * layers
            assert account.peak <= account.limit
            for owner in ("staging", "selection"):
                assert (account.by_owner[owner] > 0) != alone or at <= tokens

        step(tokens, False)
        hold_within(cache)
        cache.activate_past_recording()  # as assisted decoding does
        for _ in range(2):
            step(1, True)
            step(3, False)
            step(1, True)
        cache.selecting.watch = lambda *_: None  # as replays do
        step(1, False)
        step(1, False)
        slots, usual = cache.selecting.over_host, cache.selecting.slots(layer.config, 16, layer.history.records)
        assert layer._fetcher is not None and layer._fetcher.tiers[0].capacity == 2 * min(slots, usual)
        assert (slots > 0) == (layers > 1) and slots < usual
        cache.selecting.watch = None
        step(1, True)
    torch.testing.assert_close(torch.cat(found[1:], 1), exact[:, : at - tokens], rtol=1e-3, atol=1e-3)
    mask[0, :40] = 0
    parts = list(itertools.pairwise((0, tokens, tokens + 1, tokens + 2, tokens + 3)))

    def padded(model: Any, cache: Any, put: Put) -> torch.Tensor:
        """Logits of each step after the prompt, and of the prompt's last token."""
        masks = [put(mask[:, :last]) for _, last in parts]
        found = []
        for part, own in zip(parts, masks, strict=True):
            found.append(fed(model, cache, ids[:, slice(*part)], put, attention_mask=own)[:, -1:])
            if put is Fake and len(found) == 1:
                hold_within(cache)
        return torch.cat(found, 1)

    exact = padded(build(LlamaForCausalLM, LlamaConfig(**fields)), DynamicCache(config=model.config), host)
    model = build(LlamaForCausalLM, LlamaConfig(**fields))
    with on_the_device(model) as (there, _), DiskSwapCache(there, **own, memory=plan.peak_bytes) as cache:
        ours = padded(there, cache, Fake)
        account = cache.storage.account
        assert of_slots(cache) == [None] * layers and 0 < account.peak <= account.limit == plan.decode_bytes
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3)


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


BY_KERNELS: dict[str, tuple[int, dict[str, Any]]] = {
    "disk-swap": (574, {"num_selected": 48, "entry_bits": 8}),
    "abstract-tree": (94, {"num_selected": 16, "chunk_size": 8, "early_steps": 0}),
    "cluster": (90, {"num_selected": 16, "join_every": 8, "append_buffer": 8, "remainder": True}),
    "spec": (126, {"num_selected": 8, "quant_group": 32}),
}
"""Tokens of a prompt, and fields with which a step after it selects; but for "cluster", the second one seals a unit."""


@pytest.mark.kernels
@pytest.mark.parametrize("name", BY_KERNELS)
def test_complete_steps_by_kernels_are_those_by_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, where a kernel gets what a step gives it: of two rows of a model that projects queries,
    keys and values together, so that a query lies within a longer row."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tokens, fields), twin, launched = BY_KERNELS[name], fake_device._kernel, set[str]()
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 600}
    config = GPT2Config(vocab_size=199, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)

    def kernel(marked: Callable[..., Any]) -> Callable[..., Any]:
        module = importlib.import_module(f"{marked.__module__}_triton")

        def run(*args: Any, **kwargs: Any) -> Any:
            launched.add(marked.__name__)
            inner, options = fake_device._inner((args, kwargs))
            with _disable_current_modes():
                return fake_device._there(getattr(module, marked.__name__)(*inner, **options))

        return run

    def steps(made: Any) -> torch.Tensor:
        monkeypatch.setattr(fake_device, "_kernel", made)
        model = build(GPT2LMHeadModel, config)
        ids, given = prompt(model, 2, tokens + 2), {"engine": "memory", "num_recent": 32, **fields}
        with on_the_device(model) as (there, _), cache_class(name)(there, **given) as cache:
            found = [fed(there, cache, ids[:, :tokens], Fake, logits_to_keep=1)]
            found += [fed(there, cache, part, Fake) for part in ids[:, tokens:].split(1, 1)]
            assert cache.report().steps == "1 of 1 layers on the GPU alone"
        return torch.cat(found, 1)

    torch.testing.assert_close(steps(kernel), steps(twin), rtol=1e-3, atol=1e-3)
    assert launched >= {"attend", "bring", "exchange"} and ("seal" in launched or name == "cluster")
