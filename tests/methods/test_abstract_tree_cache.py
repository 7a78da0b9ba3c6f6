"""`AbstractTreeCache`: its fields, what a budget makes of them, and what a step brings and attends to."""

from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from checked_cache import checked
from harness import generate, prompt
from long_llama import feed, long_model

from hf_offload_cache import AbstractTreeCache, AbstractTreeConfig
from hf_offload_cache.core import Pace, counts_for_fidelity
from hf_offload_cache.errors import BudgetError, ConfigError, StoreError
from hf_offload_cache.fetch import EarlyLook
from hf_offload_cache.methods.abstract_tree import ChunkHistory
from hf_offload_cache.model import Geometry, LookAhead

LENGTH = 700


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chunk_size": 48}, "chunk_size must be a power of two.*use chunk_size=32"),
        ({"chunk_size": 1}, "chunk_size must be a power of two from 2.*use chunk_size=2"),
        ({"chunk_size": 64, "group_size": 32}, r"group_size must equal chunk_size \(64\)"),
        ({"selected_share": 0.0}, "selected_share must be a number above 0"),
        ({"selected_share": True}, "selected_share must be a number above 0"),
        ({"num_opened": 100}, "num_opened must be at least 400"),
        ({"abstracts": "tape"}, "abstracts must be one of"),
        ({"num_selected": 0}, "num_selected must be at least 1"),
        ({"num_selected": None, "num_opened": 0}, "num_opened must be at least 1"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AbstractTreeConfig(**fields)


def test_a_chunk_is_a_record() -> None:
    assert (AbstractTreeConfig().chunk_size, AbstractTreeConfig().group_size) == (64, 64)
    for given in ({"chunk_size": 16}, {"group_size": 16}, {"chunk_size": 16, "group_size": 16}):
        config = AbstractTreeConfig(**given)
        assert (config.chunk_size, config.group_size) == (16, 16)


def test_how_many_are_attended_to_and_fetched() -> None:
    config = AbstractTreeConfig()
    assert (config.attended(9000), config.tokens_fetched(9000)) == (400, 1600)
    share = AbstractTreeConfig(num_selected=None, selected_share=0.2)
    assert (share.attended(9001), share.tokens_fetched(9001)) == (1801, 7204)
    wide = AbstractTreeConfig(num_selected=None, num_opened=3000)
    assert [wide.tokens_fetched(held) for held in (9000, 60_000)] == [3000, 6000]


def test_a_step_attends_to_the_tokens_that_it_keeps() -> None:
    cls, model = checked(AbstractTreeCache), long_model()
    fields: dict[str, Any] = {"chunk_size": 8, "num_selected": 40, "num_opened": 88, "num_recent": 8, "num_sinks": 3}
    fields.update(dense_layers=0, early_steps=0)
    with cls(model, engine="memory", **fields) as cache:
        generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=5)
        report = cache.report()
        # each of two key heads has chunks of its own
        assert len(cls.gathers) == 3 * 4 and all(units.shape == (4, 12) for _, units in cls.gathers)
        visible = sum(LENGTH + step for step in range(1, 5))
        latest = sum(LENGTH + step - (LENGTH + step - 8) // 8 * 8 for step in range(1, 5))
        assert report.selected_fraction == pytest.approx((4 * 43 + latest) / visible)


def test_a_share_of_what_is_held() -> None:
    """A tenth of the sealed tokens, and more as they become more."""
    model = long_model()
    fields: dict[str, Any] = {"chunk_size": 8, "num_selected": None, "num_recent": 8, "num_sinks": 0, "dense_layers": 0}
    with AbstractTreeCache(model, engine="memory", **fields) as cache:
        for length in (320, 640):
            cache.reset()
            generate(model, cache, prompt(model, 1, length), max_new_tokens=2)
            sealed = (length - 8) // 8 * 8
            expected = -(-sealed // 10) + length + 1 - sealed
            assert cache.report().selected_fraction == pytest.approx(expected / (length + 1))


def test_a_share_within_a_budget_is_of_what_is_held() -> None:
    geometry = Geometry.of(long_model())
    config = AbstractTreeCache.fit(
        geometry, geometry.full_kv_bytes(8192, 1), 8192, 1, {"num_selected": None, "dense_layers": 0}
    )
    assert [(config.attended(held), config.tokens_fetched(held)) for held in (500, 8000)] == [(50, 200), (800, 3200)]


def test_early_steps_say_nothing_of_reading_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read nothing ahead, so that no query is guessed in them, and none is timed to decide whether to."""
    model = long_model()
    guesses: list[Any] = []
    timed: list[float] = []
    monkeypatch.setattr(LookAhead, "predict", lambda *given: guesses.append(given))
    monkeypatch.setattr(Pace, "took", lambda pace, seconds: timed.append(seconds))
    with AbstractTreeCache(model, engine="memory", num_selected=40, dense_layers=0, early_steps=3) as cache:
        ids = prompt(model, 1, 700)
        feed(cache, ids[:, :690])
        guesses.clear(), timed.clear()
        for place in range(690, 693):
            feed(cache, ids[:, place : place + 1])
        assert guesses == timed == []
        for place in range(693, 695):
            feed(cache, ids[:, place : place + 1])
        assert len(guesses) == 2 * 2 and len(timed) == 2  # of the two layers that have one before them


def test_budgets() -> None:
    """A smaller budget examines fewer tokens. Each plan fits its budget. A budget that no fields fit raises
    `BudgetError` with the memory that would do. The default attends to more tokens than `goal="speed"` does, and
    examines four times as many."""
    geometry = Geometry.of(long_model())
    full = geometry.full_kv_bytes(32768, 1)
    found = []
    for share in (4, 6, 13):
        config = AbstractTreeCache.fit(geometry, full // share, 32768, 1, {}, "speed")
        assert AbstractTreeCache.plan(geometry, config, 32768, 1).peak_bytes <= full // share
        found.append((config.num_selected, config.tokens_fetched(32768), config.reuse_capacity))
    assert found == sorted(found, reverse=True) and found[0][:2] == (400, 1600)
    usual = AbstractTreeCache.fit(geometry, full // 6, 32768, 1, {})
    assert usual.num_selected in counts_for_fidelity(32768)[:-1]
    assert usual.tokens_fetched(32768) == 4 * usual.num_selected
    assert AbstractTreeCache.plan(geometry, usual, 32768, 1).peak_bytes <= full // 6
    given = AbstractTreeCache.fit(geometry, full // 6, 32768, 1, {"chunk_size": 16, "num_selected": 128})
    assert (given.chunk_size, given.num_selected) == (16, 128)
    with pytest.raises(BudgetError) as refused:
        AbstractTreeCache.fit(geometry, full // 200, 32768, 1, {})
    least = int(re.search(r"need at least ([\d,]+)", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    config = AbstractTreeCache.fit(geometry, least, 32768, 1, {})
    assert least < full // 13 and AbstractTreeCache.plan(geometry, config, 32768, 1).peak_bytes == least


def test_what_is_left_out_matters() -> None:
    """All tokens kept: the logits of an exact cache. Some: others, which come nearer the more are kept."""
    model, ids = long_model(), prompt(long_model(), 1, LENGTH)
    found = []
    for selected in (16, 128, 1024):
        fields: dict[str, Any] = {"chunk_size": 8, "num_selected": selected, "num_recent": 8, "engine": "memory"}
        with AbstractTreeCache(model, dense_layers=2, **fields) as cache, torch.no_grad():
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).logits.numpy())
    with AbstractTreeCache(model, exact=True, engine="memory") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        exact = model(ids[:, :1], past_key_values=cache).logits.numpy()
    far = [float(np.abs(logits - exact).mean()) for logits in found]
    assert far[0] > far[1] > far[2] and far[2] < 1e-5


FIELDS: dict[str, Any] = {
    "chunk_size": 4, "num_selected": 40, "num_recent": 8, "num_sinks": 3, "block_tokens": 64, "dense_layers": 1,
    "resident_layers": 0,
}  # fmt: skip


def logits_of(cache: Any, model: Any) -> list[torch.Tensor]:
    """What a cache answers in padded beams, a second turn after a crop into what was sealed, and with candidates."""
    mask = harness.padding(2, LENGTH, 53)
    ids = prompt(model, 2, LENGTH).masked_fill(mask == 0, harness.PAD)
    found = [generate(model, cache, ids, num_beams=3, max_new_tokens=6, attention_mask=mask).logits]
    cache.reset()
    out = generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=12)
    cache.crop(-45)
    ids = torch.cat([out.tokens[:, : cache.tokens], prompt(model, 2, 3, seed=9)], 1)
    found += [out.logits, generate(model, cache, ids, max_new_tokens=40).logits]
    cache.reset()
    repeated = harness.repetitive_prompt(model, LENGTH)
    found.append(generate(model, cache, repeated, prompt_lookup_num_tokens=4, max_new_tokens=16).logits)
    return found


def test_abstracts_on_the_disk_choose_as_those_in_memory() -> None:
    model, found, held = long_model(), [], []
    for place in ("memory", "disk"):
        with harness.unchanged(model), checked(AbstractTreeCache)(model, abstracts=place, **FIELDS) as cache:
            found.append(logits_of(cache, model))
            owners = cache.report().memory_by_owner
            held.append(owners.get("summaries", 0) + owners.get("abstracts", 0))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # of 175 chunks those of one page, which has 4, are in memory
    assert 20 * held[1] < held[0]


def test_contexts_keep_abstracts_on_the_disk(tmp_path: Path) -> None:
    """A fork and an opened context go on to the bit, and read what was written; the field stays as it was saved."""
    model = long_model()
    question = prompt(model, 1, 9, seed=8)

    def answer(cache: AbstractTreeCache) -> torch.Tensor:
        return generate(model, cache, torch.cat([cache.input_ids, question], 1), max_new_tokens=8).logits

    with AbstractTreeCache(model, path=tmp_path, abstracts="disk", **FIELDS) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        cache.save(tmp_path / "context")
        with cache.fork() as twin:
            forked = answer(twin)
        with AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path) as opened:
            assert opened.config.abstracts == "disk"
            assert torch.equal(answer(opened), forked)
        assert torch.equal(answer(cache), forked)
    with pytest.raises(ConfigError, match="abstracts"):
        AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path, abstracts="memory")
    with AbstractTreeCache.open(tmp_path / "context", model, memory="2MiB", max_context=2 * LENGTH) as planned:
        assert planned.config.abstracts == "disk"
        # after the question, which attends to everything, in blocks of another size: float32 rounding
        torch.testing.assert_close(answer(planned)[0], forked[0], rtol=0, atol=1e-5)
        assert planned.report().selected_fraction < 1


@pytest.mark.parametrize("residents", [(0, 2), (2, 0)])
def test_a_context_opened_with_other_resident_layers(residents: tuple[int, int], tmp_path: Path) -> None:
    """Abstracts that are missing are made with the next chunk; until then these layers attend to everything."""
    model, found = long_model(), []
    ids = prompt(model, 1, LENGTH)
    saved, now = ({**FIELDS, "abstracts": "disk", "resident_layers": count} for count in residents)
    with AbstractTreeCache(model, path=tmp_path, **saved) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "context")
    with contextlib.ExitStack() as stack:
        opened = AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path, resident_layers=residents[1])
        first = stack.enter_context(AbstractTreeCache(model, path=tmp_path, **now))
        with torch.no_grad():
            model(ids, past_key_values=first)
            for cache in (stack.enter_context(opened), first):
                ready = [[layer.can_choose() for layer in cache.selective]]
                model(ids[:, :7], past_key_values=cache)  # attends to everything in both; chunks are of four
                ready.append([layer.can_choose() for layer in cache.selective])
                found.append([model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(7, 20)])
                places = range(len(cache.selective))
                assert ready == [[place >= 2 or cache is first for place in places], [True for _ in places]]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_crop_whose_page_cannot_be_read_back_costs_the_abstracts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is cut as asked; steps attend to everything until the next chunk is sealed, then choose again."""
    model = long_model()
    ids = prompt(model, 1, LENGTH + 60)
    with AbstractTreeCache(model, abstracts="disk", engine="memory", **FIELDS) as cache, torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache)
        history = cache.offloaded[1].history
        assert isinstance(history, ChunkHistory)
        monkeypatch.setattr(history.pages, "truncate", failing)
        cache.crop(LENGTH - 203)
        assert cache.tokens == LENGTH - 203 and history.pages.units == 0 < history.units
        monkeypatch.undo()
        expected = history.whole()[0]
        attended = []
        for _ in range(6):
            place = cache.tokens
            before = cache.storage.counters.units_selected
            model(ids[:, place : place + 1], past_key_values=cache)
            attended.append(cache.storage.counters.units_selected - before)
        assert torch.equal(history.whole()[0][:, :, : LENGTH - 203], expected)
        assert history.pages.units == history.units and attended[-1] > attended[0]
        held = history.pages.joined(cache.selective[1].fetcher.look(history, history.pages.extents()))
        keys = history.whole()[0][:, :, : history.units * 4].unflatten(2, (-1, 4))
        torch.testing.assert_close(held, torch.cat([keys.amin(3), keys.amax(3)], 1).transpose(1, 2).flatten(2))


def failing(*given: Any, **named: Any) -> torch.Tensor:
    raise StoreError(errno.EIO, "was made to fail")


def test_a_long_context_in_a_budget_that_has_no_room_for_abstracts() -> None:
    """They go to the disk before less is selected."""
    geometry = Geometry.of(long_model())
    full = geometry.full_kv_bytes(131072, 1)
    roomy, tight = (AbstractTreeCache.fit(geometry, full // share, 131072, 1, {}, "speed") for share in (13, 20))
    assert (roomy.abstracts, tight.abstracts) == ("memory", "disk")
    assert tight.num_selected == 400
    assert AbstractTreeCache.plan(geometry, tight, 131072, 1).peak_bytes <= full // 20


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("candidates", [0, 4])
def test_abstracts_are_read_a_layer_early(look_ahead: bool, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query finds its layer's read begun, those of candidates too; after a guess no second one is needed."""
    came: list[bool] = []
    come, read, begun = EarlyLook.come, EarlyLook.begin, list[int]()

    def watched(early: EarlyLook, *given: Any, **named: Any) -> bool:
        came.append(come(early, *given, **named))
        return came[-1]

    def begins(early: EarlyLook, history: Any, extents: Any) -> None:
        begun.append(extents.records.size)
        read(early, history, extents)

    monkeypatch.setattr(EarlyLook, "come", watched)
    monkeypatch.setattr(EarlyLook, "begin", begins)
    model = long_model()
    with AbstractTreeCache(model, abstracts="disk", look_ahead=look_ahead, early_steps=0, **FIELDS) as cache:
        ids = harness.repetitive_prompt(model, LENGTH)
        generate(model, cache, ids, max_new_tokens=6, prompt_lookup_num_tokens=candidates or None)
        looks = cache.selecting.looks  # type: ignore[union-attr]
        assert (looks._borrowed, looks._lent) == ([], 0)
        size = cache.selective[1].history.form.record_bytes
        assert cache.report().to_dict()["look_bytes"] == sum(begun) * size
    if candidates:
        assert len(came) > len(begun) * (5 / 3 if look_ahead else 1)  # of a guess, and of more queries than one
    else:
        assert len(begun) == 5 * 3
        assert len(came) == 5 * (3 + (2 if look_ahead else 0))  # no layer guesses for the first
    assert all(came)


def test_a_context_saved_with_abstracts_in_memory_stays_so(tmp_path: Path) -> None:
    model = long_model()
    with AbstractTreeCache(model, path=tmp_path, num_recent=8, num_selected=40, num_opened=100) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        cache.save(tmp_path / "context")
    with AbstractTreeCache.open(tmp_path / "context", model, memory="4MiB", max_context=2 * LENGTH) as opened:
        assert opened.config.abstracts == "memory" and opened.tokens == LENGTH + 3
    with pytest.raises(BudgetError, match="abstracts='memory'"):
        AbstractTreeCache.open(tmp_path / "context", model, memory="64KiB", max_context=2 * LENGTH)
