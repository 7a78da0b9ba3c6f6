"""A layer's decoding step on a CUDA device with records in pinned host memory: kernels choose, read and attend, and the
host waits for nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..fetch.choice import DeviceChoice
from ..fetch.device_slots import DeviceSlots
from ..kernels.on_a_device import has_step
from ..kernels.ranking import MOST_UNITS
from ..kernels.slots import attend, slots_bytes
from ..model.attention_call import AttentionCall
from ..predictors.base import DeviceSizes, Query

Layer = Any
"""A `SelectiveLayer`."""

LOOKED_AT = 16
"""Steps from one count of a layer's estimated mass to the next. Layers take turns, so a step pays for few."""


def is_possible(layer: Layer) -> bool:
    """Whether steps of this layer, which has its history, may run on a device. Then it watches no queries."""
    history = layer.history
    possible: bool = (
        history.device.type == "cuda"
        and history.store.in_memory
        and hasattr(layer.predictor, "choose_on_device")
        and history.form.num_key_heads == history.form.num_value_heads
        and history.form.dtype.itemsize <= 4
        and has_step(history.device, history.form.key_dim, history.form.value_dim)
    )
    if possible:
        layer.watch_query = None  # nothing is guessed
    return possible


def attend_on_device(layer: Layer, call: AttentionCall) -> tuple[torch.Tensor, None] | None:
    """Attention of a step of one query a sequence, without padding, over what the predictor chooses. None: this call
    needs the way over the host; nothing has changed.

    The output (B, 1, H, Dv) is new. Raises `BudgetError` with nothing changed.
    """
    if call.mask is not None or not is_plain(call):
        return None
    history, storage, selecting = layer.history, layer.shared.storage, layer.selecting
    predictor: Any = layer.predictor
    assert selecting is not None
    chooses = history.records > layer.budget
    if selecting.watch is not None or history.records > MOST_UNITS or (chooses and not predictor.chooses_on_device):
        return None
    slots = device_slots(layer, min(history.records, layer.budget))
    if slots is None:
        return None
    counters, query = storage.counters, layer.query_of(call.query[:, :, 0], None)
    looks = layer.shared.graphed or (counters.decode_steps + layer.layer_idx) % LOOKED_AT == 0
    if not chooses:
        every = torch.arange(history.records, dtype=torch.int32, device=history.device)
        choice = DeviceChoice(every.expand(history.rows, -1))
    else:
        choice = predictor.choose_on_device(query, layer.budget, looks)
    where = slots.bring(history, choice.units)
    if where is None:
        layer.drop_fetcher()
        layer.on_device = False
        return None
    made_of = query.states, slots.data, where, history.recent, history.form, layer.scaling
    sizes = *call.query.shape[:2], history.rows, where.shape[1], slots.count, history.recent.shape[1]
    with storage.account.holding("scores", slots_bytes(history.form, *sizes)):
        output, logarithm = attend(*made_of, choice.value, choice.weight, choice.keep)
    attended = where.shape[1] * history.form.group_size if choice.attended is None else choice.attended
    counters.attend(call.query.shape[0], history.length, attended + history.recent.shape[1])
    if choice.lost is not None:
        counters.later(lost_millionths=choice.lost)
        counters.times_lost += 1
    if looks and choice.weight is not None:
        counters.times_estimated += 1
        counters.later(estimated_millionths=((choice.weight - logarithm).exp().nan_to_num().mean() * 1e6).long())
    return output[:, None], None


def is_plain(call: AttentionCall) -> bool:
    """Whether a call is a softmax of one query a sequence, and nothing else, apart from its mask."""
    plain = call.query.shape[2] == 1 and call.autocast is None and not call.args
    return plain and call.softcap is None and call.s_aux is None and not call.wants_weights


# A step in a CUDA graph: it has fixed shapes, and reads from the device how much of its tensors exists. For a method
# that takes part, `choose_on_device` of its predictor follows `Query.sizes`, and the predictor has `graph_parts` and
# `room`; its history has a `tail`, `room` and `advance`

class GraphStep(NamedTuple):
    """What a layer's step in a graph has computed."""

    output: torch.Tensor
    """(B, 1, H, Dv)."""
    counts: torch.Tensor
    """(2, rows) int64: units that were read, and those that were in slots."""
    attended: int
    """Entries of units that a row attends to, at most."""
    nbytes: int
    """Upper bound on the device memory that it needs for itself."""


