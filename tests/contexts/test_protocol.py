"""Contexts know caches by a protocol: nothing of a cache, and no transformers, is imported in their room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SMALL, tiny
from transformers import DynamicCache

import hf_offload_cache.contexts
from hf_offload_cache import DiskSwapCache, OffloadCache
from hf_offload_cache.contexts.protocol import StoredLayer

ROOM = Path(hf_offload_cache.contexts.__file__).parent
LOWER = {"config", "errors", "registry", "memory", "model", "report", "stores"}
"""What contexts may import of this package."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, within functions and for types only too: dots before it, and the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


def test_only_lower_rooms_are_imported() -> None:
    for path in ROOM.glob("*.py"):
        for level, module in imports(path):
            top = module.partition(".")[0]
            assert level != 0 or top not in ("transformers", "hf_offload_cache"), (path.name, module)
            assert level != 2 or top in LOWER, (path.name, module)


def test_no_file_of_the_room_imports_itself_over_others() -> None:
    of = {path.stem: {module for level, module in imports(path) if level == 1} for path in ROOM.glob("*.py")}
    done: set[str] = set()
    while ready := {name for name, needs in of.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(of), f"in a circle, or behind one: {sorted(set(of) - done)}"


@pytest.mark.parametrize("cls", [OffloadCache, DiskSwapCache])
def test_which_layers_lie_in_a_store(cls: type[OffloadCache]) -> None:
    model = tiny("gemma3")
    with cls(model, **SMALL) as cache:
        assert [isinstance(layer, StoredLayer) for layer in cache.layers] == [False, True, False, True]
    assert not any(isinstance(layer, StoredLayer) for layer in DynamicCache(config=model.config).layers)


@pytest.mark.parametrize(("name", "may"), [("llama", True), ("gemma3", False), ("mistral_sliding", False)])
def test_which_models_let_a_cache_be_cropped(name: str, may: bool) -> None:
    assert DiskSwapCache.may_crop(tiny(name)) is may


@pytest.mark.parametrize("cls", [OffloadCache, DiskSwapCache])
def test_configurations_name_fields_that_they_have(cls: type[OffloadCache]) -> None:
    config_class = cls.config_class
    fields = config_class.__dataclass_fields__
    for name in ("stored_format", "of_a_run", "kept_on_open", "not_beside_exact"):
        named = getattr(config_class, name)
        assert set(named) <= set(fields) and len(set(named)) == len(named), name
    assert not set(config_class.kept_on_open) & set(config_class.of_a_run)
