"""A small model, a context of it, and ways to answer from one, to copy, change and rewrite it. No tests in here."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import COMMON, Decoded, build
from hostile_files import manifest_of, replace_state, sign

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.contexts import MANIFEST_NAME, pack, unpack
from hf_offload_cache.core import SelectiveCache

FIELDS: dict[str, Any] = {
    "group_size": 8,
    "num_recent": 8,
    "block_tokens": 256,
    "num_selected": 48,
    "reuse_capacity": 16,
    "rank": 8,
    "engine": "mapped",
    "look_ahead": True,
}
"""A record is half payload and half padding; a twelfth of a context is attended to."""
TREE: dict[str, Any] = {
    "chunk_size": 64, "num_recent": 8, "block_tokens": 256, "num_selected": 64, "num_opened": 128, "reuse_capacity": 64,
    "dense_layers": 0, "engine": "mapped", "abstracts": "disk", "compress": 0.0,
}  # fmt: skip
"""Of `AbstractTreeCache`, with abstracts and replicas on the disk. A record is 8 KiB and its replica 4."""
CLUSTERS: dict[str, Any] = {
    "cluster_size": 16, "append_buffer": 8, "join_every": 16, "group_size": 16, "num_recent": 8, "block_tokens": 256,
    "num_selected": 64, "reuse_capacity": 64, "engine": "mapped",
}  # fmt: skip
"""Of `ClusterCache`. A record is half payload and half padding."""
LONG = 600
"""Tokens of a context: more than the 512 that an adapter is made of."""


@functools.cache
def model() -> Any:
    """Three layers, of which one keeps a window of its own."""
    fields = {
        **COMMON,
        "max_position_embeddings": 2048,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    return build(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**fields))


def ids(length: int = LONG, seed: int = 7, rows: int = 1) -> torch.Tensor:
    """Random token ids (rows, length)."""
    return torch.randint(5, COMMON["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def feed(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits (rows, vocabulary) of the last of `tokens`."""
    with torch.no_grad():
        return model()(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def prefilled(
    seed: int = 7, length: int = LONG, rows: int = 1, cls: type[SelectiveCache] = DiskSwapCache, **fields: Any
) -> SelectiveCache:
    own = {"AbstractTreeCache": TREE, "ClusterCache": CLUSTERS}
    cache = cls(model(), **{**own.get(cls.__name__, FIELDS), **fields})
    feed(cache, ids(length, seed, rows))
    return cache


def opened(folder: Path, cls: type[SelectiveCache] = DiskSwapCache, **fields: Any) -> SelectiveCache:
    return cls.open(folder, model(), **{"engine": "mapped", **fields})


def answer(cache: Any, steps: int = 3, start: int = 17) -> Decoded:
    """Tokens and logits of `steps` steps, greedy, begun with the token `start`."""
    token = torch.full((max(1, cache.input_ids.shape[0]), 1), start)
    tokens, logits = [token], []
    for _ in range(steps):
        logits.append(feed(cache, token))
        token = logits[-1].argmax(-1, keepdim=True)
        tokens.append(token)
    return Decoded(torch.cat(tokens, 1), torch.stack(logits))


def same(one: Decoded, other: Decoded) -> bool:
    """To the last bit."""
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.logits, other.logits)


# --- on the disk ------------------------------------------------------------------------------------------------------


def copy_of(source: Path, target: Path, *own: str) -> Path:
    """The context `source` as `target`: files named in `own` are copied, the others linked."""
    target.mkdir(mode=0o700)
    for path in source.iterdir():
        (shutil.copy2 if path.name in own else os.link)(path, target / path.name)
    return target


def files_of(folder: Path) -> dict[str, str]:
    """Name of every file by what it is: "manifest", "cache", "layer 0", "records 0.0", "replicas 0.1"..."""
    values = manifest_of(folder)
    found = {"manifest": MANIFEST_NAME, "cache": values["state"]["file"]}
    for layer_idx, layer in enumerate(values["layers"]):
        found[f"layer {layer_idx}"] = layer["state"]["file"]
        for part_idx, part in enumerate(layer["parts"]):
            kind = "replicas" if part.get("record_bytes") else "records"
            found[f"{kind} {layer_idx}.{part_idx}"] = part["file"]
    return found


def rewrite_values(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the manifest says; what `change` returns takes its place, if it returns anything."""
    values = manifest_of(folder)
    found = change(values)
    sign(folder, values if found is None else found)


def rewrite_state(folder: Path, which: int | None, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tree of a layer's state, or of the cache's (None), and have all names and digests follow."""
    values = manifest_of(folder)
    entry = values["state"] if which is None else values["layers"][which]["state"]
    tree = unpack((folder / entry["file"]).read_bytes(), torch.device("cpu"), "test")
    found = change(tree)
    replace_state(folder, values, which, pack(tree if found is None else found))
    sign(folder, values)
