"""What a layer of `SpecCache` will hold, beside its history: the copy, what is chosen, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import OffloadConfig, SelectiveConfig
from ...core.layer import OffloadLayer
from ...core.plan import LayerKind
from ...core.selective_layer import SelectiveLayer
from ...fetch.areas import Areas, records_soon
from ...history.records import RecordFormat, latest_tokens, sealed_groups
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, Search
from ...memory.plan import LayerPlan, Planned
from .attention import MixedAttention
from .chosen_entries import ChosenEntries
from .config import SpecConfig
from .copy import LowBitForm, LowBitPredictor
from .entry_reads import EntryReads
from .pinned_entries import PinnedEntries

# The best fields of `SpecCache` that a budget allows

_COPIES = ((4, 64), (2, 32), (2, 64), (1, 32), (1, 64))
"""Bits and group of a copy, the best first."""


def fit_spec(search: Search[SpecConfig]) -> SpecConfig:
    """The copy of most bits that fits, and beside it as many entries as they were stored as fit, up to 256 a key head.

    Where not even the smallest copy fits, fewer latest tokens are kept, and then fewer entries. Raises `BudgetError`
    with the least memory that would do.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_blocks(search.most(chosen, "num_selected", 256)))


def _tried(search: Search[SpecConfig]) -> Iterator[dict[str, Any]]:
    copies = [{"bits": bits, "quant_group": group} for bits, group in _COPIES]
    for copy in copies:
        for streams in search.all_streams():
            yield {"num_selected": 64, **copy, **streams}
    for selected in (64, 32, 16, 8, 4):
        for copy in copies[:-3:-1]:  # where there are few tokens, those that wait to be quantised weigh more
            for streams in (search.least_streams(SHORT_TAIL), search.least_streams(LEAST_RECENT)):
                yield {"num_selected": selected, **copy, **streams}


UNDER_WAY = 2
"""Reads for the next step that are under way at a time: a layer's is collected as so many layers later chooses."""
TOGETHER = 2
"""Queries that are scored at a time: a token, and the guess beside it."""


class SpecPlan(SelectiveLayer):
    """The side of `SpecLayer` that is asked before there is a layer."""

    @classmethod
    def copy_form(cls, form: RecordFormat, config: SpecConfig) -> LowBitForm:
        """How the copy of a history of `form` lies in memory."""
        return LowBitForm(form, config.bits, config.quant_group)

    @classmethod
    def plan_predictor(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        assert isinstance(config, SpecConfig)
        tokens = max(0, context - config.num_recent) // config.quant_group * config.quant_group
        queries = TOGETHER  # of candidates, too
        asked = kind.num_heads, queries, cls.scores_of(config, queries), kind.device
        return LowBitPredictor.planned(cls.copy_form(kind.form, config), tokens, kind.rows, *asked)

    @staticmethod
    def scores_of(config: SpecConfig, queries: int) -> int:
        """Scores of each head that are held at a time: where attention decides what is fetched for it, twice."""
        return 2 * queries if SpecPlan.keeps_scores(config) else queries

    @staticmethod
    def keeps_scores(config: SpecConfig) -> bool:
        """Whether scores are kept for attending again; else, where it has to be, they are made again."""
        return bool(config.top_up) or not config.speculative

    @classmethod
    def most_units(cls, kind: LayerKind, config: SelectiveConfig, context: int) -> int:
        assert isinstance(config, SpecConfig)
        return cls.together(kind.form, config)

    @staticmethod
    def together(form: RecordFormat, config: SpecConfig) -> int:
        """Records a row that are read at a time: a third of what all key heads may want, most of which they had."""
        return -(-form.num_key_heads * config.chosen // 3)

    @classmethod
    def planned(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        if config.exact:
            return OffloadLayer.planned.__func__(cls, kind, config, context)  # type: ignore[attr-defined]
        assert isinstance(config, SpecConfig)
        form, wanted = kind.form, cls.most_units(kind, config, context)
        units = sealed_groups(form, config, context)
        chosen = ChosenEntries.planned(form, kind.rows, config.chosen)
        latest = -(-latest_tokens(form, config) // form.group_size)
        view = kind.rows * (min(wanted, records_soon(units)) + latest) * form.payload_width * form.dtype.itemsize
        area, ahead = cls.area_bytes(kind, config, context, wanted), UNDER_WAY if config.speculative else 0
        if config.engine == "memory":  # no more of a record comes than is wanted of it, when it is wanted
            area, ahead, view = EntryReads.area_bytes(form, kind.rows * config.chosen), 0, 0
        areas = Areas.planned(area, view, view, ahead, kind.device)
        picked = cls.picked_bytes(form, kind.rows, config)
        stored = cls.stored_bytes(form, kind.rows, kind.num_heads, TOGETHER, config, latest_tokens(form, config))
        shared = Planned(decode={**areas, "picked entries": picked, "stored entries": stored})
        own = Planned(decode={"chosen entries": chosen})
        if config.reuse_capacity and not config.records_apart:
            own += cls.plan_slots(kind, config, context)
        if config.records_apart and kind.device == "cuda":
            own += Planned.always({"tables": PinnedEntries.planned(kind.rows, units)})
        selecting = LayerPlan(own, shared)
        return cls.plan_history(kind, config, context) + cls.plan_predictor(kind, config, context) + selecting

    @staticmethod
    def picked_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
        """What has come out of its records, and is not among what is chosen yet or is for this step alone; and what has
        become a part of the copy in this step."""
        return rows * (config.chosen + config.quant_group) * form.entry_bytes

    @staticmethod
    def stored_bytes(
        form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, latest: int
    ) -> int:
        """While attention goes over what is as it was stored: see `MixedAttention.stored_bytes`; what is chosen, what
        was fetched only for this step, what has become a part of the copy in it, and the latest ones."""
        entries = config.chosen * (2 if config.top_up else 1) + config.quant_group + latest
        return MixedAttention.stored_bytes(form, rows, heads, queries, entries)
