"""What a layer that selects will hold, beside its history: areas, slots, and what its predictor says."""

from __future__ import annotations

from ..config import SelectiveConfig
from ..fetch.areas import Areas
from ..fetch.tier import SlotTier
from ..history.packing import sealed_groups
from ..memory.plan import LayerPlan, Planned
from .planned import LayerKind, plan_history


def plan_selective(
    kind: LayerKind, config: SelectiveConfig, context: int, most_units: int, most_slots: int, predictor: LayerPlan
) -> LayerPlan:
    """Of one layer: `most_units` and `most_slots` are a row's, `predictor` is the plan of the layer's predictor."""
    form, plan = kind.form, plan_history(kind, config, context)
    units = sealed_groups(form, config, context)
    payload = form.payload_width * form.dtype.itemsize
    tail_units = -(-(config.num_recent + form.group_size) // form.group_size)
    candidates = min(2 * most_units, units * 9 // 8 + 8)  # the view is as large as a verification of several needs
    ahead = 0 if config.look_ahead is False else 1
    view = kind.rows * (candidates + tail_units) * payload
    areas = Areas.planned(area_bytes(kind, config, context, most_units), view, ahead, kind.device)
    slots = kind.rows * min(most_slots, 1 << max(units - 1, 0).bit_length())
    own = predictor.own + Planned.always(SlotTier.planned(slots, payload, kind.rows * units))
    prefill, decode = (dict(each) for each in (predictor.shared.prefill, predictor.shared.decode))
    if "fitting" in prefill:  # records are packed before a predictor learns, not meanwhile
        prefill["fitting"] = max(0, prefill["fitting"] - plan.shared.prefill["packing"])
    for owner in {"moving rows"} & prefill.keys():  # one thing is moved at a time
        prefill[owner] = max(0, prefill[owner] - plan.shared.prefill.get(owner, 0))
        decode[owner] = max(0, decode[owner] - plan.shared.decode.get(owner, 0))
    return plan + LayerPlan(own, Planned(prefill, decode) + Planned(decode=areas))


def area_bytes(kind: LayerKind, config: SelectiveConfig, context: int, most_units: int) -> int:
    """Bytes of one staging area on one side: a record for each unit that a query of one layer wants."""
    units = sealed_groups(kind.form, config, context)
    return kind.rows * min(most_units, units * 9 // 8 + 8) * kind.form.record_bytes
