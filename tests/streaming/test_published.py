"""What is published, and what of it is believed: models, keys, private parts, file systems, and stopping in time."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import long_context
import numpy as np
import pytest
import torch
import walk
from fsspec.implementations.memory import MemoryFileSystem
from harness import COMMON, build, prompt, since
from lanes_in_order import compute_all, stream_first
from layered_models import dense_with_indexers
from long_context import CONTEXT, ids, is_right
from long_llama import long_model
from static_server import served
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LongcatFlashConfig, LongcatFlashForCausalLM

from eval.baselines.greedy import Schedule, bound, potential_aware
from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.core import Filling, filling
from hf_offload_cache.errors import (
    ConfigError,
    ContextError,
    ContextMismatchError,
    CorruptRecordError,
    EncryptionKeyError,
    StoreError,
    UnsupportedModelError,
)
from hf_offload_cache.model import Geometry
from hf_offload_cache.streaming import (
    GROUP,
    NAME,
    ChunkShape,
    Costs,
    binding,
    codec,
    encode,
    line_of,
    meet,
    publish,
    staircase,
    unpack,
)
from hf_offload_cache.streaming import stream_context as module
from hf_offload_cache.streaming import streaming_lane as decoder
from hf_offload_cache.tuning.which_cache import step_bytes

pytestmark = pytest.mark.usefixtures("one_chunk_at_a_time")


def published(folder: Path, model: Any = None, url: Any = None, **options: Any) -> Any:
    """The manifest of a context below `folder`, or at `url`."""
    place = folder / "published" if url is None else url
    return long_context.published(place, folder, tokens=ids()[:, :CONTEXT], model=model, **options)


def test_an_older_publication_is_told_from_the_latest(tmp_path: Path) -> None:
    """Somebody who can write to the store can put an earlier one back."""
    published(tmp_path, chunk_tokens=128)
    old = (tmp_path / "published" / NAME).read_bytes()
    latest = published(tmp_path, chunk_tokens=128, overwrite=True).digest
    with stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path, expect=latest) as cache:
        assert cache.get_seq_length() >= 128
    (tmp_path / "published" / NAME).write_bytes(old)
    with pytest.raises(ContextMismatchError, match=f"expect is {latest}: an older or another context was published"):
        stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path, expect=latest)
    with pytest.raises(StoreError, match="http"):
        stream_context("http://a..b/", long_model(), ids(), path=tmp_path, silence=1)


# --- stopping ------------------------------------------------------------------------------------------------------


def test_nothing_is_begun_once_all_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first object besides the chunks stalls; the one behind it would come byte by byte, for minutes."""
    manifest, go = published(tmp_path, chunk_tokens=128, active_mass=0.9), threading.Event()
    compute_all(monkeypatch)
    with served(tmp_path / "published") as server:
        server.trickles = manifest.fitted.name
        server.fault = lambda name, data: (go.wait(60), data)[1] if name == manifest.active.name else data
        with stream_context(server.url, long_model(), ids(), path=tmp_path, sparse=True) as cache:
            assert cache.stream_report.computed == cache.stream_report.cells
        go.set()
        assert manifest.fitted.name not in server.asked
        server.trickles = ""


def test_what_there_is_no_room_for_is_not_begun(tmp_path: Path) -> None:
    """The budget is known to be too small before the network has answered."""
    manifest = published(tmp_path, chunk_tokens=CONTEXT)
    with served(tmp_path / "published") as server:
        server.trickles = manifest.fitted.name
        own = DiskSwapCache.for_budget(long_model(), 262144, max_context=CONTEXT + 60, path=tmp_path)
        with stream_context(server.url, long_model(), ids(), own) as cache:
            assert "no room" in cache.stream_report.whole and cache.get_seq_length() == CONTEXT
        server.trickles = ""


# --- models --------------------------------------------------------------------------------------------------------


