"""What does a part of a cache cost and save, by device and batch? Steps on real text, all contenders in turns.

`--of parts`: what each part of `AbstractTreeCache` gains (LeoAM, section 6.3). Summaries rank chunks (LKA), which are
attended to completely: 400 tokens, or the 1,600 that the others read. The best tokens of these are selected, by halves
of chunks as in the paper (IAKM), or by their keys as here. Part of the reads is in 4 bits (DTP). The first reads all
keys and scores each token, without a budget.
`--of chunks`: what judging by summaries saves, compared with judging by all keys.
`--of links`: the share of reads in 4 bits, by a link's bandwidth (LeoAM, figure 13). There are no early steps, which
read nothing ahead.
`--of guess`: what guessing the next token costs, and saves where entries are far (SpeCache, table 6).
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_offload_cache.tuning import sample_ids

from ..bench_text import DYNAMIC, text_rows
from ..bench_text import run as time_steps
from ..profiles import PROFILES, Profile
from .common import Rows, Study, main
from .contexts import default_model

Contenders = dict[str, dict[str, Any]]

_KEYS = "eval.baselines.all_keys:"
_TREE, _COMPRESSED = {"cache": "abstract-tree"}, {"compress": "auto"}
_FIXED = {"cache": f"{_KEYS}FixedChunksCache", "memory": "1/6"}
_PARTS: Contenders = {
    "none": {"cache": f"{_KEYS}TokenJudgedCache"},
    "abstracts": _FIXED,
    "abstracts, compressed": {**_FIXED, **_COMPRESSED},
    "abstracts, four times as many": {**_FIXED, "num_selected": 1600},
    "abstracts, halves judged": {"cache": "eval.baselines.tree_variants:DescendingTreeCache", "memory": "1/6"},
    "abstracts, tokens judged": {**_TREE, "memory": "1/6"},
    "all": {**_TREE, **_COMPRESSED, "memory": "1/6"},
}
_CHUNKS: Contenders = {
    "tree, 1/13": {**_TREE, "memory": "1/13"},
    "tree, 1/13, num_opened=1000": {**_TREE, "memory": "1/13", "num_opened": 1000},
    "tree, 1/13, summaries on disk": {**_TREE, "memory": "1/13", "abstracts": "disk"},
    "tree, 1/6": {**_TREE, "memory": "1/6"},
    "tree, 1/6, compressed": {**_TREE, "memory": "1/6", **_COMPRESSED},
    "fixed chunks": {"cache": f"{_KEYS}FixedChunksCache", "reuse_capacity": 0},
    "all keys": {"cache": f"{_KEYS}TokenJudgedCache"},
    "all keys, ahead, by chunk": {"cache": f"{_KEYS}ChunkJudgedCache"},
}
_AHEAD = {**_TREE, "memory": "1/6", "look_ahead": True, "early_steps": 0}
_LINKS: Contenders = {str(share): {**_AHEAD, "compress": share} for share in (0.0, 0.25, 0.5, 0.75, 1.0, "auto")}
_GUESS: Contenders = {
    "the copy alone": {"cache": "spec", "num_selected": 0},
    "with a guess": {"cache": "spec"},
    "without": {"cache": "spec", "speculative": False},
    "topped up": {"cache": "spec", "top_up": "always"},
}
OF: dict[str, tuple[Contenders, tuple[str, ...], tuple[int, ...]]] = {
    "parts": (_PARTS, ("own", "emmc"), (1, 4)),
    "chunks": (_CHUNKS, ("own", "emmc"), (1, 4, 8)),
    "links": (_LINKS, ("100 MB/s", "200 MB/s", "400 MB/s", "800 MB/s"), (1,)),
    "guess": (_GUESS, tuple(PROFILES), (1,)),
}
"""Contenders, devices and batches of each question."""


def device(name: str) -> Profile | None:
    """One of `PROFILES`, or a link limited by its bandwidth: 20 us to the first byte, 32 requests at once."""
    megabytes, _, unit = name.partition(" ")
    return Profile(name, float(megabytes) * 1e6, 20e-6, 32) if unit == "MB/s" else PROFILES[name]


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, the model alone and `DynamicCache`, on each device and in each batch."""
    model, tokenizer = default_model(loaded)
    contenders, devices, batches = OF[arguments.of]
    if arguments.memory:
        own = {"memory": arguments.memory}
        contenders = {one: {**fields, **(own if "memory" in fields else {})} for one, fields in contenders.items()}
    for name in arguments.devices or devices:
        for batch in arguments.batches or batches:
            if not rows.has(device=name, batch=batch):
                ids = text_rows(sample_ids(None, tokenizer)[0], batch, arguments.tokens + arguments.steps + 1)
                found = time_steps(
                    model, ids, arguments.tokens, arguments.steps, arguments.tokens, contenders, (DYNAMIC,), turn=4,
                    shared_prefill=True, path=arguments.path, profile=device(name) or "own",
                )  # fmt: skip
                for contender, row in found.items():
                    rows.add(device=name, batch=batch, contender=contender, **row)
    return {"steps": summary(rows.rows)}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By device, batch and contender: milliseconds a step, of which it waited and unpacked "idle"; MB read; KL from
    `DynamicCache`; the first 16 steps over later ones; and the share of all keys that is read to choose by."""
    table = {}
    for row in rows:
        found = {"ms": 1e3 * row["median_seconds"], "first_over_settled": row["first_over_settled"]}
        if "waited_seconds" in row:
            found |= {"idle": 1e3 * (row["waited_seconds"] + row["unpack_seconds"]), "kl": row["kl"]}
            found |= {"MB": row["bytes_read_a_step"] / 1e6, "looked_share": row["looked_share"]}
        table[f"{row['device']}, batch {row['batch']}, {row['contender']}"] = found
    return table


STUDY = Study(
    "speed", __doc__, run,
    {
        "of": ("parts", "question", OF),
        "tokens": (7936, "tokens of history"),
        "steps": (48, "decoding steps"),
        "memory": (str, "memory budget, or none (default: the question's)"),
        "batches": ([int], "rows (default: the question's)"),
        "devices": ([str], "devices that entries are read from (default: the question's)"),
    },
    {"tokens": 1024, "steps": 24, "batches": [1], "devices": ["own"]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
