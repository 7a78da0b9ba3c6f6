"""The cache that a model gets while its step is captured as a CUDA graph: the same entries, in tensors that stay.

A step in a graph has fixed shapes, and reads from the device how much of its tensors exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..fetch.choice import DeviceChoice, DeviceDecision, InSlots
from ..kernels.ranking import MOST_UNITS
from ..kernels.slots import attend, slots_bytes
from ..memory.account import lasting_empty
from ..model.attention_call import TAG, AttentionCall, Tag
from ..predictors.base import DeviceSizes, Query
from ..report.trace import NO_TIMELINE, Timeline
from .device_step import looked

NUMBERS = 3
"""Numbers of each layer: the place of the step's token in the tail, the tail's length with it, and
`CapturedLayer.units`."""
NOT_THERE = "does not step on a CUDA device with records in pinned host memory"
SEALS, SHORT = "the step seals a group of tokens", "the context is so short that a step attends to all of it"
SLOTS = "slots are made"


class GraphStep(NamedTuple):
    """The results of a layer's step in a graph, besides its output."""

    counts: torch.Tensor
    """(2, rows) int64: units that were read, and those that were in slots."""
    attended: int
    """Entries of units that a row attends to, at most."""
    nbytes: int
    """Upper bound on the device memory that it needs for itself."""


