"""What servers, links and publishers do wrong, and where a context is not what a prompt would have made."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import peft
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from harness import PAD
from lanes_in_order import compute_all, stream_first
from long_context import CONTEXT, SIZE, change_manifest, ids, is_right, manifest_at, published
from long_llama import long_model
from pairwise import combinations
from static_server import served
from transformers import DynamicCache

from eval.baselines.greedy import bound
from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.contexts import pack
from hf_offload_cache.errors import ConfigError, ContextMismatchError, EncryptionKeyError, StoreError
from hf_offload_cache.streaming import (
    NAME,
    ComputingSpeed,
    Costs,
    Loader,
    StreamObject,
    digest,
    meet,
    staircase,
)
from hf_offload_cache.streaming import publish as checks
from hf_offload_cache.streaming import streaming_lane as decoder

pytestmark = pytest.mark.usefixtures("one_chunk_at_a_time")


def put(place: Path, data: bytes) -> StreamObject:
    (place / digest(data)).write_bytes(data)
    return StreamObject(name=digest(data), bytes=len(data))


# --- links -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 9])
def test_what_fails_once_is_asked_for_again(place: Path, chunk: int, tmp_path: Path) -> None:
    """Whatever was computed meanwhile, and taken back."""
    cell = manifest_at(place).cells[chunk][2]
    assert cell is not None
    with served(place) as server:
        failed = list[str]()

        def once(name: str, data: bytes) -> bytes | int:
            if name == cell.name and name not in failed:
                failed.append(name)
                return 503
            return data

        server.fault = once
        with stream_context(server.url, long_model(), ids(), path=tmp_path, silence=2) as cache:
            is_right(cache)


def test_what_always_fails_is_computed_and_nothing_else(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_first(monkeypatch)
    cell = manifest_at(place).cells[9][2]
    assert cell is not None
    with served(place) as server:
        server.fault = lambda name, data: 503 if name == cell.name else data
        with stream_context(server.url, long_model(), ids(), path=tmp_path) as cache:
            report = cache.stream_report
            assert report is not None and server.asked.count(cell.name) == 2
            assert (report.lost, report.streamed, report.computed) == (1, report.cells - 2, 2)
            is_right(cache)


@pytest.mark.parametrize(("what", "migrations"), combinations(["manifest", "fitted", "chunk"], [None, 0]))
def test_what_trickles_in_is_not_waited_for(what: str, migrations: int | None, place: Path, tmp_path: Path) -> None:
    manifest = manifest_at(place)
    assert manifest.fitted is not None and manifest.cells[9][2] is not None
    slow = {"manifest": NAME, "fitted": manifest.fitted.name, "chunk": manifest.cells[9][2].name}[what]
    with served(place) as server:
        server.trickles = slow
        options: dict[str, Any] = {"path": tmp_path, "silence": 0.3, "migrations": migrations}
        begun = time.monotonic()
        if what == "manifest":
            with pytest.raises(StoreError, match=r"stream.json did not arrive within 1.8 s"):
                stream_context(server.url, long_model(), ids(), **options)
        else:
            with stream_context(server.url, long_model(), ids(), **options) as cache:
                is_right(cache)
        assert time.monotonic() - begun < 20
        server.trickles = ""


def test_fitted_state_may_come_late(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was computed, with other queries: stored keys are learned again from what came."""
    compute_all(monkeypatch)
    run = Loader.run

    def run_and_look(own: Any) -> None:
        look, own._extras.look = own._extras.look, lambda lane: None
        run(own)
        deadline = time.monotonic() + 20
        while not any(layer.given_state for layer in own._filling.layers) and time.monotonic() < deadline:
            look(own._lane)

    monkeypatch.setattr(Loader, "run", run_and_look)
    with stream_context(place, long_model(), ids(), path=tmp_path) as cache:
        fitted = [layer.predictor.fitted for layer in cache.layers]
        with DiskSwapCache(long_model(), path=tmp_path) as own:
            with torch.no_grad():
                for part in ids()[:, :CONTEXT].split(SIZE, 1):
                    long_model()(part, past_key_values=own)
            own.end_prompt()
            for layer, found in zip(own.layers, fitted, strict=True):
                theirs = layer.predictor.fitted
                assert found.keys.tokens == theirs.keys.tokens and found.fitted_at == theirs.fitted_at
                for one, other in zip(found.keys.capture().values(), theirs.keys.capture().values(), strict=True):
                    if isinstance(one, torch.Tensor):
                        torch.testing.assert_close(one, other)
        is_right(cache)


class HangingFileSystem(LocalFileSystem):
    """Objects are never there; a manifest is."""

    protocol = "hanging"
    ended = threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if not path.endswith(NAME):
            HangingFileSystem.ended.wait(30)
        return super()._open(path, mode, **options)


def test_a_file_system_that_hangs_is_left_to_itself(place: Path, tmp_path: Path) -> None:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
    HangingFileSystem.ended.clear()
    begun = time.monotonic()
    with stream_context(f"hanging://{place}", long_model(), ids(), path=tmp_path, silence=0.3) as cache:
        assert cache.stream_report is not None and cache.stream_report.computed == cache.stream_report.cells
        is_right(cache)
    assert time.monotonic() - begun < 20
    HangingFileSystem.ended.set()


