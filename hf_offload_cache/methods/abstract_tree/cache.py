"""`AbstractTreeCache`: LeoAM (section 4). Abstracts of keys select chunks, and the keys select tokens in these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from ...config import OffloadConfig
from ...core.budget import Goals, choices_for_fidelity, on_curve
from ...core.layer import OffloadLayer
from ...core.selective_cache import SelectiveCache
from ...core.selective_layer import SelectiveLayer
from ...errors import ConfigError, not_whole
from ...fetch.replica_link import Rates
from ...memory.fit import LEAST_RECENT, LEAST_SELECTED, LOST_BY, SHORT_TAIL, STREAM_SHARES, Search
from ...model.geometry import Geometry
from ...stores.base import DEVICE_BLOCK
from .config import AbstractTreeConfig
from .history import ChunkHistory
from .layer import AbstractTreeLayer

# The best fields of `AbstractTreeCache` that a budget allows

_CHUNK_SIZES = (64, 32, 16)
_OPENED = (4.0, 2.5, 2.0, 1.5, 1.25)
"""Tokens in the examined chunks, as a multiple of the attended tokens: the best, the default, first."""
_NONE_DENSE = {"dense_layers": 0, "resident_layers": 0, "dense_share": 0.001}
"""Dense layers of a saved context attend to as many tokens as the other layers."""
_FRUGAL = {**_NONE_DENSE, "abstracts": "disk", "look_ahead": False, "early_steps": 0}


def fit_abstract_tree(search: Search[AbstractTreeConfig]) -> AbstractTreeConfig:
    """Find the best configuration that fits: 400 tokens, or a goal's, of four times as many examined ones, dense first
    layers in memory, and the remaining memory for slots.

    If that does not fit, these are reduced in turn: dense layers, prefetches, stream queue and buffers, abstracts in
    memory (then on disk), early steps and the recent window, the chunk size, a part of the examined tokens (all of this
    again), more of them, and the attended tokens. On a device, slots hold a complete choice if they fit: then steps run
    there without the host's buffers. Raises `BudgetError` with the minimum memory needed.
    """

    def smallest(chosen: dict[str, Any]) -> dict[str, Any]:
        return {**chosen, **_of_size(search, chosen["chunk_size"]).least_streams(chosen.get("num_recent"))}

    chosen = search.first_fit(_tried(search), smallest)
    most = search.most_slots(chosen, search.config(chosen).tokens_fetched(search.max_context))
    if search.device == "cpu":  # less than a chunk a layer
        most = search.most({**most, "host_slots": 0}, "host_slots", search.memory)
    return search.config(search.wider_streams(most))


def _of_size(search: Search[AbstractTreeConfig], size: int) -> Search[AbstractTreeConfig]:
    """`search` with chunks of `size` tokens."""
    sizes = {size, search.fields.get("dense_chunk_size") or size}
    records = [(_record_bytes(*record, tokens), tokens) for record in search.records for tokens in sizes]
    return replace(search, records=records)


def whole_chunks(search: Search[AbstractTreeConfig]) -> Search[AbstractTreeConfig]:
    """`search` with blocks that fit the largest chunk, for any layers of the model."""
    return _of_size(search, search.config({}).group_size or _CHUNK_SIZES[0])


def _tried(search: Search[AbstractTreeConfig]) -> Iterator[dict[str, Any]]:
    wanted = search.config({}).attended(search.max_context)
    given = search.fields.get("chunk_size") or search.fields.get("group_size")
    given = max(given) if isinstance(given, Sequence) else given
    sizes = _CHUNK_SIZES if given is None else [given]
    for opened in _OPENED[:2]:
        for size in sizes:
            yield from search.group(list(_examining(search, size, wanted, opened)))
    frugally = [{"chunk_size": size, **_FRUGAL, **_of_size(search, size).least_streams(SHORT_TAIL)} for size in sizes]
    yield from ({**frugal, **_selecting(wanted, opened)} for opened in _OPENED[2:] for frugal in frugally)
    for size, frugal in zip(sizes, frugally, strict=True):
        of_size, counts = _of_size(search, size), [wanted]
        while counts[-1] > LEAST_SELECTED and search.fields.get("num_selected") is None:
            counts.append(max(LEAST_SELECTED, counts[-1] * 3 // 4))
        if counts[1:]:
            yield from search.shrinking([[{**frugal, **_selecting(fewer, _OPENED[-1])}] for fewer in counts[1:]])
        for recent in (SHORT_TAIL // 2, LEAST_RECENT):
            yield {**frugal, **of_size.least_streams(recent), **_selecting(counts[-1], 1)}


def _examining(
    search: Search[AbstractTreeConfig], size: int, wanted: int, opened: float
) -> Iterator[dict[str, Any]]:
    """Fields to try with chunks of `size` tokens, if a step examines `opened` times the `wanted` tokens."""
    of_size, chosen = _of_size(search, size), {"chunk_size": size, **_selecting(wanted, opened)}
    if opened == _OPENED[0]:
        yield {**chosen, **of_size.streams(STREAM_SHARES[0])}
    chosen.update(_NONE_DENSE)
    for look in ({}, {"look_ahead": False}):
        yield from ({**chosen, **of_size.streams(share), **look} for share in STREAM_SHARES)
    yield {**chosen, **of_size.least_streams(), "look_ahead": False}
    chosen.update(abstracts="disk", look_ahead=False)
    yield from ({**chosen, **of_size.streams(share)} for share in STREAM_SHARES)
    chosen.update(_FRUGAL)
    yield from ({**chosen, **of_size.least_streams(recent)} for recent in (SHORT_TAIL, SHORT_TAIL // 2))


_LOST = ((0.0, 1.0), (0.12, 0.9), (0.14, 0.64), (0.23, 0.35), (0.39, 0.04), (1.0, 0.0))
"""Share of the tokens that a step examines -> share of the full cache's needles that are lost. Measured on SmolLM2-135M
with prompts of 4,000 and 7,000 tokens."""
_LOST_LATER = ((4096, 0.0), (7168, 0.16))
"""Tokens of a context -> the additional share that is lost without early steps: none of 10 in 4,000, 2 of 12 in 7,000.
"""
_LOST_UP_TO = 8192
"""The longest context of `_LOST`; beyond, the share is taken as of this one."""


def faithful(context: int) -> tuple[dict[str, Any], ...]:
    """`Goals.faithful`: see `choices_for_fidelity`. A step examines four times as many tokens as it selects."""
    return choices_for_fidelity(context, num_opened=None)


def needles_lost(config: AbstractTreeConfig, geometry: Geometry) -> float:
    """The share of needles that are lost because a step examines few tokens, by `_LOST` and `_LOST_LATER`."""
    context = config.max_context or _LOST_UP_TO
    lost = on_curve(config.tokens_fetched(context) / min(context, _LOST_UP_TO), _LOST)
    return min(0.99, lost + (0.0 if config.early_steps else on_curve(context, _LOST_LATER)))


def tree_shortfalls(config: AbstractTreeConfig, given: Iterable[str]) -> list[str]:
    """Warnings for fields of `config` that a budget reduced and the user has not `given`: dense layers and examined
    tokens."""
    context, shortfalls = config.max_context or 1 << 40, []
    wanted, opened = config.attended(context), config.tokens_fetched(context)
    if config.dense_layers and config.dense_share == _NONE_DENSE["dense_share"] and "dense_share" not in given:
        shortfalls.append(
            f"no room for dense_layers={config.dense_layers}: these layers attend to no more tokens than the others"
        )
    if opened < _OPENED[0] * wanted and "num_opened" not in given:
        most = round(_OPENED[0] * wanted)
        shortfalls.append(
            f"a step examines {opened} tokens for {wanted}; examining {most} loses fewer needles {LOST_BY}"
        )
    return shortfalls


def _selecting(tokens: int, opened: float) -> dict[str, Any]:
    num_opened = None if opened == _OPENED[0] else round(tokens * opened)
    return {"num_selected": tokens, "num_opened": num_opened, "reuse_capacity": 0}


def _record_bytes(nbytes: int, tokens: int, size: int) -> int:
    """Bytes of a record of `size` tokens, if a record of `tokens` has `nbytes`."""
    return -(-nbytes * size // tokens // DEVICE_BLOCK) * DEVICE_BLOCK


class AbstractTreeCache(SelectiveCache):
    """Keep the KV cache on disk in chunks, and the minimum and maximum of each chunk's key components in memory.

    `model.generate(..., past_key_values=AbstractTreeCache(model))`. See `AbstractTreeConfig` for the fields. Prefill is
    exact. A decoding step reads the chunks whose keys may score highest. It attends to the best tokens in them, by
    their keys, and to the first and the latest tokens.
    """

    config_class: ClassVar[type[OffloadConfig]] = AbstractTreeConfig
    layer_class: ClassVar[type[OffloadLayer]] = AbstractTreeLayer
    goals = Goals(faithful, lost=needles_lost)
    config: AbstractTreeConfig

    def __init__(
        self, model: Any, path: str | Path | None = None, config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        self._early = 0
        """Remaining early steps."""
        super().__init__(model, path, config, **fields)

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        sizes = self.config.chunk_size
        if isinstance(sizes, tuple) and len(sizes) != len(self.offloaded):
            raise ConfigError(
                f"chunk_size must have one value for each offloaded layer, got {len(sizes)} for {len(self.offloaded)} "
                "layers: measure them on this model with calibrate_chunks"
            )
        rates: Rates = {}
        for layer in self.selective:
            assert isinstance(layer, AbstractTreeLayer)
            layer.rates = rates
        if self.config.keeps_pages:
            for layer, following in pairwise(self.selective):
                assert isinstance(layer, AbstractTreeLayer) and isinstance(following, AbstractTreeLayer)
                layer.following = following

    def rest(self) -> None:
        """As `SelectiveCache.rest`: early steps follow a prompt."""
        super().rest()
        self._early = self.config.early_steps

    def before_selecting(self) -> None:
        if self.selecting is not None and self.selecting.widened is not (self._early > 0):
            self.selecting.widen(self._early > 0)
        residents, selective = int(self.config.residents), self.selective
        for resident in selective[:residents]:
            assert isinstance(resident, AbstractTreeLayer)
            resident.keep_all()
        if selective and self.config.keeps_pages:
            first = selective[0]  # no layer before it starts this read
            assert isinstance(first, AbstractTreeLayer)
            first.begin_look()

    def end_step(self, output: Any = None) -> Any:
        step = self.shared.step
        if step is not None and step.selects:  # a failed step is repeated
            self._early = max(0, self._early - 1)
        changed = super().end_step(output)
        if self.config.compress is None:
            return changed
        replicated = [layer for layer in self.selective if layer.config.keeps_replicas]  # type: ignore[attr-defined]
        if replicated and all(map(_has_no_replicas, replicated)):
            useless = (
                f"compress={self.config.compress!r} has no effect: 4-bit chunks of {self.config.chunk_size} tokens "
                "take no less disk space, because its blocks are 4 KiB; use a larger chunk_size"
            )
            if useless not in self.warnings:
                self.warn(useless)
        return changed

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "early": self._early}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        early = tree["early"]
        if type(early) is not int or early < 0:
            raise not_whole("the cache", f"its remaining early steps must be a whole number from 0, got {early!r:.80}")
        self._early = min(early, self.config.early_steps)

    @classmethod
    def to_try(cls, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Smaller chunks, which have tighter bounds, and more examined tokens."""
        sizes = [{"chunk_size": size} for size in (64, 32, 16)] if given.get("group_size") is None else [{}]
        wanted = given.get("num_selected", 400)
        if wanted is None or given.get("num_opened") is not None:
            return sizes
        return [{**size, **more} for size in sizes for more in ({}, {"num_opened": 8 * wanted})]

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        shortfalls = super().shortfalls(config, geometry, given)
        return shortfalls if config.exact else [*shortfalls, *tree_shortfalls(config, given)]

    @classmethod
    def choose_exact(cls, search: Search[Any]) -> OffloadConfig:
        return super().choose_exact(whole_chunks(search))

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        return fit_abstract_tree(search)


def _has_no_replicas(layer: SelectiveLayer) -> bool:
    """True if the layer has no replicas and will have none."""
    return layer.is_initialized and isinstance(layer.history, ChunkHistory) and layer.history.replicas is None