class CapturedLayer(CacheLayerMixin):
    """One layer in a captured step. Its host side stays as it is: `GraphedStep` counts the token afterwards.

    For a method that takes part, `choose_on_device` of its predictor follows `Query.sizes`, and the predictor has
    `graph_parts` and `room`; its history has a `tail`, `room` and `advance`. A method with another step on a device
    overrides this class: see `SelectiveLayer.captured_class`.

    Args:
        layer: a `SelectiveLayer`.
    """

    is_sliding = False

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.step: GraphStep | None = None
        """The latest step; None: attention has not run yet."""

    def why_not(self) -> str | None:
        """Why the next step cannot be in a graph; None: it can. Does not wait."""
        layer = self.layer
        slots, selecting, predictor = layer.device_slots, layer.selecting, layer.predictor
        if not layer.on_device or layer.state != "tagged" or selecting is None or not selecting.worthwhile:
            return f"{layer.name} {NOT_THERE}"
        history = layer.history
        if not hasattr(predictor, "graph_parts") or not hasattr(history, "advance"):
            return f"{type(predictor).__name__} has no step with fixed shapes"
        if history.records <= layer.budget or not predictor.chooses_on_device or not predictor.ready(history.units):
            return SHORT
        if history.room < 1:
            return SEALS
        if selecting.watch is not None:
            return "something watches the choices"
        made_for = selecting.version, history.records
        if slots is None or slots.closed or slots.made_for != made_for or not slots.is_ready(history):
            return SLOTS
        return None if history.units <= self.room else "the context is too long for a kernel"

    @property
    def lost(self) -> bool:
        """Whether the beginning of a step has freed what the step needs."""
        slots = self.layer.device_slots
        return slots is None or bool(slots.closed)

    @property
    def units(self) -> int:
        """Units a row now, of which there may be more in another step."""
        return int(self.layer.history.units)

    @property
    def room(self) -> int:
        """Units a row that the tensors have room for."""
        return min(self.layer.device_slots.room, self.layer.predictor.room, MOST_UNITS)

    def parts(self) -> list[Any]:
        """The tensors and numbers that a graph keeps; other ones need another graph."""
        layer = self.layer
        history, predictor = layer.history, layer.predictor
        fixed = history.rows, layer.budget, self.room, layer.scaling
        return [history.tail.memory, *layer.device_slots.memory, *fixed, *predictor.graph_parts()]

    @property
    def own_bytes(self) -> int:
        """Bytes of device memory that the layer has for graphs alone, besides those of `GraphStep.nbytes`."""
        return 0

    @property
    def latest_room(self) -> int:
        """Entries a row of `latest`."""
        return int(self.layer.history.tail.memory.shape[1])

    def latest(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The latest entries, which a captured step attends to besides its choice, as `slots.attend` takes them: as
        many as there is room for, which of them count, and the number of the first ones that exist."""
        return self.layer.history.tail.memory, None, self.sizes.recent

    def follow(self, numbers: torch.Tensor) -> None:
        """Read sizes from `numbers` (NUMBERS,) int64, on the layer's device, from now on."""
        self._place, self.sizes = numbers[:1], DeviceSizes(numbers[1], numbers[2], self.room)

    def join(self) -> None:
        """Let later work of the current stream follow what the layer does on other streams."""

    def abandon(self) -> None:
        """Forget what a capture has done on other streams, after it failed."""

    def free(self) -> None:
        """Free the memory of `own_bytes`."""

    def count_later(self, counts: torch.Tensor, told: Callable[[], object]) -> None:
        """Count units of replays when numbers leave the device: `counts` as in `GraphStep`. `told` is called then."""
        self.layer.device_slots.count_later(self.layer.history, counts, told)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OffloadLayer.update`, for keys and values of one token a row, and of its guess."""
        kept = self.layer.kept(key_states[:, :, :1], value_states[:, :, :1])
        self.layer.history.tail.put(*kept, self._place)
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        keys.__dict__[TAG] = values.__dict__[TAG] = Tag(self, False)
        return keys, values

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """As `OffloadLayer.attend`. The mask is not looked at: nothing is padded."""
        output, self.step = self.attended(call)
        return output, None

    def attended(self, call: AttentionCall) -> tuple[torch.Tensor, GraphStep]:
        """As `device_step.attend_on_device`, with the output (B, q, H, Dv): no tensor is replaced, nothing is counted
        on the host, and no mass is estimated."""
        layer, sizes = self.layer, self.sizes
        history, slots = layer.history, layer.device_slots
        form, tail = history.form, history.tail.memory
        query = Query(call.query[:, :, 0], call.scaling, None, lambda: form.split(tail)[0], sizes)
        decision: DeviceDecision = layer.predictor.choose_on_device(query, layer.budget, False)
        choice = decision if isinstance(decision, DeviceChoice) else next(decision)
        where, counts = slots.exchanged(choice.units)
        if not isinstance(decision, DeviceChoice):
            choice = looked(decision, InSlots(slots.data, where))
        shape = *call.query.shape[:2], history.rows, where.shape[1], slots.count, self.latest_room
        nbytes = slots_bytes(form, *shape) + history.rows * (self.latest_room - tail.shape[1]) * form.entry_bytes
        with layer.shared.storage.account.holding("scores", nbytes):
            latest, seen, count = self.latest()
            made_of = query.states, slots.data, where, latest, form, call.scaling
            output, _ = attend(*made_of, choice.value, choice.weight, choice.keep, seen, count)
        attended = where.shape[1] * form.group_size if choice.attended is None else choice.attended
        return output[:, None], GraphStep(counts, attended, nbytes + choice.nbytes)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer has a history."""

    def get_seq_length(self) -> int:
        return int(self.layer.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of a mask. With a guess the model would make one of the present length, which nothing looks at: it
        makes none for as many keys as queries."""
        return query_length + (self.layer.length if query_length == 1 else 0), 0

    def get_max_length(self) -> int:
        return -1


class CapturedCache(Cache):
    """The layers of a cache in a captured step. The hooks take it for a cache of ours (see `Attachable`): it does
    nothing at the begin and the end of a step.

    Args:
        layers: all layers of the cache, of one device.
        numbers: (layers * NUMBERS + t,) int64 on that device: of each layer, and the positions of the step's t tokens.
    """

    timeline: Timeline = NO_TIMELINE
    watches_blocks = False

    def __init__(self, layers: list[CapturedLayer], numbers: torch.Tensor) -> None:
        end = len(layers) * NUMBERS
        for layer, part in zip(layers, numbers[:end].split(NUMBERS), strict=True):
            layer.follow(part)
        self.captured = layers
        super().__init__(layers=[*self.captured])
        self.positions = numbers[end:]

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
            layer.join()
            layer.step = None
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            raise RuntimeError("the model did not ask each layer for attention through this library")
        counts = torch.stack([step.counts for step in known])
        return counts, [step.attended for step in known], max(step.nbytes for step in known)


def with_room(context: int, group: int) -> int:
    """As many tokens as a captured step computes with, at most, for `context` tokens a row in units of at most `group`:
    the room that its tensors have."""
    return context + context // 8 + 64 * group


def numbers_bytes(batch: int, tokens: int, layers: int, rows: int) -> int:
    """Bytes of what a graph reads of a step, its ids among them, and counts: of `tokens` a sequence, and histories of
    so many rows. The layers have counts of their own until these are joined and added."""
    return 8 * (batch * tokens + layers * NUMBERS + tokens + 3 * layers * 2 * rows)


def static(*shape: int, device: torch.device) -> torch.Tensor:
    """A tensor (shape) int64 of zeros that stays, and can be written to in any mode."""
    return lasting_empty(*shape, dtype=torch.int64, device=device).zero_()