def long_rope() -> Any:
    own = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "factor": 4.0}
    own |= {"long_factor": [1.0 + place / 2 for place in range(8)], "original_max_position_embeddings": 256}
    return build(LlamaForCausalLM, LlamaConfig(**{**COMMON, "max_position_embeddings": 1024, "rope_parameters": own}))


def test_keys_that_depend_on_the_length_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = long_rope()
    with pytest.raises(UnsupportedModelError, match=r"its rotary embedding \(longrope\) depends on"):
        published(tmp_path, model)
    with monkeypatch.context() as patch:  # as an earlier version did
        patch.setattr(filling, "length_dependent", lambda model: None)
        published(tmp_path, model)
    monkeypatch.setattr(module, "MOST_TOKENS", 128)
    with stream_context(tmp_path / "published", model, ids(), path=tmp_path) as cache:
        assert "longrope" in cache.stream_report.whole
        is_right(cache, model)


def longcat() -> Any:
    """Experts that are chosen by value cannot run without data."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16}
    layers = {"num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 32, "routed_scaling_factor": 1.0}
    heads = {"num_key_value_heads": COMMON["num_attention_heads"], "head_dim": 8}
    own = {**COMMON, "max_position_embeddings": 1024, **heads, **sizes, **experts, **layers}
    return build(LongcatFlashForCausalLM, LongcatFlashConfig(**own))


def test_keys_whose_shapes_cannot_be_known_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = longcat()
    with pytest.raises(UnsupportedModelError, match="the shapes of its keys cannot be known before it runs"):
        published(tmp_path, model)
    with monkeypatch.context() as patch:  # as an earlier version did
        patch.setattr(filling, "unknown_shapes", lambda model: None)
        published(tmp_path, model)
    with stream_context(tmp_path / "published", model, ids(), path=tmp_path) as cache:
        assert "cannot be known" in cache.stream_report.whole and cache.get_seq_length() == CONTEXT
        is_right(cache, model)


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    torch.manual_seed(5)
    other = LlamaForCausalLM(long_model().config).eval()
    with DiskSwapCache(other, path=tmp_path) as own, pytest.raises(ContextMismatchError):
        stream_context(tmp_path / "published", long_model(), ids(), own)


LATER = since("5.23", "there is no such model, or it takes other fields")
INDEXED: dict[str, Callable[[], Any]] = {
    "deepseek_v32": dense_with_indexers,
    **{
        name: lambda name=name: walk.tiny_model(walk.architectures()[name])  # type: ignore[misc]
        for name in ("axk2", "glm_moe_dsa", "hy_v4")
    },
}
"""Models that choose by an indexer, which keep nothing else."""
PIECES = 0, 64, 128, 200, 201
"""Tokens of the forwards of a text: a context of four chunks, and the next token."""


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("deepseek_v32", None),
        pytest.param("hy_v4", 8, marks=LATER),
        *(
            pytest.param(name, bits, marks=[pytest.mark.slow] + [LATER] * (name == "hy_v4"))
            for name, bits in itertools.product(INDEXED, (None, 0, 8))
            if (name, bits) not in (("deepseek_v32", None), ("hy_v4", 8))
        ),
    ],
)
def test_models_that_choose_go_on_from_what_is_streamed(
    name: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell has no indexer's keys, or keys of an indexer that its layer has not, and its chunk is computed up to
    there; the second layer of the last model shares the first one's indexer."""
    model, place = INDEXED[name](), tmp_path / "published"
    text, plain, encoded = prompt(model, 1, 210), DynamicCache(config=model.config), []

    def wrong(keys: Any, values: Any, level: str, indexer: Any) -> bytes:
        encoded.append(None)
        if len(encoded) == 2:  # of the second chunk, in the second layer
            indexer = keys[0] if indexer is None else None
        return encode(keys, values, level, indexer)

    with torch.no_grad(), DiskSwapCache(model, path=tmp_path, indexer_bits=bits) as cache:
        for begin, end in itertools.pairwise(PIECES[:-1]):
            for one in (plain, cache):
                model(text[:, begin:end], past_key_values=one)
        monkeypatch.setattr(publish, "encode", wrong)
        with pytest.raises(ConfigError, match="active_mass must be None"):
            publish_context(cache, place, active_mass=0.9)
        manifest = publish_context(cache, place, level="lossless", chunk_tokens=64)
    layers, own = len(plain.layers), [getattr(one, "indexer_keys", None) is not None for one in plain.layers]
    assert manifest.version == 2 and manifest.indexers == tuple(16 * one for one in own) and own[0]
    assert own[1] == (name != "hy_v4")
    stream_first(monkeypatch)
    fields = {"group_size": 4, "num_recent": 8, "reuse_capacity": 0, "indexer_bits": bits, "path": tmp_path}
    scored, first = list[int](), next(one for name, one in model.named_modules() if name.endswith(".indexer"))
    hook = first.register_forward_hook(lambda _, __, chosen: scored.append(chosen.shape[1]))
    with torch.no_grad(), stream_context(place, model, text, sparse=True, **fields) as cache:
        report = cache.stream_report
        assert (report.tokens, report.whole, report.computed) == (200, None, 1)
        assert report.streamed == 4 * (layers - 1) - 1 and report.recomputed_tokens == 200
        assert "by itself" in report.trouble[0] and "chunk 1 layer 1: it says" in report.trouble[1]
        assert len(report.trouble) == 2 and cache.get_seq_length() == 200
        assert scored == [64]  # a forward that ends with an indexer's keys does not score
        hook.remove()
        assert {layer.state for layer in cache.layers} == {"tagged"}  # the first step is sparse, too
        for layer, other in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(layer.whole(), (other.keys, other.values))
            if other.indexer_keys is not None:
                torch.testing.assert_close(layer.indexer.whole(), other.indexer_keys)
        read = cache.report().bytes_read
        for end in range(PIECES[-1], 208):
            found, expected = (model(text[:, end - 1 : end], past_key_values=one).logits for one in (cache, plain))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        after = cache.report()
        assert after.layers["tagged"] == layers and after.selected_fraction is not None
        assert after.selected_fraction < 0.13 and after.bytes_read > read
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no cache is needed
        into = DiskSwapCache.for_budget(model, "1MiB", 256, path=tmp_path, indexer_bits=bits)
    geometry = Geometry.of(model)
    keys_read = [step_bytes(geometry, replace(into.config, indexer_bits=one), 256, 2) for one in (bits, None)]
    assert keys_read[0] - keys_read[1] == (0 if bits is None else 2 * 4 * 4096 * sum(own))  # by those that have any
    with stream_context(place, model, text, into) as cache:
        held = cache.report()
        assert cache.stream_report.streamed == report.streamed and held.peak_memory_bytes <= 2**20
    for changes, said in (
        ({"indexers": (), "version": 1}, r"indexer keys of the widths \[\]"),
        ({"indexers": (8, *manifest.indexers[1:])}, r"the model of \[16, .*publish it anew"),
        ({"version": 1}, "version 2, and no other, has a width"),
        ({"indexers": manifest.indexers[1:]}, "version 2, and no other, has a width"),
    ):
        (place / NAME).write_bytes(manifest.model_copy(update=changes).dumped())
        with pytest.raises(ContextError, match=said):
            stream_context(place, model, text, path=tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("has_linear_state", True, "keep a state"), ("hf_device_map", {"one": 0, "two": 1}, "several devices")],
)
def test_reasons_to_prefill_whole(name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskSwapCache(long_model()) as cache:
        assert Filling.reason_against(cache) is None
        monkeypatch.setattr(cache.model if name == "hf_device_map" else cache, name, value, raising=False)
        assert reason in str(Filling.reason_against(cache))


# --- keys and private parts ----------------------------------------------------------------------------------------


def test_an_encrypted_manifest_may_begin_as_json_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypt = publish.encrypt

    def until_a_brace(key: bytes, data: bytes, context: bytes) -> bytes:
        while context == binding("", "manifest"):
            if (found := encrypt(key, data, context))[:1] == b"{":
                return found
        return encrypt(key, data, context)

    monkeypatch.setattr(publish, "encrypt", until_a_brace)
    published(tmp_path, key=lambda: b"k" * 32)
    assert (tmp_path / "published" / NAME).read_bytes()[:1] == b"{"
    with stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path, key=lambda: b"k" * 32) as cache:
        is_right(cache)
    with pytest.raises(EncryptionKeyError, match="is not encrypted"):
        stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path, key=lambda: b"o" * 32)