def test_within_a_running_event_loop(place: Path, tmp_path: Path) -> None:
    """As in a notebook."""

    async def cell() -> None:
        with served(place) as server, stream_context(server.url, long_model(), ids(), path=tmp_path) as cache:
            is_right(cache)

    asyncio.run(cell())


# --- plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [(9, 2), (9, 15), (5, 3), (0, 1)])
@pytest.mark.parametrize("balance", [0.2, 1.0, 5.0])
def test_what_cannot_come_costs_its_own_chunk_alone(hole: tuple[int, int], balance: float) -> None:
    computed = np.full((10, 16), 1.0)
    streamed = np.full((10, 16), balance)
    streamed[hole] = np.inf
    costs = Costs(computed, computed * 0.1, streamed)
    for plan in (meet(costs), staircase(costs)):
        assert plan.depths[hole[0]] > hole[1]
        assert max(plan.lanes(costs)) <= 1.05 * bound(costs) + 1.5  # of a cell or two there is no part


# --- what is not as it would have been computed ----------------------------------------------------------------


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False, r=4)
    model = peft.get_peft_model(copy.deepcopy(long_model()), config, "one")
    model.add_adapter("two", config)
    model.set_adapter("one")
    with DiskSwapCache(model, path=tmp_path) as cache:
        with torch.no_grad():
            model(ids()[:, :CONTEXT], past_key_values=cache)
        publish_context(cache, str(tmp_path / "published"), level="lossless", chunk_tokens=SIZE)
        model.set_adapter("two")
        with pytest.raises(ContextMismatchError, match="adapter"):
            publish_context(cache, str(tmp_path / "other"), chunk_tokens=SIZE)
    with pytest.raises(ContextMismatchError, match="adapter"):
        stream_context(str(tmp_path / "published"), model, ids(), path=tmp_path)
    model.set_adapter("one")
    with stream_context(str(tmp_path / "published"), model, ids(), path=tmp_path) as cache:
        assert cache.get_seq_length() == CONTEXT


def test_what_ids_do_not_tell_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskSwapCache(long_model(), path=tmp_path) as cache:
        with torch.no_grad():
            long_model()(inputs_embeds=torch.randn(1, 200, 64), past_key_values=cache)
        with pytest.raises(ConfigError, match="embeddings, images or sound"):
            publish_context(cache, str(tmp_path / "other"), chunk_tokens=SIZE)
        cache.reset()
        mask = torch.ones(1, 200, dtype=torch.long)
        mask[:, :9] = 0
        with torch.no_grad():
            padded = ids()[:, :200].masked_fill(mask == 0, PAD)
            long_model()(padded, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ConfigError, match="padding"):
            publish_context(cache, str(tmp_path / "other"), chunk_tokens=SIZE)
    monkeypatch.setattr(checks, "placeholders", lambda model: [int(ids()[0, 30])])
    with pytest.raises(ConfigError, match="embeddings, images or sound"):
        stream_context(place, long_model(), ids(), path=tmp_path)


WRONG: dict[str, Any] = {
    "no tree": [1, 2],
    "a list": {"fitted": [], "states": ["tagged"] * 3},
    "few states": {"fitted": {}, "states": ["tagged"]},
    "no states": {"fitted": {}, "states": [None] * 3},
    "other fields": {"fitted": {0: {"other": 1}, 1: {}}, "states": ["tagged"] * 3},
    "a number": {"fitted": {0: 5}, "states": ["tagged"] * 3},
    "another layer": {"fitted": {99: {}}, "states": ["tagged"] * 3},
}


