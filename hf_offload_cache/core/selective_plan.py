"""What a layer that selects will hold, beside its history: areas, slots, and what its predictor says."""

from __future__ import annotations

from ..config import SelectiveConfig
from ..fetch.areas import Areas, records_soon
from ..history.records import latest_tokens
from ..memory.plan import LayerPlan, Planned
from .plan import LayerKind
from .selecting import most_slots
from .selective_layer import SelectiveLayer


def area_bytes(
    layer: type[SelectiveLayer], kind: LayerKind, config: SelectiveConfig, context: int, wanted: int
) -> int:
    """Bytes of one staging area on one side: for at most `wanted` records a row, and no more than there may be."""
    soon = records_soon(layer.most_stored(kind, config, context))
    return kind.rows * min(wanted, soon) * kind.form.record_bytes


def plan_slots(layer: type[SelectiveLayer], kind: LayerKind, config: SelectiveConfig, context: int) -> Planned:
    """Tiers of as many slots as a history of `context` tokens a row may have."""
    records = layer.most_stored(kind, config, context)
    slots = kind.rows * min(layer.most_slots(kind, config), most_slots(config, kind.form.group_size, records))
    return layer.plan_tiers(kind, config, slots, context)


def plan_layer(
    layer: type[SelectiveLayer], kind: LayerKind, config: SelectiveConfig, context: int
) -> LayerPlan:
    """What a layer of this class takes at most where its steps select, with `context` tokens a row."""
    form, plan = kind.form, layer.plan_history(kind, config, context)
    predictor = layer.plan_predictor(kind, config, context)
    wanted = layer.most_units(kind, config, context)
    records = layer.most_records(config, form.group_size, wanted)
    stored = layer.most_stored(kind, config, context)
    payload = form.payload_width * form.dtype.itemsize
    latest = latest_tokens(form, config) + layer.most_beside(kind, config)
    tail_units = -(-latest // form.group_size)
    soon, ahead = records_soon(stored), 0 if config.look_ahead is False else 1
    together = max(records, 2 * wanted)  # of candidates that are verified
    view, widest = (kind.rows * (min(most, soon) + tail_units) * payload for most in (records, together))
    area = area_bytes(layer, kind, config, context, records)
    kept = layer.most_kept(kind, config, context)
    kept = kind.rows * (kept + tail_units * form.group_size) * form.entry_bytes if kept else 0
    widens = config.brought_at_most(context) > config.brought(context)
    whole = widest if layer.most_beside(kind, config) else 0  # whole units are kept too where some come beside them
    areas = Areas.planned(area, view, widest, ahead, kind.device, (kept, kept if widens else whole))
    own = predictor.own + plan_slots(layer, kind, config, context)
    prefill, decode = (dict(each) for each in (predictor.shared.prefill, predictor.shared.decode))
    if "fitting" in prefill:  # records are packed before a predictor learns, not meanwhile
        prefill["fitting"] = max(0, prefill["fitting"] - plan.shared.prefill.get("packing", 0))
    for owner in {"moving rows"} & prefill.keys():  # one thing is moved at a time
        prefill[owner] = max(0, prefill[owner] - plan.shared.prefill.get(owner, 0))
        decode[owner] = max(0, decode[owner] - plan.shared.decode.get(owner, 0))
    return plan + LayerPlan(own, Planned(prefill, decode) + Planned(decode=areas))