def test_of_private_queries_nothing_is_told_and_nothing_asked_for(tmp_path: Path) -> None:
    hidden = published(tmp_path, chunk_tokens=128, active_mass=0.9, private=[(0, 10)])
    assert hidden.active is None and hidden.fitted is None
    told = published(tmp_path, chunk_tokens=128, active_mass=0.9, overwrite=True)
    with served(tmp_path / "published") as server:
        asked: dict[str, Any] = {"path": tmp_path, "sparse": True, "private": [(0, 10)]}
        with stream_context(server.url, long_model(), ids(), **asked) as cache:
            assert any("private" in one for one in cache.stream_report.trouble)
            is_right(cache)
        assert not {told.active.name, told.fitted.name} & set(server.asked)


# --- objects -------------------------------------------------------------------------------------------------------


class Committing(MemoryFileSystem):
    """Stores objects, and has no transactions, as the Hub."""

    protocol = "committing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @property
    def transaction(self) -> Any:
        raise NotImplementedError("Transactional commits are not supported.")


def test_file_systems_without_transactions(tmp_path: Path) -> None:
    fsspec.register_implementation("committing", Committing, clobber=True)
    published(tmp_path, url="committing://context")
    with stream_context("committing://context", long_model(), ids(), path=tmp_path) as cache:
        is_right(cache)
    Committing.store.clear()


