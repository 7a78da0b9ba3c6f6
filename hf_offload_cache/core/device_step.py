"""A layer's decoding step on a CUDA device with records in pinned host memory: kernels choose, read and attend, and the
host waits for nothing."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch

from ..errors import BudgetError
from ..fetch.choice import DeviceChoice, DeviceDecision, InSlots
from ..fetch.device_slots import DeviceSlots
from ..history.records import RecordFormat
from ..kernels.on_a_device import has_step, plans_step
from ..kernels.ranking import MOST_UNITS
from ..kernels.slots import attend, slots_bytes, tokens_at, units_at
from ..memory.account import SLOTS
from ..memory.dry_run import DryRun
from ..model.attention_call import AttentionCall
from .plan import LayerKind

Layer = Any
"""A `SelectiveLayer`."""

LOOKED_AT = 16
"""Steps from one count of a layer's estimated mass to the next. Layers take turns, so a step pays for few."""


def _reads(form: RecordFormat) -> bool:
    """Whether kernels attend to such records."""
    return form.num_key_heads == form.num_value_heads and form.dtype.itemsize <= 4


def is_possible(layer: Layer) -> bool:
    """Whether steps of this layer, which has its history, may run on a device. Then it watches no queries."""
    history = layer.history
    possible: bool = (
        history.device.type == "cuda"
        and history.store.in_memory
        and hasattr(layer.predictor, "choose_on_device")
        and _reads(history.form)
        and has_step(history.device, history.form.key_dim, history.form.value_dim)
    )
    if possible:
        layer.watch_query = None  # nothing is guessed
    return possible


