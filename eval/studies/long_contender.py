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
from hf_offload_cache.methods.cluster import ClusterLayer

from .watch import Look, Watch

_SHOWN = 12, 1
"""Layer and key head of which keys are drawn."""
_SPENT = "bytes_read", "bytes_written", "reads"


class LongContender:
    """One cache over ids (1, T), and what is measured of it."""

    def __init__(self, name: str, model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> None:
        self.name, self.model, self.cache, self.ids, self.place = name, model, cache, ids, 0
        self.seconds: list[float] = []
        self.mass: list[list[tuple[float, float]]] = []
        self.settling = 0.0
        """Seconds that joining, settling and splitting clusters took."""
        self.feed(prompt)
        self.pictures = [self._picture()]
        self._before: dict[str, Any] = self._report()

    def restart(self) -> None:
        """Forget the times and reads measured so far. Pictures and attention mass are kept."""
        self.seconds, self.settling, self._before = [], 0.0, self._report()

    @property
    def clustered(self) -> list[ClusterLayer]:
        """The layers that have clusters."""
        layers = self.cache.selective if isinstance(self.cache, SelectiveCache) else []
        return [layer for layer in layers if isinstance(layer, ClusterLayer)]

    def _report(self) -> dict[str, Any]:
        if not isinstance(self.cache, SelectiveCache):
            return {}
        self.cache.storage.prefetcher.flush()
        counters = self.cache.storage.counters
        hits = {"selected": counters.units_selected, "resident": counters.units_resident}
        return {**self.cache.report().to_dict(), **hits}

    def feed(self, last: int) -> None:
        """The text up to token `last`."""
        with torch.no_grad():
            self.model(self.ids[:, self.place : last], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.place = last

    def step(self) -> None:
        with self._settling_timed():
            start = time.perf_counter()
            self.feed(self.place + 1)
            self.seconds.append(time.perf_counter() - start)

    @contextlib.contextmanager
    def _settling_timed(self) -> Iterator[None]:
        """While entered, what joins, settles and splits clusters is timed; nested calls count once."""
        depth, patched = [0], list[tuple[Any, str]]()

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def settle(*given: Any, **named: Any) -> Any:
                start = time.perf_counter()
                depth[0] += 1
                try:
                    return call(*given, **named)
                finally:
                    depth[0] -= 1
                    self.settling += 0.0 if depth[0] else time.perf_counter() - start

            return settle

        for layer in self.clustered:
            own = layer.history.clustered  # type: ignore[attr-defined]
            for owner, name in ((layer, "settle"), (own, "settle"), (own, "add")):
                setattr(owner, name, timed(getattr(owner, name)))
                patched.append((owner, name))
        try:
            yield
        finally:
            for owner, name in patched:
                delattr(owner, name)

    def look(self) -> None:
        """One more step, of which the attention is looked at."""
        if not isinstance(self.cache, SelectiveCache) or self.cache.selecting is None:
            return self.step()
        layers, found = self.cache.selective, list[tuple[float, float]]()
        first, last = self.cache.config.num_sinks, self.place - self.cache.config.num_recent  # type: ignore[attr-defined]

        def told(look: Look) -> None:
            if look.columns is not None:
                found.append(look.between(first, last))

        keys = [layer.rows.unfold(layer.history.whole()[0]) for layer in layers]
        with Watch(self.cache, keys, told):
            self.feed(self.place + 1)
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

    def spent(self) -> dict[str, float]:
        """Since `restart`: bytes read and written a step, reads a step and the hit rate. "peak_share": the most memory
        in use so far, over the full KV by now. Nothing for `DynamicCache`."""
        if not isinstance(self.cache, SelectiveCache):
            return {}
        after, before, count = self._report(), self._before, len(self.seconds)
        found = {f"{name}_a_step": (after[name] - before[name]) / count for name in _SPENT}
        selected = after["selected"] - before["selected"]
        found |= {"hit_rate": (after["resident"] - before["resident"]) / selected} if selected else {}
        return found | {"peak_share": after["peak_memory_bytes"] / after["full_kv_bytes"]}

    def row(self) -> dict[str, Any]:
        """By thirds: `mass` captured outside sinks and tail, `oracle`'s, and `ms` a step, the mean. `settling_seconds`;
        of decoding alone bytes, reads and hits a step; `variance` within `clusters`, those of one
        centroid together."""
        parts = np.array_split(np.array(self.mass), 3) if self.mass else []
        thirds = [np.mean(part, (0, 1)).tolist() for part in parts]
        row: dict[str, Any] = {"ms": [1e3 * statistics.mean(part) for part in np.array_split(self.seconds, 3)]}
        row |= {"mass": [one[0] for one in thirds], "oracle": [one[1] for one in thirds]}
        if not isinstance(self.cache, SelectiveCache):
            return row
        row |= self.spent()
        if layers := self.clustered:
            row["settling_seconds"] = self.settling
            apart = [clusters_of(layer, each)[2] for layer in layers for each in range(layer.history.rows)]
            row |= dict(zip(("variance", "clusters"), np.mean(apart, 0).tolist(), strict=True))
        row["pictures"] = [self.pictures[0], self._picture()] if self.pictures[0] else []
        return row


def clusters_of(layer: SelectiveLayer, row: int) -> tuple[np.ndarray, np.ndarray, tuple[float, int]]:
    """The keys (n, D) of one row, and the cluster of each, (n,), -1: none; the mean squared distance to the mean of
    their cluster, and the number of clusters. Clusters of one centroid are one."""
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
