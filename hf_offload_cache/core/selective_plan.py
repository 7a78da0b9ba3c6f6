"""What a layer that selects will hold, beside its history: areas, slots, and what its predictor says."""

from __future__ import annotations

from ..config import OffloadConfig, SelectiveConfig
from ..fetch.areas import Areas, records_soon
from ..fetch.tier import SlotTier
from ..history.records import latest_tokens, sealed_groups
from ..memory.plan import LayerPlan, Planned
from ..predictors.sinks import sink_units
from .layer import OffloadLayer
from .plan import LayerKind
from .selecting import most_slots


class SelectivePlan(OffloadLayer):
    """The side of `SelectiveLayer` that is asked before there is a layer: each hook beside that of what it plans."""

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """What the predictor of one layer holds at most."""
        raise NotImplementedError(f"{cls.__name__} does not say what its predictor holds")

    @classmethod
    def most_units(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        """Units a row that a step of one layer that holds `context` tokens a row wants at most, sinks of a padded row
        included."""
        group = kind.form.group_size
        return -(-config.brought(context) // group) + sink_units(config.num_sinks, group, padded=True)

    @classmethod
    def most_records(cls, config: SelectiveConfig, group_size: int, units: int) -> int:
        """In how many records a row what `units` full ones of `group_size` entries hold may lie."""
        return units

    @classmethod
    def most_stored(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        """Records a row that a history of `context` tokens a row lies in at most."""
        return sealed_groups(kind.form, config, context)

    @classmethod
    def area_bytes(cls, kind: LayerKind, config: SelectiveConfig, context: int, wanted: int) -> int:
        """Bytes of one staging area on one side: for at most `wanted` records a row, and no more than there may be."""
        soon = records_soon(cls.most_stored(kind, config, context))
        return kind.rows * min(wanted, soon) * kind.form.record_bytes

    @classmethod
    def most_beside(cls, kind: LayerKind, config: SelectiveConfig) -> int:
        """Entries a row that come with every gather beside records and tail."""
        return 0

    @classmethod
    def most_slots(cls, kind: LayerKind, config: SelectiveConfig) -> int:
        """Slots a row, as a mean over the layers."""
        group = kind.form.group_size
        return -(-config.reuse_capacity // group) + -(-config.num_sinks // group) if config.reuse_capacity else 0

    @classmethod
    def most_kept(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        """Tokens a row that a choice keeps of its units at most; 0: units are attended to whole."""
        return 0

    @classmethod
    def plan_tiers(cls, kind: LayerKind, config: SelectiveConfig, slots: int, context: int) -> Planned:
        """What `make_tiers` makes of `slots` slots in all, over a history of `context` tokens a row. A prefill gives it
        back before it begins."""
        payload, records = kind.form.payload_width * kind.form.dtype.itemsize, cls.most_stored(kind, config, context)
        return Planned(decode=SlotTier.planned(slots, payload, kind.rows * records))

    @classmethod
    def plan_slots(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> Planned:
        """Tiers of as many slots as a history of `context` tokens a row may have."""
        records = cls.most_stored(kind, config, context)
        slots = kind.rows * min(cls.most_slots(kind, config), most_slots(config, kind.form.group_size, records))
        return cls.plan_tiers(kind, config, slots, context)

    @classmethod
    def planned(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        if config.exact:
            return super().planned(kind, config, context)
        assert isinstance(config, SelectiveConfig)
        form, plan = kind.form, cls.plan_history(kind, config, context)
        predictor = cls.plan_predictor(kind, config, context)
        wanted = cls.most_units(kind, config, context)
        records = cls.most_records(config, form.group_size, wanted)
        stored = cls.most_stored(kind, config, context)
        payload = form.payload_width * form.dtype.itemsize
        latest = latest_tokens(form, config) + cls.most_beside(kind, config)
        tail_units = -(-latest // form.group_size)
        soon, ahead = records_soon(stored), 0 if config.look_ahead is False else 1
        together = max(records, 2 * wanted)  # of candidates that are verified
        view, widest = (kind.rows * (min(most, soon) + tail_units) * payload for most in (records, together))
        area = cls.area_bytes(kind, config, context, records)
        kept = cls.most_kept(kind, config, context)
        kept = kind.rows * (kept + tail_units * form.group_size) * form.entry_bytes if kept else 0
        widens = config.brought_at_most(context) > config.brought(context)
        whole = widest if cls.most_beside(kind, config) else 0  # whole units are kept too where some come beside them
        areas = Areas.planned(area, view, widest, ahead, kind.device, (kept, kept if widens else whole))
        own = predictor.own + cls.plan_slots(kind, config, context)
        prefill, decode = (dict(each) for each in (predictor.shared.prefill, predictor.shared.decode))
        if "fitting" in prefill:  # records are packed before a predictor learns, not meanwhile
            prefill["fitting"] = max(0, prefill["fitting"] - plan.shared.prefill.get("packing", 0))
        for owner in {"moving rows"} & prefill.keys():  # one thing is moved at a time
            prefill[owner] = max(0, prefill[owner] - plan.shared.prefill.get(owner, 0))
            decode[owner] = max(0, decode[owner] - plan.shared.decode.get(owner, 0))
        return plan + LayerPlan(own, Planned(prefill, decode) + Planned(decode=areas))
