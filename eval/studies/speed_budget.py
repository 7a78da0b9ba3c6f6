"""Fixed memory a sequence (setting A), and a fixed total with the largest batch that it allows (setting B); KVSwap,
sections 4.3 and 5.4."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hf_offload_cache.config import parse_size

from ..compare import setting_of
from ..contenders import METHODS, OWN
from ..equal_memory import BASELINES, bytes_held, fields_for
from ..synthetic import Shape
from .common import Rows, Study, main
from .speed_throughput import QUICK, add_rows, common_arguments, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BITS_16 = 2


def recommended(method: str, shape: Shape) -> dict[str, Any]:
    """The fields that a baseline's own paper recommends, with compact keys in 16 bits.

    InfiniGen: half of the dimensions (KVSwap, section 4.3, "Setting B"). Loki: a quarter of the components (its section
    5). ShadowKV: rank 160, chunks of 8 (its section 5).
    """
    ranks = {"InfiniGen": shape.head_dim // 2, "Loki": shape.head_dim // 4, "ShadowKV": 160}
    rank = ranks.get(method, shape.head_dim // 2)
    reuse = 400 if method == "InfiniGen*+ru" else 0
    group = 8 if method == "ShadowKV" else 1
    return {"rank": rank, "reuse_capacity": reuse, "group_size": group, "summary_dtype": "bfloat16"}


def largest_batch(method: str, total: int, shape: Shape, tokens: int, depth: int) -> tuple[int, dict[str, Any]]:
    """The most sequences that fit `total` bytes for `depth` layers, and the fields; 0 where not even one does.

    `DiskSwapCache` is as in setting A, at 1/13.
    """
    here = total * shape.layers // depth
    if method not in (OWN, *BASELINES):
        return here // (tokens * shape.token_bytes), {}
    own = method == OWN
    fields = fields_for(method, shape, tokens, 1, Fraction(1, 13), depth=depth) if own else recommended(method, shape)
    batch = 0
    while True:
        element = 1 if own else _BITS_16
        held = (batch + 1) * bytes_held(method, shape, tokens, batch + 1, fields, depth, element)
        if held > here:
            return batch, fields
        batch += 1


def run(arguments: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Rows of setting "A" for each fraction and batch, of "B" for each total and method."""
    methods = tuple(arguments.methods)
    for memory in map(Fraction, arguments.fractions):
        for batch in arguments.batch:
            if not rows.has(setting="A", memory=str(memory), batch=batch):
                result = measured(arguments, arguments.tokens, batch, methods, ("on",), memory=memory)
                add_rows(rows, result, setting="A", memory=str(memory), batch=batch)
    probe = setting_of(arguments.shape, arguments.tokens)
    depth = probe.depth or probe.shape.layers
    for total in arguments.totals:
        for name in methods:
            if rows.has(setting="B", memory=total, method=name):
                continue
            fits, fields = largest_batch(name, parse_size(total), probe.shape, arguments.tokens, depth)
            key = {"setting": "B", "memory": total, "fits": fits}
            if not fits:
                rows.add(**key, batch=0, method=name, left_out="not one sequence fits")
                continue
            batch = min(fits, arguments.most)
            by_method = {name: fields} if fields else {}
            result = measured(arguments, arguments.tokens, batch, (name,), ("on",), by_method=by_method)
            add_rows(rows, result, **key, batch=batch)
    ran = [row for row in rows.rows if "left_out" not in row]
    return {
        f"{row['setting']} {row['memory']} {row['method']} x{row['batch']}": row["tokens_per_second_on"] for row in ran
    }


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    """Setting A: tokens a second over the batch. Setting B: a bar a method, its batch written on it."""
    ran = [row for row in rows if "left_out" not in row]
    first, second = figure.subplots(1, 2)
    for key in dict.fromkeys((row["method"], row["memory"]) for row in ran if row["setting"] == "A"):
        points = [row for row in ran if row["setting"] == "A" and (row["method"], row["memory"]) == key]
        batches, rates = [row["batch"] for row in points], [row["tokens_per_second_on"] for row in points]
        first.plot(batches, rates, marker="o", label=f"{key[0]}, {key[1]}")
    first.set_title("A: memory a sequence")
    first.set_xlabel("batch")
    first.set_ylabel("tokens/s, all sequences")
    first.legend()
    bars = [row for row in ran if row["setting"] == "B"]
    places = second.bar(range(len(bars)), [row["tokens_per_second_on"] for row in bars])
    second.bar_label(places, [f"b={row['batch']}" for row in bars])
    second.set_xticks(range(len(bars)), [f"{row['method']}\n{row['memory']}" for row in bars], rotation=30)
    second.set_title("B: memory in total")


def arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--fractions", nargs="+", default=["1/13", "1/34"], help="setting A: of the full KV")
    parser.add_argument("--totals", nargs="+", default=["2000MiB", "800MiB"], help="setting B: for the whole model")
    parser.add_argument("--most", type=int, default=16, help="sequences to run, however many fit")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS,
        default=[OWN, "InfiniGen", "InfiniGen*", "InfiniGen*+ru", "Loki", "ShadowKV"],
    )  # fmt: skip


STUDY = Study(
    "speed_budget",
    "Which method is fastest with so much memory a sequence, and with so much in total?",
    run,
    plot,
    arguments,
    {**QUICK, "tokens": 8192, "batch": [1], "fractions": ["1/13"], "totals": ["800MiB"], "most": 1,
     "methods": [OWN, "InfiniGen*", "ShadowKV"]},
    (12.0, 4.5),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
