"""How do clusters that follow a long output do beside those that do not, and beside none? (DynaKV, section 8)"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hf_offload_cache.caches.cluster import ClusterLayer
from hf_offload_cache.console.default_model import load_default_model
from hf_offload_cache.core.selective_cache import SelectiveCache
from hf_offload_cache.core.selective_layer import SelectiveLayer
from hf_offload_cache.fetch.choice import Choice
from hf_offload_cache.history.clustered_entries import ClusteredEntries
from hf_offload_cache.tuning.sample import sample_ids

from ..bench_text import text_rows
from .common import Rows, Study, judged, main
from .contexts import open_cache
from .fidelity import contenders_of, setting_argument
from .watch import Look, Watch

_BASELINES = "eval.baselines.clusters:"
ADAPTIVE, STATIC, LOCAL, ROWS, AT_ONCE = "adaptive", "static", "local", "token rows", "adaptive, split at once"
USUAL: dict[str, dict[str, Any]] = {
    ADAPTIVE: {"cache": "cluster"},
    STATIC: {"cache": _BASELINES + "StaticClusterCache"},
    LOCAL: {"cache": _BASELINES + "LocalClusterCache"},
    AT_ONCE: {"cache": "cluster", "append_buffer": 0},
    ROWS: {"cache": "disk-swap", "group_size": 1},
}
"""What is decoded joins clusters that are split; or clusters of the prompt, as many from the beginning as the others
come to have; or makes clusters of its own, a window at a time. And joins clusters at once, read for it; or no clusters.
"""
TURN = 32
"""Steps that one contender takes before the next does."""
_SHOWN = 12, 1
"""Layer and key head of which keys are drawn."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are prefilled")
    parser.add_argument("--steps", type=int, default=4096, help="tokens decoded after them, teacher-forced")
    parser.add_argument("--every", type=int, default=64, help="steps from one look at the attention to the next")
    setting_argument(parser)


