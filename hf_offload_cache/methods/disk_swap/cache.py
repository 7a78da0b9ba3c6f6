"""`DiskSwapCache`: KVSwap (sections 3.1 to 3.4). Keys predict from memory, groups come from disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ...config import OffloadConfig
from ...core.layer import OffloadLayer
from ...core.plan import LayerKind
from ...core.selective_cache import Pace, SelectiveCache
from ...core.selective_layer import SelectiveLayer
from ...core.selective_plan import area_bytes
from ...core.shared import Shared
from ...errors import ConfigError
from ...fetch.choice import Choice
from ...history.records import RecordFormat
from ...memory.fit import Search
from ...memory.plan import LayerPlan
from ...model.attention_call import AttentionCall
from ...model.config_values import config_value
from ...model.geometry import Geometry
from ...model.look_ahead import LookAhead
from ...predictors.base import Query
from ...stores.base import FreezableStore
from .adapter import Adapter, adapter_rank
from .coding import default_summary_bytes
from .compact_keys import default_rank
from .config import DiskSwapConfig
from .fit import fit_disk_swap, shortfalls
from .kept_choice import NEVER
from .layer_budgets import MOST, spread
from .learnt_keys import LowRankShared, Rules
from .predictor import LowRankPredictor

_LEARNT = (
    "summary", "sinks", "adapter", "fitted_at", "longest_piece", "measured_at", "latest_queries", "latest", "beyond",
    "since", "kept",
)  # fmt: skip
"""What of a captured layer is its predictor's."""
_NOTHING = {"fitted_at": 0, "longest_piece": 0, "measured_at": 0, "since": 0, "kept": {"usual": NEVER, "choice": None}}
"""Those of a layer without fitted state."""


def rules_of(settings: DiskSwapConfig) -> Rules:
    """How units are ranked and chosen."""
    kind = settings.summaries
    return Rules(
        None if kind == "coded" else getattr(torch, kind),
        settings.num_sinks,
        settings.rank,
        settings.summary_bytes,
        settings.selection,
        settings.target_mass,
        settings.measures_budgets,
        settings.max_context or 0,
        settings.steps_per_selection,
    )


