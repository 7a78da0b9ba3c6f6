"""How long does attention over a copy in a few bits take, beside that over the keys and values themselves?"""

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

from .common import Rows, Study, judged, main

_PLAIN = "as stored"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="of queries, of keys, and their width")
    parser.add_argument("--repetitions", type=int, default=9)


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    heads, key_heads, dim = arguments.heads
    form = RecordFormat(key_heads, dim, key_heads, dim, torch.bfloat16, 4)
    for batch in arguments.batch:
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
    found = []
    for batch in arguments.batch:
        plain, low = (
            rows.where(batch=batch, queries=1, what=what)[0]["milliseconds"] for what in (_PLAIN, "2 bits")
        )
        found.append(judged(f"attention over 2 bits over that as stored, batch {batch}", low / plain, most=1.0))
    return {"must_reach": found}


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


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    names = [f"{row['what']}, batch {row['batch']}, {row['queries']} tokens" for row in rows]
    axes.barh(range(len(rows)), [row["milliseconds"] for row in rows])
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(xlabel="ms a layer")


STUDY = Study("low_bit_attention", __doc__, run, plot, arguments, {"tokens": 2048, "batch": [1], "repetitions": 3})

if __name__ == "__main__":
    main(STUDY)
