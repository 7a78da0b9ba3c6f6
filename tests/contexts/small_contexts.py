"""A model without windows, contexts of it by each of the caches, and ways to damage them. No tests in here."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

CACHES = [DiskSwapCache, ClusterCache, SpecCache, AbstractTreeCache]
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


def key() -> bytes:
    return KEY


def other_key() -> bytes:
    return OTHER_KEY


@functools.cache
def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()


def ids(length: int = 300, seed: int = 1) -> torch.Tensor:
    """(1, length)."""
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def prefilled(cls: Any, tokens: torch.Tensor | None = None, **fields: Any) -> Any:
    """An open cache that holds `tokens`."""
    cache = cls(model(), **{"engine": "mapped", **fields})
    with torch.inference_mode():
        model()(ids() if tokens is None else tokens, past_key_values=cache)
    return cache


def saved(folder: Path, cls: Any = DiskSwapCache, tokens: torch.Tensor | None = None, **fields: Any) -> Path:
    """`folder`, a context of `tokens` now."""
    with prefilled(cls, tokens, **fields) as cache:
        cache.save(folder)
    return folder


def answer(cache: Any, new: int = 3) -> list[int]:
    """The ids that follow what the cache holds, greedy."""
    held = cache.input_ids
    prompt = torch.cat([held, torch.full((1, 1), 17)], 1)
    found = model().generate(prompt, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return found[0, prompt.shape[1] :].tolist()


def flip(folder: Path, most: int = 99, ending: str = "records") -> None:
    """One bit in each of the first `most` files, in place, as another process would."""
    for path in sorted(folder.glob(f"*.{ending}"))[:most]:
        with open(path, "r+b") as file:
            file.seek(100)
            byte = file.read(1)
            file.seek(100)
            file.write(bytes([byte[0] ^ 4]))
