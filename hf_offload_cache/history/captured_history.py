"""Whether what was captured of a history holds together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import not_whole, shown
from ..stores.base import Store
from .record_format import RecordFormat

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that keys and values may have."""
LARGEST = 3e38
"""What lies beyond is no number, or is none in some of these types."""


def is_tensor(
    value: Any, shape: tuple[int | None, ...], *dtypes: torch.dtype, low: float | None = None, high: float | None = None
) -> bool:
    """Whether a captured object is a tensor of this shape (None: any size in that dimension) and one of these types,
    with all values from `low` to `high`, so without NaN."""
    if not isinstance(value, torch.Tensor) or value.ndim != len(shape) or value.dtype not in dtypes:
        return False
    if any(wanted not in (None, size) for wanted, size in zip(shape, value.shape, strict=True)):
        return False
    above = low is None or bool((value >= low).all())
    return above and (high is None or bool((value <= high).all()))


def check_form(form: RecordFormat, name: str) -> None:
    """Raise `ContextError` unless a captured form is a form of keys and values."""
    sizes = [form.num_key_heads, form.key_dim, form.num_value_heads, form.value_dim, form.group_size]
    if not all(type(size) is int and 0 < size < 2**20 for size in sizes) or form.dtype not in DTYPES:
        raise not_whole(name, f"its entries have the form {shown(form, 200)}")


def check_tail(
    form: RecordFormat, tail: Any, length: Any, parts: Sequence[Store], name: str, group_size: int | None
) -> None:
    """Raises `ContextError` unless the form and the tail of a captured history of `length` tokens hold together with
    the records, in `parts`. `group_size`: the configuration's."""
    check_form(form, name)
    wrong = None
    if group_size not in (None, form.group_size):
        wrong = f"a record holds {form.group_size} tokens, group_size is {group_size}"
    elif (found := {part.record_bytes for part in parts} - {form.record_bytes}):
        wrong = f"its records have {form.record_bytes} bytes, there are some of {found}"
    elif not isinstance(tail, torch.Tensor) or type(length) is not int:
        wrong = f"its tail and its length are {type(tail)} and {length!r:.80}"
    elif tail.ndim != 3 or not len(tail) or tail.shape[2] != form.entry_width or tail.dtype != form.dtype:
        wrong = f"its tail is {tuple(tail.shape)} {tail.dtype} and an entry has {form.entry_width} of {form.dtype}"
    elif length < tail.shape[1]:
        wrong = f"its length is {length}, its tail holds {tail.shape[1]}"
    if wrong:
        raise not_whole(name, wrong)


def check_captured(
    form: RecordFormat, ids: Any, tail: Any, length: Any, parts: Sequence[Store], name: str, group_size: int | None
) -> None:
    """As `check_tail`, and whether the table `ids` (rows, groups) names records that there are, as many as `length`
    says."""
    check_tail(form, tail, length, parts, name, group_size)
    records, wrong = sum(part.capacity for part in parts), None
    if not isinstance(ids, np.ndarray):
        wrong = f"its table is {type(ids)}"
    elif ids.ndim != 2 or ids.dtype != np.int32 or len(ids) != tail.shape[0]:
        wrong = f"its table is {ids.shape} {ids.dtype} for {tail.shape[0]} sequences"
    elif ids.size and not (ids.min() >= 0 and ids.max() < records):
        wrong = f"its table names records {ids.min()} to {ids.max()} and there are {records}"
    elif length != ids.shape[1] * form.group_size + tail.shape[1]:
        wrong = f"its length is {length}, its groups and its tail hold {ids.shape[1] * form.group_size + tail.shape[1]}"
    if wrong:
        raise not_whole(name, wrong)