def rehearse(layer: Layer, run: DryRun, kind: LayerKind, context: int) -> bool:
    """Rehearse a step that runs on a device, in a dry run: slots, and what it computes with. Within a budget they are
    those of `reuse_capacity`, which hold a complete choice, and otherwise so many besides one. Widened steps run there
    too if slots hold theirs. False: steps go over the host, and nothing was rehearsed. After `rehearse` of the layer's
    predictor."""
    config, history, selecting, form = layer.config, layer.history, layer.selecting, kind.form
    records, recent = history.records, history.recent.shape[1]
    scores_of = getattr(layer.predictor, "device_bytes", None)
    if kind.over_host or config.engine != "memory" or scores_of is None or records > MOST_UNITS:
        return False
    if not _reads(form) or not plans_step(kind.device, form.key_dim, form.value_dim):
        return False
    selecting.padded, selecting.widened = False, layer.widens(context)  # rows with padding go over the host
    wanted, widest = (
        min(records, layer.most_records(config, form.group_size, units))
        for units in (selecting.units(config, form.group_size, context, usual=usual) for usual in (True, False))
    )
    selecting.widened = False
    count = selecting.slots(config, form.group_size, records) + (widest if config.memory is None else 0)
    most = min(count, widest)
    needed = scores_of(context, kind.num_heads * kind.batch // kind.rows, most, recent)
    if count < wanted or needed is None:
        selecting.padded = True
        return False
    data = run.empty(SLOTS, kind.rows, count, form.payload_width, dtype=form.payload_dtype)
    if kind.rows > 1:
        run.passes("moving rows", decode=DeviceSlots.moving_bytes(data.nbytes))
    run.keeps("tables", DeviceSlots.planned_tables(kind.rows, count, records, layer.by_use))
    latest, copied = recent, kind.rows * most * form.group_size if layer.most_kept(context) else 0
    if history.extra_entries is not None:
        latest += history.extra_entries[0].shape[1]
        copied += kind.rows * latest * form.entry_bytes
    attended = copied + slots_bytes(form, kind.batch, kind.num_heads, kind.rows, most, count, latest)
    for owner, nbytes in {**needed, "scores": max(needed["scores"], attended)}.items():
        run.passes(owner, decode=nbytes - run.passing(owner)[1], together=True)  # instead of the host's
    run.alone = True
    return True


NO_KERNELS = "Triton's kernels do not run on this GPU, or not for these heads"
NOT_ON_GPU = "what chooses is not on the GPU"
NOT_PINNED = "the system pins no more memory"
ON_DISK = "records are not in host memory"
LIMITS_UNKNOWN = f"{ON_DISK}: give max_context and max_batch, or engine='memory'"


def why_on_disk(config: Any) -> str:
    """Why a device does not read the records, which are on a disk. "auto" decides where they are when a cache is
    made."""
    return LIMITS_UNKNOWN if config.engine == "auto" and None in (config.max_context, config.max_batch) else ON_DISK


def why_over_host(layer: Layer) -> str | None:
    """Why the latest step of a layer needed the host, as the report says it; None: it ran on a device alone. Does not
    wait."""
    if layer.on_device:
        found: str | None = layer.over_host
        return found
    history = layer.history
    if history.device.type != "cuda":
        return "the layer is on a CPU"
    if not history.store.in_memory:
        return why_on_disk(layer.config)
    if not has_step(history.device, history.form.key_dim, history.form.value_dim):
        return NO_KERNELS
    if not hasattr(layer.predictor, "choose_on_device"):
        return NOT_ON_GPU
    return NOT_PINNED if _reads(history.form) else "no kernel attends to such records"


def attend_on_device(layer: Layer, call: AttentionCall) -> tuple[torch.Tensor, None] | None:
    """Attention of a step of one query a sequence, without padding, over what the predictor chooses. None: this call
    needs the way over the host; nothing has changed but `over_host` of the layer.

    The output (B, 1, H, Dv) is new. Raises `BudgetError` with nothing changed.
    """
    layer.over_host, slots = _slots_for(layer, call)
    if slots is None:
        return None
    chooses = layer.history.records > layer.budget
    slots.at_work = True
    try:
        return _attend_in(slots, layer, call, chooses)
    finally:
        slots.at_work = False


def _slots_for(layer: Layer, call: AttentionCall) -> tuple[str | None, DeviceSlots | None]:
    """The slots for a call's step, or why it needs the host."""
    if call.mask is not None or not is_plain(call):
        return "the call has padding, several tokens, or more than a softmax", None
    history, selecting = layer.history, layer.selecting
    predictor: Any = layer.predictor
    assert selecting is not None
    if selecting.watch is not None:
        return "something watches the choices", None
    if history.units > MOST_UNITS:
        return f"a row has more than {MOST_UNITS:,} groups", None
    if history.records > layer.budget and not predictor.chooses_on_device:
        return NOT_ON_GPU, None
    most = layer.most_records(layer.config, history.form.group_size, layer.budget)
    slots = device_slots(layer, most)
    if slots is not None:
        return None, slots
    if (count := planned_slots(layer)) >= min(history.records, most):
        return "the budget has no room for slots now", None
    return f"the budget has {count:,} slots a row, and a step may select more records", None


def _attend_in(
    slots: DeviceSlots, layer: Layer, call: AttentionCall, chooses: bool
) -> tuple[torch.Tensor, None] | None:
    """As `attend_on_device`, with these slots; `chooses`: not all units are attended to."""
    history, storage, predictor = layer.history, layer.shared.storage, layer.predictor
    counters, query = storage.counters, layer.query_of(call.query[:, :, 0], None)
    looks = layer.shared.graphed or (counters.decode_steps + layer.layer_idx) % LOOKED_AT == 0
    decision: DeviceDecision = predictor.choose_on_device(query, layer.budget, looks) if chooses else (
        history.all_on_device()
    )
    choice = decision if isinstance(decision, DeviceChoice) else next(decision)
    where = slots.bring(history, choice.units)
    if where is None:
        layer.drop_fetcher()
        layer.on_device = False
        return None
    if not isinstance(decision, DeviceChoice):
        choice = looked(decision, InSlots(slots.data, where))
    latest, copied = history.recent.shape[1], 0 if choice.keep is None else choice.keep.nbytes
    if history.extra_entries is not None:
        latest += history.extra_entries[0].shape[1]
        copied += history.rows * latest * history.form.entry_bytes
    sizes = *call.query.shape[:2], history.rows, where.shape[1], slots.count, latest
    with storage.account.holding("scores", copied + slots_bytes(history.form, *sizes)):
        entries, seen = history.unsealed()
        given = query.states, slots.data, where, entries, history.form, layer.scaling
        output, logarithm = attend(*given, choice.value, choice.weight, choice.keep, seen)
    attended = where.shape[1] * history.form.group_size if choice.attended is None else choice.attended
    counters.attend(call.query.shape[0], history.length, attended + history.recent.shape[1])
    if choice.lost is not None:
        counters.lost_later(choice.lost, logarithm.numel())
    if looks and choice.weight is not None:
        counters.estimated_later(choice.weight, logarithm)
    layer.attended_on_device(choice)
    return output[:, None], None


def looked(decision: Generator[DeviceChoice, InSlots, DeviceChoice], stored: InSlots) -> DeviceChoice:
    """The choice of a decision that has looked at the `stored` entries it asked for."""
    try:
        decision.send(stored)
    except StopIteration as end:
        choice: DeviceChoice = end.value
        return choice
    raise AssertionError("a decision looks once")


def is_plain(call: AttentionCall) -> bool:
    """Whether a call is a softmax of one query a sequence, and nothing else, apart from its mask."""
    plain = call.query.shape[2] == 1 and call.autocast is None and not call.args
    return plain and call.softcap is None and call.s_aux is None and not call.wants_weights


def planned_slots(layer: Layer) -> int:
    """Slots a row on the device that the layer's budget has: those of `reuse_capacity`, and what is lent."""
    history, slots = layer.history, layer.selecting.slots
    count: int = slots(layer.config, history.form.group_size, history.records)
    return count


def rehearse_beside(layer: Layer, run: DryRun, kind: LayerKind, wanted: int) -> None:
    """Declare the temporary memory of exchange and attention on a device, for a step that selects `wanted` units a row,
    in a dry run of a layer that was rehearsed for steps over the host."""
    history, form = layer.history, kind.form
    count = max(planned_slots(layer), wanted)
    sizes = kind.batch, kind.num_heads, kind.rows, wanted, count, history.recent.shape[1]
    run.passes("scores", decode=slots_bytes(form, *sizes) + kind.rows * wanted * form.group_size)


def device_slots(layer: Layer, most: int) -> DeviceSlots | None:
    """The slots of a layer, of which a step needs at most `most` a row: under a limit those of `reuse_capacity` and
    what is lent, without one as many besides a complete choice. None: they do not hold so many, or there is no memory
    for them."""
    history, selecting, slots, storage = layer.history, layer.selecting, layer.device_slots, layer.shared.storage
    assert selecting is not None
    made_for, least = (selecting.version, history.records), min(history.records, most)
    if slots is not None and not slots.closed and slots.made_for == made_for and slots.count >= least:
        return slots
    limited = storage.account.limit is not None
    count = planned_slots(layer) + (0 if limited else most)
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
        if limited:
            selecting.rest()  # what steps over the host had
        try:
            layer.device_slots = slots = DeviceSlots(storage, history, count, layer.by_use)
        except BudgetError:
            return None
        layer.shared.books_changed = True
    slots.made_for = made_for
    return slots


# Layers whose model chooses: an `IndexedLayer`

def reads_chosen(layer: Layer) -> bool:
    """Whether steps of this layer, which has its history, may read on a device what the model's indexer chose."""
    history = layer.history
    on_device = layer.topk > 0 and history.device.type == "cuda" and history.store.in_memory
    return bool(on_device and has_step(history.device))


def why_chosen_over_host(layer: Layer) -> str | None:
    """As `why_over_host`."""
    history = layer.history
    if layer.on_device:
        if layer.config.indexer_bits == 8 and layer.indexer.batch:
            return "with indexer_bits=8 the host decides at the edge of a choice"
        return cast("str | None", layer.over_host)
    if history.device.type != "cuda":
        return "the layer is on a CPU"
    if not history.store.in_memory:
        return why_on_disk(layer.config)
    if not has_step(history.device):
        return NO_KERNELS
    return layer.over_host or NOT_ON_GPU


def chosen_bytes(form: RecordFormat, rows: int, chosen: int, count: int, units: int) -> int:
    """Upper bound on the device memory, besides slots, of a step that attends to `chosen` tokens a row, with `count`
    slots and so many `units` a row."""
    return rows * (chosen * (form.entry_bytes + 8) + units + 8 * (count + 2 * chosen + 1))


def slots_of_chosen(layer: Layer) -> int:
    """Slots a row of a layer whose indexer chooses: those of `reuse_capacity` and what is lent, and without a limit as
    many besides as a choice needs."""
    count: int = layer.slots
    return count + (0 if layer.config.memory is not None else min(layer.most_chosen, layer.most_units))


def rehearse_chosen(layer: Layer, run: DryRun, kind: LayerKind, context: int) -> bool:
    """Rehearse a step on a device that reads what the indexer chose, in a dry run: slots, and what it computes with.
    False: steps go over the host, and nothing was rehearsed."""
    form, records = kind.form, layer.history.records
    wanted = min(kind.most_chosen, records)
    layer.most_chosen = kind.most_chosen
    count = slots_of_chosen(layer)
    possible = kind.topk > 0 and layer.config.engine == "memory" and plans_step(kind.device)
    if kind.over_host or not possible or count < wanted:
        return False
    data = run.empty(SLOTS, kind.rows, count, form.payload_width, dtype=form.payload_dtype)
    if kind.rows > 1:
        run.passes("moving rows", decode=DeviceSlots.moving_bytes(data.nbytes))
    run.keeps("tables", DeviceSlots.planned_tables(kind.rows, count, records))
    run.passes("selection", decode=chosen_bytes(form, kind.rows, min(kind.most_chosen, context), count, records))
    run.alone = True
    return True


def attend_to_chosen(layer: Layer, call: AttentionCall, chosen: torch.Tensor) -> Any | None:
    """Attention of one query a sequence, by the model's own function, to the tokens (B, 1, K) that its indexer chose.
    None: this call needs the way over the host; nothing has changed but `over_host` of the layer.

    Raises `BudgetError` with nothing changed."""
    history, storage, places = layer.history, layer.shared.storage, chosen[:, 0]
    form, rows, units = history.form, history.rows, history.units
    count, stored = min(places.shape[1], units), units * form.group_size
    slots = None if not units else _chosen_slots(layer, count)
    if slots is None:
        return None
    slots.at_work = True
    try:
        with storage.account.holding("selection", chosen_bytes(form, rows, places.shape[1], slots.count, units)):
            if slots.bring(history, units_at(places, stored, form.group_size, count)) is None:
                layer.over_host, layer.on_device = NOT_PINNED, False
                layer.drop_fetcher()
                return None
            mask = call.mask
            mask = mask[:, 0, 0] if mask is not None and mask.shape[-1] == history.length else None
            given = slots.slot_of, slots.data, history.unsealed()[0], stored, form.group_size, mask
            entries, seen = tokens_at(places, *given)
            storage.counters.attend(len(places), history.length, places.shape[1])
            keys, values = layer.expanded(call, *form.split(entries))
            return call.run(keys, values, seen[:, None, None])
    finally:
        slots.at_work = False


def _chosen_slots(layer: Layer, least: int) -> DeviceSlots | None:
    """The slots of a layer, at least so many a row; None: there are fewer, or no memory for them."""
    history, storage, slots = layer.history, layer.shared.storage, cast("DeviceSlots | None", layer.device_slots)
    layer.over_host = None
    if slots is not None and not slots.closed and slots.count >= least:
        return slots
    count = slots_of_chosen(layer)
    layer.drop_fetcher()
    layer.indexing.areas.release()  # which steps over the host had
    if count < least:
        layer.over_host = f"the budget has {count:,} slots a row, and a step may select more records"
        return None
    try:
        layer.device_slots = slots = DeviceSlots(storage, history, count)
    except BudgetError:
        layer.over_host = "the budget has no room for slots now"
        return None
    layer.shared.books_changed = True
    return slots
