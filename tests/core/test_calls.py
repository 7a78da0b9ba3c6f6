"""How long the way of one decoding step is: the files that it enters, and its Python calls a layer.

Both are limits for readers and for speed. Somebody who follows a step opens these files, and on a small model most of a
step's time is calls. A change that needs more of either says so here, with its reason.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_offload_cache
from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache

ROOT = f"{Path(hf_offload_cache.__file__).parent}/"
LAYERS = 4
STEPS = 7
"""Some of them seal a group, or wait for the device: the median does neither."""
LIMITS = [
    (DiskSwapCache, {"engine": "memory", "look_ahead": False, "num_selected": 399}, 40, 153),
    (ClusterCache, {"engine": "memory", "look_ahead": False, "num_selected": 399}, 42, 165),
    (SpecCache, {"engine": "mapped", "num_selected": 63}, 38, 170),
    (AbstractTreeCache, {"engine": "mapped", "look_ahead": False, "num_selected": 399}, 42, 190),
    (DiskSwapCache, {"engine": "mapped", "exact": True}, 28, 240),
    (ClusterCache, {"engine": "memory", "exact": True}, 32, 290),
]
"""Cache, its fields, and the most files and calls. With io_uring, which not every machine has, a step makes up to ten
calls a layer more. These engines read on the thread that runs the model, so that each machine counts the same. The
mapped one advises the system of each run of records, which would be most of the calls where few adjacent ones are read.
Nothing is read ahead: whether it is depends on the machine's speed. Of `DiskSwapCache`'s calls 13 are for its estimate
of what is not selected. An exact `ClusterCache` streams blocks whose tokens have positions, which an index puts in
order: half of its calls are for blocks."""


class Calls:
    """Counts calls of the package's functions, in this thread and in those that are started while it is `on`."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            self.files.append(name)


@pytest.fixture
def calls() -> Iterator[Calls]:
    before, counted = sys.getprofile(), Calls()
    threading.setprofile(counted)
    sys.setprofile(counted)
    yield counted
    sys.setprofile(before)
    threading.setprofile(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    positions = {"vocab_size": 200, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**sizes, **positions, num_hidden_layers=LAYERS)).eval()


@pytest.mark.parametrize(("cache_class", "fields", "most_files", "most_calls"), LIMITS)
def test_a_step_is_short(
    cache_class: type[Any], fields: dict[str, Any], most_files: int, most_calls: int, model: LlamaForCausalLM,
    calls: Calls, tmp_path: Path,
) -> None:  # fmt: skip
    ids, files, made = torch.randint(0, 200, (1, 2048)), [], []
    with torch.no_grad(), cache_class(model, path=tmp_path, **fields) as cache:
        model(ids[:, :2000], past_key_values=cache, logits_to_keep=1)
        for place in range(2000, 2020 + STEPS):
            calls.files.clear()
            model(ids[:, place : place + 1], past_key_values=cache)
            if place >= 2020:
                entered = {name for name in calls.files if not name.endswith("__init__.py")}
                files.append(sorted(name.removeprefix(ROOT) for name in entered))
                made.append(len(calls.files) / LAYERS)
    usual = sorted(files, key=len)[STEPS // 2]
    assert len(usual) <= most_files, usual
    assert statistics.median(made) <= most_calls, made
    assert len(usual) > 20 and min(made) > 50, "something was counted"
