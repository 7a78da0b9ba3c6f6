"""Captured clusters that do not hold together are refused, whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_offload_cache.errors import ContextError
from hf_offload_cache.fetch import Storage
from hf_offload_cache.methods.cluster import ClusterForm, ClusterHistory
from hf_offload_cache.testing.histories import CONFIG, FORM, some_keys_and_values

CPU, CLUSTERS = torch.device("cpu"), ClusterForm(size=6, capacity=12)


def restored(storage: Storage, tree: dict[str, Any], history: ClusterHistory) -> ClusterHistory:
    parts = history.freeze()
    return ClusterHistory.restore(storage, tree, parts, CPU, CONFIG, "layer 0", CLUSTERS, lambda records: None)


def changed(table: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    table = table.clone()
    table[place] = value
    return table


Wrong = Callable[[dict[str, torch.Tensor]], dict[str, Any]]
WRONG: dict[str, tuple[Wrong, str]] = {
    "no tables": (lambda tree: {}, "entries of its clusters are NoneType"),
    "one is missing": (lambda tree: {"step": None}, "step of its clusters is None"),
    "a type": (lambda tree: {"counts": tree["counts"].long()}, "counts of .* torch.int64, expected"),
    "labels of another type": (lambda tree: {"labels": tree["labels"].to(torch.int16)}, "torch.uint16 or torch.uint32"),
    "fewer tokens": (lambda tree: {"labels": tree["labels"][:, 1:]}, r"labels .* expected \(rows=2, sealed="),
    "fewer rows": (lambda tree: {"used": tree["used"][1:]}, r"used .* expected \(rows=2\)"),
    "narrow means": (lambda tree: {"centroids": tree["centroids"][:, :, 1:]}, "centroids .* width="),
    "too many clusters": (lambda tree: {"used": tree["used"] + 1000}, "rows use"),
    "a cluster that is none": (lambda tree: {"used": changed(tree["used"], (1,), 2)}, "the token counts of row 1"),
    "another's token": (
        lambda tree: {"labels": changed(tree["labels"].int(), (0, 0), int(tree["labels"][0, 0] == 0)).to(torch.uint16)},
        "the token counts of row 0",
    ),
    "a record that is none": (lambda tree: {"first": tree["first"] + 10_000}, "they use records"),
    "a step of two": (lambda tree: {"step": tree["step"] * 2}, "not adjacent|share a record|they use records"),
    "one place for two": (
        lambda tree: {"first": changed(tree["first"], (0, 1), int(tree["first"][0, 0])),
                      "step": changed(tree["step"], (0, 1), int(tree["step"][0, 0]))},
        "two of a row share a record",
    ),
    "a mean that is none": (
        lambda tree: {"centroids": changed(tree["centroids"], (0, 0, 0), float("nan"))}, "not a finite number"
    ),
    "a limit that is none": (lambda tree: {"limits": changed(tree["limits"], (0,), float("nan"))}, "limit is not"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_hold_together(what: str) -> None:
    wrong, said = WRONG[what]
    storage = Storage(CONFIG, None)
    try:
        history = ClusterHistory(storage, FORM, 2, CPU, CONFIG, "layer 0", CLUSTERS, lambda records: None)
        keys, values = some_keys_and_values(2, 120, 1)
        history.append(keys, values)
        history.freeze()
        tree = history.capture()
        good = restored(storage, tree, history)
        assert torch.equal(good.whole()[0], keys)
        tree["clusters"] = {**tree["clusters"], **wrong(tree["clusters"])} if what != "no tables" else None
        with pytest.raises(ContextError, match=f"layer 0 of the context does not hold together: .*({said})"):
            restored(storage, tree, history)
    finally:
        storage.close()


def test_clusters_that_are_larger_than_there_is_room_for() -> None:
    storage = Storage(CONFIG, None)
    try:
        history = ClusterHistory(storage, FORM, 1, CPU, CONFIG, "layer 0", CLUSTERS, lambda records: None)
        history.append(*some_keys_and_values(1, 120, 1))
        parts, tree = history.freeze(), history.capture()
        small = ClusterForm(size=2, capacity=4)
        with pytest.raises(ContextError, match="but 4 tokens need only 1"):
            ClusterHistory.restore(storage, tree, parts, CPU, CONFIG, "layer 0", small, lambda records: None)
    finally:
        storage.close()
