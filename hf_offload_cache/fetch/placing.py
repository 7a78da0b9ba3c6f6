"""Payloads on their way between tiers and the view that attention gets."""

from __future__ import annotations

import numpy as np
import torch

from .areas import Areas, ByteRows, View
from .choice import Fetched, Source, kept_entries
from .tier import Tier

Found = list[tuple[Tier, np.ndarray]]
"""The tiers, nearest first, and in which slot of each the records lie (-1: in none)."""


def take_resident(found: Found, view: View) -> None:
    """Copy what is resident, each from the nearest tier that has it."""
    taken: np.ndarray | None = None
    for tier, lies_in in found:
        here = lies_in >= 0 if taken is None else (lies_in >= 0) & ~taken
        held = here.nonzero()[0]
        if held.size == here.size:
            tier.take(lies_in, view.payloads, view.target)
        elif held.size:
            tier.take(lies_in[held], view.payloads, view.target[held])
        taken = here if taken is None else taken | here


def keep(found: Found, records: np.ndarray, view: View) -> None:
    """Let each tier keep what it did not have. Nothing in here can fail."""
    for tier, lies_in in found:
        places = ((lies_in < 0) & (records >= 0)).nonzero()[0]
        if places.size:
            keep_in(tier, lies_in, places, *distinct(records[places]), view)


def keep_in(
    tier: Tier, lies_in: np.ndarray, places: np.ndarray, fresh: np.ndarray, which: np.ndarray | None, view: View
) -> None:
    """Let one tier keep the records `fresh`, which it does not have: those at `places`, as `distinct` says."""
    first = places if which is None else places[np.unique(which, return_index=True)[1]]
    tier.keep(fresh, lies_in[lies_in >= 0], view.payloads, view.target[first])


def distinct(records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct records, ascending, and for each that was given which of them it is; None: these are they."""
    if np.logical_and.reduce(records[1:] > records[:-1]):
        return records, None
    return np.unique(records, return_inverse=True)


def among(records: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each of `records` is one of `others`, and which; both are distinct and ascending, and `others` not none.
    """
    which = others.searchsorted(records)
    which[which == others.size] = 0  # it is above all of them, and not the first
    return others[which] == records, which


def kept_of(history: Source, view: View, valid: np.ndarray, areas: Areas) -> Fetched:
    """The `valid` entries of a view alone, and the latest ones behind them."""
    form, recent = history.form, history.recent
    places, there = kept_entries(valid)
    (rows, chosen), whole = places.shape, view.entries.shape[1]
    entries = areas.kept(rows, chosen, recent.shape[1], form, history.device)
    entries[:, chosen:] = recent
    from_rows = (np.arange(rows)[:, None] * whole + places).reshape(-1)
    into_rows = (np.arange(rows)[:, None] * entries.shape[1] + np.arange(chosen)).reshape(-1)
    source = ByteRows(view.entries.view(-1, form.entry_width))
    ByteRows(entries.view(-1, form.entry_width)).put(into_rows, source, from_rows)
    if there is not None:
        entries[:, :chosen][torch.from_numpy(~there).to(entries.device)] = 0
    return Fetched(entries, chosen, there, places)


def importance_of(
    importance: np.ndarray | None, places: np.ndarray, count: int, which: np.ndarray | None
) -> np.ndarray | None:
    """How much each of `count` distinct records matters, (count,) float32: the most that `importance` has at those of
    the `places` (bool) where it is wanted, as `distinct` says. None: nobody says."""
    if importance is None:
        return None
    wanted = importance.reshape(-1)[places]
    if which is None:
        return wanted
    found = np.full(count, -np.inf, dtype=np.float32)
    np.maximum.at(found, which, wanted)
    return found
