"""The JSON of a tuning: written whole or not at all, refused where it does not fit, and which row a cache takes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import LAYERS, tiny_llama, token_ids

from hf_offload_cache import Adapter, DiskSwapCache, DiskSwapConfig
from hf_offload_cache.core import FORMAT, load_config, nearest
from hf_offload_cache.errors import AdapterError, ConfigError
from hf_offload_cache.model.fingerprint import fingerprint
from hf_offload_cache.tuning import Tuned

ROWS = [(1, 4096), (1, 8192), (2, 4096), (2, 8192), (8, 4096), (8, 8192)]


def tuned(seed: int = 0, memory: int = 240_000_000) -> Tuned:
    """Rows that are told apart by their reuse capacity: 100 times the batch and the thousands of the context."""
    model = tiny_llama(seed)
    generator = torch.Generator().manual_seed(seed)
    adapter = Adapter(
        {index: torch.linalg.qr(torch.randn(32, 16, generator=generator))[0] for index in range(LAYERS)},
        fingerprint(model),
    )
    fields = {"num_selected": 64, "group_size": 8, "rank": 12, "adapter": None, "write_queue": 100_000}
    rows = [
        {"batch": b, "context": s, "fields": {**fields, "reuse_capacity": 100 * b + s // 1000}, "hidden": True}
        for b, s in ROWS
    ]
    values = {"format": FORMAT, "model": adapter.made_for, "memory": memory, "max_context": 8192, "max_batch": 8}
    return Tuned({**values, "rows": rows, "left_out": []}, adapter)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tuned().save(tmp_path / "config.json")
    return tmp_path / "config.json"


def adapter_of(path: Path) -> Path:
    return next(path.parent.glob("*.safetensors"))


def taken(path: Path, **fields: Any) -> DiskSwapConfig:
    config = load_config(DiskSwapConfig, path, fields)
    assert isinstance(config, DiskSwapConfig)
    return config


def test_two_files_and_no_more_readable_by_people(path: Path) -> None:
    adapter, own = sorted(place.name for place in path.parent.iterdir())
    assert own == "config.json"
    assert re.fullmatch(r"config\.adapter-[0-9a-f]{8}\.safetensors", adapter)
    values = json.loads(path.read_text())
    assert values["format"] == "hf_offload_cache tuning 1"
    assert {row["fields"]["adapter"] for row in values["rows"]} == {adapter}
    assert len(path.read_text().splitlines()) > 50


def test_without_an_adapter_one_file(tmp_path: Path) -> None:
    """Coded keys have none; one that an earlier object named is gone with it."""
    tuned().save(tmp_path / "config.json")
    values = tuned().values
    fields = {"num_selected": 64, "group_size": 8, "summary_bytes": 12, "reuse_capacity": 16}
    rows = [{**row, "fields": fields} for row in values["rows"]]
    Tuned({**values, "rows": rows}, None).save(tmp_path / "config.json")
    assert [place.name for place in tmp_path.iterdir()] == ["config.json"]
    config = taken(tmp_path / "config.json")
    assert (config.summaries, config.summary_bytes, config.adapter, config.reuse_capacity) == ("coded", 12, None, 16)


def test_without_sizes_the_largest_row_and_its_limits(path: Path) -> None:
    config = taken(path)
    assert (config.reuse_capacity, config.group_size, config.rank, config.num_selected) == (808, 8, 12, 64)
    assert (config.memory, config.max_context, config.max_batch) == (240_000_000, 8192, 8)
    assert config.adapter == str(adapter_of(path))


@pytest.mark.parametrize(
    ("asked", "row", "memory"),
    [
        ((2, 4096), (2, 4096), 60_000_000),
        ((1, 8192), (1, 8192), 30_000_000),
        ((3, 8192), (2, 8192), 90_000_000),  # log2(3/2) is less than log2(8/3); each sequence has its share
        ((5, 8192), (8, 8192), 240_000_000),
        ((4, 4096), (8, 4096), 240_000_000),  # as far from 2 as from 8: the one for more
        ((1, 4097), (1, 8192), 30_000_000),  # nearer to 4096, which is too short
        ((1, 20), (1, 4096), 30_000_000),
        ((1, 9000), (1, 8192), 30_000_000),  # there is no longer one
        ((99, 4096), (8, 4096), 240_000_000),
    ],
)
def test_sizes_pick_the_row_exact_or_nearest(
    path: Path, asked: tuple[int, int], row: tuple[int, int], memory: int
) -> None:
    config = taken(path, max_batch=asked[0], max_context=asked[1])
    assert config.reuse_capacity == 100 * row[0] + row[1] // 1000
    assert (config.max_batch, config.max_context, config.memory) == (*asked, memory)


def test_one_size_alone_leaves_the_other_at_its_largest(path: Path) -> None:
    assert taken(path, max_batch=1).reuse_capacity == 108
    assert taken(path, max_context=4096).reuse_capacity == 804


def test_fields_by_name_are_on_top(path: Path) -> None:
    config = taken(path, group_size=4, memory="50MiB")
    assert (config.group_size, config.memory, config.rank) == (4, "50MiB", 12)


def test_every_row_is_its_own_nearest() -> None:
    rows = [{"batch": b, "context": s} for b in range(1, 17) for s in range(4096, 32769, 2048)]
    assert all(nearest(rows, row["batch"], row["context"]) is row for row in rows)
    with pytest.raises(ConfigError, match="whole numbers of at least 1, got 0 and 5"):
        nearest(rows, 0, 5)


def test_a_cache_generates_with_it(path: Path) -> None:
    model = tiny_llama()
    ids = token_ids(700)[None]
    with DiskSwapCache(model, config=path, max_batch=1, engine="memory") as cache:
        output = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert output.shape == (1, 703)
        summary = cache.offloaded[0].predictor.fitted.keys
        kept = tuned().adapter.projections[0][:, :12].to(summary.adapter.dtype)
        torch.testing.assert_close(summary.adapter.flatten(0, 1), kept)


def test_another_models_file_is_refused_by_the_field_that_differs(path: Path) -> None:
    message = r"config\.json' was tuned for another model: weights is \w+, the tuned one's"
    with pytest.raises(ConfigError, match=message):
        DiskSwapCache(tiny_llama(1), config=path)
    with pytest.raises(ConfigError, match="num_key_value_heads is 4, the tuned one's is 2"):
        DiskSwapCache(tiny_llama(num_key_value_heads=4), config=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "hf_offload_cache tuning 2"}, "has the format 'hf_offload_cache tuning 2' and this library reads"),
        ({"rows": []}, "is not what tuning wrote"),
        ({"rows": [{"batch": 1, "context": 10}]}, "is not what tuning wrote"),
        ({"model": None}, "is not what tuning wrote"),
        ({"max_batch": "8"}, "max_batch and max_context must be"),
        ({"memory": "300MiB"}, "is not what tuning wrote"),
        ({"rows": [{"batch": 0, "context": 10, "fields": {}}]}, "is not what tuning wrote"),
        ({"rows": [{"batch": 1, "context": 10**400, "fields": {}}]}, "is not what tuning wrote"),
    ],
)
def test_a_damaged_file_or_another_version(path: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError, match=message):
        DiskSwapCache(tiny_llama(), config=path)


def test_without_its_adapter(path: Path) -> None:
    adapter_of(path).unlink()
    with pytest.raises(AdapterError, match=r"config\.adapter-\w+\.safetensors"):
        DiskSwapCache(tiny_llama(), config=path)


@pytest.mark.parametrize("call", range(2))
@pytest.mark.parametrize("before", [True, False])
def test_interrupted_what_was_there_is_there_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, before: bool
) -> None:
    path = tmp_path / "config.json"
    if before:
        tuned(seed=1).save(path)
    old = {place.name: place.read_bytes() for place in tmp_path.iterdir()}
    calls: list[Any] = []
    replace = os.replace

    def interrupted(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) > call:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(memory=2_000).save(path)
    assert {place.name: place.read_bytes() for place in tmp_path.iterdir()} == old


def test_written_over_the_old_adapter_goes_and_others_stay(path: Path) -> None:
    old = adapter_of(path)
    other = path.with_name("other.json")
    tuned().save(other)
    tuned(seed=1, memory=1_000_000_000).save(path)
    assert taken(path).memory == 1_000_000_000
    assert not old.exists()
    assert sorted(place.suffix for place in path.parent.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]
    tuned(seed=1).save(path)  # the same adapter
    assert Path(str(taken(path).adapter)).exists()
