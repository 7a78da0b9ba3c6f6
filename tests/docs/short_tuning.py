"""Tuning that takes seconds in the place of minutes: what pages ask for stays, less of it is measured."""

from __future__ import annotations

from typing import Any

import pytest
from page_model import TEXT

from hf_offload_cache.methods.disk_swap.tuning import by_solver, profile
from hf_offload_cache.tuning import measure_caches, tuner


def tune_shortly(patch: pytest.MonkeyPatch) -> None:
    """One sample, one row and one size of groups; a decoder block is timed with one sequence of 2,048 tokens."""
    plain = tuner.tune

    def tune(*given: Any, **named: Any) -> Any:
        less: dict[str, Any] = {"quick": True, "samples": 1, "max_group_size": 4, "time_limit": 1.0, "progress": False}
        return plain(*given, **{**named, **less})

    patch.setattr(tuner, "tune", tune)
    patch.setattr(by_solver, "rows_for", lambda batch, context: ([batch], [context]))
    patch.setattr(by_solver, "coarse", lambda values, count: [min(values[0], 1 if values[0] < 2048 else 2048)])
    patch.setattr(profile, "_LEAST_FILE", 1 << 20)


def measure_shortly(patch: pytest.MonkeyPatch) -> None:
    """One sample, of a short text, and few steps."""
    plain = measure_caches.measure_caches

    def measure(*given: Any, **named: Any) -> Any:
        less: dict[str, Any] = {"texts": TEXT, "samples": 1, "steps": 8, "progress": False}
        return plain(*given, **{**named, **less})

    patch.setattr(measure_caches, "measure_caches", measure)
