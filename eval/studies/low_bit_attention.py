"""How long does attention over a copy in a few bits take, compared with the keys and values themselves?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import LowBitCopy, LowBitForm, MixedAttention

from .common import Rows, Study, main

_PLAIN = "as stored"


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    heads, key_heads, dim = arguments.heads
    form = RecordFormat(key_heads, dim, key_heads, dim, torch.bfloat16, 4)
    for batch in arguments.batch:
        if rows.has(batch=batch):
            continue
        made = torch.Generator().manual_seed(0)
        shape = batch, key_heads, arguments.tokens, dim
        keys, values = (torch.randn(shape, generator=made).bfloat16() for _ in range(2))
        query = torch.randn(batch, heads, 2, dim, generator=made).bfloat16()
        latest = keys[:, :, -64:], values[:, :, -64:]
        for queries in (1, 2):
            own = query[:, :, :queries].unflatten(1, (key_heads, -1)).flatten(2, 3)
            once = partial(torch.nn.functional.scaled_dot_product_attention, own, keys, values)
            rows.add(batch=batch, queries=queries, what=_PLAIN, **_taken(once, arguments.repetitions))
        for bits in (1, 2, 4):
            copy = LowBitCopy(LowBitForm(form, bits, 64), batch, torch.device("cpu"), MemoryAccount())
            copy.append([(keys, values)], arguments.tokens)
            for queries in (1, 2):
                once = partial(_over_copy, copy, query[:, :, :queries], latest)
                rows.add(batch=batch, queries=queries, what=f"{bits} bits", **_taken(once, arguments.repetitions))
            copy.close()
    ratios = {}
    for batch in arguments.batch:
        plain, low = (rows.where(batch=batch, queries=1, what=what)[0]["milliseconds"] for what in (_PLAIN, "2 bits"))
        ratios[f"batch {batch}"] = low / plain
    return {"2 bits over as stored": ratios}


def _over_copy(copy: LowBitCopy, query: torch.Tensor, latest: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    mixed = MixedAttention(copy, query, query.shape[3] ** -0.5, latest, None)
    return mixed.attend([], range(query.shape[2]))[0]


def _taken(once: Callable[[], Any], repetitions: int) -> dict[str, float]:
    """Milliseconds: median and quartiles."""
    once()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        once()
        taken.append(1e3 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(taken, n=4)
    return {"milliseconds": middle, "from_": low, "to": high}


STUDY = Study(
    "low_bit_attention", __doc__, run,
    {
        "tokens": (32768, "tokens of the copy"),
        "batch": ([1, 4], "rows"),
        "heads": ([9, 3, 64], "query heads, key heads, and their width"),
        "repetitions": (9, "timed calls"),
    },
    {"tokens": 2048, "batch": [1], "repetitions": 3},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