class Contender:
    """One cache over ids (1, T), and what is measured of it."""

    def __init__(self, name: str, model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> None:
        self.name, self.model, self.cache, self.ids, self.place = name, model, cache, ids, prompt
        self.seconds: list[float] = []
        self.mass: list[list[tuple[float, float]]] = []
        self.runs: list[tuple[int, int]] = []
        self.settling = Settling()
        self.feed(0, prompt)
        self.pictures = [self._picture()]
        self._before: dict[str, Any] = self._report()

    def _report(self) -> dict[str, Any]:
        if not isinstance(self.cache, SelectiveCache):
            return {}
        self.cache.storage.prefetcher.flush()
        return self.cache.report().to_dict()

    def feed(self, first: int, last: int) -> None:
        with torch.no_grad():
            self.model(self.ids[:, first:last], past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self) -> None:
        with self.settling.counted(self.cache):
            start = time.perf_counter()
            self.feed(self.place, self.place + 1)
            self.seconds.append(time.perf_counter() - start)
        self.place += 1

    def look(self) -> None:
        """One more step, of which the attention is looked at, and how what is wanted lies on the disk."""
        if not isinstance(self.cache, SelectiveCache) or self.cache.selecting is None:
            return self.step()
        layers, found = self.cache.selective, list[tuple[float, float]]()
        first, last = self.cache.config.num_sinks, self.place - self.cache.config.num_recent  # type: ignore[attr-defined]

        def told(look: Look) -> None:
            if look.columns is not None:
                found.append(look.between(first, last))

        def runs(layer_idx: int, choice: Choice) -> None:
            history = self.cache.layers[layer_idx].history
            extents = history.extents(choice.units)
            there = extents.records >= 0
            held = there * history.form.group_size if extents.count is None else extents.count
            records = np.sort(extents.records[there])
            self.runs.append((int(held[there].sum()), 1 + int((np.diff(records) != 1).sum())))

        keys = [layer.rows.unfold(layer.history.whole()[0]) for layer in layers]
        self.cache.selecting.watch = runs
        with Watch(self.cache, keys, told):
            self.feed(self.place, self.place + 1)
        self.cache.selecting.watch = None
        self.place += 1
        if found:
            self.mass.append(found)

    def _picture(self) -> dict[str, Any] | None:
        """Keys (n, 2), by their first two components, and their clusters (n,)."""
        layers = getattr(self.cache, "selective", [])
        layer = layers[min(_SHOWN[0], len(layers) - 1)] if layers else None
        if not isinstance(layer, ClusterLayer):
            return None
        keys, labels, _ = clusters_of(layer, min(_SHOWN[1], layer.history.rows - 1))
        middle = keys - keys.mean(0)
        plane = torch.pca_lowrank(torch.from_numpy(middle), 2, center=False)[2].numpy()
        return {"at": (middle @ plane).round(3).tolist(), "cluster": labels.tolist()}

    def row(self) -> dict[str, Any]:
        """What was measured: `mass` captured outside sinks and tail, and `oracle`'s, and `ms` a step, by thirds;
        `settling`, what `Settling` counted; of decoding alone bytes, reads and hits a step; `run`, entries that lie
        side by side; `variance` within `clusters`, those of one centroid together."""
        parts = np.array_split(np.array(self.mass), 3) if self.mass else []
        thirds = [np.mean(part, (0, 1)).tolist() for part in parts]
        row: dict[str, Any] = {"ms": [1e3 * statistics.median(part) for part in np.array_split(self.seconds, 3)]}
        row |= {"seconds": sum(self.seconds), "steps": len(self.seconds)}
        row |= {"mass": [one[0] for one in thirds], "oracle": [one[1] for one in thirds]}
        if not isinstance(self.cache, SelectiveCache):
            return row
        after, steps = self._report(), len(self.seconds)
        for name in ("bytes_read", "bytes_written", "reads"):
            row[f"{name}_a_step"] = (after[name] - self._before[name]) / steps
        row |= {"hit_rate": after["hit_rate"], "peak_share": after["peak_memory_bytes"] / after["full_kv_bytes"]}
        row["run"] = sum(entries for entries, _ in self.runs) / max(1, sum(count for _, count in self.runs))
        row |= {f"settling_{name}": value for name, value in vars(self.settling).items()}
        layers = [layer for layer in self.cache.selective if isinstance(layer, ClusterLayer)]
        if layers:
            apart = [clusters_of(layer, each)[2] for layer in layers for each in range(layer.history.rows)]
            row |= dict(zip(("variance", "clusters"), np.mean(apart, 0).tolist(), strict=True))
        row["pictures"] = [self.pictures[0], self._picture()] if self.pictures[0] else []
        return row


class Settling:
    """What adapting clusters took, while it was counted: seconds of joining, settling and splitting; bytes that were
    read for it; and bytes that a layout without room between clusters would have moved: whenever one grows, all of the
    row that lie behind it."""

    def __init__(self) -> None:
        self.seconds, self.loaded_bytes, self.moved_bytes = 0.0, 0, 0

    @contextlib.contextmanager
    def counted(self, cache: Any) -> Iterator[None]:
        """While entered, of the clusters of a cache."""
        layers = getattr(cache, "selective", [])
        owners = [layer.history.clustered for layer in layers if isinstance(layer, ClusterLayer)]
        depth = [0]
        for own in owners:
            for name, note in (("add", None), ("settle", self._moved), ("read", self._loaded)):
                setattr(own, name, self._timed(getattr(own, name), own, note, depth))
        try:
            yield
        finally:
            for own in owners:
                for name in ("add", "settle", "read"):
                    delattr(own, name)

    def _timed(self, call: Callable[..., Any], own: ClusteredEntries, note: Any, depth: list[int]) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            if note is not None:
                note(own, *given[:2])
            depth[0] += 1
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    self.seconds += time.perf_counter() - start

        return timed

    def _moved(self, own: ClusteredEntries, row: int, cluster: int) -> None:
        self.moved_bytes += int(own.stored[row, cluster:].sum()) * own.form.entry_bytes

    def _loaded(self, own: ClusteredEntries, row: int, cluster: int) -> None:
        self.loaded_bytes += int(own.page_counts[row, cluster]) * own.form.record_bytes


def clusters_of(layer: SelectiveLayer, row: int) -> tuple[np.ndarray, np.ndarray, tuple[float, int]]:
    """Of the keys (n, D) of one row which cluster each is in, (n,), -1: none; and the mean squared distance to the mean
    of their cluster, and how many clusters there are. Clusters of one centroid are one."""
    assert isinstance(layer, ClusterLayer)
    own = layer.history.clustered  # type: ignore[attr-defined]
    keys = layer.history.whole()[0][row].transpose(0, 1).flatten(1).float().cpu().numpy()
    same = np.unique(own.partition.centroids[row], axis=0, return_inverse=True)[1].reshape(-1)
    labels = np.full(len(keys), -1)
    labels[: own.sealed] = np.unique(same[own.labels[row]], return_inverse=True)[1]
    inside, count = labels >= 0, int(labels.max(initial=-1)) + 1
    held = np.bincount(labels[inside], minlength=count)
    means = np.zeros((count, keys.shape[1]), dtype=np.float32)
    np.add.at(means, labels[inside], keys[inside])
    means /= held[:, None]
    return keys, labels, (float(np.square(keys[inside] - means[labels[inside]]).sum(1).mean()), count)


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """A row for each contender; `loaded`: a model and its tokenizer in the place of the default one."""
    if rows.rows:
        return summary(rows.rows)
    model, tokenizer = load_default_model(torch.bfloat16) if loaded is None else loaded
    held = arguments.prompt + arguments.steps
    ids = text_rows(sample_ids(None, tokenizer)[0], 1, held + 1)
    contenders = contenders_of(arguments, USUAL)
    with contextlib.ExitStack() as stack:
        full = DynamicCache(config=model.config)
        each: list[Contender] = [Contender("DynamicCache", model, full, ids, arguments.prompt)]
        for name, contender in contenders.items():
            fields = dict(contender.fields or {})
            if fields.get("cache", "").endswith("StaticClusterCache"):
                fields.setdefault("num_clusters", held // 32)
            cache = stack.enter_context(open_cache(model, fields, held + 8, arguments.path))
            each.append(Contender(name, model, cache, ids, arguments.prompt))
        for number, first in enumerate(range(0, arguments.steps, TURN)):
            for one in each if number % 2 == 0 else each[::-1]:
                for step in range(first, min(first + TURN, arguments.steps)):
                    one.look() if step % arguments.every == arguments.every - 1 else one.step()
        for one in each:
            rows.add(name=one.name, **one.row())
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By contender what was measured, lists by thirds of the decode; and what is asked of the adaptive one."""
    table = {row["name"]: row for row in rows}
    shown: dict[str, dict[str, Any]] = {}
    for name, row in table.items():
        flat = {key: value for key, value in row.items() if isinstance(value, int | float)}
        shown[name] = {**flat, **{f"late {key}": row[key][-1] for key in ("ms", "mass", "oracle") if row[key]}}
    reached = []
    if {ADAPTIVE, STATIC, LOCAL} <= set(table):
        own, static, local = (table[name] for name in (ADAPTIVE, STATIC, LOCAL))
        late = {name: table[name]["mass"][-1] for name in (ADAPTIVE, STATIC, LOCAL)}
        reached += [
            judged("late mass over static", late[ADAPTIVE] / late[STATIC], least=1.3),
            judged("late mass over the better of both", late[ADAPTIVE] / max(late[STATIC], late[LOCAL]), least=1.03),
            judged("variance over static", own["variance"] / static["variance"], most=0.65),
            judged("variance over local", own["variance"] / local["variance"], most=1.0),
            judged("late step of static over ours", static["ms"][-1] / own["ms"][-1], least=1.4),
            judged("late step of local over ours", local["ms"][-1] / own["ms"][-1], least=1.2),
            judged("share of the decode spent adapting", own["settling_seconds"] / own["seconds"], most=0.05),
            judged(
                "bytes written, over moving all that lies behind",
                own["bytes_written_a_step"] * own["steps"] / own["settling_moved_bytes"], most=1e-3,
            ),
        ]  # fmt: skip
    if {ADAPTIVE, ROWS} <= set(table):
        own, none = table[ADAPTIVE], table[ROWS]
        reached += [judged("late step without clusters over ours", none["ms"][-1] / own["ms"][-1], least=2.0)]
        reached += [judged("entries a run over token rows", own["run"] / none["run"], least=3.0)]
    if {ADAPTIVE, AT_ONCE} <= set(table):
        read = [table[name]["bytes_read_a_step"] for name in (ADAPTIVE, AT_ONCE)]
        reached += [judged("bytes read over splitting at once", read[0] / read[1], most=0.6)]
    return {"contenders": shown, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    """Keys by their first two components, in the colours of their clusters, after the prompt and at the end (figure 4
    of the paper); and the mass captured, by thirds of the decode."""
    drawn = [row for row in rows if row.get("pictures") and row["name"] in (ADAPTIVE, STATIC, LOCAL)]
    if drawn:
        upper, lower = figure.subfigures(2, 1, height_ratios=(2, 1))
        for column, row in zip(upper.subplots(2, len(drawn), squeeze=False).T, drawn, strict=True):
            for axes, when, picture in zip(column, ("after the prompt", "at the end"), row["pictures"], strict=True):
                at, cluster = np.array(picture["at"]), np.array(picture["cluster"])
                axes.scatter(*at[cluster >= 0].T, c=cluster[cluster >= 0] % 20, cmap="tab20", s=3)
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
    "long_decode", __doc__, run, plot, arguments, {"prompt": 320, "steps": 96, "every": 16}, size=(10.0, 10.0)
)

if __name__ == "__main__":
    main(STUDY)
