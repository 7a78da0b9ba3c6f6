"""`AbstractTreeCache` with INT4 replicas of its chunks on the disk."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Decoded, generate, prompt, repetitive_prompt, unchanged
from long_llama import feed, long_model

from hf_offload_cache import AbstractTreeCache, AbstractTreeConfig, verify
from hf_offload_cache.errors import ConfigError, CorruptRecordError
from hf_offload_cache.kernels.low_bit import pack_replicas, unpacked
from hf_offload_cache.methods.abstract_tree import AbstractTreeLayer
from hf_offload_cache.model import Geometry

LENGTH = 1100
FIELDS: dict[str, Any] = {
    "chunk_size": 64, "num_selected": 128, "num_opened": 256, "num_recent": 8, "num_sinks": 3, "dense_layers": 0,
    "early_steps": 0, "reuse_capacity": 0, "engine": "mapped",
}  # fmt: skip
"""Chunks are 8 KiB and their replicas 4."""


@pytest.mark.parametrize("share", [1.5, -0.1, True, "often", float("nan"), [0.5]])
def test_shares_that_are_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"compress must be a share from 0 to 1, 'auto' or None.*use 'auto'"):
        AbstractTreeConfig(compress=share)


@contextlib.contextmanager
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """For each gather of each layer, the share of its entries that are those of a replica and not of the record; each
    is the one or the other, to the bit."""
    seen: list[float] = []
    fetched_before = AbstractTreeLayer.fetched

    def watched(layer: Any, choice: Any, fetched: Any) -> None:
        history, replicas = layer.history, layer.history.replicas
        whole = torch.cat(history.whole(), 3)[:, 0, : history.units * 64]
        packed = torch.empty(history.rows * history.units, replicas.record_bytes, dtype=torch.uint8)
        pack_replicas(replicas.form.layout, whole.reshape(len(packed), -1), packed)
        image = unpacked(replicas.form.layout.rows(packed), 4).view(whole.shape)
        places = torch.from_numpy(fetched.of_chosen(history.positions(choice.units)))
        there = places >= 0 if fetched.valid is None else torch.from_numpy(fetched.valid)
        got = fetched.entries[:, : fetched.chosen]
        index = places.clip(min=0)[:, :, None]
        is_whole, is_image = (
            (got == torch.take_along_dim(part, index, 1)).all(2) for part in (whole, image)
        )
        assert (is_whole | is_image)[there].all()
        seen.append((is_image & ~is_whole)[there].float().mean().item())
        fetched_before(layer, choice, fetched)

    with monkeypatch.context() as patch:
        patch.setattr(AbstractTreeLayer, "fetched", watched)
        yield seen


USUALLY = [(0.0, "memory", True), (0.5, "memory", True), (0.5, "disk", False), (1.0, "disk", False)]
FURTHER = [one for one in itertools.product((0.0, 0.5, 1.0), ("memory", "disk"), (True, False)) if one not in USUALLY]


@pytest.mark.parametrize(
    ("share", "abstracts", "look_ahead"), [*USUALLY, *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER)]
)
def test_what_attention_is_given(
    share: float, abstracts: str, look_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_model()
    fields = {**FIELDS, "compress": share, "abstracts": abstracts, "look_ahead": look_ahead}
    with unchanged(model), told(monkeypatch) as came, AbstractTreeCache(model, **fields) as cache:
        out = generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=4)
        generate(model, cache, torch.cat([out.tokens, prompt(model, 2, 9, seed=8)], 1), max_new_tokens=4)
        cache.crop(-300)
        ids = torch.cat([cache.input_ids, prompt(model, 2, 80, seed=9)], 1)
        generate(model, cache, ids, max_new_tokens=3)
        cache.reset()
        generate(model, cache, prompt(model, 1, LENGTH), num_beams=3, max_new_tokens=40)
        cache.reset()
        generate(model, cache, repetitive_prompt(model, LENGTH), prompt_lookup_num_tokens=4, max_new_tokens=12)
        report = cache.report()
    assert len(came) >= 3 * 40
    assert max(came) == 0 if share == 0 else np.mean(came) > 0.6 * share
    assert share < 1 or min(came) == 1.0
    assert report.compressed_fraction == pytest.approx(share, abs=0.07)
    assert (report.unpack_seconds > 0) == (share > 0)


def test_without_replicas_nothing_is_said() -> None:
    with AbstractTreeCache(long_model(), **FIELDS) as cache:
        generate(long_model(), cache, prompt(long_model(), 1, LENGTH), max_new_tokens=3)
        assert cache.report().compressed_fraction is None
        assert all(layer.history.replicas is None for layer in cache.offloaded)


@pytest.mark.parametrize("share", [0.5, "auto"])
def test_solved_or_given_it_is_planned(share: Any, tmp_path: Path) -> None:
    model, fields = long_model(), {**FIELDS, "compress": share, "num_selected": 64, "num_opened": 128}
    geometry = Geometry.of(model)
    for rows in (1, 3):
        with AbstractTreeCache(model, path=tmp_path, **fields) as cache:
            plan = cache.plan(geometry, cache.config, LENGTH + 70, rows)
            generate(model, cache, prompt(model, rows, LENGTH), max_new_tokens=70)
            report = cache.report()
            assert report.peak_memory_bytes <= plan.peak_bytes
            assert report.disk_bytes <= plan.disk_bytes * 9 // 8 + 2**21
            assert 0 <= report.compressed_fraction <= 1
    without = cache.plan(geometry, AbstractTreeConfig(**{**fields, "compress": None}), LENGTH + 70, 3)
    assert plan.disk_bytes - without.disk_bytes == 3 * 3 * 2 * 4096 * ((LENGTH + 70 - 8) // 64)


def follow(cache: Any) -> torch.Tensor:
    return torch.stack([feed(cache, prompt(long_model(), 1, 1, seed=seed)) for seed in range(5)])


def test_saved_opened_and_forked(tmp_path: Path) -> None:
    model, fields = long_model(), {**FIELDS, "compress": 1.0}
    with AbstractTreeCache(model, path=tmp_path, **fields) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        cache.save(tmp_path / "context")
        with cache.fork() as twin:
            expected = follow(twin)
            told = twin.report()
            assert told.compressed_fraction == 1
            whole = sum(layer.history.store.disk_bytes for layer in twin.offloaded)
            assert whole / 3 < told.replica_bytes < 0.6 * whole and whole + told.replica_bytes <= told.disk_bytes
            assert "of it 4-bit copies" in str(told)
        assert torch.equal(follow(cache), expected)
    assert not verify(tmp_path / "context").findings
    with AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path) as opened:
        assert opened.config.compress == 1.0
        assert torch.equal(follow(opened), expected)
        feed(opened, prompt(model, 1, 200, seed=50))
        opened.save(tmp_path / "longer")
        more = follow(opened)
        assert opened.report().compressed_fraction == 1
    with AbstractTreeCache.open(tmp_path / "longer", model, path=tmp_path) as opened:
        assert torch.equal(follow(opened), more)
    with AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path, compress=None) as plain:
        other = follow(plain)
        assert plain.report().compressed_fraction is None and plain.report().replica_bytes == 0
        plain.save(tmp_path / "again")
    with AbstractTreeCache(model, path=tmp_path, **FIELDS) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        cache.save(tmp_path / "plain")
        assert torch.equal(follow(cache), other) and not torch.equal(other, expected)
    with AbstractTreeCache.open(tmp_path / "again", model, path=tmp_path, compress=1.0) as again:
        follow(again)
        assert again.report().compressed_fraction == 0  # they were let go of
    with AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path, exact=True) as exact:
        assert exact.tokens == LENGTH and all(layer.history.replicas is None for layer in exact.offloaded)
    with AbstractTreeCache.open(tmp_path / "plain", model, path=tmp_path, compress=1.0) as late:
        feed(late, prompt(model, 1, 500, seed=51))
        follow(late)
        assert 0 < late.report().compressed_fraction < 1  # those that came since


def test_what_is_damaged_of_replicas_is_read_whole(tmp_path: Path) -> None:
    model = long_model()
    with AbstractTreeCache(model, path=tmp_path, **{**FIELDS, "compress": 1.0}) as cache:
        feed(cache, prompt(model, 1, LENGTH))
        cache.save(tmp_path / "context")
    with AbstractTreeCache.open(tmp_path / "context", model, compress=None) as plain:
        expected = follow(plain)
    replicas = [file for file in (tmp_path / "context").glob("*.records") if file.stat().st_size % 8192 == 4096]
    replicas = replicas or sorted((tmp_path / "context").glob("*.records"), key=lambda file: file.stat().st_size)[:3]
    assert len(replicas) == 3  # of each layer
    for file in replicas:
        file.chmod(0o600)
        file.write_bytes(bytes(file.stat().st_size))
    assert len(verify(tmp_path / "context").findings) == 3
    for share in (1.0, "auto"):
        with AbstractTreeCache.open(tmp_path / "context", model, compress=share) as opened:
            assert torch.equal(follow(opened), expected)
            if share == 1.0:  # where the disk is as fast without, none may have been read
                with pytest.raises(CorruptRecordError, match="not what was written"):
                    opened.save(tmp_path / "damaged")
    with AbstractTreeCache.open(tmp_path / "context", model, compress=None) as plain:
        plain.save(tmp_path / "saved")
    assert verify(tmp_path / "saved").whole


@pytest.mark.parametrize("look_ahead", [True, False])
def test_the_same_every_time(look_ahead: bool) -> None:
    model = long_model()

    def run() -> Decoded:
        own = {"compress": 0.5, "reuse_capacity": 128, "look_ahead": look_ahead}
        with AbstractTreeCache(model, **{**FIELDS, **own}) as cache:
            return generate(model, cache, prompt(model, 2, LENGTH), max_new_tokens=12)

    one, other = run(), run()
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.logits, other.logits)


def test_shares_of_small_reads_add_up() -> None:
    model = long_model()
    for share in (0.2, 0.45):
        with AbstractTreeCache(model, **{**FIELDS, "compress": share, "reuse_capacity": 800}) as cache:
            generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=60)
            assert cache.report().compressed_fraction == pytest.approx(share, abs=0.04)


def test_chunks_too_small_for_replicas_are_told() -> None:
    model = long_model()
    fields = {**FIELDS, "chunk_size": 32, "compress": 1.0}
    with AbstractTreeCache(model, **fields) as cache, pytest.warns(UserWarning, match="compress=1.0 has no effect"):
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
    with AbstractTreeCache(model, **{**FIELDS, "compress": 1.0}) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        assert not cache.warnings


def test_descriptors_of_both_stores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("hf_offload_cache.core.cache.check_descriptors", asked.append)
    for share in (None, 0.5):
        AbstractTreeCache(long_model(), **{**FIELDS, "compress": share}).close()
    assert asked == [3, 6]
