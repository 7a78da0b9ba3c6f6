"""How much of the attention mass falls on what a cache attends to, and how far is it from `DynamicCache`?

`--of caches`: each cache within `--memory`.
`--of chunks`: what chunks, summaries and the tree lose, compared with judging by all keys.
`--of bits`: what a copy in a few bits loses, and what fetched entries give back (SpeCache, section 4).
`--of guess`: how much of a token's attention lies on the tokens that a guess of it selected, or it itself (SpeCache,
section 3.3): see "outside".
`--of fields`: what each field of each cache changes.
`--of output --tokens 512 --steps 128`: the same of fields that matter in a long output.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from hf_offload_cache import calibrate

from . import fields
from .common import Rows, Study, main
from .contexts import MODEL, default_model, reference_texts
from .teacher_forced import compare, contenders_of, means

Contenders = dict[str, dict[str, Any]]

_CACHES: Contenders = {
    "DiskSwapCache": {"cache": "disk-swap"},
    "AbstractTreeCache": {"cache": "abstract-tree"},
    "ClusterCache": {"cache": "cluster"},
}
_KEYS, _VARIANTS = "eval.baselines.all_keys:", "eval.baselines.tree_variants:"
_ALONE: dict[str, Any] = {"dense_layers": 0, "early_steps": 0, "look_ahead": False}
_FIXED: dict[str, Any] = {"cache": f"{_KEYS}FixedChunksCache", "look_ahead": False}
_BOUNDS: dict[str, Any] = {"cache": f"{_VARIANTS}BoundsChunksCache", "look_ahead": False}
_CHUNKS: Contenders = {
    "tree": {"cache": "abstract-tree", "look_ahead": False},
    "tree alone": {"cache": "abstract-tree", **_ALONE},
    "tree alone, by bounds": {"cache": f"{_VARIANTS}BoundsTreeCache", **_ALONE},
    "tree alone, halves judged": {"cache": f"{_VARIANTS}DescendingTreeCache", **_ALONE},
    "tree alone, all halves judged": {"cache": f"{_VARIANTS}AllHalvesTreeCache", **_ALONE},
    "fixed chunks of 64": _FIXED,
    "fixed chunks of 64, four times as many": {**_FIXED, "num_selected": 1600},
    "fixed chunks of 64, by bounds": _BOUNDS,
    "fixed chunks of 16": {**_FIXED, "chunk_size": 16},
    "fixed chunks of 16, by bounds": {**_BOUNDS, "chunk_size": 16},
    "all keys": {"cache": f"{_KEYS}TokenJudgedCache"},
    "all keys, by chunk": {"cache": f"{_KEYS}ChunkJudgedCache"},
}
_COPIES = {"1 bit, g=32": (1, 32), "1 bit, g=64": (1, 64), "2 bits": (2, 64), "4 bits": (4, 64)}
_BITS: Contenders = {
    f"{name}{how}": {"cache": "spec", "bits": bits, "quant_group": group, **own}
    for name, (bits, group) in _COPIES.items()
    for how, own in {
        "": {}, ", alone": {"num_selected": 0}, ", topped up": {"top_up": "always"},
        ", KIVI, alone": {"num_selected": 0, "cache": "eval.baselines.spec_variants:PlainLowBitCache"},
    }.items()
    if bits == 1 or "KIVI" not in how
}  # fmt: skip
_GUESS: Contenders = {
    f"{count}, {who}": {"cache": "spec", "num_selected": count, "speculative": who == "a guess"}
    for count in (16, 32, 64, 128, 256)
    for who in ("a guess", "itself")
}
OF: dict[str, tuple[Contenders, dict[str, Any]]] = {
    "caches": (_CACHES, {"memory": "1/13"}), "chunks": (_CHUNKS, {"engine": "memory"}), "bits": (_BITS, {}),
    "guess": (_GUESS, {}), "fields": (fields.contenders(fields.OWN) | fields.RULES, {}),
    "output": (fields.contenders(fields.OUTPUT), {"num_selected": 100}),
}  # fmt: skip
"""Contenders of each question, and fields that all have."""


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    loaded = model, tokenizer = default_model(loaded, arguments.model)
    usual, shared = OF[arguments.of]
    if arguments.memory:
        shared = {**shared, "memory": arguments.memory}
    asked = contenders_of(arguments, usual, **shared)
    with tempfile.TemporaryDirectory() as folder:
        calibrated = [one for one in asked.values() if one.get("adapter") == "calibrated"]
        if calibrated:
            path = Path(folder) / "adapter.safetensors"
            calibrate(model, [reference_texts(tokenizer, 2, arguments.tokens)[1]]).save(path)
            for one in calibrated:
                one["adapter"] = str(path)
        compare(arguments, rows, asked, loaded)
    return {"contenders": means(rows.rows)}


STUDY = Study(
    "quality", __doc__, run,
    {
        "of": ("caches", "question", OF),
        "tokens": (4096, "prefilled tokens"),
        "steps": (32, "tokens decoded after them, teacher-forced"),
        "samples": (4, "texts"),
        "memory": (str, "memory budget: a share of the full KV, a size, or none (default: the question's)"),
        **MODEL,
    },
    {"tokens": 1536, "steps": 8, "samples": 1}, settings=True,
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
