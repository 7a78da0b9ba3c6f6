"""A published context in a cache of this process: the same as computed, whatever the network does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes_in_order import compute_first, stream_first
from long_context import CONTEXT, MORE, SIZE, ids, short_forwards
from long_llama import long_model
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
from hf_offload_cache.streaming import publish as checks

ALL = list(map(cache_class, CACHES))


@pytest.fixture(autouse=True)
def one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with short_forwards(monkeypatch):
        yield


def published(folder: Path, cls: Any = DiskSwapCache, level: str = "lossless", **options: Any) -> Path:
    place = folder / "published"
    with cls(long_model(), path=folder) as cache:
        with torch.no_grad():
            for part in ids()[:, :CONTEXT].split(SIZE, 1):
                long_model()(part, past_key_values=cache)
        publish_context(cache, str(place), level=level, chunk_tokens=SIZE, **options)
    return place


def logits(cache: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = long_model()(ids()[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -MORE:]
    return found


def expected() -> torch.Tensor:
    cache = DynamicCache(config=long_model().config)
    with torch.no_grad():
        return long_model()(ids(), past_key_values=cache).logits[:, -MORE:]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("streamed_first", [True, False])
def test_it_is_as_if_it_was_prefilled(
    cls: Any, streamed_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without loss, streamed or computed: what is held and what is answered, saved and forked, too."""
    place = published(tmp_path, cls)
    (stream_first if streamed_first else compute_first)(monkeypatch)
    with stream_context(str(place), long_model(), ids(), cls, path=tmp_path) as cache:
        report = cache.stream_report
        assert isinstance(report, StreamReport) and report.whole is None and not report.trouble
        assert cache.get_seq_length() == report.tokens == CONTEXT
        assert report.computed + report.streamed == report.cells == CONTEXT // SIZE * 2
        assert report.first_token_seconds is None and "first token" not in str(report)
        assert report.streamed == report.cells if streamed_first else report.computed > 0
        whole = DynamicCache(config=long_model().config)
        with torch.no_grad():
            long_model()(ids()[:, :CONTEXT], past_key_values=whole)
        for own, (keys, values, _) in zip(cache, whole, strict=True):
            torch.testing.assert_close(own[:2], (keys, values), rtol=1e-4, atol=1e-4)
        with cache.fork() as twin:
            cache.save(tmp_path / "saved")
            torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)
            took = cache.stream_report.first_token_seconds
            assert report.seconds < took < report.seconds + 60 and f"first token after {took:.2f} s" in str(
                cache.stream_report
            )
            torch.testing.assert_close(logits(twin), logits_of_opened(cls, tmp_path), rtol=1e-4, atol=1e-4)
        out = long_model().generate(ids(), past_key_values=twin_of(cls, tmp_path), max_new_tokens=8, do_sample=False)
        assert out.shape == (1, CONTEXT + MORE + 8)


def logits_of_opened(cls: Any, folder: Path) -> torch.Tensor:
    with cls.open(folder / "saved", long_model(), path=folder) as opened:
        return logits(opened)


def twin_of(cls: Any, folder: Path) -> Any:
    return cls.open(folder / "saved", long_model(), path=folder)


