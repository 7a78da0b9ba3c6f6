"""Payloads on their way between tiers, areas and the view that attention gets."""

from __future__ import annotations

import numpy as np
import torch

from .rows import copy_rows
from .tier import Tier

Found = list[tuple[Tier, np.ndarray]]
"""The tiers, nearest first, and in which slot of each the records lie (-1: in none)."""


def take_resident(found: Found, records: np.ndarray, view: torch.Tensor, target: np.ndarray) -> None:
    """Copy what is resident, each from the nearest tier that has it."""
    taken: np.ndarray | None = None
    for tier, lies_in in found:
        here = lies_in >= 0 if taken is None else (lies_in >= 0) & ~taken
        held = here.nonzero()[0]
        if len(held) == len(records):
            tier.take(lies_in, view, target)
        elif len(held):
            tier.take(lies_in[held], view, target[held])
        if len(found) > 1:
            taken = here if taken is None else taken | here


def put(payload: torch.Tensor, row: np.ndarray, view: torch.Tensor, target: np.ndarray) -> None:
    """Copy to `target` what was read: its rows in `payload`, -1 for what is not in there."""
    here = (row >= 0).nonzero()[0]
    if len(here) == len(row):
        copy_rows(view, target, payload, row)
    else:
        copy_rows(view, target[here], payload, row[here])


def keep(found: Found, records: np.ndarray, view: torch.Tensor, target: np.ndarray) -> None:
    """Let each tier keep what it did not have. Nothing in here can fail."""
    for tier, lies_in in found:
        places = ((lies_in < 0) & (records >= 0)).nonzero()[0]
        if not len(places):
            continue
        fresh, which = distinct(records[places])
        taken, into = tier.keep(fresh, lies_in[lies_in >= 0])
        first = places if which is None else places[np.unique(which, return_index=True)[1]]
        tier.fill(into, view, target[first[taken]])


def distinct(records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct records, ascending, and for each that was given which of them it is; None: these are they."""
    if len(records) < 2 or (records[1:] > records[:-1]).all():
        return records, None
    return np.unique(records, return_inverse=True)
