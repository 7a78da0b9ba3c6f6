"""The cache that a model gets while its step is captured as a CUDA graph: the same entries, in tensors that stay."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..memory.account import lasting_empty
from ..model.attention_call import TAG, AttentionCall, Tag
from ..predictors.base import DeviceSizes
from ..report.trace import NO_TIMELINE, Timeline
from .device_step import GraphStep, attend_in_graph, graph_room

NUMBERS = 3
"""Numbers of each layer: the place of the step's token in the tail, the tail's length with it, and units a row."""


class CapturedLayer(CacheLayerMixin):
    """One layer in a captured step. Its host side stays as it is: `GraphedStep` counts the token afterwards.

    Args:
        layer: a `SelectiveLayer`.
        numbers: (NUMBERS,) int64, on its device, which a replay reads.
    """

    is_sliding = False

    def __init__(self, layer: Any, numbers: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = DeviceSizes(numbers[1], numbers[2], graph_room(layer))
        self.step: GraphStep | None = None
        """The latest step; None: attention has not run yet."""
        self._place = numbers[:1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OffloadLayer.update`, for keys and values of one token a row."""
        self.layer.history.tail.put(*self.layer.kept(key_states, value_states), self._place)
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        keys.__dict__[TAG] = values.__dict__[TAG] = Tag(self, False)
        return keys, values

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """As `OffloadLayer.attend`."""
        self.step = attend_in_graph(self.layer, call, self.sizes)
        return self.step.output, None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer has a history."""

    def get_seq_length(self) -> int:
        return int(self.layer.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class CapturedCache(Cache):
    """The layers of a cache in a captured step. The hooks take it for a cache of ours (see `Attachable`): it does
    nothing at the begin and the end of a step.

    Args:
        layers: all layers of the cache, `SelectiveLayer`s of one device.
        numbers: (layers * NUMBERS + 1,) int64 on that device: of each layer, and the position of the step's token.
    """

    timeline: Timeline = NO_TIMELINE
    watches_blocks = False

    def __init__(self, layers: list[Any], numbers: torch.Tensor) -> None:
        parts = numbers[:-1].split(NUMBERS)
        self.captured = [CapturedLayer(layer, part) for layer, part in zip(layers, parts, strict=True)]
        super().__init__(layers=[*self.captured])
        self.position = numbers[-1:]

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        """Do nothing: `GraphedStep` begins the step."""

    def end_step(self, output: Any) -> None:
        """Do nothing: `GraphedStep` ends the step."""

    def fail_step(self) -> None:
        """Do nothing: nothing was added."""

    def prepare_step(self, *, first: bool) -> None:
        """Do nothing: `generate` does not get this cache."""

    def taken(self) -> tuple[torch.Tensor, list[int], int]:
        """Counts of the latest step's units, (layers, 2, rows) int64, new; the entries of units that each layer attends
        to; and an upper bound on the device memory that a layer needs for itself. Drops the step's tensors. Raises
        `RuntimeError` if the model has not asked some layer."""
        steps = [layer.step for layer in self.captured]
        for layer in self.captured:
            layer.step = None
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            raise RuntimeError("the model did not ask each layer for attention through this library")
        counts = torch.stack([step.counts for step in known])
        return counts, [step.attended for step in known], max(step.nbytes for step in known)


def static(*shape: int, device: torch.device) -> torch.Tensor:
    """A tensor (shape) int64 of zeros that stays, and can be written to in any mode."""
    return lasting_empty(*shape, dtype=torch.int64, device=device).zero_()
