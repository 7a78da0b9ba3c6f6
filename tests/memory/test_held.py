"""What lies in memory for a cache is what its report says: every tensor and array that it keeps, by its storage."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import repetitive_prompt
from long_models import long_tiny
from storages import bytes_of, storages_of
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

from eval import memory
from hf_offload_cache import DiskSwapCache, DiskSwapConfig, registry
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.model import Geometry

TOKENS, PIECE, STEPS = 700, 650, 12
NAMES = 0.02
"""Of what is reported, the most that is kept besides: 8-byte names of the units that a layer chose last and that its
slots hold. A unit's own bytes are a hundred times as many."""
BOOKS = 1024
"""And bytes a layer of what is as large whatever a cache holds: scales and means of a coding, free records."""


def ids_of(model: Any, rows: int = 1) -> torch.Tensor:
    most = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(5, most, (rows, TOKENS), generator=torch.Generator().manual_seed(rows))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def check(cache: Any, model: Any) -> None:
    """Nothing beyond the report lies in memory, weights left out; nor less than nine tenths of what it says, the ring
    of io_uring left out, which is no tensor."""
    cache.storage.prefetcher.flush()
    gc.collect()
    report = cache.report()
    found = storages_of(cache, model, *model.parameters(), *model.buffers())
    held, said = bytes_of(found), report.memory_bytes
    largest = sorted(found, key=lambda one: -one.nbytes)[:12]
    assert held <= (1 + NAMES) * said + BOOKS * len(cache.layers), (report.memory_by_owner, largest)
    assert held >= 0.9 * (said - report.memory_by_owner.get("io ring", 0)), report.memory_by_owner


def own(cls: Any) -> dict[str, Any]:
    """A field of its own, so that a cache selects although the full KV of these models would take less memory."""
    return {"num_selected": cls.config_class.num_selected - 1}


