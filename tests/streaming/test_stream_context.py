"""A published context in a cache of this process: the same as computed, whatever the network does."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import generate, prompt
from lanes_in_order import compute_first, stream_first
from long_context import CONTEXT, SIZE, answers, change_manifest, ids, is_right, manifest_at, published
from long_llama import long_model
from pairwise import combinations
from static_server import served
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from hf_offload_cache import DiskSwapCache, StreamReport, publish_context, stream_context
from hf_offload_cache.errors import (
    ConfigError,
    ContextError,
    ContextMismatchError,
    EncryptionKeyError,
    StoreError,
    UnsupportedModelError,
)
from hf_offload_cache.registry import CACHES, cache_class
from hf_offload_cache.streaming import NAME, StreamManifest

pytestmark = pytest.mark.usefixtures("one_chunk_at_a_time")
ALL = list(map(cache_class, CACHES))


@pytest.mark.parametrize(("cls", "first"), combinations(ALL, [stream_first, compute_first]))
def test_it_is_as_if_it_was_prefilled(cls: Any, first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without loss, streamed or computed: what is held and what is answered, saved and forked, too."""
    published(tmp_path / "published", tmp_path, cls)
    first(monkeypatch)
    with stream_context(tmp_path / "published", long_model(), ids(), cls, path=tmp_path) as cache:
        report = cache.stream_report
        assert isinstance(report, StreamReport) and report.whole is None and not report.trouble
        assert cache.get_seq_length() == report.tokens == CONTEXT
        assert report.computed + report.streamed == report.cells == CONTEXT // SIZE * 2
        assert report.first_token_seconds is None and "first token" not in str(report)
        assert report.streamed == report.cells if first is stream_first else report.computed > 0
        whole = DynamicCache(config=long_model().config)
        with torch.no_grad():
            long_model()(ids()[:, :CONTEXT], past_key_values=whole)
        for own, (keys, values, _) in zip(cache, whole, strict=True):
            torch.testing.assert_close(own[:2], (keys, values), rtol=1e-4, atol=1e-4)
        cache.save(tmp_path / "saved")
        with cache.fork() as twin, cls.open(tmp_path / "saved", long_model(), path=tmp_path) as opened:
            is_right(cache)
            took = cache.stream_report.first_token_seconds
            assert report.seconds < took < report.seconds + 60 and f"{took:.2f} s" in str(cache.stream_report)
            torch.testing.assert_close(answers(twin), answers(opened), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_state_fitted_to_the_prompt_comes_along(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`DiskSwapCache` fits its compact keys to queries, which a streamed prompt does not have. A cache of another
    format fits its own."""
    place, made = tmp_path / "published", functools.partial(DiskSwapCache, heads_apart=apart)
    published(place, tmp_path, made)
    stream_first(monkeypatch)
    with stream_context(place, long_model(), ids(), path=tmp_path, heads_apart=apart) as cache:
        fitted = [layer.predictor.fitted for layer in cache.layers]
        with made(long_model(), path=tmp_path) as own:
            with torch.no_grad():
                for part in ids()[:, :CONTEXT].split(SIZE, 1):
                    long_model()(part, past_key_values=own)
            own.end_prompt()
            for layer, found in zip(own.layers, fitted, strict=True):
                theirs = layer.predictor.fitted
                assert found.keys.tokens == theirs.keys.tokens > 0 and found.fitted_at == theirs.fitted_at
                assert torch.equal(found.keys.coding.queries, theirs.keys.coding.queries)
        is_right(cache)
    other_format = {"summary_dtype": "int8", "heads_apart": not apart}
    with stream_context(place, long_model(), ids(), path=tmp_path, **other_format) as other:
        assert all(not hasattr(layer.predictor.fitted.keys, "coding") for layer in other.layers)
        is_right(other)


def test_the_map_of_the_remainder_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after a streamed prompt estimate what those after a computed one do."""
    model, tokens = long_model(), 19 * SIZE
    text = prompt(model, 1, tokens + 12)
    published(tmp_path / "published", tmp_path, tokens=text[:, :tokens])
    stream_first(monkeypatch)
    own = DiskSwapCache(model, path=tmp_path)
    with stream_context(tmp_path / "published", model, text, path=tmp_path) as cache, own, torch.no_grad():
        assert cache.get_seq_length() == tokens and not cache.stream_report.trouble
        model(text[:, :tokens], past_key_values=own)
        for layer, other in zip(cache.layers, own.layers, strict=True):
            maps, theirs = layer.predictor.fitted.maps, other.predictor.fitted.maps
            assert maps.maps.any() and torch.equal(maps.maps, theirs.maps) and torch.equal(maps.ratio, theirs.ratio)
        for token in text[:, tokens:].split(1, 1):
            found, wanted = (model(token, past_key_values=each).logits for each in (cache, own))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        mass, expected = (each.report().estimated_mass for each in (cache, own))
        assert mass == pytest.approx(expected, rel=1e-3) and mass > 0.01


@pytest.mark.parametrize(("chunk", "layer"), [(0, 2), (4, 1)])
def test_what_was_exchanged_is_computed(
    chunk: int, layer: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that has its own digest, and is not of that cell's shape, which shows when it is decoded."""
    manifest = manifest_at(place)
    rows = [list(row) for row in manifest.cells]
    rows[chunk][layer] = manifest.fitted
    change_manifest(place, cells=tuple(map(tuple, rows)))
    stream_first(monkeypatch)
    with stream_context(place, long_model(), ids(), path=tmp_path) as cache:
        report = cache.stream_report
        assert report.lost == 1 and f"chunk {chunk} layer {layer}" in report.trouble[0]
        assert report.recomputed_tokens >= SIZE if chunk == 0 else report.computed == 1
        assert all(layer.given_state is not None for layer in cache.layers)
        is_right(cache)


def test_a_text_that_goes_on_differently_has_what_came_before(tmp_path: Path, place: Path) -> None:
    other = ids().clone()
    other[0, 200] = (other[0, 200] + 1) % 50
    with stream_context(place, long_model(), other, path=tmp_path) as cache:
        assert cache.get_seq_length() == 192 == cache.stream_report.tokens
    with stream_context(place, long_model(), ids()[:, :CONTEXT], path=tmp_path) as cache:
        assert cache.get_seq_length() == CONTEXT - 1  # one id is left to go on from
    other[0, 0] = (other[0, 0] + 1) % 50
    with stream_context(place, long_model(), other, path=tmp_path) as cache:
        assert cache.get_seq_length() == 0 and "no complete chunk in common" in cache.stream_report.whole


@pytest.mark.parametrize(
    ("tokens", "chunks", "first"),
    [
        *[(900, 1, stream_first), (900, 1, compute_first), (4072, 4, stream_first), (4072, 4, compute_first)],
        *[(2048, 2, stream_first), (1025, 1, stream_first)],
    ],
)
def test_a_complete_text_is_streamed_to_its_last_token_but_one(
    tokens: int, chunks: int, first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt ends where the publication does, in a chunk that may be shorter; in a memory budget, too."""
    text = prompt(long_model(), 1, tokens)
    published(tmp_path / "published", tmp_path, tokens=text, chunk_tokens=1024)
    expected = generate(long_model(), DynamicCache(config=long_model().config), text, max_new_tokens=8)
    first(monkeypatch)
    budget = DiskSwapCache.for_budget(long_model(), "2MiB", max_context=tokens + 8, path=tmp_path, exact=True)
    for into in (DiskSwapCache(long_model(), path=tmp_path, exact=True), budget):
        with stream_context(tmp_path / "published", long_model(), text, into) as cache:
            report = cache.stream_report
            assert cache.get_seq_length() == report.tokens == tokens - 1 and report.whole is None, report
            assert torch.equal(cache.input_ids, text[:, :-1])
            assert report.cells == chunks * 2 and (report.lost, report.trouble) == (0, ())
            assert report.streamed == report.cells if first is stream_first else report.computed > 0
            found = generate(long_model(), cache, text, max_new_tokens=8)
            assert torch.equal(found.tokens, expected.tokens)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_private_ranges_are_neither_published_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "published"
    manifest = published(place, tmp_path, private=[(130, 131)])
    assert [row[1] is None for row in manifest.cells] == [chunk == 2 for chunk in range(10)]
    stream_first(monkeypatch)
    with served(place) as server:
        with stream_context(server.url, long_model(), ids(), path=tmp_path, private=[(600, 601)]) as cache:
            assert cache.stream_report.computed == 4
            is_right(cache)
        assert not {cell.name for cell in manifest.cells[9] if cell} & set(server.asked)


def test_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, key = tmp_path / "published", lambda: b"k" * 32
    published(place, tmp_path, key=key)
    stream_first(monkeypatch)
    with stream_context(place, long_model(), ids(), path=tmp_path, key=key) as cache:
        assert cache.stream_report.streamed == cache.stream_report.cells and not cache.stream_report.trouble
        is_right(cache)
    with pytest.raises(EncryptionKeyError, match="give its key"):
        stream_context(place, long_model(), ids(), path=tmp_path)
    with pytest.raises(EncryptionKeyError, match="has another key, or changed"):
        stream_context(place, long_model(), ids(), path=tmp_path, key=lambda: b"x" * 32)
    names = [file for file in place.iterdir() if file.name != NAME]
    assert all(b"HFOC" not in file.read_bytes() for file in names)


# --- faults ----------------------------------------------------------------------------------------------------


FAULTS: dict[str, Any] = {
    "missing": lambda data: None, "flipped": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "cut off": lambda data: data[:100], "too long": lambda data: data + b"0" * 9000, "empty": lambda data: b"",
}  # fmt: skip


@pytest.mark.parametrize(("fault", "every"), combinations(list(FAULTS), [1, 3]))
def test_what_is_wrong_is_computed(
    fault: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    stream_first(monkeypatch)
    with served(place) as server:
        server.fault = lambda name, data: data if name == NAME or int(name, 16) % every else FAULTS[fault](data)
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=1) as cache:
            report = cache.stream_report
            assert report.computed > 0 and report.trouble
            assert report.computed == report.cells if every == 1 else report.streamed > 0
            is_right(cache)


@pytest.mark.parametrize("after", [0, 4])
def test_the_link_dies(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    stream_first(monkeypatch)
    with served(place) as server:

        def dying(name: str, data: bytes) -> bytes:
            server.dead = name != NAME and len(server.asked) > after + 1
            return data

        server.fault = dying
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=1) as cache:
            assert cache.stream_report.computed > 0 and cache.stream_report.trouble
            is_right(cache)


def test_a_server_that_stalls_is_not_waited_for(tmp_path: Path, place: Path) -> None:
    release = threading.Event()
    with served(place) as server:

        def stalling(name: str, data: bytes) -> bytes:
            if name != NAME:
                release.wait(20)
            return data

        server.fault = stalling
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=0.3) as cache:
            assert cache.stream_report.seconds < 15 and cache.stream_report.computed == cache.stream_report.cells
            is_right(cache)
        release.set()


def test_a_manifest_that_is_wrong_is_refused(place: Path, tmp_path: Path) -> None:
    whole = (place / NAME).read_bytes()

    def refused(error: type[Exception], said: str, content: bytes | None = None, **update: Any) -> None:
        (place / NAME).write_bytes(content or whole)
        change_manifest(place, **update) if update else None
        with pytest.raises(error, match=said):
            stream_context(place, long_model(), ids(), path=tmp_path)

    for wrong in (whole[:-40], b"{}", b'{"format": "other"}'):
        refused(ContextError, "no manifest of a published context", wrong)
    for version in (3, None, "1", True):
        said = f"version {version} and this library reads 1 and 2: publish the context anew$"
        refused(ContextError, said, json.dumps({**json.loads(whole), "version": version}).encode())
    for update in ({"tokens": 10**6}, {"chunk_tokens": 32}, {"layers": 2}):
        refused(ContextError, "", **update)
    identity = StreamManifest.parse(whole, "").identity
    refused(ContextMismatchError, "weights", identity={**identity, "weights": "0" * 16})
    for update in ({"heads": 4}, {"key_dim": 2**21}, {"value_dim": 8}, {"dtype": "float16"}):
        refused(ContextMismatchError, "the context has keys and values", **update)
    (place / NAME).write_bytes(whole)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ContextMismatchError, match="in float32, the model"):
        stream_context(place, long_model(), ids(), path=tmp_path)
    (place / NAME).unlink()
    with pytest.raises(StoreError, match="no published context"):
        stream_context(place, long_model(), ids(), path=tmp_path)


def test_a_directory_is_published_with_its_model(tmp_path: Path) -> None:
    saved, place = tmp_path / "saved", tmp_path / "published"
    with DiskSwapCache(long_model(), path=tmp_path) as cache, torch.no_grad():
        long_model()(ids()[:, :CONTEXT], past_key_values=cache)
        cache.save(saved)
    with pytest.raises(ConfigError, match="model is missing"):
        publish_context(saved, str(place))
    manifest = publish_context(saved, str(place), model=long_model(), chunk_tokens=128)
    assert manifest.tokens == CONTEXT and manifest.chunks == 5
    cells = {cell.name for row in manifest.cells for cell in row[1:]}
    assert {file.name for file in place.iterdir()} == {NAME, manifest.fitted.name, *cells}


def test_what_keeps_more_than_keys_and_values_is_not_published(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with DiskSwapCache(model, path=tmp_path) as cache:
        with torch.no_grad():
            model(torch.arange(40)[None], past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match="2 of 2 layers keep a window or a state"):
            publish_context(cache, str(tmp_path / "published"))
    assert not (tmp_path / "published").exists()


def test_both_lanes_are_in_the_trace(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    stream_first(monkeypatch)
    seen: list[int] = []
    with stream_context(
        str(place), long_model(), ids(), path=tmp_path, trace=file, on_progress=lambda cells: seen.append(cells.chunks)
    ) as cache:
        report = cache.stream_report
        assert cache.report().memory_by_owner.get("streaming", 0) == 0
    events = json.loads(file.read_text())
    lanes = [[event for event in events if event.get("cat") == lane] for lane in ("computing", "streaming")]
    assert lanes[0] and len(lanes[1]) == report.streamed + report.overtaken and seen
    assert all(event["args"]["bytes"] > 0 and event["name"].startswith("chunk ") for event in lanes[1])
    assert "interrupted" not in file.read_text()
