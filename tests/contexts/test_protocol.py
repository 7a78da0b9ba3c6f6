"""Contexts know caches by a protocol."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SMALL, prompt, tiny
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, OffloadCache, OffloadConfig
from hf_offload_cache.contexts import StoredLayer, fork, open_context
from hf_offload_cache.contexts.save import save
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.model import may_crop


@pytest.mark.parametrize("cls", [OffloadCache, DiskSwapCache])
def test_which_layers_lie_in_a_store(cls: type[OffloadCache]) -> None:
    model = tiny("gemma3")
    with cls(model, **SMALL) as cache:
        assert [isinstance(layer, StoredLayer) for layer in cache.layers] == [False, True, False, True]
    assert not any(isinstance(layer, StoredLayer) for layer in DynamicCache(config=model.config).layers)


@pytest.mark.parametrize(("name", "may"), [("llama", True), ("gemma3", False), ("mistral_sliding", False)])
def test_which_models_let_a_cache_be_cropped(name: str, may: bool) -> None:
    assert may_crop(tiny(name)) is may


@pytest.mark.parametrize("cls", [OffloadCache, DiskSwapCache])
def test_configurations_name_fields_that_they_have(cls: type[OffloadCache]) -> None:
    config_class = cls.config_class
    fields = config_class.__dataclass_fields__
    for name in ("stored_format", "of_a_run", "kept_on_open", "not_with_exact"):
        named = getattr(config_class, name)
        assert set(named) <= set(fields) and len(set(named)) == len(named), name
    assert not set(config_class.kept_on_open) & set(config_class.of_a_run)


class PlainCache(DynamicCache):
    """Not of our family: it keeps all in memory, and has what the protocol asks for and no more."""

    config_class = OffloadConfig
    sequences, adapters, identity, path = 1, None, None, Path("/")

    def __init__(self, model: Any, path: Any = None, config: Any = None, **fields: Any) -> None:
        super().__init__(config=model.config)
        self.model = self.given_model = model
        self.config = self.config_class.load(config, fields)
        self.storage = SimpleNamespace(directory=path, engine="memory", ring=None, key=None, account=MemoryAccount())
        self.ids = torch.empty(1, 0, dtype=torch.int64)
        self.closed = False

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def warn(self, message: str, stacklevel: int = 2) -> None:
        warnings.warn(message, stacklevel=stacklevel)

    def check_open(self) -> None:
        assert not self.closed

    def freeze(self) -> None:
        pass

    def capture(self) -> dict[str, Any]:
        return {"ids": self.ids}

    def restore(self, tree: dict[str, Any]) -> None:
        self.ids = tree["ids"]

    def close(self) -> None:
        self.closed = True


def test_any_cache_that_keeps_the_protocol_is_saved_opened_and_forked(tmp_path: Path) -> None:
    model = tiny("gemma3")
    cache = PlainCache(model)
    with torch.no_grad():
        model(prompt(model), past_key_values=cache)
        cache.ids = prompt(model)
        save(cache, tmp_path / "context", overwrite=False, tokenizer=None, full_digest=False)
        opened = open_context(PlainCache, tmp_path / "context", model, None, None, None, {})
        step = torch.tensor([[17]])
        logits = [model(step, past_key_values=each).logits for each in (fork(opened), opened, cache)]
    assert torch.equal(opened.ids, prompt(model)) and not any(each.closed for each in (opened, cache))
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[2])
