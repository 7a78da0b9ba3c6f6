"""The memory that a `BudgetError` names does, as it is written, and a byte less does not."""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, config_of, tiny
from pairwise import combinations

from hf_offload_cache import OffloadCache, registry
from hf_offload_cache.config import parse_size
from hf_offload_cache.console.main import main
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.model import Geometry, KeptLayer, LayerShape
from hf_offload_cache.report import least_size_text

GEOMETRIES = {
    "SmolLM2": Geometry.uniform(30, 9, 3, 64),
    "tiny": Geometry.uniform(2, 4, 2, 16, torch.float32),
    "windows": Geometry.uniform(3, 4, 1, 256, kept=(KeptLayer(0, 1024, 511),) * 15),
    "uneven": Geometry(
        (LayerShape(4, 2, 16, 2, 16), LayerShape(8, 4, 64, 4, 32)), torch.float32, num_blocks=2, hidden_size=64
    ),
    "nothing offloaded": Geometry((), torch.bfloat16, kept=(KeptLayer(10, 64, 128),)),
    "on a GPU": Geometry.uniform(2, 4, 2, 64, torch.float32, device="cuda"),
}
CACHES = [*registry.CACHES, "exact"]
FIELDS: list[dict[str, Any]] = [
    {}, {"engine": "memory"}, {"exact": True}, {"num_recent": 8}, {"write_queue": "64KiB"}, {"num_sinks": 70},
    {"look_ahead": False}, {"num_selected": 16}, {"engine": "mapped", "block_tokens": 512},
]  # fmt: skip


def class_of(name: str) -> Any:
    return OffloadCache if name == "exact" else registry.cache_class(name)


def least_of(error: BudgetError) -> tuple[str, str]:
    """The bytes and the size, as the error writes them."""
    found = re.search(r"need at least ([\d,]+) \(([^)]+)\)", str(error))
    assert found is not None, error
    return found[1], found[2]


def check(cls: Any, geometry: Geometry, context: int, batch: int, fields: dict[str, Any]) -> None:
    """Asked with far too little and with a byte too little it says the same, and that is enough."""
    with pytest.raises(BudgetError) as refused:
        cls.fit(geometry, 1, context, batch, dict(fields))
    exact, rounded = least_of(refused.value)
    least = parse_size(exact)
    for text in (exact, rounded):
        memory = parse_size(text)
        config = cls.fit(geometry, memory, context, batch, dict(fields))
        assert cls.plan(geometry, config, context, batch).peak_bytes <= memory
    assert least <= parse_size(rounded) < 1.1 * least + 1  # a tenth of a unit, of one unit at least
    if least > 1:
        with pytest.raises(BudgetError) as again:
            cls.fit(geometry, least - 1, context, batch, dict(fields))
        assert least_of(again.value) == (exact, rounded)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("which", GEOMETRIES)
def test_the_least_memory_does_and_a_byte_less_does_not(which: str, name: str) -> None:
    cls, place = class_of(name), list(GEOMETRIES).index(which) + CACHES.index(name)
    for turn, (context, batch) in enumerate(((2, 3), (700, 1))):
        fields = {key: value for key, value in FIELDS[(2 * place + turn) % len(FIELDS)].items()
                  if hasattr(cls.config_class, key)}  # fmt: skip
        check(cls, GEOMETRIES[which], context, batch, fields)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_least_memory_of_many_wishes(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(40):
        cls, geometry = class_of(chosen.choice(CACHES)), chosen.choice(list(GEOMETRIES.values()))
        fields = {key: value for one in chosen.sample(FIELDS, 2) for key, value in one.items()
                  if hasattr(cls.config_class, key)}  # fmt: skip
        check(cls, geometry, chosen.choice([1, 7, 40, 513, 1000, 8000, 32768]), chosen.choice([1, 1, 3, 8]), fields)


@pytest.mark.parametrize("name", [*registry.CACHES, "exact"])
def test_a_cache_runs_in_the_least_memory(name: str) -> None:
    """As `for_budget` takes it, written either way; a model with windows, to the last token of the context."""
    if name != "exact" and (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    model, cls = tiny("gemma3"), class_of(name)
    ids = torch.randint(3, 190, (1, 300), generator=torch.Generator().manual_seed(0))
    with pytest.raises(BudgetError) as refused:
        cls.for_budget(model, "1KiB", max_context=300, engine="direct")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for memory in least_of(refused.value):
            with cls.for_budget(model, memory, max_context=300, engine="direct") as cache, torch.no_grad():
                model(input_ids=ids[:, :280], past_key_values=cache)
                for place in range(280, 300):
                    model(input_ids=ids[:, place : place + 1], past_key_values=cache)
                report = cache.report()
            assert report.peak_memory_bytes <= report.memory_budget == parse_size(memory)


@pytest.mark.parametrize(("name", "model_name"), combinations(registry.CACHES, ("llama", "gemma3")))
def test_the_console_takes_what_it_names(name: str, model_name: str, tmp_path: Path, capsys: Any) -> None:
    """`plan --memory` with what its error says, in bytes and rounded."""
    config_of(model_name).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()),
                    "architectures": [f"{TINY[model_name][0]}ForCausalLM"]})
    )  # fmt: skip
    asked = ["plan", "--model", str(tmp_path), "--context", "500", "--cache", name, "--set", "engine=direct"]
    assert main([*asked, "--memory", "2KiB"]) == 2
    found = re.search(r"need at least ([\d,]+) \(([^)]+)\)", capsys.readouterr().err)
    assert found is not None
    for text in (found[1], found[1].replace(",", ""), found[2], found[2].replace(" ", "")):
        assert main([*asked, "--memory", text]) == 0, text
        assert "fields:" in capsys.readouterr().out
    assert main([*asked, "--memory", str(int(found[1].replace(",", "")) - 1)]) == 2


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 1025, 2108, 2111, 4_775_404, 2**20 - 1, 2**20, 2**30 - 1, 2**34 + 1])
def test_a_rounded_size_is_no_less(nbytes: int) -> None:
    text = least_size_text(nbytes)
    assert parse_size(text) >= nbytes
    step = {"B": 1, "KiB": 2**10 / 10, "MiB": 2**20 / 10, "GiB": 2**30 / 100}[text.split()[1]]
    assert parse_size(text) - nbytes < step


def test_exact_trees_have_blocks_of_whole_chunks() -> None:
    """The planner chose blocks of 48 tokens for chunks of 64, which the configuration refuses."""
    cls, geometry = registry.cache_class("abstract-tree"), GEOMETRIES["tiny"]
    with pytest.raises(BudgetError) as refused:
        cls.fit(geometry, 1000, 700, 1, {"exact": True})
    config = cls.fit(geometry, parse_size(least_of(refused.value)[0]), 700, 1, {"exact": True})
    assert config.block_tokens >= config.group_size