def why_no_graph(layer: Layer) -> str | None:
    """Why the next step of a layer cannot be in a graph; None: it can. Does not wait."""
    slots, selecting, predictor = layer.device_slots, layer.selecting, layer.predictor
    if not layer.on_device or layer.state != "tagged" or selecting is None or not selecting.worthwhile:
        return f"{layer.name} does not step on a CUDA device with records in pinned host memory"
    history = layer.history
    if not hasattr(predictor, "graph_parts") or not hasattr(history, "advance"):
        return f"{type(predictor).__name__} has no step with fixed shapes"
    if history.records <= layer.budget or not predictor.chooses_on_device or not predictor.ready(history.units):
        return "the context is so short that a step attends to all of it"
    if history.room < 1:
        return "the step seals a group of tokens"
    if selecting.watch is not None:
        return "something watches the choices"
    if slots is None or slots.closed or slots.made_for != (selecting.version, history.records):
        return "slots are made"
    if history.units > graph_room(layer):
        return "the context is too long for a kernel"
    return None


def graph_room(layer: Layer) -> int:
    """Units a row that the tensors of a step in a graph have room for."""
    return min(layer.device_slots.room, layer.predictor.room, MOST_UNITS)


def graph_parts(layer: Layer) -> list[Any]:
    """The tensors and numbers that a step in a graph keeps; other ones need another graph."""
    history, room = layer.history, graph_room(layer)
    fixed = history.rows, layer.budget, room, layer.scaling
    return [history.tail.memory, *layer.device_slots.memory, *fixed, *layer.predictor.graph_parts()]


def attend_in_graph(layer: Layer, call: AttentionCall, sizes: DeviceSizes) -> GraphStep:
    """As `attend_on_device`, in a graph: no tensor is replaced, nothing is counted on the host, and no mass is
    estimated. The mask is not looked at: nothing is padded."""
    history, slots, storage = layer.history, layer.device_slots, layer.shared.storage
    form, memory = history.form, history.tail.memory
    query = Query(call.query[:, :, 0], call.scaling, None, lambda: form.split(memory)[0], sizes)
    choice = layer.predictor.choose_on_device(query, layer.budget, False)
    where, counts = slots.exchanged(choice.units)
    shape = *call.query.shape[:2], history.rows, where.shape[1], slots.count, memory.shape[1]
    nbytes = slots_bytes(form, *shape)
    with storage.account.holding("scores", nbytes):
        made_of = query.states, slots.data, where, memory, form, call.scaling
        output, _ = attend(*made_of, choice.value, choice.weight, choice.keep, sizes.recent)
    attended = where.shape[1] * form.group_size if choice.attended is None else choice.attended
    return GraphStep(output[:, None], counts, attended, nbytes + choice.nbytes)


def tables_bytes(layer: Layer, device_type: str) -> int:
    """Upper bound on the bytes of the tables of `device_slots`, for a layer that is as large as it can become."""
    history, store = layer.history, layer.history.store
    if device_type != "cuda" or store.engine != "memory" or not hasattr(layer.predictor, "choose_on_device"):
        return 0
    count = layer.slots // history.rows + layer.budget
    return DeviceSlots.planned_tables(history.rows, history.records, count)


def device_slots(layer: Layer, least: int) -> DeviceSlots | None:
    """The slots of a layer, for at least `least` units a row: under a limit those that are planned, without one as many
    besides a complete choice. None: a complete choice does not fit those that are planned."""
    history, selecting, slots, storage = layer.history, layer.selecting, layer.device_slots, layer.shared.storage
    assert selecting is not None
    made_for = selecting.version, history.records
    if slots is not None and not slots.closed and slots.made_for == made_for:
        return slots
    count = layer.slots // history.rows + (layer.budget if storage.account.limit is None else 0)
    if count < least:
        layer.drop_fetcher()
        return None
    if slots is None or slots.closed or slots.made_for[0] != selecting.version or slots.count < count:
        layer.drop_fetcher()
        layer.device_slots = slots = DeviceSlots(storage, history, count)
        layer.shared.books_changed = True
    slots.made_for = made_for
    return slots
