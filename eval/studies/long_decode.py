"""How do clusters that adapt to a long output compare with clusters that do not, and with none? (DynaKV, section 8)"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hf_offload_cache.methods.cluster import ClusterConfig
from hf_offload_cache.tuning import sample_ids

from ..bench_text import text_rows
from .common import Rows, Study, main
from .contexts import default_model, open_cache
from .long_contender import LongContender
from .teacher_forced import contenders_of

_BASELINES = "eval.baselines.clusters:"
ADAPTIVE, STATIC, LOCAL, ROWS, AT_ONCE = "adaptive", "static", "local", "token rows", "adaptive, split at once"
USUAL: dict[str, dict[str, Any]] = {
    ADAPTIVE: {"cache": "cluster"},
    STATIC: {"cache": _BASELINES + "StaticClusterCache"},
    LOCAL: {"cache": _BASELINES + "LocalClusterCache"},
    AT_ONCE: {"cache": "cluster", "append_buffer": 0},
    ROWS: {"cache": "disk-swap", "group_size": 1},
}
"""Decoded tokens join clusters that are split; or the prompt's clusters, which stay; or form their own clusters, a
window at a time; or join clusters immediately, which are read for it; or there are no clusters."""
_COLOURED = 10
"""Clusters drawn in colours that one can tell apart."""


@contextlib.contextmanager
def opened(
    name: str, fields: dict[str, Any], loaded: Any, arguments: argparse.Namespace, held: int
) -> Iterator[LongContender]:
    """A contender on the sample text that has read its prompt, with room for `held` tokens. Static clusters are as many
    from the beginning as the others' will be, if there are two keys for each."""
    model, tokenizer = loaded
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    if fields.get("cache", "").endswith("StaticClusterCache"):
        keys = fields.get("cluster_size") or ClusterConfig().cluster_size
        fields = {"num_clusters": min(held // keys, arguments.prompt // 2), **fields}
    with open_cache(model, fields, held + 8, arguments.path) as cache:
        yield LongContender(name, model, cache, ids, arguments.prompt)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each contender, one after the other; `long_growth` times steps in turns."""
    loaded, held = default_model(loaded), arguments.prompt + arguments.steps
    for name, fields in contenders_of(arguments, USUAL).items():
        if rows.has(name=name):
            continue
        with opened(name, fields, loaded, arguments, held) as one:
            for step in range(arguments.steps):
                one.look() if step % arguments.every == arguments.every - 1 else one.step()
                if step % 512 == 511:
                    rows.say(f"{name}: {step + 1:,} of {arguments.steps:,} steps, {sum(one.seconds):.0f} s")
            rows.add(name=name, **one.row())
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Measurements by contender, with the last third of those by thirds."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        flat = {key: value for key, value in row.items() if isinstance(value, int | float)}
        by_thirds = (key for key in ("ms", "mass", "oracle") if row[key])
        table[row["name"]] = {**flat, **{f"late {key}": row[key][-1] for key in by_thirds}}
    return {"contenders": table}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Keys by their first two components, those of the largest clusters in a colour each, after the prompt and at the
    end (figure 4 of the paper); and the mass captured, by thirds of the decode."""
    drawn = [row for row in rows if row.get("pictures") and row["name"] in (ADAPTIVE, STATIC, LOCAL)]
    if drawn:
        upper, lower = figure.subfigures(2, 1, height_ratios=(2, 1))
        for column, row in zip(upper.subplots(2, len(drawn), squeeze=False).T, drawn, strict=True):
            for axes, when, picture in zip(column, ("after the prompt", "at the end"), row["pictures"], strict=True):
                at, cluster = np.array(picture["at"]), np.array(picture["cluster"])
                axes.scatter(*at.T, color="lightgrey", s=2)
                largest = np.argsort(-np.bincount(cluster[cluster >= 0]), kind="stable")[:_COLOURED]
                for colour, number in enumerate(largest.tolist()):
                    axes.scatter(*at[cluster == number].T, color=f"C{colour}", s=9)
                axes.set(title=f"{row['name']}, {when}", xticks=[], yticks=[])
    else:
        lower = figure
    axes = lower.subplots()
    for row in rows:
        if row["mass"]:
            axes.plot(("first", "middle", "last"), row["mass"], marker="o", label=row["name"])
    axes.set(ylabel="mass captured", xlabel="third of the decode")
    axes.legend(fontsize="small")


STUDY = Study(
    "long_decode", __doc__, run,
    {
        "prompt": (512, "prefilled tokens"),
        "steps": (4096, "tokens decoded after them, teacher-forced"),
        "every": (64, "steps from one look at the attention to the next"),
    },
    {"prompt": 320, "steps": 96, "every": 16}, settings=True, plots={"plot": plot}, size=(10.0, 10.0),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