@pytest.mark.parametrize("overwrite", [True, False])
def test_objects_that_are_damaged_are_written_again_and_no_others(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off, of another byte, or missing; with the manifest there, or without it."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    system, place = MemoryFileSystem(), "/context"
    manifest = published(tmp_path, url="memory://context")
    whole = {name: system.cat_file(name) for name in system.find(place)}
    cut, flipped, lost = (f"{place}/{cell.name}" for cell in manifest.cells[1][1:3] + manifest.cells[0][1:2])
    system.pipe_file(cut, whole[cut][:100])
    system.pipe_file(flipped, whole[flipped][:-1] + bytes([whole[flipped][-1] ^ 1]))
    system.rm(lost)
    if not overwrite:
        system.rm(f"{place}/{NAME}")
    opened, written = MemoryFileSystem._open, []

    def note(own: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        written.extend([own._strip_protocol(path)] if mode == "wb" else [])
        return opened(own, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", note)
    published(tmp_path, url="memory://context", overwrite=overwrite)
    assert sorted(written) == sorted([cut, flipped, lost, f"{place}/{NAME}"])
    assert all(system.cat_file(name) == data for name, data in whole.items() if not name.endswith(NAME))


@pytest.mark.parametrize(("name", "value"), [("fitted_at", "x"), ("fitted_at", -1), ("fitted_at", 1.5)])
def test_numbers_of_fitted_state_are_checked(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = publish._Publishing._fitted

    def wrong(own: Any) -> Any:
        tree = fitted(own)
        return {**tree, "fitted": {index: {**one, name: value} for index, one in tree["fitted"].items()}}

    with monkeypatch.context() as patch:
        patch.setattr(publish._Publishing, "_fitted", wrong)
        published(tmp_path)
    stream_first(monkeypatch)
    with stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path) as cache:
        assert any(f"{name} of its fitted state is {value}" in one for one in cache.stream_report.trouble)


# --- chunks --------------------------------------------------------------------------------------------------------


def states(tokens: int = 128, dim: int = 32) -> tuple[torch.Tensor, torch.Tensor, ChunkShape]:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, tokens, dim, generator=generator) for _ in range(2))
    return keys, values, ChunkShape(2, tokens, dim, dim, torch.float32)


@pytest.mark.parametrize(("level", "most"), [("fine", 0.04), ("small", 0.12), ("smallest", 0.16)])
def test_a_channel_far_from_zero_does_not_coarsen_the_others(level: str, most: float) -> None:
    """Steps are shares of the standard deviation: an error of .29 of a step."""
    keys, values, shape = states()
    keys[:, :, 7] += 200
    found, _ = unpack(encode(keys, values, level), shape, "a chunk").decode()
    others = torch.arange(32) != 7
    assert float((found - keys)[..., others].std() / keys[..., others].std()) < most
    assert float((found - keys)[..., 7].std()) < most


@pytest.mark.parametrize("scale", [1e-8, 1e-4])
def test_what_scales_of_16_bits_do_not_reach_is_kept_whole(scale: float) -> None:
    keys, values, shape = states()
    found = unpack(encode(keys * scale, values * scale), shape, "a chunk").decode()
    assert torch.equal(found[0], keys * scale) and torch.equal(found[1], values * scale)


def test_an_object_of_another_level_is_none_of_the_context() -> None:
    keys, values, shape = states()
    unpack(encode(keys, values, "lossless"), shape, "a chunk", "default")
    with pytest.raises(CorruptRecordError, match="level 'fine', and should be of 'default'"):
        unpack(encode(keys, values, "fine"), shape, "a chunk", "default")


def test_a_context_that_is_of_no_use_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its cells would cost another forward."""
    published(tmp_path)
    stream_first(monkeypatch)
    monkeypatch.setattr(codec, "_VERSION", 99)
    with stream_context(tmp_path / "published", long_model(), ids(), path=tmp_path) as cache:
        report = cache.stream_report
        assert report.computed == report.cells and report.streamed == 0 and report.recomputed_tokens <= 3 * CONTEXT
        assert report.trouble[-1] == "3 cells were useless: no others are requested"
        is_right(cache)


def test_cells_are_decoded_in_whole_groups() -> None:
    assert decoder.FEW % GROUP == 0


# --- arguments, and what is told -----------------------------------------------------------------------------------


def test_trouble_is_a_line() -> None:
    assert line_of("a\nb\x00c") == "a b c"
    assert len(line_of("x" * 5000)) < 310


# --- plans ---------------------------------------------------------------------------------------------------------


def costs(computed: float, streamed: float, chunks: int = 3, layers: int = 4) -> Costs:
    shape = chunks, layers
    return Costs(np.full(shape, computed), np.full(shape, computed / 10), np.full(shape, streamed))


@pytest.mark.parametrize("given", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, np.inf), (1e9, 1e9), (1.0, 1.0)])
def test_plans_of_strange_costs_end(given: tuple[float, float]) -> None:
    of = costs(*given)
    ours = [Schedule.from_the_end(make(of), of) for make in (meet, staircase)]
    for plan in (*ours, potential_aware(of, stage=1.0)):
        assert len(plan.depths) == 3 and all(1 <= depth <= 4 for depth in plan.depths)
        assert not any(np.isinf(of.streamed[cell]) for cell in plan.order)
    assert bound(of) <= ours[0].seconds(of) * (1 + 1e-6) + 1e-9


def test_plans_of_nothing_are_empty() -> None:
    of = costs(1.0, 1.0, chunks=0)
    assert meet(of).depths == staircase(of).depths == () and bound(of) == 0
