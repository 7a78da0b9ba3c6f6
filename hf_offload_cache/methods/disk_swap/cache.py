"""`DiskSwapCache` and its layer: KVSwap's runtime (section 3.4). Compact keys in memory select the groups to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from ...config import OffloadConfig, parse_size
from ...core.budget import Goals
from ...core.layer import OffloadLayer
from ...core.plan import LayerKind, layer_kinds, place_bytes, stream_bytes, streamed
from ...core.selective_cache import SelectiveCache
from ...core.selective_layer import SelectiveLayer
from ...core.shared import Shared
from ...errors import ConfigError
from ...history.records import RecordFormat, unpacking_bytes
from ...memory.dry_run import DryRun
from ...memory.fit import Search
from ...model.attention_call import AttentionCall
from ...model.config_values import config_value
from ...model.geometry import Geometry
from ...stores.base import FreezableStore
from .adapter import Adapter, adapter_rank
from .coding import default_summary_bytes
from .config import DiskSwapConfig
from .fit import QUICK, faithful, fit_disk_swap, needles_lost, quickest, shortfalls
from .fitted_keys import LowRankShared, Rules
from .low_rank_keys import default_rank
from .predictor import LowRankPredictor


def rules_of(settings: DiskSwapConfig) -> Rules:
    """The fields that decide how units are ranked and selected."""
    kind = settings.summaries
    return Rules(
        None if kind == "coded" else getattr(torch, kind),
        settings.num_sinks,
        settings.rank,
        settings.summary_bytes,
        settings.max_context or 0,
        settings.remainder,
        None if settings.memory is None else parse_size(settings.memory),
        settings.block_tokens or 0,
    )


class DiskSwapLayer(SelectiveLayer):
    """A layer with compact keys in memory and slots. It selects groups anew for every query."""

    predictor: LowRankPredictor | None
    predictor_class: ClassVar[type[LowRankPredictor]] = LowRankPredictor

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.adapter: torch.Tensor | None = None
        """Calibrated projection (Hk D, r) float32 of this layer; set by the cache."""

    def make_predictor(self) -> LowRankPredictor:
        selecting, storage = self.selecting, self.shared.storage
        assert selecting is not None and isinstance(selecting.settings, DiskSwapConfig)
        history, form, rows, settings = self.history, self.history.form, self.history.rows, selecting.settings
        kind = self.kind(1)

        def streaming() -> int:  # without a reference to this layer, which holds the predictor
            records = history.records
            unpacked = unpacking_bytes(form, rows * streamed(kind, settings, records))
            buffers = stream_bytes(kind, settings, records) - storage.account.by_owner["stream buffers"]  # those there
            return max(0, buffers) + place_bytes(kind, settings, records) + unpacked

        shared = LowRankShared(
            storage.account, selecting.workspace, lambda: selecting.postponed, selecting.rest,
            lambda tokens: selecting.units(settings, form.group_size, tokens), streaming,
        )  # fmt: skip
        rules = rules_of(settings)
        own = self.adapter, self.layer_idx, self.rows.heads
        return self.predictor_class(form, rows, rules, shared, self.name, *own)

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        if isinstance(self.config, DiskSwapConfig) and self.config.adapter is not None:
            rank = adapter_rank(self.config.adapter)
            width = kind.form.joined(kind.rows // kind.batch).key_width
            self.adapter = torch.empty(width, rank, dtype=torch.float32, device="meta")
        super().rehearse(run, kind, context)

    @property
    def estimates(self) -> bool:
        return cast(DiskSwapConfig, self.config).remainder

    def prompted(self, call: AttentionCall) -> None:
        step = self.shared.step
        if self.predictor is not None and not (step is not None and step.selects):  # candidates are not a prompt
            self.predictor.prompted(self.scaling)

    def settle_rows(self, rows: torch.Tensor) -> None:
        self.end_prompt()  # the rows' own queries are for it
        super().settle_rows(rows)

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        super().restore(tree, parts, device)
        if self.predictor is not None:
            self.adapter = self.predictor.fitted.adapter


def runs_alone(geometry: Geometry, context: int, batch: int, fields: Mapping[str, Any]) -> bool:
    """`Goals.alone`: all layers' steps run on a device, if their slots hold a complete choice."""
    if geometry.device != "cuda" or "reuse_capacity" in fields:
        return False
    config = replace(DiskSwapConfig.load(None, dict(fields)), memory=None)  # then slots do
    kinds = dict.fromkeys(layer_kinds(geometry, config, batch))
    return bool(kinds) and all(DiskSwapLayer.plan(*kind, context).alone for kind in kinds)


class DiskSwapCache(SelectiveCache):
    """KVSwap: keeps the KV cache on disk and reads back the groups that each step needs.

    `model.generate(..., past_key_values=DiskSwapCache(model))`. See `DiskSwapConfig` for the fields. Prefill is exact.
    Decoding attends to the first tokens, the latest ones, and the groups whose compact keys score highest with the
    layer's own query. While a layer runs, the next layer's groups are prefetched by a guess of its query.
    """

    config_class: ClassVar[type[OffloadConfig]] = DiskSwapConfig
    layer_class: ClassVar[type[OffloadLayer]] = DiskSwapLayer
    goals = Goals(faithful, QUICK, needles_lost, quickest, partial(needles_lost, alone=True), runs_alone)
    solver = "hf_offload_cache.methods.disk_swap.tuning:tune_by_solver"
    config: DiskSwapConfig

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        settings = self.config
        if self.selecting is None:
            return
        layers = [layer for layer in self.selective if isinstance(layer, DiskSwapLayer)]
        width = key_width(model)
        if settings.rank is not None and width is not None and settings.rank > width:
            raise ConfigError(
                f"rank must be at most {width}, the joined width of this model's keys, got {settings.rank}: "
                f"use rank={width}"
            )
        if settings.adapter is not None:
            adapter = Adapter.load(Path(settings.adapter), model)
            for layer in layers:
                layer.adapter = adapter.of_layer(layer.layer_idx, settings.rank, width).float()

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        settings = search.config({**search.streams(10), "look_ahead": False})
        shapes, context = dict.fromkeys(geometry.layers), search.max_context
        kinds = [LayerKind.of(shape, geometry, settings, search.max_batch) for shape in shapes]
        plans = [DiskSwapLayer.plan(replace(kind, over_host=True), settings, context) for kind in kinds]
        forms: list[RecordFormat] = list(dict.fromkeys(kind.form.joined(kind.rows // kind.batch) for kind in kinds))
        return fit_disk_swap(search, forms, max((plan.shared.decode["staging"] for plan in plans), default=0))

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        width = max((form.key_width for form in geometry.forms(config.group_size)), default=0)
        general = super().shortfalls(config, geometry, given)
        return general if config.exact or not width else [*shortfalls(config, width, given), *general]

    @classmethod
    def stored_fields(cls, config: Any, geometry: Geometry) -> dict[str, Any]:
        fields = super().stored_fields(config, geometry)
        forms = geometry.forms(config.group_size)
        if not config.exact and forms:
            width = max(form.key_width for form in forms)
            if config.summaries == "coded":
                fields.setdefault("summary_bytes", default_summary_bytes(width))
            else:
                fields.setdefault("rank", default_rank(width))
        return fields


def key_width(model: Any) -> int | None:
    """Joined key width Hk D from the model's configuration; None if the configuration does not give it."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, key_heads, hidden, dim = (config_value(config, name) for name in names)
    key_heads = key_heads or heads
    dim = dim or (hidden // heads if hidden and heads else None)
    return key_heads * dim if isinstance(key_heads, int) and isinstance(dim, int) else None