def test_what_was_learnt_of_the_prompt_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DiskSwapCache` fits its compact keys to queries, which a streamed prompt does not have."""
    place = published(tmp_path)
    stream_first(monkeypatch)
    with stream_context(str(place), long_model(), ids(), path=tmp_path) as cache:
        learnt = [layer.predictor.learnt for layer in cache.layers]
        with DiskSwapCache(long_model(), path=tmp_path) as own:
            with torch.no_grad():
                for part in ids()[:, :CONTEXT].split(SIZE, 1):
                    long_model()(part, past_key_values=own)
            for layer, found in zip(own.layers, learnt, strict=True):
                theirs = layer.predictor.learnt
                assert found.keys.tokens == theirs.keys.tokens > 0 and found.fitted_at == theirs.fitted_at
                assert torch.equal(found.keys.coding.queries, theirs.keys.coding.queries)
    with stream_context(str(place), long_model(), ids(), path=tmp_path, summary_dtype="int8") as other:
        assert all(not hasattr(layer.predictor.learnt.keys, "coding") for layer in other.layers)
        torch.testing.assert_close(logits(other), expected(), rtol=1e-3, atol=1e-3)


def test_what_was_learnt_is_kept_when_the_first_chunk_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of it is damaged, which shows when it is decoded: all that was held is given up."""
    place = published(tmp_path)
    manifest = StreamManifest.parse((place / NAME).read_bytes(), "")
    rows = [list(row) for row in manifest.cells]
    rows[0][2] = manifest.learnt
    (place / NAME).write_bytes(manifest.model_copy(update={"cells": tuple(map(tuple, rows))}).dumped())
    stream_first(monkeypatch)
    with stream_context(str(place), long_model(), ids(), path=tmp_path) as cache:
        assert cache.stream_report.lost == 1 and cache.stream_report.recomputed_tokens >= SIZE
        assert all(layer.lesson is not None for layer in cache.layers)
        torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)


def test_a_text_that_goes_on_differently_has_what_came_before(tmp_path: Path) -> None:
    place = published(tmp_path)
    other = ids().clone()
    other[0, 200] = (other[0, 200] + 1) % 50
    with stream_context(str(place), long_model(), other, path=tmp_path) as cache:
        assert cache.get_seq_length() == 192 == cache.stream_report.tokens
    with stream_context(str(place), long_model(), ids()[:, :CONTEXT], path=tmp_path) as cache:
        assert cache.get_seq_length() == CONTEXT - SIZE  # one id is left to go on from
    other[0, 0] = (other[0, 0] + 1) % 50
    with stream_context(str(place), long_model(), other, path=tmp_path) as cache:
        assert cache.get_seq_length() == 0 and "no complete chunk in common" in cache.stream_report.whole


def test_private_ranges_are_neither_published_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = published(tmp_path, private=[(130, 131)])
    manifest = StreamManifest.parse((place / NAME).read_bytes(), "")
    assert [row[1] is None for row in manifest.cells] == [chunk == 2 for chunk in range(10)]
    stream_first(monkeypatch)
    with served(place) as server:
        with stream_context(server.url, long_model(), ids(), path=tmp_path, private=[(600, 601)]) as cache:
            assert cache.stream_report.computed == 4
            torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)
        assert not {cell.name for cell in manifest.cells[9] if cell} & set(server.asked)


def test_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> bytes:
        return b"k" * 32

    place = published(tmp_path, key=key)
    stream_first(monkeypatch)
    with stream_context(str(place), long_model(), ids(), path=tmp_path, key=key) as cache:
        assert cache.stream_report.streamed == cache.stream_report.cells and not cache.stream_report.trouble
        torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)
    with pytest.raises(EncryptionKeyError, match="give its key"):
        stream_context(str(place), long_model(), ids(), path=tmp_path)
    with pytest.raises(EncryptionKeyError, match="has another key, or changed"):
        stream_context(str(place), long_model(), ids(), path=tmp_path, key=lambda: b"x" * 32)
    names = [file for file in place.iterdir() if file.name != NAME]
    assert all(b"HFOC" not in file.read_bytes() for file in names)


# --- faults ----------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:50] + bytes([data[50] ^ 1]) + data[51:]


FAULTS: dict[str, Any] = {
    "missing": lambda name, data: None,
    "flipped": lambda name, data: flipped(data),
    "cut off": lambda name, data: data[:100],
    "too long": lambda name, data: data + b"0" * 9000,
    "empty": lambda name, data: b"",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_wrong_is_computed(
    fault: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = published(tmp_path)
    stream_first(monkeypatch)
    with served(place) as server:
        server.fault = lambda name, data: data if name == NAME or int(name, 16) % every else FAULTS[fault](name, data)
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=1) as cache:
            report = cache.stream_report
            assert report.computed > 0 and report.trouble
            assert report.computed == report.cells if every == 1 else report.streamed > 0
            torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)


def test_what_was_exchanged_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of another name and size, which has its own digest, and is not of that cell's shape."""
    place = published(tmp_path)
    manifest = StreamManifest.parse((place / NAME).read_bytes(), "")
    rows = [list(row) for row in manifest.cells]
    rows[4][1] = manifest.learnt
    changed = manifest.model_copy(update={"cells": tuple(map(tuple, rows))})
    (place / NAME).write_bytes(changed.dumped())
    stream_first(monkeypatch)
    with stream_context(str(place), long_model(), ids(), path=tmp_path) as cache:
        report = cache.stream_report
        assert report.lost == 1 and "chunk 4 layer 1" in report.trouble[0] and report.computed == 1
        torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_the_link_dies(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = published(tmp_path)
    stream_first(monkeypatch)
    with served(place) as server:

        def dying(name: str, data: bytes) -> bytes:
            server.dead = name != NAME and len(server.asked) > after + 1
            return data

        server.fault = dying
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=1) as cache:
            assert cache.stream_report.computed > 0 and cache.stream_report.trouble
            torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)


def test_a_server_that_stalls_is_not_waited_for(tmp_path: Path) -> None:
    place = published(tmp_path)
    release = threading.Event()
    with served(place) as server:

        def stalling(name: str, data: bytes) -> bytes:
            if name != NAME:
                release.wait(20)
            return data

        server.fault = stalling
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=0.3) as cache:
            assert cache.stream_report.seconds < 15 and cache.stream_report.computed == cache.stream_report.cells
            torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)
        release.set()


def changed_manifest(place: Path, **update: Any) -> None:
    manifest = StreamManifest.parse((place / NAME).read_bytes(), "")
    (place / NAME).write_bytes(manifest.model_copy(update=update).dumped())


def test_a_manifest_that_is_wrong_is_refused(tmp_path: Path) -> None:
    place = published(tmp_path)
    whole = (place / NAME).read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        published(tmp_path)
    for wrong in (whole[:-40], b"{}", b'{"format": "other"}'):
        (place / NAME).write_bytes(wrong)
        with pytest.raises(ContextError, match="no manifest of a published context"):
            stream_context(str(place), long_model(), ids(), path=tmp_path)
    for version in (2, None, "1", True):
        (place / NAME).write_bytes(json.dumps({**json.loads(whole), "version": version}).encode())
        said = f"version {version} and this library reads 1: publish the context anew$"
        with pytest.raises(ContextError, match=said):
            stream_context(str(place), long_model(), ids(), path=tmp_path)
    (place / NAME).write_bytes(whole)
    for update in ({"tokens": 10**6}, {"chunk_tokens": 32}, {"layers": 2}):
        changed_manifest(place, **update)
        with pytest.raises(ContextError):
            stream_context(str(place), long_model(), ids(), path=tmp_path)
        (place / NAME).write_bytes(whole)
    changed_manifest(place, identity={**StreamManifest.parse(whole, "").identity, "weights": "0" * 16})
    with pytest.raises(ContextMismatchError, match="weights"):
        stream_context(str(place), long_model(), ids(), path=tmp_path)
    (place / NAME).unlink()
    with pytest.raises(StoreError, match="no published context"):
        stream_context(str(place), long_model(), ids(), path=tmp_path)
    with pytest.raises(ConfigError, match="migrations must be 0 or more"):
        stream_context(str(place), long_model(), ids(), path=tmp_path, migrations=-1)
    with pytest.raises(ConfigError, match="stage must be more than 0"):
        stream_context(str(place), long_model(), ids(), path=tmp_path, stage=0)
    with pytest.raises(ConfigError, match="level must be"):
        publish_context(DiskSwapCache(long_model()), "x", level="best")
    with pytest.raises(ConfigError, match="input_ids"):
        checks.as_ids(torch.zeros(2, 3))


def test_a_directory_is_published_with_its_model(tmp_path: Path) -> None:
    with DiskSwapCache(long_model(), path=tmp_path) as cache:
        with torch.no_grad():
            long_model()(ids()[:, :CONTEXT], past_key_values=cache)
        cache.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="model is missing"):
        publish_context(tmp_path / "saved", str(tmp_path / "published"))
    manifest = publish_context(tmp_path / "saved", str(tmp_path / "published"), model=long_model(), chunk_tokens=128)
    assert manifest.tokens == CONTEXT and manifest.chunks == 5
    objects = {file.name for file in (tmp_path / "published").iterdir()}
    assert objects == {NAME, manifest.learnt.name, *(cell.name for row in manifest.cells for cell in row[1:])}


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


def test_any_file_system_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream_first(monkeypatch)
    with DiskSwapCache(long_model(), path=tmp_path) as cache:
        with torch.no_grad():
            long_model()(ids()[:, :CONTEXT], past_key_values=cache)
        first = publish_context(cache, "memory://contexts/manual", level="lossless", chunk_tokens=SIZE)
        again = publish_context(cache, "memory://contexts/manual", level="lossless", chunk_tokens=SIZE, overwrite=True)
        assert first.cells == again.cells  # named by their content
    with stream_context("memory://contexts/manual", long_model(), ids(), path=tmp_path) as cache:
        assert cache.stream_report.streamed == cache.stream_report.cells
        torch.testing.assert_close(logits(cache), expected(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="no file system of that kind"):
        stream_context("nowhere://contexts", long_model(), ids(), path=tmp_path)


def test_both_lanes_are_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, file = published(tmp_path), tmp_path / "trace.json"
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
