"""`DiskSwapCache`: KVSwap (sections 3.1 to 3.4). Keys predict from memory, groups come from disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ..config import OffloadConfig
from ..core.offload_cache import OffloadCache
from ..core.offload_layer import OffloadLayer
from ..core.pace import Pace
from ..errors import ConfigError
from ..fetch.selection_buffer import SelectionBuffer
from ..model.fingerprint import config_value
from ..model.look_ahead import LookAhead
from ..predictors.layer_budgets import MOST, spread
from .adapter import Adapter
from .disk_swap_config import DiskSwapConfig
from .disk_swap_layer import DiskSwapLayer


def key_width(model: PreTrainedModel) -> int | None:
    """Hk D as the model's configuration says it; None where it does not."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, key_heads, hidden, dim = (config_value(config, name) for name in names)
    key_heads = key_heads or heads
    dim = dim or (hidden // heads if hidden and heads else None)
    return key_heads * dim if isinstance(key_heads, int) and isinstance(dim, int) else None


class DiskSwapCache(OffloadCache):
    """Keeps the KV cache on disk and brings back, group by group, what each step needs.

    `model.generate(..., past_key_values=DiskSwapCache(model))`. See `DiskSwapConfig` for the fields. Prefill is exact.
    Decoding attends to the first tokens, the latest ones, and the groups whose compact keys score highest with the
    layer's own query; what the look-ahead query of the layer before selects is read ahead.
    """

    config_class: ClassVar[type[OffloadConfig]] = DiskSwapConfig
    layer_class: ClassVar[type[OffloadLayer]] = DiskSwapLayer

    def prepare(self, model: PreTrainedModel) -> None:
        settings = self.config
        assert isinstance(settings, DiskSwapConfig)
        self.buffer = None if settings.exact else SelectionBuffer(self.shared, settings)
        self._pace = Pace(True if settings.selection == "paper" else settings.look_ahead)
        if self.buffer is None:
            return
        width = key_width(model)
        if settings.rank is not None and width is not None and settings.rank > width:
            raise ConfigError(
                f"rank must be at most {width}, the joined width of this model's keys, got {settings.rank}: "
                f"use rank={width}"
            )
        if settings.look_ahead is not False or settings.selection == "paper":
            self.look_ahead = LookAhead(self.shared.account, "input" if settings.selection == "paper" else "attended")
        layers = [layer for layer in self.layers if isinstance(layer, DiskSwapLayer)]
        if not isinstance(settings.layer_budgets, str):
            if len(settings.layer_budgets) != len(layers):
                raise ConfigError(
                    f"layer_budgets must name tokens for each of the {len(layers)} offloaded layers, got "
                    f"{len(settings.layer_budgets)} numbers"
                )
            budgets = zip(layers, settings.layer_budgets, strict=True)
            self.buffer.spread({layer.layer_idx: tokens for layer, tokens in budgets}, given=True)
        adapter = None if settings.adapter is None else Adapter.load(Path(settings.adapter), model)
        for layer in layers:
            layer.buffer = self.buffer
            layer.learn = None if self.look_ahead is None else self.look_ahead.learn
            if adapter is not None:
                layer.adapter = adapter.of_layer(layer.layer_idx, settings.rank, width).float()

    def freeze(self) -> None:
        if self.buffer is not None:
            self.buffer.settle()  # no read is under way in a store that is about to change
        super().freeze()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "budgets": None if self.buffer is None else self.buffer.capture()}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        if self.buffer is not None and tree["budgets"] is not None:
            self.buffer.restore(tree["budgets"])

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        changed = super().begin_step(model, kwargs)
        if self.buffer is not None and not self.decoding:
            self.buffer.rest()
        if self.decoding and self.buffer is not None:
            self.buffer.begin_step()
            self._spread_budgets()
            if 0 in self._by_index and self._pace.first:  # no layer before it looks ahead for it
                with self.timeline.span("look ahead", 0):
                    self._prefetch(self._by_index[0], None)
        return changed

    def _spread_budgets(self) -> None:
        """Before the first step after a prefill: give each layer its share of the groups that are selected."""
        settings = self.config
        assert isinstance(settings, DiskSwapConfig)
        layers = [layer for layer in self.offloaded if isinstance(layer, DiskSwapLayer)]
        assert self.buffer is not None
        if not any(layer.latest_queries is not None for layer in layers):
            return
        group = max((layer.history.form.group_size for layer in layers if layer.is_initialized), default=1)
        mean = -(-settings.num_selected // group)
        curves = {layer.layer_idx: layer.density(MOST * mean) for layer in layers if layer.is_initialized}
        known = {layer_idx: curve for layer_idx, curve in curves.items() if curve is not None}
        if known:
            groups = spread(np.stack(list(known.values())), mean)
            self.buffer.spread({layer_idx: int(n) * group for layer_idx, n in zip(known, groups, strict=True)})
        self._account_live()  # the queries are gone: what selecting takes comes in their place

    def end_step(self, output: Any) -> Any | None:
        started = self._step_started
        changed = super().end_step(output)
        if started is not None:
            self._pace.took(time.perf_counter() - started)
        return changed

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """After a layer's attention: the next layer, if it is offloaded, fetches what it will probably select."""
        if self.decoding and self._pace.first and layer_idx + 1 in self._by_index:
            with self.timeline.span("look ahead", layer_idx + 1):
                self._prefetch(self._by_index[layer_idx + 1], output)

    def _prefetch(self, layer: OffloadLayer, output: torch.Tensor | None) -> None:
        settings = self.config
        assert isinstance(settings, DiskSwapConfig)
        assert isinstance(layer, DiskSwapLayer)
        if self.look_ahead is None or settings.selection == "random":
            return
        query = None if output is None else self.look_ahead.predict(layer.layer_idx, output)
        if query is not None:
            layer.prefetch_for(query)
        elif settings.selection == "default" and layer.buffer is not None and layer.is_initialized:
            layer.buffer.prefetch_again(layer)
