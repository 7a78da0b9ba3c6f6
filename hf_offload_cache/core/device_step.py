"""A layer's decoding step on a CUDA device with records in pinned host memory: kernels choose, read and attend, and the
host waits for nothing."""

from __future__ import annotations

from typing import Any

import torch

from ..fetch.choice import DeviceChoice, DeviceDecision, InSlots
from ..fetch.device_slots import DeviceSlots
from ..kernels.on_a_device import has_step
from ..kernels.ranking import MOST_UNITS
from ..kernels.slots import attend, slots_bytes
from ..memory.dry_run import DryRun
from ..model.attention_call import AttentionCall
from .plan import LayerKind

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
    plain = call.mask is None and call.query.shape[2] == 1 and call.autocast is None and not call.args
    if not plain or call.softcap is not None or call.s_aux is not None or call.wants_weights:
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
    looks = (counters.decode_steps + layer.layer_idx) % LOOKED_AT == 0
    if not chooses:
        every = torch.arange(history.records, dtype=torch.int32, device=history.device)
        decision: DeviceDecision = DeviceChoice(every.expand(history.rows, -1))
    else:
        decision = predictor.choose_on_device(query, layer.budget, looks)
    choice = decision if isinstance(decision, DeviceChoice) else next(decision)
    where = slots.bring(history, choice.units)
    if where is None:
        layer.drop_fetcher()
        layer.on_device = False
        return None
    if not isinstance(decision, DeviceChoice):
        try:
            decision.send(InSlots(slots.data, where))
        except StopIteration as end:
            choice = end.value
    made_of = query.states, slots.data, where, history.recent, history.form, layer.scaling
    sizes = *call.query.shape[:2], history.rows, where.shape[1], slots.count, history.recent.shape[1]
    kept = 0 if choice.keep is None else choice.keep.nbytes
    with storage.account.holding("scores", slots_bytes(history.form, *sizes) + kept):
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


def rehearse(layer: Layer, run: DryRun, kind: LayerKind, wanted: int) -> None:
    """Declare the temporary memory of exchange and attention, for a step that selects `wanted` units a row, in a dry
    run of a layer whose steps may run on a device."""
    history, form = layer.history, kind.form
    count = max(layer.near_slots // kind.rows, wanted)
    sizes = kind.batch, kind.num_heads, kind.rows, wanted, count, history.recent.shape[1]
    run.passes("scores", decode=slots_bytes(form, *sizes) + kind.rows * wanted * form.group_size)


def device_slots(layer: Layer, least: int) -> DeviceSlots | None:
    """The slots of a layer, for at least `least` units a row: under a limit those that are planned, without one as many
    besides a complete choice. None: a complete choice does not fit those that are planned."""
    history, selecting, slots, storage = layer.history, layer.selecting, layer.device_slots, layer.shared.storage
    assert selecting is not None
    made_for = selecting.version, history.records
    if slots is not None and not slots.closed and slots.made_for == made_for:
        return slots
    count = layer.near_slots // history.rows + (layer.budget if storage.account.limit is None else 0)
    if count < least:
        if slots is not None:
            layer.drop_fetcher()
        return None
    changed = slots is not None and slots.made_for[0] != selecting.version and slots.count != count
    if slots is None or slots.closed or changed or slots.count < count:
        if slots is not None:
            slots.free_memory()  # in the stream's order; the next ones wait for the reads when they close
            layer.device_slots = None
        layer.drop_fetcher()
        layer.device_slots = slots = DeviceSlots(storage, history, count)
        layer.shared.books_changed = True
    slots.made_for = made_for
    return slots