class DiskSwapLayer(SelectiveLayer):
    """A layer with compact keys in memory, slots, and groups selected anew for every query."""

    predictor: LowRankPredictor | None

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.adapter: torch.Tensor | None = None
        """Calibrated projection of this layer; set by the cache."""
        self.follows_guess = False
        """By the paper's rule: what was guessed decides, if there is a guess; set by the cache."""

    def make_predictor(self) -> LowRankPredictor:
        selecting, storage = self.selecting, self.shared.storage
        assert selecting is not None and isinstance(selecting.settings, DiskSwapConfig)
        shared = LowRankShared(
            storage.account, selecting.workspace, selecting.generator, lambda: storage.counters,
            lambda: selecting.postponed,
            selecting.rest,
        )  # fmt: skip
        rules = rules_of(selecting.settings)
        form, rows = self.history.form, self.history.rows
        return LowRankPredictor(form, rows, rules, shared, self.name, self.adapter, self.layer_idx)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, DiskSwapConfig)
        rank = config.rank or (None if config.adapter is None else adapter_rank(config.adapter))
        wanted = cls.most_units(kind, config, context)
        return LowRankPredictor.planned(kind.form, rules_of(config), rank, kind.num_heads, context, kind.rows, wanted)

    @classmethod
    def most_units(cls, kind: LayerKind, config: Any, context: int) -> int:
        group = kind.form.group_size
        selected = -(-config.num_selected // group)
        if isinstance(config.layer_budgets, tuple):
            selected = -(-max(config.layer_budgets) // group)
        elif config.measures_budgets:
            selected *= MOST
        return selected + (-(-(config.num_sinks + group - 1) // group) if config.num_sinks else 0)

    @classmethod
    def most_slots(cls, kind: LayerKind, config: Any) -> int:
        """As a mean over the layers: budgets of their own are rounded up layer by layer."""
        reuse, group = config.reuse_capacity, kind.form.group_size
        if not reuse:
            return 0
        slots = -(-reuse // group)
        if isinstance(config.layer_budgets, tuple):
            shares = [-(-round(tokens / config.num_selected * reuse) // group) for tokens in config.layer_budgets]
            slots = -(-sum(shares) // len(shares))
        elif config.measures_budgets:
            slots = -(-(-(-config.num_selected // group) * reuse) // config.num_selected) + 1
        return slots + -(-config.num_sinks // group)

    def prompted(self, call: AttentionCall) -> None:
        step = self.shared.step
        if self.predictor is not None and not (step is not None and step.selects):  # candidates are no prompt
            self.predictor.watch(call.query, self.length)

    def choose(self, query: Query, *, guess: bool = False, again: bool = False) -> Choice:
        """As `SelectiveLayer.choose`, or by the paper's rule."""
        if self.follows_guess and not guess and self._fetcher is not None:
            decided = self._fetcher.guess
            if decided is not None:
                return decided
        return super().choose(query, guess=guess, again=again)

    def prefetch_again(self) -> None:
        """Nothing is guessed of a random choice; by the paper's rule the first layer, which nobody looks ahead for,
        chooses by its own query."""
        settings = self.shared.config
        assert isinstance(settings, DiskSwapConfig)
        if settings.selection == "default":
            super().prefetch_again()

    def density(self, most: int, visible: torch.Tensor | None = None) -> np.ndarray | None:
        """See `LowRankPredictor.density`; None also where there is nothing to choose from. `visible` as in `Query`."""
        if self.predictor is None or not self.can_choose():
            return None
        if visible is not None:
            visible = visible.to(self.history.device) if visible.shape == (self.batch, self.length) else None
        return self.predictor.density(most, lambda states: self.query_of(states, visible), self.length)

    # The saved format has what the predictor holds beside what the layer holds.

    def capture(self) -> dict[str, Any]:
        tree = super().capture()
        learnt = tree.pop("predictor")
        if learnt is None:
            learnt = {**dict.fromkeys(_LEARNT), "adapter": self.adapter, **_NOTHING}
        return {**tree, **learnt}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        learnt = {name: tree[name] for name in _LEARNT}
        self.adapter = tree["adapter"]
        super().restore({**tree, "predictor": learnt}, parts, device)


class DiskSwapCache(SelectiveCache):
    """Keeps the KV cache on disk and brings back, group by group, what each step needs.

    `model.generate(..., past_key_values=DiskSwapCache(model))`. See `DiskSwapConfig` for the fields. Prefill is exact.
    Decoding attends to the first tokens, the latest ones, and the groups whose compact keys score highest with the
    layer's own query; what the look-ahead query of the layer before selects is read ahead.
    """

    config_class: ClassVar[type[OffloadConfig]] = DiskSwapConfig
    layer_class: ClassVar[type[OffloadLayer]] = DiskSwapLayer
    config: DiskSwapConfig

    @classmethod
    def fit(
        cls, geometry: Geometry, memory: int, max_context: int, max_batch: int, fields: dict[str, Any]
    ) -> DiskSwapConfig:
        return cast(DiskSwapConfig, super().fit(geometry, memory, max_context, max_batch, fields))

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        settings = self.config
        if self.selecting is None:
            return
        layers = [layer for layer in self.selective if isinstance(layer, DiskSwapLayer)]
        if settings.selection == "paper":
            self._pace = Pace(True)
            self.look_ahead = LookAhead(self.storage.account, "input")
            self.watch_queries()
            for layer in layers:
                layer.follows_guess = True
        width = key_width(model)
        if settings.rank is not None and width is not None and settings.rank > width:
            raise ConfigError(
                f"rank must be at most {width}, the joined width of this model's keys, got {settings.rank}: "
                f"use rank={width}"
            )
        if isinstance(settings.layer_budgets, tuple):
            if len(settings.layer_budgets) != len(layers):
                raise ConfigError(
                    f"layer_budgets must name tokens for each of the {len(layers)} offloaded layers, got "
                    f"{len(settings.layer_budgets)} numbers"
                )
            budgets = zip(layers, settings.layer_budgets, strict=True)
            self.selecting.spread({layer.layer_idx: tokens for layer, tokens in budgets}, given=True)
        if settings.adapter is not None:
            adapter = Adapter.load(Path(settings.adapter), model)
            for layer in layers:
                layer.adapter = adapter.of_layer(layer.layer_idx, settings.rank, width).float()

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        if search.fields.get("exact"):
            return super().choose_fields(search, geometry)
        settings = search.config({**search.streams(10), "look_ahead": False})
        shapes, context = dict.fromkeys(geometry.layers), search.max_context
        kinds = [LayerKind.of(shape, geometry, settings, search.max_batch, False) for shape in shapes]
        wanted = (DiskSwapLayer.most_units(kind, settings, context) for kind in kinds)
        pairs = zip(kinds, wanted, strict=True)
        areas = (area_bytes(DiskSwapLayer, kind, settings, context, units) for kind, units in pairs)
        forms: list[RecordFormat] = list(dict.fromkeys(kind.form for kind in kinds))
        return fit_disk_swap(search, forms, max(areas, default=0))

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        width = max((form.key_width for form in geometry.forms(config.group_size)), default=0)
        found = super().shortfalls(config, geometry, given)
        return found if config.exact or not width else [*shortfalls(config, width, given), *found]

    @classmethod
    def stored_fields(cls, config: Any, geometry: Geometry) -> dict[str, Any]:
        found = super().stored_fields(config, geometry)
        forms = geometry.forms(config.group_size)
        if not config.exact and forms:
            width = max(form.key_width for form in forms)
            if config.summaries == "coded":
                found.setdefault("summary_bytes", default_summary_bytes(width))
            else:
                found.setdefault("rank", default_rank(width))
        return found

    def read_ahead(self, layer: SelectiveLayer, output: torch.Tensor) -> None:
        """As `SelectiveCache.read_ahead`; nothing is guessed of a random choice."""
        if self.config.selection != "random":
            super().read_ahead(layer, output)

    def before_selecting(self) -> None:
        """Before the first step after a prefill: give each layer its share of the groups that are selected."""
        if not self.config.measures_budgets:
            return
        layers = [layer for layer in self.selective if isinstance(layer, DiskSwapLayer) and layer.predictor is not None]
        if not any(layer.predictor is not None and layer.predictor.latest_queries is not None for layer in layers):
            return
        assert self.selecting is not None
        group = max((layer.history.form.group_size for layer in layers), default=1)
        mean = -(-self.config.num_selected // group)
        visible = self.contents.tokens.visible if self.contents.tokens.padded else None
        curves = {layer.layer_idx: layer.density(MOST * mean, visible) for layer in layers}
        known = {layer_idx: curve for layer_idx, curve in curves.items() if curve is not None}
        if known:
            groups = spread(np.stack(list(known.values())), mean)
            for layer in layers:  # all slots before any is made anew: together they would be above the budget
                layer.drop_fetcher()
            self.selecting.spread({layer_idx: int(n) * group for layer_idx, n in zip(known, groups, strict=True)})
        self.contents.account_live()  # the queries are gone: what selecting takes comes in their place

    @property
    def measures_budgets(self) -> bool:
        return self.config.measures_budgets


def key_width(model: Any) -> int | None:
    """Hk D as the model's configuration says it; None where it does not."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, key_heads, hidden, dim = (config_value(config, name) for name in names)
    key_heads = key_heads or heads
    dim = dim or (hidden // heads if hidden and heads else None)
    return key_heads * dim if isinstance(key_heads, int) and isinstance(dim, int) else None
