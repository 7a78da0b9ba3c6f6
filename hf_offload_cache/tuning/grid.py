"""The grids that tuning measures and solves on."""

from __future__ import annotations

from typing import Any

import torch

from ..caches.disk_swap_config import DiskSwapConfig
from ..caches.summary_bytes import sizes_to_try
from ..history.record_format import RecordFormat
from ..model.config_values import config_value
from ..model.geometry import Geometry
from ..predictors.low_rank_keys import default_rank
from ..stores.base import DEVICE_BLOCK

LEAST_CONTEXT = 4096
"""S_min: tokens of the shortest context that is profiled and solved for."""
_CONTEXT_STEP = 2048
_MOST_CONTEXTS = 32
"""Rows a batch size; the step between contexts grows, in multiples of itself, until there are no more."""
_MOST_BATCHES = 16


def rows_for(max_batch: int, max_context: int) -> tuple[list[int], list[int]]:
    """The batch sizes and contexts that are solved for: steps of 1, and of 2K from 4K (appendix A.3), or wider ones
    where those would be too many; the largest are always among them."""
    stride = -(-max_batch // _MOST_BATCHES)
    batches = sorted({1, *range(stride, max_batch + 1, stride), max_batch})
    if max_context <= LEAST_CONTEXT:
        return batches, [max_context]
    span = max_context - LEAST_CONTEXT
    step = _CONTEXT_STEP * max(1, -(-span // (_CONTEXT_STEP * (_MOST_CONTEXTS - 1))))
    return batches, sorted({*range(LEAST_CONTEXT, max_context, step), max_context})


def coarse(values: list[int], count: int) -> list[int]:
    """At most `count` of ascending `values`, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def largest_form(geometry: Geometry) -> RecordFormat:
    """How the largest entries of the model's layers lie, one a record."""
    forms = geometry.forms(1)
    return max(forms, key=lambda form: form.entry_bytes)


def group_sizes(form: RecordFormat, most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, from the largest whose record is one block, or else from 1."""
    sizes = [1 << power for power in range(most.bit_length())]
    fits = [size for size in sizes if size * form.entry_bytes <= DEVICE_BLOCK]
    return tuple(size for size in sizes if size >= max(fits, default=1))


def sizes_of(form: RecordFormat, settings: DiskSwapConfig, sigma_max: float) -> list[int]:
    """Sizes of compact keys to choose from, descending: all bytes of coded ones that the planner tries, or ranks."""
    return code_sizes(form) if settings.summaries == "coded" else _ranks_of(form, settings, sigma_max)


def code_sizes(form: RecordFormat) -> list[int]:
    """Bytes of coded keys that the planner tries, descending."""
    return sizes_to_try(form.key_width)[::-1]


def _ranks_of(form: RecordFormat, settings: DiskSwapConfig, sigma_max: float) -> list[int]:
    """Ranks to choose from, descending, in steps of at least 4: from the library's default down to that of σ_max."""
    component = getattr(torch, settings.summaries).itemsize
    most = default_rank(form.key_width)
    least = max(1, -(-form.key_width * form.dtype.itemsize // int(sigma_max * component)))
    least = min(least, most)
    return sorted({*range(most, least, -max(4, (most - least) // 24)), most, least}, reverse=True)


def sample_sizes(model: Any, selected: int, max_context: int, steps: int) -> tuple[int, int]:
    """Tokens of a sample's context of which so many are `selected`, and `steps` that are decoded behind it."""
    context = min(4096, max(max_context, 4 * selected))
    positions = config_value(model.config.get_text_config(decoder=True), "max_position_embeddings")
    return (min(context, positions - steps) if isinstance(positions, int) else context), steps
