"""One cache that decodes for long, and what is measured of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hf_offload_cache.core import SelectiveCache, SelectiveLayer
from hf_offload_cache.fetch import Choice
from hf_offload_cache.methods.cluster import ClusteredEntries, ClusterLayer

from .watch import Look, Watch

_SHOWN = 12, 1
"""Layer and key head of which keys are drawn."""


class LongContender:
    """One cache over ids (1, T), and what is measured of it."""

    def __init__(self, name: str, model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> None:
        self.name, self.model, self.cache, self.ids, self.place = name, model, cache, ids, prompt
        self.seconds: list[float] = []
        self.mass: list[list[tuple[float, float]]] = []
        self.runs: list[tuple[int, int, int]] = []
        self.settling = Settling()
        self.feed(0, prompt)
        self.pictures = [self._picture()]
        self._before: dict[str, Any] = self._report()

    def restart(self) -> None:
        """What was measured until now does not count; what was looked at does."""
        self.seconds, self.settling, self._before = [], Settling(), self._report()

    @property
    def clustered(self) -> list[ClusterLayer]:
        """The layers that have clusters."""
        layers = self.cache.selective if isinstance(self.cache, SelectiveCache) else []
        return [layer for layer in layers if isinstance(layer, ClusterLayer)]

    def _report(self) -> dict[str, Any]:
        if not isinstance(self.cache, SelectiveCache):
            return {}
        self.cache.storage.prefetcher.flush()
        return self.cache.report().to_dict()

    def grown(self, name: str) -> float:
        """What a count of the report has grown by, a step."""
        return (self._report()[name] - self._before[name]) / len(self.seconds)

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
            places = np.sort(history.positions(choice.units), 1)
            begins = (np.diff(places, prepend=-1) != 1) & (places >= 0)
            self.runs.append((int(held[there].sum()), _runs(extents.records[there]), int(begins.sum())))

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
        if not (layers := self.clustered):
            return None
        layer = layers[min(_SHOWN[0], len(layers) - 1)]
        keys, labels, _ = clusters_of(layer, min(_SHOWN[1], layer.history.rows - 1))
        middle = keys - keys.mean(0)
        plane = torch.pca_lowrank(torch.from_numpy(middle), 2, center=False)[2].numpy()
        return {"at": (middle @ plane).round(3).tolist(), "cluster": labels.tolist()}

    def row(self) -> dict[str, Any]:
        """What was measured, by thirds: `mass` captured outside sinks and tail, `oracle`'s, and `ms` a step, mean and
        median; `settling`, what `Settling` counted; of decoding alone bytes, reads and hits a step; `run`, entries that
        lie side by side, and as many as would in the order of the sequence; `variance` within `clusters`, those of one
        centroid together."""
        parts = np.array_split(np.array(self.mass), 3) if self.mass else []
        thirds = [np.mean(part, (0, 1)).tolist() for part in parts]
        row: dict[str, Any] = {"ms": [1e3 * statistics.mean(part) for part in np.array_split(self.seconds, 3)]}
        row["median_ms"] = [1e3 * statistics.median(part) for part in np.array_split(self.seconds, 3)]
        row |= {"seconds": sum(self.seconds), "steps": len(self.seconds)}
        row |= {"mass": [one[0] for one in thirds], "oracle": [one[1] for one in thirds]}
        if not isinstance(self.cache, SelectiveCache):
            return row
        after = self._report()
        for name in ("bytes_read", "bytes_written", "reads"):
            row[f"{name}_a_step"] = self.grown(name)
        row |= {"hit_rate": after["hit_rate"], "peak_share": after["peak_memory_bytes"] / after["full_kv_bytes"]}
        entries, together, in_sequence = np.sum(self.runs or [(0, 1, 1)], 0).tolist()
        row |= {"run": entries / together, "run_in_sequence": entries / in_sequence}
        row |= {f"settling_{name}": value for name, value in vars(self.settling).items()}
        if layers := self.clustered:
            apart = [clusters_of(layer, each)[2] for layer in layers for each in range(layer.history.rows)]
            row |= dict(zip(("variance", "clusters"), np.mean(apart, 0).tolist(), strict=True))
        row["pictures"] = [self.pictures[0], self._picture()] if self.pictures[0] else []
        return row


class Settling:
    """What adapting clusters took, while it was counted: seconds of joining, settling and splitting; bytes that were
    read for it; `rewritten_bytes` of what lay on the disk already; and what a layout without room between clusters
    would have moved in their place, all of a row that lies behind what grows: `moved_bytes`, whenever some grow
    together, and `moved_singly_bytes`, for each entry, as it would be moved without entries that wait."""

    def __init__(self) -> None:
        self.seconds, self.loaded_bytes, self.rewritten_bytes = 0.0, 0, 0
        self.moved_bytes, self.moved_singly_bytes = 0, 0

    @contextlib.contextmanager
    def counted(self, cache: Any) -> Iterator[None]:
        """While entered, of the clusters of a cache."""
        layers = getattr(cache, "selective", [])
        depth, patched = [0], list[tuple[Any, str]]()
        for layer in (layer for layer in layers if isinstance(layer, ClusterLayer)):
            own = layer.history.clustered  # type: ignore[attr-defined]
            told = ("settle", self._moved), ("read", self._loaded), ("add", None)
            for owner, name, note in ((layer, "settle", None), *((own, *each) for each in told)):
                setattr(owner, name, self._timed(getattr(owner, name), owner, note, depth))
                patched.append((owner, name))
        try:
            yield
        finally:
            for owner, name in patched:
                delattr(owner, name)

    def _timed(self, call: Callable[..., Any], own: Any, note: Any, depth: list[int]) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            if note is not None:
                given = note(own, *given)
            self.seconds -= time.perf_counter() - start if depth[0] else 0.0  # of a call that is counted
            depth[0] += 1
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    self.seconds += time.perf_counter() - start

        return timed

    def _moved(self, own: ClusteredEntries, pages: Any, rows: np.ndarray, clusters: np.ndarray) -> tuple[Any, ...]:
        """Of a call of `settle` with these arguments; with which it is to be made."""
        size, group = own.form.entry_bytes, own.form.group_size
        behind = own.stored[:, ::-1].cumsum(1)[:, ::-1] - own.stored
        self.moved_singly_bytes += int((behind[rows, clusters] * own.waiting[rows, clusters]).sum()) * size
        for row in np.unique(rows):
            self.moved_bytes += int(behind[row, clusters[rows == row].min()]) * size

        def read(rows: np.ndarray, clusters: np.ndarray, numbers: np.ndarray) -> Any:
            there = np.minimum(group, own.stored[rows, clusters] - numbers * group)
            self.rewritten_bytes += int(there.sum()) * size
            return pages(rows, clusters, numbers)

        return read, rows, clusters

    def _loaded(self, own: ClusteredEntries, rows: np.ndarray, *given: np.ndarray) -> tuple[Any, ...]:
        self.loaded_bytes += len(rows) * own.form.record_bytes
        return rows, *given


def _runs(records: np.ndarray) -> int:
    """Of how many pieces of adjacent records these are."""
    return 1 + int((np.diff(np.sort(records)) != 1).sum())


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