def decode(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """A prompt in one piece, and `STEPS` tokens after it."""
    with torch.no_grad():
        model(input_ids=ids[:, :PIECE], past_key_values=cache, logits_to_keep=1)
        for place in range(PIECE, PIECE + STEPS):
            model(input_ids=ids[:, place : place + 1], past_key_values=cache, logits_to_keep=1)


@pytest.mark.parametrize("model_name", ["llama", "gemma3", "qwen3_next", "lfm2", "llama4_text"])
@pytest.mark.parametrize("name", registry.CACHES)
def test_what_a_cache_keeps_is_what_it_reports(name: str, model_name: str, tmp_path: Path) -> None:
    """After a prompt in one piece, after steps, in a fork, in what was saved and opened, and nothing once it is closed.
    Windows of gemma3 and llama4 hold 15 tokens of the piece's 650."""
    if (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    model, cls = long_tiny(model_name), registry.cache_class(name)
    ids = ids_of(model)
    with quiet(), cls(model, engine="direct", **own(cls)) as cache, torch.no_grad():
        model(input_ids=ids[:, :PIECE], past_key_values=cache, logits_to_keep=1)
        check(cache, model)
        for place in range(PIECE, PIECE + STEPS):
            model(input_ids=ids[:, place : place + 1], past_key_values=cache, logits_to_keep=1)
        check(cache, model)
        with cache.fork() as twin:
            check(twin, model)
            model(input_ids=ids[:, -3:], past_key_values=twin, logits_to_keep=1)
            check(twin, model)
            check(cache, model)
        cache.save(tmp_path / "saved")
    left = storages_of(cache, model, *model.parameters(), *model.buffers())
    assert bytes_of(left) <= BOOKS * model.config.num_hidden_layers, left
    with quiet(), cls.open(tmp_path / "saved", model, engine="direct") as opened:
        check(opened, model)


@pytest.mark.parametrize(
    ("model_name", "owner", "bits"),
    [
        ("deepseek_v32", "indexer keys", None),
        ("deepseek_v32", "indexer keys", 8),
        ("deepseek_v32", "stream buffers", 0),
        ("deepseek_v4", "layers not offloaded", None),
        ("minimax_m3_vl_text", "layers not offloaded", None),
    ],
)
def test_indexers_and_compressors_are_counted(model_name: str, owner: str, bits: int | None) -> None:
    """What layers keep beside keys and values: in the account, in the plan, and no view of a whole piece."""
    model, fields = long_tiny(model_name), {"engine": "direct", "indexer_bits": bits, **own(DiskSwapCache)}
    with quiet(), DiskSwapCache(model, max_context=TOKENS, max_batch=1, **fields) as cache:
        decode(model, cache, ids_of(model))
        check(cache, model)
        held = cache.report().memory_by_owner[owner]
        planned = cache.plan(_geometry(model), cache.config, TOKENS, 1).decode[owner]
    assert 0 < held <= planned


@pytest.mark.parametrize(
    "model_name",
    ["gemma3", "gemma3n_text", "gemma4_text", "llama4_text", "nemotron_h", "qwen3_next", "falcon_h1"],
)
def test_what_is_kept_is_planned_and_no_more(model_name: str) -> None:
    """Layers that take the keys of others, and those without attention, keep nothing: nothing is planned for them."""
    model = long_tiny(model_name)
    with quiet(), DiskSwapCache(model, engine="direct", **own(DiskSwapCache)) as cache:
        decode(model, cache, ids_of(model))
        held, geometry = cache.report().memory_by_owner["layers not offloaded"], _geometry(model)
        window = max((layer.token_bytes for layer in geometry.kept if layer.most_tokens), default=0)
        assert abs(held - geometry.kept_bytes(cache.tokens, 1)) <= 4 * window + 512


def _geometry(model: Any) -> Any:
    from hf_offload_cache.model import Geometry

    return Geometry.of(model)


@pytest.mark.parametrize("name", registry.CACHES)
def test_rows_and_crops_leave_no_view_behind(name: str) -> None:
    """Rows that are repeated, reordered and dropped; tokens that are taken back; then decoding goes on."""
    if (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    model, cls = long_tiny("llama"), registry.cache_class(name)
    ids = ids_of(model, 2)
    with quiet(), cls(model, engine="direct", **own(cls)) as cache, torch.no_grad():
        decode(model, cache, ids)
        cache.batch_repeat_interleave(2)
        check(cache, model)
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
        check(cache, model)
        cache.batch_select_indices(torch.tensor([1]))
        check(cache, model)
        cache.crop(-40)
        check(cache, model)
        model(input_ids=ids[:1, :1], past_key_values=cache)
        check(cache, model)
        cache.reset()
        check(cache, model)


# ---------------------------------------------------------------------------------------------- windows


def windowed() -> Any:
    """Six layers in seven have a window of 128 tokens of 128 numbers a key."""
    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=7, num_attention_heads=1,
            num_key_value_heads=1, head_dim=128, sliding_window=128, max_position_embeddings=4096,
            sliding_window_pattern=7, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def window_bytes(cache: Any) -> int:
    """What the layers with a window really keep in memory."""
    layers = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    return bytes_of(storages_of([(layer.keys, layer.values) for layer in layers]))


@pytest.mark.parametrize(("piece", "candidates"), [(2048, True), (512, False)])
@pytest.mark.parametrize("name", registry.CACHES)
def test_a_budget_is_kept_with_windows(name: str, piece: int, candidates: bool) -> None:
    """Windows hold 127 tokens of a prompt of 2,048, whatever its pieces, and the budget counts them, and what steps add
    with or without candidates."""
    if (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    model, cls = windowed(), registry.cache_class(name)
    ids = torch.randint(1, 128, (1, 2060), generator=torch.Generator().manual_seed(0))
    with quiet(), cls.for_budget(model, "1/1", 2100, candidates=candidates) as cache, torch.no_grad():
        for part in ids[:, :2048].split(piece, 1):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)
            assert window_bytes(cache) == 6 * 2 * 127 * 512
        for place in range(2048, 2060):
            model(input_ids=ids[:, place : place + 1], past_key_values=cache)
        report = cache.report()
        assert window_bytes(cache) == report.memory_by_owner["layers not offloaded"]
        assert window_bytes(cache) == 6 * 2 * (129 if name == "spec" else 128) * 512  # a guess comes beside a token
        assert report.peak_memory_bytes <= report.memory_budget
        plan = cache.plan(Geometry.of(model), cache.config, 2100, 1)
        assert window_bytes(cache) <= plan.decode["layers not offloaded"]
        with cache.fork() as twin:
            model(input_ids=ids[:, :1], past_key_values=twin)
            alone = storages_of([layer.keys for layer in twin.layers if getattr(layer, "is_sliding", False)])
            shared = {one.address for one in storages_of([layer.keys for layer in cache.layers if layer.is_sliding])}
            assert not shared & {one.address for one in alone}


@pytest.mark.parametrize("length", [100, 128, 129, 700])
def test_tokens_beside_windows_are_those_of_dynamic_cache(length: int) -> None:
    """Greedy, with candidates from the prompt (which crop), and with beams; a window that is not full, just full, and
    long past; the logits are equal to the bit where nothing is selected."""
    model = windowed()
    ids = repetitive_prompt(model, length)
    for options in ({}, {"prompt_lookup_num_tokens": 5}, {"num_beams": 3}):
        arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **options}
        expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **arguments)
        with quiet(), DiskSwapCache(model, exact=True) as cache:
            assert torch.equal(model.generate(ids, past_key_values=cache, **arguments), expected), options


@pytest.mark.parametrize("repeats", [True, False], ids=["candidates in the prompt", "none"])
def test_candidates_keep_the_budget_with_windows(repeats: bool) -> None:
    """transformers records the whole prompt while candidates are verified; within a budget a window keeps what a crop
    may take back, and 32 tokens beyond the window are planned. After generating, windows are as without candidates."""
    model = windowed()
    ids = repetitive_prompt(model, 1500) if repeats else torch.arange(1, 128).repeat(8)[None, : 8 * 127 - 1].flip(1)
    if not repeats:
        ids[0, -1] = 0  # the last token was never before: there is nothing to look up
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "prompt_lookup_num_tokens": 6}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **arguments)
    with quiet(), DiskSwapCache.for_budget(model, "9/10", max_context=1600, exact=True) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **arguments), expected)
        report = cache.report()
        assert report.peak_memory_bytes <= report.memory_budget
        assert window_bytes(cache) <= 6 * 2 * (127 + 32) * 512