@pytest.mark.parametrize(("wrong", "first"), combinations(list(WRONG), [True, False]))
def test_wrong_fitted_state_is_left(
    wrong: str, first: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes before anything is held, or later: its own state is fitted, as ever."""
    if first:
        stream_first(monkeypatch)
    change_manifest(place, fitted=put(place, pack(WRONG[wrong])))
    with stream_context(place, long_model(), ids(), path=tmp_path) as cache:
        assert not any(layer.given_state for layer in cache.layers)
        report = cache.stream_report
        if first and wrong != "another layer":  # of which there is nothing to be told
            assert report is not None and any("fitted state" in one for one in report.trouble)
        assert all(layer.predictor.ready(layer.history.units) for layer in cache.layers)
        is_right(cache)


# --- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [[(200, 130)], [(-100, -1)], [(5, 5)], (130, 131), [(1,)]])
def test_what_is_to_be_hidden_is_told_rightly(private: Any, place: Path, tmp_path: Path) -> None:
    with DiskSwapCache(long_model(), path=tmp_path) as cache:
        with torch.no_grad():
            long_model()(ids()[:, :200], past_key_values=cache)
        with pytest.raises(ConfigError, match="private must be pairs"):
            publish_context(cache, str(tmp_path / "other"), private=private)
        with pytest.raises(ConfigError, match="private must lie within"):
            publish_context(cache, str(tmp_path / "other"), private=[(190, 201)])
    with pytest.raises(ConfigError, match="private must be pairs"):
        stream_context(place, long_model(), ids(), private=private)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"silence": wrong}, "silence must be") for wrong in (0, "a", float("inf"), float("nan"), 1e11)),
        ({"into": DynamicCache}, "into must"), ({"options": {"nothing": 1}}, "options must"),
        ({"input_ids": ids() > 3}, "input_ids must be the ids of one sequence"),
        ({"input_ids": torch.zeros(2, 3)}, "input_ids"), ({"migrations": -1}, "migrations must be 0 or more"),
        ({"stage": 0}, "stage must be more than 0"), ({"expect": "latest"}, "expect must be a digest of 64"),
        ({"url": "nothing://there"}, "nothing"), ({"url": "github://x"}, "github"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(given: dict[str, Any], said: str, place: Path, tmp_path: Path) -> None:
    with served(place) as server, pytest.raises(ConfigError, match=said):
        stream_context(**{"url": server.url, "model": long_model(), "input_ids": ids(), "path": tmp_path, **given})
    with pytest.raises(ConfigError, match="level must be"), DiskSwapCache(long_model()) as cache:
        publish_context(cache, "x", level="best")


@pytest.mark.parametrize("room", [True, False])
def test_into_a_cache_of_a_budget(room: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are decoded at a time; where there is no room for that either, all is computed."""
    stream_first(monkeypatch)
    own = DiskSwapCache.for_budget(long_model(), "1/2", max_context=CONTEXT + 60, path=tmp_path)
    if not room:
        monkeypatch.setattr(decoder, "unpacked_bytes", lambda level, shape: 2**20)
    with pytest.raises(ConfigError, match="into is a cache already, which num_selected cannot change"):
        stream_context(place, long_model(), ids(), own, num_selected=8)
    with stream_context(place, long_model(), ids(), own) as cache:
        report, streamed = cache.report(), cache.stream_report
        assert cache is own and report.memory_budget is not None and streamed is not None
        assert report.peak_memory_bytes <= report.memory_budget and cache.get_seq_length() == CONTEXT
        assert report.memory_by_owner.get("streaming", 0) == 0
        if not room:
            assert streamed.whole is not None and "no room for what is streamed" in streamed.whole
        else:
            assert streamed.whole is None and streamed.streamed == streamed.cells


def test_a_few_tokens_at_a_time_are_what_all_are_at_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_first(monkeypatch)
    published(place, tmp_path, level="default", chunk_tokens=CONTEXT // 2, overwrite=True)
    found = []
    for fields in ({}, {"memory": 2**23}):
        with stream_context(place, long_model(), ids(), path=tmp_path, **fields) as cache:
            assert cache.stream_report.streamed == cache.stream_report.cells
            found.append([layer.whole() for layer in cache.offloaded])
    for whole, few in zip(*found, strict=True):
        assert all(torch.equal(*both) for both in zip(whole, few, strict=True))


def test_keys(place: Path, tmp_path: Path) -> None:
    def key() -> bytes:
        return b"k" * 32

    with pytest.raises(EncryptionKeyError, match="not encrypted: leave key out"):
        stream_context(place, long_model(), ids(), key=key)
    with DiskSwapCache(long_model(), path=tmp_path, encryption_key=key) as cache:
        with torch.no_grad():
            long_model()(ids()[:, :200], past_key_values=cache)
        with pytest.raises(EncryptionKeyError, match="give key="):
            publish_context(cache, str(tmp_path / "other"))
        cache.save(tmp_path / "encrypted")
    with DiskSwapCache(long_model(), path=tmp_path) as cache:
        with torch.no_grad():
            long_model()(ids()[:, :200], past_key_values=cache)
        cache.save(tmp_path / "plain")
    own: dict[str, Any] = {"model": long_model(), "chunk_tokens": SIZE}
    publish_context(tmp_path / "plain", str(tmp_path / "one"), key=key, context_key=False, **own)
    publish_context(
        tmp_path / "encrypted", str(tmp_path / "two"), key=lambda: b"x" * 32, context_key=key, **own
    )
    for folder, secret in (("one", key), ("two", lambda: b"x" * 32)):
        with stream_context(str(tmp_path / folder), long_model(), ids(), path=tmp_path, key=secret) as cache:
            assert cache.get_seq_length() == 200 and not cache.stream_report.trouble


def test_what_is_not_worth_computing_is_taken_in_as_it_comes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that computes slowly, behind a link that is fast enough."""
    slow = ComputingSpeed()
    slow.note(SIZE, SIZE / 2, 20.0)
    monkeypatch.setattr(ComputingSpeed, "of", lambda model: slow)
    manifest = manifest_at(place)
    with served(place) as server:
        server.pause = 0.01
        with stream_context(server.url, long_model(), ids(), path=tmp_path) as cache:
            assert cache.stream_report.computed == 0 and cache.stream_report.streamed == cache.stream_report.cells
        asked = server.asked
    assert asked.index(manifest.cells[0][1].name) < asked.index(manifest.cells[4][1].name)
