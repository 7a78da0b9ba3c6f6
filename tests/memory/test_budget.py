"""Budgets: what is planned, what fits, and that what was planned is kept while a tiny model runs."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import COMMON, TINY, build, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import (
    AbstractTreeCache,
    ClusterCache,
    DiskSwapCache,
    DiskSwapConfig,
    OffloadCache,
    SpecCache,
    registry,
)
from hf_offload_cache.config import parse_memory, parse_size
from hf_offload_cache.core import missed_goal
from hf_offload_cache.errors import BudgetError, ConfigError, UnsupportedModelError
from hf_offload_cache.fetch import Prefetcher
from hf_offload_cache.fetch.areas import PLACE_BYTES
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.disk_swap import fit as summary_bytes
from hf_offload_cache.methods.disk_swap import most_bytes, needles_lost, worth
from hf_offload_cache.model import Geometry, KeptLayer, LayerShape, geometry

SMOL = Geometry.uniform(30, 9, 3, 64)
LLAMA_8B = Geometry.uniform(32, 32, 8, 128)
CONTEXT, BATCH = 960, 2
"""Of the tiny model's runs: long enough that compact keys are made, which takes 512 tokens."""


# ---------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("text", "memory"),
    [("1/13", 100_000 // 13), (" 2 / 4 ", 50_000), (700, 700), ("3KiB", 3072), ("1.5MiB", 3 * 2**19), ("1/1", 100_000)],
)
def test_a_memory_is_bytes_a_size_or_a_fraction(text: int | str, memory: int) -> None:
    assert parse_memory(text, 100_000) == memory


@pytest.mark.parametrize("text", ["", "1/0", "0", "0/3", "1/13 MiB", "-1/2", "much", None, 1.5, True])
def test_a_memory_that_is_none(text: Any) -> None:
    if text == 1.5:
        assert parse_memory(text, 100) == 1
        return
    with pytest.raises(ConfigError, match=r"memory must be .*1/13") as caught:
        parse_memory(text, 100)
    assert repr(text) in str(caught.value)


# ---------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("name", [name for name in TINY])
def test_a_geometry_says_what_a_forward_makes(name: str) -> None:
    """All layers' shapes, kept ones included, by what `report` finds after a prompt; no weight is changed or read."""
    model = tiny(name)
    state = torch.random.get_rng_state()
    geometry = Geometry.of(model)
    assert torch.equal(state, torch.random.get_rng_state())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with OffloadCache(model) as cache, torch.no_grad():
            model(torch.randint(3, 190, (2, 40)), past_key_values=cache)
            report = cache.report()
            forms = [layer.history.form for layer in cache.offloaded]
    assert geometry.forms(None) == forms
    assert geometry.shapes == geometry.layers and len(set(map(id, geometry.shapes))) == len(set(geometry.layers))
    assert geometry.full_kv_bytes(40, 2) == report.full_kv_bytes
    assert geometry.kept_bytes(40, 2) == report.memory_by_owner.get("layers not offloaded", 0)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert geometry.weight_bytes == weights


def test_a_geometry_of_a_model_that_cannot_run_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration decides then; where it cannot, the refusal says what to do."""
    model = tiny("llama")
    whole = Geometry.of(model)

    def fails(*arguments: Any, **fields: Any) -> Any:
        raise NotImplementedError("no data")

    monkeypatch.setattr(type(model), "_from_config", fails)
    assert Geometry.of(model) == whole  # of one that ran before
    geometry._probe.cache_clear()
    assert Geometry.of(model) == whole
    monkeypatch.setattr(type(tiny("deepseek_v2")), "_from_config", fails)
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV2ForCausalLM's keys.*no data.*without a budget"):
        Geometry.of(tiny("deepseek_v2"))


def test_kept_layers_hold_their_window() -> None:
    layer = KeptLayer(fixed_bytes=100, token_bytes=8, most_tokens=15)
    assert [layer.nbytes(context) for context in (1, 15, 400)] == [108, 220, 220]
    assert KeptLayer(token_bytes=8).nbytes(400) == 3200


# ---------------------------------------------------------------------------------------------- the plan


def test_a_plan_by_hand() -> None:
    """SmolLM2's shape, 768 bytes a token: groups of 16 in records of 12 KiB; a context of 1040 seals 63."""
    config = DiskSwapConfig(num_selected=64, reuse_capacity=32, rank=10, look_ahead=False, block_tokens=128,
                            write_queue="64KiB", remainder=False)  # fmt: skip
    plan = DiskSwapCache.plan(SMOL, config, 1040, 1)
    unit = 16 * 768
    selected = 4 + 2  # sinks of a padded row may lie in two groups
    assert plan.decode["compact keys"] == 30 * 1040 * 10
    assert plan.decode["adapters"] == 2 * 30 * 192 * 10 * 2  # of keys and of queries, in bfloat16
    assert plan.decode["rolling tail"] == 30 * 48 * 768
    assert plan.decode["staging"] == selected * unit
    assert plan.decode["selection"] == (2 * selected + 3) * unit  # what a verification of candidates may want
    assert plan.decode["reuse slots"] == 30 * 3 * unit
    assert plan.decode["write queue"] == 65536
    assert plan.decode["token ids"] == 1040 * 8
    assert plan.prefill["stream buffers"] == 2 * 8 * unit
    assert "stream buffers" not in plan.decode
    assert plan.disk_bytes == 30 * 63 * unit
    assert plan.full_kv_bytes == 30 * 1040 * 768
    assert "reuse slots" not in plan.prefill  # a prefill gives them back
    assert plan.peak_bytes == sum(plan.decode.values()) == plan.to_dict()["peak_bytes"]


@pytest.mark.parametrize(
    ("fields", "owner", "factor"),
    [
        ({"look_ahead": True}, "staging", 2),
        ({"summary_dtype": "float32"}, "compact keys", 4),
        ({"rank": 20}, "adapters", 2),
        ({"num_recent": 80}, "rolling tail", 2),
    ],
)
def test_what_a_field_costs(fields: dict[str, Any], owner: str, factor: float) -> None:
    base = DiskSwapConfig(num_selected=64, reuse_capacity=32, rank=10, look_ahead=False, remainder=False)
    two = Geometry(layers=SMOL.layers[:2], dtype=torch.bfloat16)
    other = DiskSwapConfig.load(base, fields)
    before, after = (DiskSwapCache.plan(two, config, 1040, 1).decode[owner] for config in (base, other))
    assert after == pytest.approx(before * factor)


def test_what_a_change_of_rows_takes() -> None:
    """Beside the new rows of a layer its old ones, the largest of compact keys, tail and ids; one row never changes."""
    config = DiskSwapConfig(num_selected=64, rank=10)
    assert "moving rows" not in DiskSwapCache.plan(SMOL, config, 1040, 1).decode
    assert DiskSwapCache.plan(SMOL, config, 1040, 2).decode["moving rows"] == 2 * 48 * 768
    assert DiskSwapCache.plan(SMOL, config, 10400, 2).prefill["moving rows"] == 2 * 10400 * 10
    assert DiskSwapCache.plan(SMOL, DiskSwapConfig(exact=True), 10400, 2).decode["moving rows"] == 2 * 10400 * 8


def test_what_reads_are_held_in() -> None:
    """On CUDA on both sides; mapped pages count; records in memory are all, in chunks of 4 MiB; a trace has room."""
    config = DiskSwapConfig(num_selected=64, remainder=False)
    two = [Geometry.uniform(2, 9, 3, 64, device=device) for device in ("cpu", "cuda")]
    host, cuda = (DiskSwapCache.plan(geometry, config, 1040, 1) for geometry in two)
    places = 1024 // 16 * PLACE_BYTES  # a kernel is told where the records of a block are
    for owner, there, apart, here, more in (
        ("stream buffers", cuda.prefill, cuda.host_prefill, host.prefill, places),
        ("staging", cuda.decode, cuda.host_decode, host.decode, 0),
    ):
        assert there[owner] - more == apart[f"{owner}, host"] == here[owner] > 0
    assert host.host_bytes == 0
    mapped = DiskSwapCache.plan(SMOL, DiskSwapConfig(num_selected=64, engine="mapped"), 1040, 1)
    assert mapped.decode["records in memory"] == mapped.decode["staging"]
    memory = DiskSwapCache.plan(SMOL, DiskSwapConfig(engine="memory"), 1040, 1)
    assert memory.decode["records in memory"] == 30 * (2**22 // 12288) * 12288
    assert memory.disk_bytes == 0
    assert DiskSwapCache.plan(SMOL, DiskSwapConfig(trace="t"), 1040, 1).decode["timeline"] == 320 * 1024
    exact = DiskSwapCache.plan(SMOL, DiskSwapConfig(exact=True), 1040, 1)
    assert exact.decode["stream buffers"] == exact.prefill["stream buffers"] == 2 * 64 * 16 * 768
    assert "compact keys" not in exact.decode


# ---------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("part", ["1/13", "1/34"])
@pytest.mark.parametrize(("geometry", "context"), [(SMOL, 7168), (SMOL, 32768), (LLAMA_8B, 32768)])
def test_the_papers_budgets_fit(geometry: Geometry, context: int, part: str, batch: int) -> None:
    """Nearly all of the budget is used, and no compact keys are below the limit of compression."""
    memory = parse_memory(part, geometry.full_kv_bytes(context, batch))
    config = DiskSwapCache.fit(geometry, memory, context, batch, {})
    plan = DiskSwapCache.plan(geometry, config, context, batch)
    assert 0.93 * memory < plan.peak_bytes <= memory
    assert (config.memory, config.max_context, config.max_batch) == (memory, context, batch)
    width = geometry.forms(None)[0].key_width
    assert config.summary_bytes is not None and width <= 32 * config.summary_bytes
    assert parse_size(config.write_queue) <= min(2**24, memory // 10)
    if part == "1/13":
        selected = {7168: 800, 32768: 3200}[context]  # a tenth
        assert (config.num_selected, config.entry_bits, config.remainder) == (selected, 8, True)
        assert config.block_tokens >= 256  # a prefill in pieces over blocks of 64 takes two thirds more time
        assert config.summary_bytes >= width // 8  # needles are lost with less
    else:
        assert config.num_selected >= 128


def test_what_more_memory_buys() -> None:
    """Look-ahead, bytes of compact keys and slots; never a worse division than for less."""
    full = SMOL.full_kv_bytes(7168, 1)
    configs = [DiskSwapCache.fit(SMOL, full * n // 100, 7168, 1, {}) for n in (5, 7, 15, 30, 60, 150)]
    values = [worth(config.summary_bytes or 0, 192, config.reuse_capacity, config.num_selected) for config in configs]
    assert values == sorted(values)
    assert [config.look_ahead for config in configs] == [False, False, None, None, None, None]
    assert configs[-1].summary_bytes == 36 and configs[-1].reuse_capacity == 7168
    assert [config.block_tokens for config in configs][-1] == 2048


def test_a_small_budget_selects_as_many_tokens_as_fit() -> None:
    """One more group would not fit."""
    geometry = Geometry.uniform(3, 4, 2, 16, torch.float32)
    fields: dict[str, Any] = {"candidates": False, "num_recent": 16, "entry_bits": None, "group_size": 16}
    counts = []
    for part in (10, 12, 14):
        limits = geometry.full_kv_bytes(2000, 2) * 2 // part, 2000, 2
        counts.append(DiskSwapCache.fit(geometry, *limits, dict(fields)).num_selected)
        with pytest.raises(BudgetError):
            DiskSwapCache.fit(geometry, *limits, {**fields, "num_selected": counts[-1] + 16})
    assert counts == sorted(counts, reverse=True) and 64 <= counts[-1] < counts[0] < 400


def test_no_slot_is_bought_with_the_bytes_that_find_needles() -> None:
    """Between 1/20 and 1/34 of 7,000 tokens: codes are as long as what all of the prefill leaves allows, and the
    shorter they are the more is lost."""
    full = SMOL.full_kv_bytes(7230, 1)
    configs = [DiskSwapCache.fit(SMOL, full // part, 7230, 1, {}) for part in (34, 30, 25, 22, 20)]
    found = [config.summary_bytes or 0 for config in configs]
    assert found == sorted(found) and found[2] >= 12
    for nbytes in range(6, 24):
        assert worth(nbytes + 1, 192, 0, 400) > worth(nbytes, 192, 0, 400)


def test_no_more_bytes_than_codes_can_have() -> None:
    """Three key heads of 64: 64 components at most, 8 of them in 8 bits."""
    assert most_bytes(192) == 36
    plans = [DiskSwapCache.plan(SMOL, DiskSwapConfig(summary_bytes=nbytes), 8192, 1) for nbytes in (35, 36, 4096)]
    held = [plan.decode["compact keys"] for plan in plans]
    assert held[0] < held[1] == held[2]


def test_a_budget_below_what_retrieval_needs_is_told() -> None:
    """At a twentieth of a 4,000 tokens' KV, and not at a thirteenth of 32,000; nor where keys are truncated."""
    for context, part, told in ((4096, 20, True), (32768, 13, False)):
        config = DiskSwapCache.fit(SMOL, SMOL.full_kv_bytes(context, 1) // part, context, 1, {})
        (*said,) = DiskSwapCache.shortfalls(config, SMOL)
        assert bool(said) is told
        if told:
            assert f"compact keys of {config.summary_bytes} bytes" in said[0] and "; 20 bytes" in said[0]
    assert DiskSwapCache.shortfalls(DiskSwapConfig(rank=4), SMOL, {"rank"}) == []
    assert DiskSwapCache.shortfalls(DiskSwapConfig(exact=True), SMOL) == []


@pytest.mark.parametrize(
    ("context", "part", "fields", "words"),
    [
        (700, 9, {}, ["compact keys of 6 bytes", "a step selects"]),
        (8192, 36, {"summary_dtype": "int8", "entry_bits": None}, ["truncated", "a step selects"]),
        (8192, 20, {"summary_bytes": 24}, []),
        (8192, 20, {"summary_bytes": 24, "num_selected": 300}, []),
        (700, 7, {}, ["compact keys of 8 bytes"]),
    ],
)
def test_all_that_gives_way_is_told(context: int, part: int, fields: dict[str, Any], words: list[str]) -> None:
    """Coded keys that are too short, truncated ones in their place, fewer tokens selected; not what the user chose."""
    config = DiskSwapCache.fit(SMOL, SMOL.full_kv_bytes(context, 1) // part, context, 1, fields)
    said = DiskSwapCache.shortfalls(config, SMOL, fields)
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


@pytest.mark.parametrize("heads", [16, 32])
def test_nothing_is_told_that_no_memory_changes(heads: int) -> None:
    """Codes of wide keys have at most 132 bytes, and truncated ones the default rank: with all of that, and not by
    bytes that are never used."""
    wide = Geometry.uniform(32, 32, heads, 128)
    full = wide.full_kv_bytes(8192, 1)
    for fields in ({}, {"summary_dtype": "int8"}):
        assert DiskSwapCache.shortfalls(DiskSwapCache.fit(wide, full, 8192, 1, fields), wide, fields) == []
    assert DiskSwapCache.shortfalls(DiskSwapConfig(summary_bytes=4096), wide) == []
    assert len(DiskSwapCache.shortfalls(DiskSwapConfig(summary_bytes=100), wide)) == 1


def test_for_budget_warns_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_bytes, "RETRIEVES", 1.0)  # the tiny model's codes are never below a tenth
    with pytest.warns(UserWarning, match="bytes a token lose needles"):
        DiskSwapCache.for_budget(tiny("llama"), "16MiB", 960, engine="memory").close()


def test_the_users_fields_stay() -> None:
    fields = {"num_selected": 128, "reuse_capacity": 64, "rank": 20, "look_ahead": True, "group_size": 8,
              "num_recent": 48, "block_tokens": 256, "write_queue": "1MiB"}  # fmt: skip
    config = DiskSwapCache.fit(SMOL, 12 * 2**20, 7168, 1, fields)
    assert {name: getattr(config, name) for name in fields} == fields
    words = r"memory is 6,291,456 .*need at least [\d,]+ .*num_selected=128.*leave fields"
    with pytest.raises(BudgetError, match=words):
        DiskSwapCache.fit(SMOL, 6 * 2**20, 7168, 1, fields)
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        DiskSwapCache.fit(SMOL, 1, 7168, 1, {"rnk": 3})
    exact = DiskSwapCache.fit(SMOL, 12 * 2**20, 7168, 1, {"exact": True})
    assert exact.exact is True and exact.num_recent == 32


def chosen_for(
    share: int, goal: str | None, tokens: int = 8192, **fields: Any
) -> tuple[tuple[Any, ...], list[str]]:
    """What SmolLM2's shape gets for a share of the full KV, which it keeps, and the notes."""
    memory = SMOL.full_kv_bytes(tokens, 1) // share
    config = DiskSwapCache.fit(SMOL, memory, tokens, 1, fields, goal)
    assert isinstance(config, DiskSwapConfig)
    assert DiskSwapCache.plan(SMOL, config, tokens, 1).peak_bytes <= memory
    selected = config.num_selected, config.remainder, config.entry_bits
    return selected, missed_goal(DiskSwapCache, goal, config, fields)


def test_a_goal_chooses_fields_that_fit() -> None:
    """For fidelity, and by default, more tokens, in 8 bits, and an estimate of the others. At less memory fewer tokens,
    then less of the rest, then quick steps, with a note if fidelity was asked for. The user's own fields stay."""
    assert chosen_for(13, "speed") == ((400, False, 8), [])
    assert chosen_for(13, "speed", entry_bits=None) == ((400, False, None), [])
    assert chosen_for(13, "speed", 16384) == ((400, False, 8), [])
    assert chosen_for(13, "speed", 32768) == ((400, False, None), [])  # slots hold more than twice that
    assert chosen_for(13, "speed", 32768, entry_bits=8) == ((400, False, 8), [])
    for goal in ("fidelity", None):
        assert chosen_for(13, goal) == ((800, True, 8), [])
        assert chosen_for(13, goal, num_selected=500) == ((500, True, 8), [])
        assert chosen_for(13, goal, entry_bits=None) == ((800, True, None), [])
        assert chosen_for(13, goal, remainder=False) == ((800, False, 8), [])
        assert chosen_for(13, goal, exact=True) == ((400, True, None), [])
        fits = {chosen_for(share, goal)[0] for share in (13, 16, 21, 22, 23, 24, 25, 34)}
        less = {(400, True, 8), (400, True, None), (400, False, 8)}
        assert fits == {(800, True, 8), (700, True, 8), *less}
    usual, (note,) = chosen_for(15, "fidelity", 2048)
    assert usual == (400, False, 8) and chosen_for(15, None, 2048) == (usual, []) == chosen_for(15, "speed", 2048)
    assert note.startswith('goal="fidelity" has room for num_selected=400, remainder=False, entry_bits=8 only, where')
    fewer, (note,) = chosen_for(22, "fidelity")
    assert fewer == (700, True, 8) and note.startswith('goal="fidelity" has room for num_selected=700, remainder=True')
    assert "where more memory gets num_selected=800, remainder=True" in note


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [(2048, []), (5900, []), (6100, [800]), (16384, [1600, 1200, 900]), (22000, [2400, 1800, 1350, 1012, 759])],
)
def test_fidelity_selects_a_tenth_of_a_context(tokens: int, counts: list[int]) -> None:
    """Ample memory gets the first count. Less memory gets fewer tokens first, then loses estimates or 8 bits."""
    tried = [fields["num_selected"] for fields in DiskSwapCache.goals.faithful(tokens)]
    assert tried == [*counts, *([700] if counts else []), 560, 400, 400, 400]
    assert chosen_for(2, None, tokens) == ((tried[0], True, 8), [])


@pytest.mark.parametrize("part", [13, 18, 20])
def test_no_goal_takes_bytes_that_find_needles(part: int) -> None:
    """Compact keys of a default are not shorter than those for speed, unless the latter are long enough."""
    memory = SMOL.full_kv_bytes(8192, 1) // part
    found = [DiskSwapCache.fit(SMOL, memory, 8192, 1, {}, goal) for goal in (None, "speed")]
    lost = [needles_lost(config, SMOL) for config in found]
    assert found[0] != found[1] and lost[0] <= lost[1] + 0.02


@pytest.mark.parametrize(("tokens", "selected"), [(640, 400), (800, 400), (1119, 400), (1120, 560)])
def test_a_default_selects_at_most_half_of_a_context(tokens: int, selected: int) -> None:
    config = DiskSwapCache.fit(SMOL, SMOL.full_kv_bytes(tokens, 1), tokens, 1, {})
    assert isinstance(config, DiskSwapConfig)
    assert (config.num_selected, config.remainder) == (selected, tokens >= 800)
    faithful = DiskSwapCache.fit(SMOL, SMOL.full_kv_bytes(tokens, 1), tokens, 1, {}, "fidelity")
    assert isinstance(faithful, DiskSwapConfig)
    assert faithful.num_selected == 560 and faithful.remainder


def test_a_small_budget_has_no_memory_for_candidates() -> None:
    """The planner gives up that memory before it selects fewer tokens or shortens compact keys, for any goal. It keeps
    the memory if neither gets worse, or if the user asks for it. Without it, a step's view has room for one query."""
    for tokens, part, goal in ((8192, 13, None), (8192, 13, "speed"), (4096, 20, None), (4096, 16, "speed")):
        memory, some = SMOL.full_kv_bytes(tokens, 1) // part, part == 13
        config = DiskSwapCache.fit(SMOL, memory, tokens, 1, {}, goal)
        asked = DiskSwapCache.fit(SMOL, memory, tokens, 1, {"candidates": not some}, goal)
        assert (config.candidates, asked.candidates) == (some, not some)
        assert isinstance(config, DiskSwapConfig) and isinstance(asked, DiskSwapConfig)
        assert needles_lost(config, SMOL) <= needles_lost(asked, SMOL) + (0.02 if some else -0.02)
    memory = SMOL.full_kv_bytes(4096, 1) // 20
    chosen, asked = (DiskSwapCache.fit(SMOL, memory, 4096, 1, fields) for fields in ({}, {"candidates": True}))
    assert isinstance(chosen, DiskSwapConfig) and isinstance(asked, DiskSwapConfig)
    assert needles_lost(chosen, SMOL) < needles_lost(asked, SMOL) - 0.1
    both = (DiskSwapConfig.load(chosen, {"candidates": some}) for some in (False, True))
    one, many = (sum(DiskSwapCache.plan(SMOL, config, 4096, 1).decode[owner] for owner in ("selection", "staging"))
                 for config in both)  # fmt: skip
    assert 1.6 * one < many < 1.8 * one  # twice the view, and the area of a read


def test_a_budget_for_entries_in_8_bits_only() -> None:
    """Less than 16 bits need: each goal fits all the same, and 16 bits raise."""
    wide, memory = Geometry.uniform(32, 32, 8, 128), 34_050_000
    for goal in (None, "speed"):
        config = DiskSwapCache.fit(wide, memory, 8192, 1, {}, goal)
        assert isinstance(config, DiskSwapConfig)
        assert config.entry_bits == 8 and DiskSwapCache.plan(wide, config, 8192, 1).peak_bytes <= memory
        with pytest.raises(BudgetError, match="need at least"):
            DiskSwapCache.fit(wide, memory, 8192, 1, {"entry_bits": None}, goal)


@pytest.mark.parametrize(
    ("cls", "layers", "tokens", "part", "selected", "in_16_bits"),
    [(ClusterCache, 28, 4096, 13, 560, 400), (AbstractTreeCache, 32, 32768, 34, 2400, 1800)],
)
def test_8_bits_where_16_select_fewer(
    cls: Any, layers: int, tokens: int, part: int, selected: int, in_16_bits: int
) -> None:
    """Only there, and not for speed, nor against the user's word. A plan that selects all in 8 bits lacks nothing."""
    geometry = Geometry.uniform(layers, 32, 8, 128)

    def chosen(part: int, goal: str | None = None, **fields: Any) -> tuple[int, int | None]:
        memory = geometry.full_kv_bytes(tokens, 1) // part
        config = cls.fit(geometry, memory, tokens, 1, fields, goal)
        assert cls.plan(geometry, config, tokens, 1).peak_bytes <= memory
        return config.num_selected, config.entry_bits

    assert chosen(part) == chosen(part, "fidelity") == (selected, 8)
    assert chosen(part, entry_bits=None) == (in_16_bits, None)
    assert chosen(part, "speed")[1] is None and chosen(4)[1] is None
    assert chosen(4, entry_bits=8) == (chosen(4)[0], 8)
    config = cls.fit(geometry, geometry.full_kv_bytes(tokens, 1) // part, tokens, 1, {}, "fidelity")
    missed = missed_goal(cls, "fidelity", config, {})
    assert [note[:38] for note in missed] == ([] if selected == 560 else ['goal="fidelity" has room for num_selec'])


@pytest.mark.parametrize("part", [13, 20])
@pytest.mark.parametrize("cls", [DiskSwapCache, AbstractTreeCache, ClusterCache])
def test_what_a_prefill_leaves_of_a_budget_goes_to_its_streams(cls: Any, part: int) -> None:
    """No wider blocks and no longer queue would fit, even where a step needs the whole budget."""
    memory = SMOL.full_kv_bytes(8192, 1) // part
    config = cls.fit(SMOL, memory, 8192, 1, {})
    for name, most in (("block_tokens", 2048), ("write_queue", memory // 10)):
        wider = dataclasses.replace(config, **{name: 2 * getattr(config, name)})
        assert getattr(wider, name) > most or cls.plan(SMOL, wider, 8192, 1).peak_bytes > memory


def test_blocks_on_a_device_get_what_a_budget_leaves() -> None:
    """There each costs launches: blocks up to 16,384 tokens where a CPU's have 1,024 to attend to everything, and as
    long ones as fit. A given length stays."""
    gpu, context = dataclasses.replace(SMOL, device="cuda"), 32768
    full = SMOL.full_kv_bytes(context, 1)
    for cls in (OffloadCache, DiskSwapCache):
        wide, narrow = (cls.fit(gpu, full // part, context, 1, {}) for part in (2, 40))
        assert wide.block_tokens == 16384
        assert cls.plan(gpu, dataclasses.replace(wide, block_tokens=16384), context, 1).peak_bytes <= full // 2
        longer = dataclasses.replace(narrow, block_tokens=2 * narrow.least_block)
        assert narrow.least_block < 16384 and cls.plan(gpu, longer, context, 1).peak_bytes > full // 40
        assert cls.fit(gpu, full // 2, context, 1, {"block_tokens": 512}).block_tokens == 512
    assert OffloadCache.fit(SMOL, full // 2, context, 1, {}).block_tokens == 1024


def test_slots_of_a_budget_for_a_device_hold_a_choice_of_each_layer() -> None:
    """Then steps need no buffers of the host's way. A goal, a given field or the disk may want that way, and so does a
    budget that is too small for slots."""
    gpu, context, cls = dataclasses.replace(SMOL, device="cuda"), 8192, DiskSwapCache
    memory, own = SMOL.full_kv_bytes(context, 1) // 13, {"engine": "memory"}

    def fitted(nbytes: int, goal: str | None = None, **fields: Any) -> tuple[DiskSwapConfig, bool]:
        config = cls.fit(gpu, nbytes, context, 1, {**own, **fields}, goal)
        plan = cls.plan(gpu, config, context, 1)
        assert plan.peak_bytes <= nbytes and ("staging" in plan.decode) == ("selection" in plan.decode)
        assert "staging, host" in plan.host_decode  # for steps that need the host in spite of the plan
        return config, "staging" not in plan.decode  # type: ignore[return-value]

    for goal, count, on_device in ((None, 560, True), ("speed", 400, True), ("fidelity", 800, False)):
        config, alone = fitted(memory, goal)
        assert (config.num_selected, alone, config.reuse_capacity >= count) == (count, on_device, on_device)
    assert not fitted(memory, reuse_capacity=100)[1] and not fitted(memory, engine="direct")[1]
    assert fitted(memory, "speed", num_selected=250)[0].num_selected == 250
    with pytest.raises(BudgetError) as refused:
        cls.fit(gpu, 1, context, 1, own)
    assert refused.value.needed is not None and not fitted(refused.value.needed)[1]
    config = dataclasses.replace(fitted(memory)[0], memory=None)
    extra, plain = (cls.plan(gpu, dataclasses.replace(config, reuse_capacity=count), context, 1) for count in (590, 0))
    record = 3960  # of 10 tokens in 8 bits; without a limit, slots lie besides those of a choice
    assert extra.decode["reuse slots"] - plain.decode["reuse slots"] == 30 * 60 * record
    assert plain.decode["reuse slots"] == 30 * 57 * record


def test_a_short_context_keeps_16_bits() -> None:
    """A step selects most of it, so that tokens may be those of the full KV. Whoever asks for speed gets 8 bits."""
    memory = 2 * SMOL.full_kv_bytes(600, 1)
    usual, speed = (DiskSwapCache.fit(SMOL, memory, 600, 1, {}, goal) for goal in (None, "speed"))
    assert (usual.entry_bits, speed.entry_bits) == (None, 8)  # type: ignore[attr-defined]


def test_a_budget_for_entries_in_16_bits_only() -> None:
    """A small model, whose conversion of entries needs more memory than 8 bits save."""
    small = Geometry.of(tiny("llama"))
    with pytest.raises(BudgetError) as refused:
        DiskSwapCache.fit(small, 1000, 1024, 1, {"entry_bits": None, "remainder": False})
    least = refused.value.needed
    with pytest.raises(BudgetError):
        DiskSwapCache.fit(small, least, 1024, 1, {"entry_bits": 8})
    config = DiskSwapCache.fit(small, least, 1024, 1, {}, "speed")
    assert isinstance(config, DiskSwapConfig)
    assert config.entry_bits is None and DiskSwapCache.plan(small, config, 1024, 1).peak_bytes <= least


def test_a_long_context_keeps_its_budget_without_a_rough_form() -> None:
    """A step estimates among many times as many groups as it selects, in the least memory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2}
    positions = {"vocab_size": 200, "num_hidden_layers": 2, "max_position_embeddings": 1 << 14}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **positions)).eval()
    ids = torch.randint(1, 199, (1, 9020), generator=torch.Generator().manual_seed(0))
    fields = {"engine": "mapped", "num_selected": 64, "rank": 8, "remainder": True}
    with pytest.raises(BudgetError) as refused:
        DiskSwapCache.for_budget(model, 1000, 9024, **fields)
    assert refused.value.needed is not None
    with DiskSwapCache.for_budget(model, refused.value.needed, 9024, **fields) as cache, torch.no_grad():
        for piece in ids[:, :9000].split(2000, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        for place in range(9000, 9008):
            model(ids[:, place : place + 1], past_key_values=cache)
        report = cache.report()
    assert report.estimated_mass and report.peak_memory_bytes <= report.memory_budget


def test_a_plan_that_loses_needles_says_how_many() -> None:
    """The tree at 1/20 of 8K tokens: with the memory that would do, which does, and the cache that loses few. With 400
    tokens no memory would do; where no cache does better, with less memory, other fields would."""

    def notes(cls: Any, share: int, tokens: int, goal: str | None = None, **fields: Any) -> list[str]:
        config = cls.fit(SMOL, SMOL.full_kv_bytes(tokens, 1) // share, tokens, 1, fields, goal)
        found = cls.notes(cls.plan(SMOL, config, tokens, 1), config, SMOL, fields)
        return [note for note in found if note.startswith("about ")]

    assert not notes(AbstractTreeCache, 13, 4096) and not notes(AbstractTreeCache, 6, 8192)
    (told,) = notes(AbstractTreeCache, 13, 8192)  # without early steps
    assert "raise memory to " in told and "or use DiskSwapCache, which loses 0% in this memory" in told
    (told,) = notes(AbstractTreeCache, 20, 8192)
    match = re.fullmatch(
        r"about \d+% of the needles that the full KV finds are lost \(measured on SmolLM2-135M up to 8K tokens\): "
        r"raise memory to ([\d.]+ MiB), or use DiskSwapCache, which loses \d+% in this memory",
        told,
    )
    assert match is not None
    enough = AbstractTreeCache.fit(SMOL, parse_size(match[1]), 8192, 1, {})
    assert not AbstractTreeCache.notes(AbstractTreeCache.plan(SMOL, enough, 8192, 1), enough, SMOL)
    (told,) = notes(AbstractTreeCache, 4, 8192, num_selected=400)
    assert told.endswith(": use DiskSwapCache, which loses 0% in this memory")
    assert not notes(AbstractTreeCache, 4, 8192, num_selected=None)
    (told,) = notes(AbstractTreeCache, 28, 8192)
    assert re.search(r"about \d+% .*: raise memory to [\d.]+ MiB$", told)
    (told,) = notes(AbstractTreeCache, 28, 8192, num_selected=128)
    assert told.endswith(": leave fields to the planner")
    (told,) = notes(DiskSwapCache, 28, 8192)
    assert re.search(r"about \d+% .*: raise memory to [\d.]+ MiB$", told)
    (told,) = notes(AbstractTreeCache, 4, 8192, goal="speed")
    assert told.endswith(': leave out goal="speed", or use DiskSwapCache, which loses 0% in this memory')
    assert not notes(DiskSwapCache, 13, 8192) and not notes(AbstractTreeCache, 28, 8192, exact=True)
    assert not notes(ClusterCache, 6, 4096)
    for share, tokens in ((13, 4096), (13, 8192)):  # large clusters, a long context
        (told,) = notes(ClusterCache, share, tokens)
        assert "use DiskSwapCache, which loses 0% in this memory" in told
    (told,) = notes(ClusterCache, 20, 4096)  # and few tokens
    assert "raise memory to " in told


def test_a_goal_gives_way_to_the_users_fields() -> None:
    """More tokens than the user lets a step examine are left out, and no note says that memory is missing."""
    memory, fields = SMOL.full_kv_bytes(8192, 1) // 2, {"num_opened": 500}
    config = AbstractTreeCache.fit(SMOL, memory, 8192, 1, fields, "fidelity")
    assert (config.num_selected, config.num_opened) == (400, 500)  # type: ignore[attr-defined]
    assert missed_goal(AbstractTreeCache, "fidelity", config, fields) == []


def test_more_tokens_do_not_make_clusters_larger() -> None:
    """At 1/20 of 8K tokens more would fit in clusters of 128 keys, which lose more needles."""
    memory = SMOL.full_kv_bytes(8192, 1) // 20
    usual, speed = (ClusterCache.fit(SMOL, memory, 8192, 1, {}, goal) for goal in (None, "speed"))
    assert usual.cluster_size <= speed.cluster_size  # type: ignore[attr-defined]
    assert any("keys on average" in line for line in ClusterCache.shortfalls(speed, SMOL))
    assert not ClusterCache.shortfalls(ClusterCache.fit(SMOL, 4 * memory, 8192, 1, {}), SMOL)


def test_all_keys_are_read_between_steps_within_a_budget() -> None:
    """The areas of a step make room for the buffers of a stream, and the next step has its memory again."""
    sizes = {**COMMON, "max_position_embeddings": 8192}
    model = build(LlamaForCausalLM, LlamaConfig(**sizes))
    model.set_attn_implementation("eager")
    ids = torch.randint(1, 60, (1, 3704), generator=torch.Generator().manual_seed(1))
    with ClusterCache.for_budget(model, 1_137_828, 4096) as cache, torch.no_grad():
        for piece in ids[:, :3696].split(1024, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        for step in range(3696, 3700):
            model(ids[:, step : step + 1], past_key_values=cache)
            assert cache.layers[0].keys.shape[2] == step + 1
        model(ids[:, 3700:3701], past_key_values=cache, output_attentions=True)
        report = cache.report()
        assert report.peak_memory_bytes <= report.memory_budget


def test_a_goal_that_is_none() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError, match="goal must be one of fidelity, speed, got 'best'"):
        DiskSwapCache.for_budget(model, "3/5", CONTEXT, goal="best")
    with pytest.raises(ConfigError, match='SpecCache has no fields for goal="fidelity": use DiskSwapCache'):
        SpecCache.for_budget(model, "3/5", CONTEXT, goal="fidelity")
    with OffloadCache.for_budget(model, "3/5", CONTEXT, goal="fidelity") as cache:  # it is exact
        assert type(cache) is OffloadCache


@pytest.mark.parametrize("cls", [DiskSwapCache, ClusterCache])
def test_a_cache_for_fidelity_keeps_its_budget(cls: Any) -> None:
    model = tiny("llama")
    with cls.for_budget(model, "2/1", CONTEXT, BATCH, goal="fidelity") as cache:
        assert cache.config.remainder
        run(model, cache, 700, 256, 10)
        check_kept(cache, Geometry.of(model))
    small = "7/10" if cls is ClusterCache else "2/5"
    with cls.for_budget(model, small, CONTEXT, BATCH, goal="fidelity") as cache:
        assert not cache.config.remainder
        assert [note for note in cache.report().warnings if note.startswith('goal="fidelity" has no room')]


def test_the_least_that_would_do_does() -> None:
    with pytest.raises(BudgetError) as caught:
        DiskSwapCache.fit(SMOL, 1000, 7168, 1, {})
    least = int(str(caught.value).partition("at least ")[2].split()[0].replace(",", ""))
    config = DiskSwapCache.fit(SMOL, least, 7168, 1, {})
    assert (config.num_recent, config.summary_bytes, config.reuse_capacity) == (8, 6, 0)
    with pytest.raises(BudgetError):
        DiskSwapCache.fit(SMOL, least - 1, 7168, 1, {})


shapes = st.builds(
    lambda heads, times, dim, value_dim: LayerShape(heads * times, heads, dim, heads, value_dim),
    st.integers(1, 8), st.integers(1, 4), st.sampled_from([8, 16, 64, 128, 192]), st.sampled_from([8, 64, 128]),
)  # fmt: skip
geometries = st.builds(
    Geometry,
    layers=st.lists(shapes, min_size=1, max_size=6).map(tuple),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    kept=st.sampled_from([(), (KeptLayer(10, 64, 128), KeptLayer(4096))]),
    device=st.sampled_from(["cpu", "cuda"]),
)
chosen_fields = st.fixed_dictionaries(
    {},
    optional={
        "num_selected": st.integers(1, 900),
        "reuse_capacity": st.integers(0, 900),
        "rank": st.integers(1, 64),
        "look_ahead": st.sampled_from([None, True, False]),
        "group_size": st.integers(1, 64),
        "num_sinks": st.integers(0, 70),
        "num_recent": st.integers(1, 130),
        "summary_dtype": st.sampled_from(["int8", "bfloat16", "float32"]),
        "engine": st.sampled_from(["direct", "mapped", "memory"]),
        "exact": st.booleans(),
        "entry_bits": st.sampled_from([None, 8]),
        "heads_apart": st.booleans(),
    },
).filter(lambda fields: not (fields.get("exact") and fields.get("entry_bits")))


wishes = given(
    geometry=geometries, context=st.integers(1, 40_000), batch=st.integers(1, 16),
    divisor=st.floats(0.5, 60), fields=chosen_fields,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@wishes
def test_a_fit_keeps_to_the_budget_or_says_what_would(**wish: Any) -> None:
    keeps_to_the_budget_or_says_what_would(**wish)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@wishes
def test_fits_of_many_wishes(**wish: Any) -> None:
    keeps_to_the_budget_or_says_what_would(**wish)


def keeps_to_the_budget_or_says_what_would(
    geometry: Geometry, context: int, batch: int, divisor: float, fields: dict[str, Any]
) -> None:
    memory = max(1, int(geometry.full_kv_bytes(context, batch) / divisor))
    for fit in (
        lambda memory: DiskSwapCache.fit(geometry, memory, context, batch, fields),
        lambda memory: OffloadCache.fit(geometry, memory, context, batch, {}),
    ):
        try:
            config = fit(memory)
        except BudgetError as error:
            least = int(str(error).partition("at least ")[2].split()[0].replace(",", ""))
            assert least > memory
            config, memory = fit(least), least
        cache_class = DiskSwapCache if isinstance(config, DiskSwapConfig) else OffloadCache
        assert cache_class.plan(geometry, config, context, batch).peak_bytes <= memory
        assert config.memory == memory
        if isinstance(config, DiskSwapConfig):
            assert {name: getattr(config, name) for name in fields} == fields


# ---------------------------------------------------------------------------------------------- the account


def test_an_account_with_a_limit_refuses_before_it_books() -> None:
    account = MemoryAccount(100)
    account.hold("slots", 60)
    words = r"staging needs 41 bytes in addition to the 60 in use \(slots 60 B\), above the limit of 100"
    with pytest.raises(BudgetError, match=words):
        account.hold("staging", 41)
    with pytest.raises(BudgetError), account.holding("packing", 41):
        raise AssertionError("entered")
    assert (account.current, account.peak, account.by_owner["staging"]) == (60, 60, 0)
    with account.holding("packing", 40):
        assert account.current == 100
    account.release("slots", 20)
    account.observe("tables", 70)  # is there, whoever allowed it
    account.release("slots", 10)  # giving back is never refused
    assert (account.current, account.peak) == (100, 110)


def test_what_can_be_had_again_is_given_back_before_something_is_refused() -> None:
    account = MemoryAccount(100)

    class Copies:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes
            account.hold("slots", nbytes)
            account.spare(self)

        def free_memory(self) -> None:
            account.release("slots", self.nbytes)
            self.nbytes = 0

    some, others = Copies(40), Copies(50)
    account.hold("packing", 10)
    assert (account.pressed, account.current) == (0, 100) and account.has_room(0) and not account.has_room(1)
    with account.not_sparing(), pytest.raises(BudgetError):  # for what is not needed nobody gives anything
        account.hold("staging", 1)
    with pytest.raises(BudgetError, match="fitting needs 101 bytes"):  # nor for what can never be held
        account.hold("fitting", 101)
    assert (account.pressed, account.current) == (0, 100)
    account.hold("fitting", 45)  # who came last gives first, and the others keep what is not needed
    assert (some.nbytes, others.nbytes, account.pressed, account.current) == (40, 0, 1, 95)
    account.hold("fitting", 30)
    assert (some.nbytes, account.pressed, account.current, account.peak) == (0, 2, 85, 100)
    with pytest.raises(BudgetError, match="fitting needs 16 bytes"):
        account.hold("fitting", 16)
    del some, others
    account.hold("fitting", 15)
    assert account.pressed == 2


# ---------------------------------------------------------------------------------------------- a model that runs


def padded_ids(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    mask = torch.ones(BATCH, tokens, dtype=torch.long)
    mask[0, :13] = 0
    return torch.randint(3, 190, (BATCH, tokens), generator=generator), mask


def run(model: Any, cache: Any, tokens: int, chunk: int, steps: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A padded prompt in chunks behind what `mask` says is held, then greedy steps; the mask of all of it."""
    ids, fresh = padded_ids(tokens)
    held = 0 if mask is None else mask.shape[1]
    mask = fresh if mask is None else torch.cat([mask, torch.ones_like(fresh)], 1)
    with torch.no_grad():
        for start in range(0, tokens, chunk):
            part = ids[:, start : start + chunk]
            output = model(part, attention_mask=mask[:, : held + start + part.shape[1]], past_key_values=cache)
        for _ in range(steps):
            mask = torch.cat([mask, mask.new_ones(BATCH, 1)], 1)
            output = model(output.logits[:, -1:].argmax(-1), attention_mask=mask, past_key_values=cache)
    return mask


def check_kept(cache: Any, geometry: Geometry) -> None:
    """The account is within the plan by owner, and within the budget at its peak."""
    report = cache.report()
    plan = cache.plan(geometry, cache.config, CONTEXT, BATCH)
    assert report.memory_budget == cache.storage.account.limit
    assert report.peak_memory_bytes <= plan.peak_bytes <= report.memory_budget
    most = {owner: max(plan.prefill.get(owner, 0), plan.decode.get(owner, 0)) for owner in report.memory_by_owner}
    areas = ("staging", "selection", "kept")  # one query's, or those of candidates, which are larger: not each of them
    if cache.selects and cache.selecting.lent:
        del most["reuse slots"]
    assert sum(report.memory_by_owner.get(owner, 0) for owner in areas) <= sum(most.pop(owner, 0) for owner in areas)
    held = {owner: report.memory_by_owner[owner] for owner in most}
    over = {owner: (nbytes, most[owner]) for owner, nbytes in held.items() if nbytes > most[owner]}
    assert over == {}
    assert cache.storage.account.pressed == 0


PARTS: list[tuple[Any, str, dict[str, Any]]] = [
    (cls, part, {}) for cls in (DiskSwapCache, OffloadCache) for part in ("1/1", "3/5", "2/5")
]
PARTS += [(AbstractTreeCache, part, {}) for part in ("1/1", "3/5")]  # of less, two chunks are more than a tenth
PARTS += [(DiskSwapCache, part, {"entry_bits": 8}) for part in ("3/5", "2/5")]
PARTS += [(DiskSwapCache, part, {"heads_apart": True}) for part in ("3/5", "2/5")]
PARTS += [(AbstractTreeCache, "3/5", {"entry_bits": 8}), (ClusterCache, "4/5", {"entry_bits": 8})]


@pytest.mark.parametrize(
    ("cache_class", "part", "fields", "chunk"),
    [pytest.param(*one, chunk, marks=pytest.mark.slow if (turn + (chunk == 128)) % 2 else [])
     for turn, one in enumerate(PARTS) for chunk in (CONTEXT, 128)],
)  # fmt: skip
def test_the_budget_is_kept(cache_class: Any, part: str, fields: dict[str, Any], chunk: int) -> None:
    """Prefill, 10 steps, a second turn and 10 more, up to the last token of the context; nothing raises."""
    model = tiny("llama")
    geometry = Geometry.of(model)
    with cache_class.for_budget(model, part, CONTEXT, BATCH, **fields) as cache:
        mask = run(model, cache, 700, chunk, 10)
        check_kept(cache, geometry)
        mask = run(model, cache, CONTEXT - 740, chunk, 10, mask)
        assert cache.get_seq_length() == CONTEXT - 20
        run(model, cache, 19, 19, 1, mask)
        check_kept(cache, geometry)
        assert cache.report().decode_steps == 21


def wide_keys() -> Any:
    """What is made of 256 components of a key takes more than all else of a short history."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, **sizes}))


@pytest.mark.parametrize("quarters", [4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", registry.CACHES)
def test_the_least_budget_is_kept_where_adapters_are_made_in_a_step(name: str, quarters: int) -> None:
    """What a history is known by is found out in a step, once there are 512 tokens of it. Wide keys: that takes as much
    as selecting does."""
    model, cls = wide_keys(), registry.cache_class(name)
    with pytest.raises(BudgetError) as refused:
        cls.for_budget(model, "1KiB", max_context=540, engine="mapped")
    least = int(re.search(r"need at least ([\d,]+)", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    ids, memory = torch.randint(1, 199, (1, 540), generator=torch.Generator().manual_seed(0)), least * quarters // 4
    with cls.for_budget(model, memory, max_context=540, engine="mapped") as cache, torch.no_grad():
        model(ids[:, :500], past_key_values=cache)
        for place in range(500, 540):
            model(ids[:, place : place + 1], past_key_values=cache)
        report = cache.report()
    assert report.peak_memory_bytes <= memory and report.decode_steps == 40
    assert report.selected_fraction < 0.9


@pytest.mark.parametrize("look_ahead", [True, None])
def test_a_verification_of_candidates_within_the_budget(look_ahead: bool | None) -> None:
    """It attends to more than a step does, in the memory of the reads ahead, which go on after it; tokens are those of
    a cache without a limit, and no slot was given up for it."""
    model, fields = tiny("llama"), {"look_ahead": look_ahead, "group_size": 8}
    ids = padded_ids(700)[0][1:].repeat_interleave(2, 1)[:, :700]
    arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": 6}
    with DiskSwapCache.for_budget(model, "2/5", CONTEXT, num_selected=64, goal="speed", **fields) as cache:
        with DiskSwapCache(model, config=cache.config, memory=None) as free:
            expected = model.generate(ids, past_key_values=free, **arguments)
        widest, views, areas = [], [], []

        def seen(layer_idx: int, choice: Any) -> None:
            account = cache.storage.account.by_owner
            widest.append(choice.units.shape[1])
            views.append(account["selection"])
            areas.append(account["staging"])

        cache.selecting.watch = seen
        found = model.generate(ids, past_key_values=cache, **arguments)
        plan, report = cache.plan(Geometry.of(model), cache.config, CONTEXT, 1), cache.report()
        usual = cache.selecting.units(cache.config, 8, 0, usual=True)
        assert min(widest) <= usual < max(widest)
        for owner, held in (("selection", views), ("staging", areas)):
            assert max(held[at] for at, width in enumerate(widest) if width <= usual) <= plan.decode[owner]
        assert max(view + area for view, area in zip(views, areas, strict=True)) <= (
            plan.decode["selection"] + plan.decode["staging"]
        )
        assert views[widest.index(max(widest))] > plan.decode["selection"]
        assert report.peak_memory_bytes <= plan.peak_bytes <= report.memory_budget
        assert cache.storage.account.pressed == 0
    assert torch.equal(found, expected)


def test_a_prefill_may_have_more_writes_waiting_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is short while steps select, for which slots have the memory, and long again in the next turn; without
    a limit it stays as it is."""
    model, limits = tiny("llama"), []
    limit = Prefetcher.limit_writes
    monkeypatch.setattr(Prefetcher, "limit_writes", lambda self, most: [limits.append(most), limit(self, most)])
    fields: dict[str, Any] = {"num_selected": 32, "write_queue": "1MiB", "max_context": CONTEXT, "max_batch": 1}
    ids = padded_ids(700)[0][:1]
    for memory in ("32MiB", None):
        with DiskSwapCache(model, memory=memory, **fields) as cache, torch.no_grad():
            for tokens in (700, 1, 1, 50):
                model(ids[:, :tokens], past_key_values=cache)
            layers = cache.selective
            plan = cache.plan(Geometry.of(model), cache.config, CONTEXT, 1)
            short = max(2, len(layers)) * layers[0].history.form.record_bytes
            assert (plan.prefill["write queue"], plan.decode["write queue"]) == (2**20, short)
    assert limits == [short, 2**20]
    exact = DiskSwapCache.plan(Geometry.of(model), DiskSwapConfig(exact=True, write_queue="1MiB"), CONTEXT, 1)
    assert exact.decode["write queue"] == 2**20


@pytest.mark.parametrize("group_size", [4, 8])
def test_slots_make_room_for_what_is_learned_late(group_size: int) -> None:
    """A short prompt: compact keys are first made, with all that takes, between steps that have slots."""
    model, ids = wide_keys(), padded_ids(560)[0][:1]
    fields: dict[str, Any] = {"num_selected": 64, "look_ahead": False}
    with DiskSwapCache.for_budget(model, "1/2", 700, group_size=group_size, **fields) as cache, torch.no_grad():
        model(ids[:, :480], past_key_values=cache)
        for place in range(480, 560):
            model(ids[:, place : place + 1], past_key_values=cache)
        report = cache.report()
        assert all(layer.predictor.ready(layer.history.units) for layer in cache.selective)
        assert 0 < cache.storage.account.pressed <= 2 * len(cache.selective)
        assert report.peak_memory_bytes <= report.memory_budget and report.memory_by_owner["reuse slots"] > 0


@pytest.mark.parametrize(("cache_class", "memory"), [(DiskSwapCache, "1/3"), (ClusterCache, "1400KiB")])
def test_slots_get_what_a_longer_context_will_need(cache_class: Any, memory: str) -> None:
    """A short context has more slots than configured, and a second row takes some back. Choices stay the same, and no
    step has to free slots."""
    model, fields = tiny("llama"), {"num_selected": 64, "group_size": 4, "candidates": True}
    ids, lent = padded_ids(CONTEXT)[0][:1], []
    with (
        cache_class.for_budget(model, memory, CONTEXT, BATCH, **fields) as cache,
        cache_class(model, config=cache.config, memory=None) as free,
        torch.no_grad(),
    ):
        for begin in (300, 600, 900):
            for one in (free, cache):
                model(ids[:, one.get_seq_length() : begin], past_key_values=one)
            for place in range(begin, begin + 10):
                states = [model(ids[:, place : place + 1], past_key_values=one).logits for one in (free, cache)]
                assert torch.equal(*states)
            layer = cache.selective[0]
            assert layer.slots > free.selective[0].slots and layer.fetcher.tiers[0].capacity == layer.slots
            lent.append(cache.selecting.lent)
        assert (lent[0] > lent[1] > lent[2] > 0) == (cache_class is DiskSwapCache)  # the other has room for all tokens
        assert cache.storage.account.pressed == 0
        cache.batch_repeat_interleave(2)
        model(ids[:, -1:].expand(2, -1), past_key_values=cache)
        assert cache.selecting.lent < lent[2]
        assert cache.report().peak_memory_bytes <= cache.report().memory_budget


def test_slots_leave_room_for_windows_that_grow() -> None:
    """Layers with a window longer than the context take more with each step."""
    model = tiny("gemma3")
    config = copy.deepcopy(model.config)
    config.sliding_window = 2048
    wide = type(model)(config).eval()
    ids = torch.randint(5, 90, (1, 1400), generator=torch.Generator().manual_seed(0))
    full = Geometry.of(wide).full_kv_bytes(1400, 1)
    with DiskSwapCache.for_budget(wide, full * 2 // 3, 1400, num_selected=64) as cache, torch.no_grad():
        wide(ids[:, :1000], past_key_values=cache)
        for place in range(1000, 1150):
            wide(ids[:, place : place + 1], past_key_values=cache)
        report = cache.report()
        assert cache.selecting.lent > 0 and cache.storage.account.pressed == 0
        assert report.peak_memory_bytes <= report.memory_budget


def test_slots_that_the_user_has_fixed_stay() -> None:
    model = tiny("llama")
    with DiskSwapCache.for_budget(model, "1/2", CONTEXT, BATCH, num_selected=64, reuse_capacity=0) as cache:
        run(model, cache, 700, 256, 3)
        assert cache.selecting.lent == 0 and not cache.report().memory_by_owner.get("reuse slots")


def test_slots_make_room_for_a_crop() -> None:
    """One that goes back into what was sealed reads a part of it again, here when no byte is free."""
    model = tiny("llama")
    fields: dict[str, Any] = {"num_selected": 64, "group_size": 4}
    with DiskSwapCache.for_budget(model, "1/2", CONTEXT, **fields) as cache, torch.no_grad():
        with DiskSwapCache(model, config=cache.config, memory=None) as free:
            ids, said = padded_ids(730)[0][:1], []
            for one in (free, cache):
                model(ids[:, :700], past_key_values=one)
                for place in range(700, 720):
                    model(ids[:, place : place + 1], past_key_values=one)
                account = one.storage.account
                limit, account.limit = account.limit, account.current if one is cache else None
                one.crop(-60)
                account.limit = limit
                said.append(model(ids[:, 720:721], past_key_values=one).logits)
        assert cache.get_seq_length() == 661 and torch.equal(*said)
        assert cache.storage.account.pressed > 0
        assert cache.report().peak_memory_bytes <= cache.report().memory_budget


@pytest.mark.parametrize(
    ("num_selected", "look_ahead"),
    [
        (800, True), (CONTEXT, False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((800, False), (CONTEXT, True))),
    ],
)  # fmt: skip
def test_steps_that_attend_to_nearly_all_clusters_hold_what_was_planned(num_selected: int, look_ahead: bool) -> None:
    """Of each cluster a page is not full: there are more records than tokens fill, and a step wants most of them. What
    a prefill takes is small here, so that steps decide what is planned."""
    model = tiny("llama")
    fields: dict[str, Any] = {"num_selected": num_selected, "look_ahead": look_ahead, "engine": "direct"}
    fields |= {"write_queue": "64KiB", "block_tokens": 64, "max_context": CONTEXT, "max_batch": BATCH}
    plan = ClusterCache.plan(Geometry.of(model), ClusterCache.config_class(**fields), CONTEXT, BATCH)
    assert sum(plan.decode.values()) == plan.peak_bytes
    with ClusterCache(model, **fields, memory=plan.peak_bytes) as cache:
        run(model, cache, CONTEXT - 24, 256, 24)
        check_kept(cache, Geometry.of(model))


def test_what_the_account_holds_is_what_was_planned() -> None:
    """At the end of the context, by owner, for what does not depend on the moment. Slots are a mean over layers."""
    model = tiny("llama")
    geometry = Geometry.of(model)
    with DiskSwapCache.for_budget(model, "2/5", CONTEXT, BATCH, num_selected=64, reuse_capacity=64) as cache:
        run(model, cache, CONTEXT - 1, 256, 1)
        held = cache.report().memory_by_owner
        plan = cache.plan(geometry, cache.config, CONTEXT, BATCH).decode
    for owner in ("compact keys", "adapters", "rolling tail", "token ids"):
        assert held[owner] == plan[owner], owner
    for owner in ("staging", "selection", "reuse slots", "scores", "tables"):
        assert 0 < held[owner] <= plan[owner], owner


@pytest.mark.parametrize("cache_class", [DiskSwapCache, AbstractTreeCache, ClusterCache, OffloadCache])
def test_beyond_the_plan_raises_and_the_cache_goes_on(cache_class: Any) -> None:
    """A step too long, a batch too large, more rows: each is told before anything changes, and what follows is as if
    it had not been asked for."""
    model = tiny("llama")

    def beyond(cache: Any) -> None:
        before = (cache.get_seq_length(), cache.memory_bytes, cache.disk_bytes)
        long = padded_ids(CONTEXT + 1 - before[0])[0]
        attempts: list[tuple[str, Callable[[], Any]]] = [
            ("max_context is 960 and this step would make it 961", lambda: model(long, past_key_values=cache)),
            ("max_batch is 2 and this step would make it 4", lambda: cache.batch_repeat_interleave(2)),
            ("max_batch is 2", lambda: cache.reorder_cache(torch.tensor([0, 1, 1]))),
            ("max_batch is 2", lambda: cache.batch_select_indices(torch.tensor([0, 1, 1]))),
            ("max_context is 960", lambda: cache.update(*[torch.zeros(BATCH, 2, CONTEXT, 16)] * 2, 0)),
        ]  # fmt: skip
        for words, attempt in attempts:
            with pytest.raises(BudgetError, match=words), torch.no_grad():
                attempt()
        assert (cache.get_seq_length(), cache.memory_bytes, cache.disk_bytes) == before

    tokens = []
    for asks in (False, True):
        with cache_class.for_budget(model, "2/3", CONTEXT, BATCH) as cache:
            mask = run(model, cache, 600, 256, 4)
            if asks:
                beyond(cache)
            run(model, cache, 20, 20, 4, mask)
            tokens.append(cache.contents.tokens._ids[:, : cache.contents.tokens.length].clone())
    assert torch.equal(*tokens)


def test_a_kept_layer_takes_nothing_in_beyond_the_plan() -> None:
    """The first layer has a sliding window and would have had the step before an offloaded one could refuse it."""
    model = tiny("gemma3")
    with DiskSwapCache.for_budget(model, "2/1", 300, BATCH) as cache:
        run(model, cache, 290, 290, 1)
        held = [layer.get_seq_length() for layer in cache.layers]
        with pytest.raises(BudgetError, match=r"max_context is 300 and this step would make it 301"), torch.no_grad():
            model(torch.ones(BATCH, 10, dtype=torch.long), past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == held
        with torch.no_grad():
            mask = torch.cat([cache.attention_mask, torch.ones(BATCH, 9, dtype=torch.long)], 1)
            model(torch.ones(BATCH, 9, dtype=torch.long), attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == 300


def test_a_batch_beyond_the_plan_is_told_at_the_first_step() -> None:
    model = tiny("llama")
    with DiskSwapCache.for_budget(model, "3/5", CONTEXT, BATCH) as cache:
        words = "max_batch is 2 and this step would make it 3 sequences"
        with pytest.raises(BudgetError, match=words), torch.no_grad():
            model(torch.ones(3, 8, dtype=torch.long), past_key_values=cache)
        assert cache.get_seq_length() == 0
        run(model, cache, 40, 40, 1)
        assert cache.get_seq_length() == 41


def test_beams_within_the_plan() -> None:
    """Rows that share records and change places; the batch of the plan is that of the beams."""
    model = tiny("llama")
    ids, _ = padded_ids(560)
    with DiskSwapCache.for_budget(model, "4/5", 700, 4) as cache:
        model.generate(ids[1:], past_key_values=cache, num_beams=4, max_new_tokens=24, do_sample=False)
        assert cache.report().peak_memory_bytes <= cache.report().memory_budget


def test_fewer_rows_within_the_plan() -> None:
    """Old and new rows of a layer are there at once for a moment: planned for."""
    model = tiny("llama")
    with DiskSwapCache.for_budget(model, "2/5", CONTEXT, BATCH, num_selected=64) as cache:
        run(model, cache, CONTEXT - 30, 256, 3)
        cache.batch_select_indices(torch.tensor([1]))
        with torch.no_grad():
            mask = torch.cat([cache.attention_mask, torch.ones(1, 1, dtype=torch.long)], 1)
            model(torch.tensor([[5]]), attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == CONTEXT - 26
        assert cache.report().peak_memory_bytes <= cache.report().memory_budget


def test_a_constructor_with_limits_that_do_not_go_together() -> None:
    model = tiny("llama")
    with pytest.raises(BudgetError, match=r"memory is 100,000 bytes, and 2 x 960 tokens can take [\d,]+ with these"):
        DiskSwapCache(model, memory=100_000, max_context=CONTEXT, max_batch=BATCH)
    with DiskSwapCache(model, memory=50_000) as cache, torch.no_grad():
        with pytest.raises(BudgetError, match=r"needs .* above the limit of 50,000"):
            model(padded_ids(400)[0], past_key_values=cache)
        assert cache.report().peak_memory_bytes <= 50_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_context": 0}, "max_context must be a whole number of at least 1, got 0"),
        ({"max_batch": 1.5}, "max_batch must be a whole number of at least 1, got 1.5"),
        ({"memory": "lots"}, "memory must be bytes, a size"),
        ({"rank": 33}, "rank must be at most 32"),
        ({"colour": 3}, "has no field 'colour'"),
    ],
)
def test_requests_that_are_wrong(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DiskSwapCache.for_budget(tiny("llama"), **{"memory": "1/1", "max_context": CONTEXT, **arguments})


def test_the_engine_is_known_before_it_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the map works, its pages are in the plan."""
    from hf_offload_cache.stores import engines

    monkeypatch.setattr(engines, "choose_engine", lambda engine, directory: ("mapped", "by the test"))
    with DiskSwapCache.for_budget(tiny("llama"), "1/1", CONTEXT, BATCH) as cache:
        assert cache.config.engine == "mapped"
        run(tiny("llama"), cache, 600, 128, 3)
        check_kept(cache, Geometry.of(tiny("llama")))
