"""The table by phase: what of a trace it counts to what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from harness import fresh

from eval.phases import MEANS, phases
from hf_offload_cache import DiskSwapCache


def span(name: str, start: float, stop: float, track: str = "compute") -> dict[str, Any]:
    return {"ph": "X", "cat": track, "name": name, "ts": start, "dur": stop - start}


def test_a_phase_is_what_is_left_of_it() -> None:
    """Of nested spans each counts without those within; prefills, other tracks and the first steps do not."""
    events = [span("prefill", 0, 500), span("layer 0", 10, 400), span("reads", 0, 90, "reads")]
    for step, longer in enumerate((900, 0, 100, 50)):
        start = 1000 + 10_000 * step
        events += [
            span("decode", start, start + 1000 + longer),
            span("layer 0", start + 100, start + 500),
            span("attention", start + 110, start + 400),
            span("gather", start + 200, start + 300),
            span("wait", start + 220, start + 260),
            span("layer 1", start + 500, start + 900),
            span("attention", start + 500, start + 800),
        ]
    found = phases(list(reversed(events)), first=1)
    assert {name: round(1e3 * value) for name, value in found.items()} == {
        "step": 1050, "decode": 250, "layer": 110 + 100, "attention": 190 + 300, "gather": 60, "wait": 40,
    }  # fmt: skip
    assert round(sum(value for name, value in found.items() if name != "step"), 9) == found["step"]


def test_every_phase_of_a_real_trace_has_a_meaning(tmp_path: Path) -> None:
    model = fresh("llama")
    ids = torch.randint(1, 190, (1, 700), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "trace.json"
    fields = {"num_selected": 16, "reuse_capacity": 16, "num_recent": 8, "group_size": 4}
    with DiskSwapCache(model, tmp_path, trace=path, **fields) as cache, torch.no_grad():
        model(ids[:, :640], past_key_values=cache)
        for place in range(640, 680):
            model(ids[:, place : place + 1], past_key_values=cache)
    found = phases(json.loads(path.read_text()), first=4)
    assert set(found) <= {*MEANS, "step"}
    assert {"attend", "rank", "gather", "read", "append"} <= set(found)
