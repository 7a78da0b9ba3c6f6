"""Other values than the default for each field of each cache: contenders of `quality --of fields` and `--of output`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = dict[str, tuple[Any, ...]]
"""Field -> values that are tried, one at a time. Other fields stay, except those of `_ADDED`."""
Fields = dict[str, Any]

SHARED: Values = {
    "num_selected": (200, 800),
    "num_sinks": (0, 64),
    "num_recent": (8, 128),
    "group_size": (4, 8),
    "reuse_capacity": (0, 800),
    "look_ahead": (True,),
    "exact": (True,),
    "block_tokens": (256, 4096),
    "write_queue": ("64KiB", "16MiB"),
}
"""Fields of all caches, tried with `DiskSwapCache`."""
OWN: dict[str, Values] = {
    "disk-swap": {
        **SHARED,
        "summary_bytes": (8, 16, 36),
        "summary_dtype": ("int8", "float32"),
        "rank": (16, 96),
        "adapter": ("calibrated",),
        "entry_bits": (8,),
        "heads_apart": (True,),
        "remainder": (False,),
    },
    "abstract-tree": {
        "chunk_size": (16, 128),
        "abstracts": ("disk",),
        "num_opened": (400, 800),
        "selected_share": (0.1, 0.2),
        "early_steps": (0, 64),
        "dense_layers": (0, 4),
        "dense_share": (0.25, 1.0),
        "dense_chunk_size": (16, 64),
        "resident_layers": (0,),
        "compress": (0.5, 1.0),
        "host_slots": ("8MiB", "32MiB"),
        "entry_bits": (8,),
    },
    "cluster": {
        "cluster_size": (8, 32),
        "num_clusters": (128,),
        "cluster_capacity": (16, 30),
        "selected_share": (0.1, 0.2),
        "centroids": ("disk",),
        "remainder": (True,),
        "entry_bits": (8,),
    },
    "spec": {"bits": (1, 4), "quant_group": (32,), "speculative": (False,), "top_up": ("always",)},
}
OUTPUT: dict[str, Values] = {
    "cluster": {"split_threshold": (1.05, 1e9), "append_buffer": (0, 64), "join_every": (4, 128)}
}
"""Fields that matter in a long output."""
_ADDED: dict[str, Fields] = {
    "block_tokens": {"exact": True},
    "cluster_capacity": {"cluster_size": 12},
    "dense_share": {"dense_chunk_size": 8},
    "selected_share": {"num_selected": None},
    "summary_dtype": {"rank": 48},
}
"""Fields that another needs to have an effect, or to have only its own. The label names them too."""
DEFAULT = "default fields"
_VARIANTS = "eval.baselines.swap_variants:"
RULES: dict[str, Fields] = {
    "disk-swap: as in the paper": {"cache": f"{_VARIANTS}PaperSwapCache", "look_ahead": True},
    "disk-swap: groups at random": {"cache": f"{_VARIANTS}RandomSwapCache", "look_ahead": False},
}
"""Other rules of selection, with the default fields."""


def contenders(tables: Mapping[str, Values]) -> dict[str, Fields]:
    """By "cache: field=value, added=value", each cache's default first. No cache measures whether to look ahead."""
    found: dict[str, Fields] = {}
    for cache, values in tables.items():
        base: Fields = {"cache": cache, **({} if cache == "spec" else {"look_ahead": False})}
        found[f"{cache}: {DEFAULT}"] = base
        for field, several in values.items():
            for value in several:
                own = {field: value, **_ADDED.get(field, {})}
                label = ", ".join(f"{name}={one}" for name, one in own.items())
                found[f"{cache}: {label}"] = {**base, **own}
    return found
