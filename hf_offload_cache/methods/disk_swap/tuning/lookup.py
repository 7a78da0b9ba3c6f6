"""The tables of appendix A.1, measured on sample text: properties of the model, the same on every machine.

One run of the model per group size records the selections of each decoding step. They do not depend on the slots, so
replaying them through a slot table gives the reuse rate of every capacity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ....core.layer import OffloadLayer
from ....fetch.choice import Choice
from ....fetch.tier import ABSENT, SlotTable
from ....history.records import RecordFormat
from ....memory.account import MemoryAccount, Workspace
from ....model.place import inner_model
from ....predictors.sinks import largest, with_sinks
from ....tuning.fill import ObservedCache, attention_modules, fill, observed, scaling_of
from ..cache import DiskSwapCache
from ..coding import fit_coding
from ..compact_keys import CodedKeys
from ..config import DiskSwapConfig
from ..fit import sizes_to_try
from ..ranking import rank_units
from .calibrate import KeyMoments
from .solve import CompressionTable, ReuseTable

_TEXTS_CODED = 2
"""Texts that coded keys are measured on: each takes as long as a second prefill."""

Selections = dict[int, list[np.ndarray]]
"""By layer index: the groups (B, M) that each step selected, in order."""


class Reader:
    """Reads sample texts with a model and collects the tables' data.

    Args:
        model: a PreTrainedModel whose every layer is one of full attention; runs on its own device.
        group_sizes: those to record selections for.
        capacities: of the reuse buffer, tokens per sequence and layer, ascending from 0.
        settings: the fields that decide the selection and are not tuned.
        cache_class: the class whose selections are recorded.

    `form` is the format of the layers' records, after the first text; if layers differ, of the largest.
    """

    def __init__(
        self,
        model: Any,
        group_sizes: tuple[int, ...],
        capacities: list[int],
        settings: DiskSwapConfig,
        cache_class: type[DiskSwapCache] = DiskSwapCache,
    ) -> None:
        self._cache_class = cache_class
        self._model = inner_model(model)
        self._group_sizes = group_sizes
        self._capacities = capacities
        self._settings = settings
        self._modules = attention_modules(model)
        self.moments = KeyMoments()
        self.masses: dict[int, list[list[float]]] = {}
        """By bytes of coded keys: for each text, the mass kept in each layer."""
        self.rates: dict[int, list[list[float]]] = {size: [] for size in group_sizes}
        self.form: RecordFormat | None = None

    def read(self, ids: torch.Tensor, context: int, on_step: Callable[[float, str], object]) -> None:
        """Read the first `context` of token ids (T,) as the context, and decode the others one by one, whatever the
        model predicts.

        The first step finds all slots empty and is not counted: T - context must be at least 2. `on_step` gets the
        finished share and the current work. Holds the keys and values of the text in memory.
        """
        ids = ids[None].to(self._model.device)
        on_step(0.0, f"reading {context:,} tokens")
        with ObservedCache(self._model, exact=True, engine="memory") as whole:
            with torch.no_grad():
                self._model(input_ids=ids[:, :context], past_key_values=whole, use_cache=True, logits_to_keep=1)
            forms = [layer.history.form for layer in whole.offloaded]
            self.form = max(forms, key=lambda form: form.entry_bytes)
            if self._settings.summaries == "coded":
                self._measure_codes(whole.offloaded, on_step)
            else:
                for layer in whole.offloaded:
                    self.moments.add(layer.layer_idx, layer.whole()[0], observed(layer))
            for index, size in enumerate(self._group_sizes):
                on_step((index + 1) / (1 + len(self._group_sizes)), f"groups of {size}")
                selections = self._decode(whole.offloaded, ids, context, size)
                sinks = self._settings.num_sinks
                self.rates[size].append([replay(selections, capacity, size, sinks) for capacity in self._capacities])

    def _measure_codes(self, layers: list[OffloadLayer], on_step: Callable[[float, str], object]) -> None:
        """Mass kept by codes of each size on this text; only for the first few texts, which suffice for a mean."""
        assert self.form is not None
        sizes = code_sizes(self.form)
        if self.masses and len(self.masses[sizes[0]]) >= _TEXTS_CODED:
            return
        on_step(0.5 / (1 + len(self._group_sizes)), "codes")
        masses = []
        for layer in layers:
            queries = observed(layer)
            if queries is not None:
                keys, group = layer.whole()[0], self._group_sizes[-1]
                masses.append(kept_mass(keys, queries, scaling_of(layer), sizes, self._settings, group))
        for size, kept in zip(sizes, zip(*masses, strict=True), strict=True):
            self.masses.setdefault(size, []).append(list(kept))

    def _decode(self, layers: list[OffloadLayer], ids: torch.Tensor, context: int, group_size: int) -> Selections:
        fields: dict[str, Any] = {"num_selected": self._settings.num_selected, "num_sinks": self._settings.num_sinks}
        fields |= {"num_recent": self._settings.num_recent, "summary_dtype": self._settings.summaries}
        fields |= {"reuse_capacity": 0, "look_ahead": False, "remainder": False}
        with self._cache_class(self._model, group_size=group_size, engine="memory", **fields) as cache:
            filled = {layer.layer_idx: layer for layer in cache.offloaded}
            for layer in layers:
                fill(filled[layer.layer_idx], self._modules[layer.layer_idx], *layer.whole(), observed(layer))
            with recorded(cache) as selections, torch.no_grad():
                for position in range(context, ids.shape[1]):
                    step = ids[:, position : position + 1]
                    self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return selections

    @property
    def samples(self) -> int:
        """Texts read so far."""
        return len(self.rates[self._group_sizes[0]])

    def reuse_table(self) -> ReuseTable:
        """Capacity to reuse rate, over all texts read."""
        by_size = {size: np.array(rows) for size, rows in self.rates.items()}
        tables = [
            {size: [round(float(value), 6) for value in statistic(rows, axis=0)] for size, rows in by_size.items()}
            for statistic in (np.mean, np.min, np.max, np.std)
        ]
        return ReuseTable(self._capacities, *tables)

    def compression_table(self, sizes: list[int]) -> CompressionTable:
        """For `sizes`, descending, of compact keys of the configured type."""
        assert self.form is not None
        key_bytes = self.form.key_width * self.form.dtype.itemsize
        if self._settings.summaries == "coded":
            layers = np.array([np.mean(self.masses[size], 0) for size in sizes])
            mean, least = (part.round(6).tolist() for part in (layers.mean(1), layers.min(1)))
            return CompressionTable(key_bytes, 1, list(sizes), mean, least)
        energy = self.moments.energy(sizes)
        component = getattr(torch, self._settings.summaries).itemsize
        mean, least = (part.tolist() for part in (energy.mean(0), energy.amin(0)))
        return CompressionTable(key_bytes, component, list(sizes), mean, least)


def code_sizes(form: RecordFormat) -> list[int]:
    """Bytes of coded keys that the planner tries, descending."""
    return sizes_to_try(form.key_width)[::-1]


@contextlib.contextmanager
def recorded(cache: DiskSwapCache) -> Iterator[Selections]:
    """Record the selections of steps within the `with`, by layer, without changing the steps."""
    selecting = cache.selecting
    selections: Selections = {}
    if selecting is None:
        raise ValueError("this cache is exact and selects nothing: give one that is not")

    def record(layer_idx: int, choice: Choice) -> None:
        selections.setdefault(layer_idx, []).append(np.array(choice.units))

    selecting.watch = record
    try:
        yield selections
    finally:
        selecting.watch = None


def replay(selections: Selections, capacity: int, group_size: int, num_sinks: int = 4) -> float:
    """The reuse rate of a buffer of `capacity` tokens per sequence: selected groups that were in a slot before their
    step, over all selected, without the first step of each layer.

    Sized as the cache sizes it: complete groups, plus the sinks'.
    """
    resident = selected = 0
    for steps in selections.values():
        batch = steps[0].shape[0]
        slots = batch * (-(-capacity // group_size) + -(-num_sinks // group_size)) if capacity else 0
        stride = 1 + max(int(groups.max(initial=0)) for groups in steps)
        table = SlotTable(slots)
        for index, groups in enumerate(steps):
            records = (groups + stride * np.arange(batch)[:, None]).reshape(-1)  # rows share nothing
            lies_in = table.locate(records)
            held = lies_in != ABSENT
            if index:
                resident += int(held.sum())
                selected += len(records)
            table.insert(np.unique(records[~held]), lies_in[held])
    return resident / selected if selected else 0.0


# The attention mass kept by coded compact keys

_QUERIES, _SPACING = 4, 4
"""Number of queries tested, and their spacing, from the latest on."""


def kept_mass(
    keys: torch.Tensor,
    queries: torch.Tensor,
    scaling: float,
    sizes: list[int],
    settings: DiskSwapConfig,
    group_size: int,
) -> list[float]:
    """For each of `sizes`, bytes of a code: the attention mass of the selection by such codes, over that of the best
    selection; the mean over some of the latest queries, all heads together. Tokens that are always attended to count on
    both sides.

    `keys` (1, Hk, T, D) of one layer, and the `queries` (1, H, n, D) of the last n of the same tokens.
    """
    heads, tokens = keys.shape[1], keys.shape[2]
    places = [place for place in range(tokens - 1, tokens - 1 - _QUERIES * _SPACING, -_SPACING) if place >= 0]
    units = max(0, (places[-1] + 1 - settings.num_recent) // group_size)
    budget = -(-settings.num_selected // group_size) + -(-settings.num_sinks // group_size)
    if units <= budget or queries.shape[2] < _QUERIES * _SPACING:
        return [1.0] * len(sizes)
    held, account, masses = units * group_size, MemoryAccount(), []
    asked = list(_asked(keys, queries, scaling, places, held))
    sinks = np.arange(-(-settings.num_sinks // group_size))[None]
    for size in sizes:
        coding = fit_coding(lambda: [keys[:, :, :held]], held, heads, None, size, queries)
        compact = CodedKeys(coding, heads, 1, account, Workspace(account, "scores"))
        compact.append(keys[:, :, :held])
        shares = []
        for query, scores in asked:
            exact = np.concatenate([scores[:, : settings.num_sinks], scores[:, held:]], 1)[None]
            ranking = rank_units(compact, query, scaling, group_size, budget, exact=exact, apart=sinks)
            mass = torch.from_numpy(scores).softmax(1).numpy()
            of_units = mass[:, :held].reshape(len(mass), units, group_size).sum((0, 2))[None]
            chosen, best = (
                largest(with_sinks(each.copy(), settings.num_sinks, group_size), budget)[0]
                for each in (ranking.importance, of_units)
            )
            always = mass[:, held:].sum()
            shares.append((of_units[0, chosen].sum() + always) / (of_units[0, best].sum() + always))
        compact.close()
        masses.append(float(np.mean(shares)))
    return masses


def _asked(
    keys: torch.Tensor, queries: torch.Tensor, scaling: float, places: list[int], held: int
) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """The query (1, H, D) of the token at each place, and its exact scores (H, t) for all tokens up to it."""
    heads = keys.shape[1]
    for place in places:
        query = queries[:, :, queries.shape[2] - (keys.shape[2] - place)]
        seen = keys[0, :, : place + 1].float()
        scores = query[0].float().unflatten(0, (heads, -1)) @ seen.transpose(1, 2) * scaling
        yield query, scores.flatten(0, 1).numpy(force=True)