def test_windows_without_candidates() -> None:
    """Nothing is planned for candidates, none are taken, and the cache serves a call without them."""
    model, ids = windowed(), torch.arange(1, 128).repeat(8)[None]
    windows, geometry = 6 * 2 * 127 * 512, Geometry.of(windowed())
    configs = [DiskSwapConfig(exact=True, candidates=some) for some in (False, True)]
    less, more = (DiskSwapCache.plan(geometry, one, 1600, 1).decode["layers not offloaded"] for one in configs)
    assert more - less == 30 * windows // 127
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **arguments)
    with quiet(), DiskSwapCache.for_budget(model, "9/10", 1600, exact=True, candidates=False) as cache:
        with pytest.raises(BudgetError, match=r"candidates is False: .* Make it with candidates=True, .* nothing was"):
            model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=6, **arguments)
        assert cache.get_seq_length() == 0
        assert torch.equal(model.generate(ids, past_key_values=cache, **arguments), expected)
        assert window_bytes(cache) <= windows + windows // 127
        assert cache.report().peak_memory_bytes <= cache.plan(geometry, cache.config, 1600, 1).peak_bytes


def test_a_crop_beyond_what_was_recorded_raises() -> None:
    """A window that would be left with fewer tokens than it needs would attend to fewer: that is told."""
    model = windowed()
    ids = ids_of(model)
    with quiet(), DiskSwapCache(model, **own(DiskSwapCache)) as cache, torch.no_grad():
        cache.activate_past_recording()
        model(input_ids=ids[:, :300], past_key_values=cache)
        cache.crop(-3)
        with pytest.raises(RuntimeError, match=r"cropped by 2 tokens.*window of 128 have enough for 0: call crop once"):
            cache.crop(-2)
        assert cache.get_seq_length() == 297
        plain = DynamicCache(config=model.config)
        expected = model(input_ids=ids[:, :298], past_key_values=plain).logits[:, -1]
        found = model(input_ids=ids[:, 297:298], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_account_of_windows_agrees_with_the_process() -> None:
    """What the kernel says of a child process, after a prompt of 4,096 tokens in one piece, and after steps."""
    found = memory.measure(memory.Run(4096, steps=8, layers=8, heads=3, window=512, fields={"summary_bytes": 64}))
    for stage, row in found["stages"].items():
        assert row["agrees"], (stage, row)
        assert row["owners"]["layers not offloaded"] in {6 * 2 * tokens * 384 for tokens in (511, 512)}
    assert abs(found["left_after_close"]) <= memory.LEAST_BYTES
