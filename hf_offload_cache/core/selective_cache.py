"""The base of caches that attend to a selection: what their layers share, and prefetching."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..config import OffloadConfig, SelectiveConfig
from ..errors import BudgetError, not_whole
from ..memory.account import GRAPHS, RECORDS, SLOTS
from ..memory.fit import LOST_BY, Search, fit_selective
from ..memory.plan import LayerPlan, MemoryPlan, Planned
from ..model.geometry import Geometry
from ..model.look_ahead import LookAhead
from .cache import OffloadCache
from .captured import numbers_bytes, with_room
from .indexed_layer import IndexedLayer
from .layer import OffloadLayer
from .plan import LayerKind, decoding_queue, layer_kinds, slots_of_choice
from .selecting import Selecting
from .selective_layer import SelectiveLayer
from .step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# A/B test of two equivalent code paths

class Pace:
    """A/B test of two equivalent ways of doing a step; keeps the faster. `first` is whether to take the first way.

    Tries both in turns, forth and back, so that other work on the machine affects both equally. It decides as soon as
    each of `CLEAR` steps was faster than its counterpart and their medians differ by a tenth, or after `TRIAL` steps of
    each by their medians. The first step of each does not count. It tries again after `AGAIN` steps, because the
    context's length and other work change.
    """

    CLEAR, TRIAL, AGAIN = 3, 8, 512

    def __init__(self, forced: bool | None = None) -> None:
        self._forced = forced
        self._taken: dict[bool, list[float]] = {True: [], False: []}
        self._chosen: bool | None = None
        self._since = 0

    @property
    def first(self) -> bool:
        """Whether the coming step takes the first way."""
        if self._forced is not None:
            return self._forced
        if self._chosen is not None:
            return self._chosen
        return (len(self._taken[True]) + len(self._taken[False])) % 4 in (0, 3)

    def took(self, seconds: float) -> None:
        """Record the time of a step that `first` decided."""
        if self._forced is not None:
            return
        if self._chosen is not None:
            self._since += 1
            if self._since >= self.AGAIN:
                self._chosen, self._since, self._taken = None, 0, {True: [], False: []}
            return
        self._taken[self.first].append(seconds)
        first, second = self._taken[True][1:], self._taken[False][1:]
        tried = min(len(first), len(second))
        if tried < self.CLEAR:
            return
        faster = [one < other for one, other in zip(first, second, strict=False)]
        ways = statistics.median(first), statistics.median(second)
        clear = (all(faster) or not any(faster)) and min(ways) < 0.9 * max(ways)
        if clear or tried >= self.TRIAL - 1:
            self._chosen = ways[0] <= ways[1]


class SelectiveCache(OffloadCache):
    """A cache with exact prefill. A step that selects attends to the first tokens, the latest ones, and the units that
    its layers' predictors select. A method is a `layer_class` with a predictor, and a `config_class`."""

    config_class: ClassVar[type[OffloadConfig]] = SelectiveConfig
    layer_class: ClassVar[type[OffloadLayer]] = SelectiveLayer
    selects: ClassVar[bool] = True
    graph_tokens: ClassVar[int] = 1
    """Tokens a sequence in a captured step."""

    config: Any

    def __init__(
        self, model: Any, path: str | Path | None = None, config: OffloadConfig | str | Path | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        self.selecting: Selecting | None = None
        """State that the layers share; None: the cache is exact."""
        self.look_ahead: LookAhead | None = None
        """Guesses the next layer's query; None: nothing is prefetched by a guess."""
        self.weighs = False
        """The fields that decide the memory for selecting have their defaults; see `weigh`."""
        self._pace = Pace()
        self._looks_ahead = False  # in this step
        self._weighed = (0, 0)  # sequences and tokens of the latest plan
        self._lent_for = (0, 0)  # sequences and tokens that slots were lent for
        self._queue_for = 0  # sequences that the short write queue was sized for
        self._in_prompt = False  # no step has selected since the latest prompt
        self._selective: dict[int, SelectiveLayer] = {}  # by index; none if the cache is exact
        self._following: dict[int, SelectiveLayer | IndexedLayer] = {}  # these, and those whose model chooses
        self.graphed: Any = None
        """The `GraphedStep` of this cache, which is closed with it; None: there is none."""
        super().__init__(model, path, config, **fields)

    def prepare(self, model: PreTrainedModel) -> None:
        """Make what the layers share, before the seams are attached to `model`. A method extends this."""
        settings = self.config
        assert isinstance(settings, SelectiveConfig)
        self.weighs = all(getattr(settings, name) == getattr(type(settings), name) for name in settings.sets_memory)
        self._pace = Pace(settings.look_ahead)
        if settings.exact:
            return
        self.selecting = Selecting(settings, self.shared.storage, self.reads_ahead, len(self.selective))
        indexed = [layer for layer in self.offloaded if isinstance(layer, IndexedLayer)]
        if settings.look_ahead is not False and (self.selective or indexed):
            self.look_ahead = LookAhead(self.shared.storage.account)
        self._selective = {layer.layer_idx: layer for layer in self.selective}
        self._following = {**self._selective, **{layer.layer_idx: layer for layer in indexed}}
        if indexed:
            self.shared.indexing.look_ahead = self.look_ahead
        for layer in self.selective:
            layer.selecting = self.selecting
        self.watch_queries()

    @classmethod
    def shortfalls(cls, config: Any, geometry: Geometry, given: Iterable[str] = ()) -> list[str]:
        """Warn if a step selects fewer tokens than by default, unless they are `given`. A method extends this."""
        notes, usual = super().shortfalls(config, geometry, given), type(config).num_selected
        wanted = None if config.exact or "num_selected" in given else config.num_selected
        if wanted is not None and usual is not None and wanted < usual:
            notes.append(f"a step selects {wanted} tokens; selecting {usual} loses fewer needles {LOST_BY}")
        return notes

    def watch_queries(self) -> None:
        """Let the look-ahead see how the layers' queries are made."""
        for layer in self.selective:
            layer.watch_query = None if self.look_ahead is None else self.look_ahead.learn

    @classmethod
    def plan_outside_layers(cls, geometry: Geometry, config: OffloadConfig, batch: int) -> Planned:
        if config.exact or not isinstance(config, SelectiveConfig) or config.look_ahead is False:
            return super().plan_outside_layers(geometry, config, batch)
        held = LookAhead.planned(geometry.num_blocks, geometry.hidden_size, geometry.dtype.itemsize, batch)
        return super().plan_outside_layers(geometry, config, batch) + Planned.always(held)

    @classmethod
    def plan(cls, geometry: Geometry, config: OffloadConfig, max_context: int, max_batch: int) -> MemoryPlan:
        plan = super().plan(geometry, config, max_context, max_batch)
        if not isinstance(config, SelectiveConfig) or not config.graphs or config.exact:
            return plan
        if geometry.device != "cuda" or config.engine != "memory" or not geometry.layers:
            return plan
        kinds = [kind for kind, _ in layer_kinds(geometry, config, max_batch)]
        group, rows = (max(each) for each in zip(*((kind.form.group_size, kind.rows) for kind in kinds), strict=True))
        ids, tokens = max_batch * geometry.rows_of_ids, cls.graph_tokens
        most = with_room(max_context, group)  # and slots for all, so that steps run on the device alone
        step = super().plan(geometry, replace(config, reuse_capacity=most), most, max_batch).decode
        held = plan.decode.get(GRAPHS, 0) + numbers_bytes(ids, tokens, len(kinds), rows)
        held += 2 * (step.get("scores", 0) + step.get("fitting", 0))  # of the ranking, and of attention
        held += ids * tokens * geometry.vocab_size * geometry.dtype.itemsize
        return replace(plan, prefill={**plan.prefill, GRAPHS: held}, decode={**plan.decode, GRAPHS: held})

    @classmethod
    def choose_fields(cls, search: Search[Any], geometry: Geometry) -> OffloadConfig:
        """The best configuration of a search. A method with more fields decides in which order they shrink."""
        return fit_selective(search)

    @classmethod
    def to_try(cls, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Fields that `tune` tries in addition to those of `for_budget`: those that depend on model and machine. The
        user's `given` fields override them. An empty list: there is nothing to tune."""
        return []

    solver: ClassVar[str | None] = None
    """The method's own tuner, "module:function", which `tune` imports; None: `tune` tries `to_try`."""

    @property
    def selective(self) -> list[SelectiveLayer]:
        """The layers that select."""
        return [layer for layer in self.offloaded if isinstance(layer, SelectiveLayer)]

    @property
    def reads_ahead(self) -> int:
        """Maximum number of prefetches for layers' gathers in flight."""
        return 0 if self.config.look_ahead is False else 1

    # --- the step ----------------------------------------------------------------------------------------------

    def begin_step(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        changed = super().begin_step(model, kwargs)
        step = self.shared.step
        if self.selecting is None or step is None:
            return changed
        if step.selects:
            self.weigh(step)
            if self._in_prompt and self.selecting.worthwhile:
                self.end_prompt()
                step.started = time.perf_counter()
            self.lend_slots(step)
        if not step.selects or not self.selecting.worthwhile:
            self.rest()
            return changed
        self.make_room(step)
        self.before_selecting()
        # no attention runs before the first layer's, so its last choice is prefetched
        first = self._following.get(0)
        self._looks_ahead = self._pace.first and (first is None or first.device_slots is None)
        if self.look_ahead is not None and step.tokens == 1 and self._looks_ahead:
            self.storage.counters.steps_ahead += 1
            if first is not None:
                with self.timeline.span("look ahead", 0):
                    first.prefetch_again()
        return changed

    def weigh(self, step: Step) -> None:
        """Compare the memory for selecting with the full KV.

        With the default fields a cache uses no more memory than `DynamicCache` would: it has fewer slots, and if no
        slot fits, steps attend to everything. Repeated when the context has grown by a sixteenth."""
        if not self.weighs or not self._selective:
            return
        tokens = step.history + step.tokens
        unit = max(128, 1 << max(0, tokens.bit_length() - 5))
        size = step.sequences, -(-tokens // unit) * unit
        if size == self._weighed:
            return
        assert self.selecting is not None
        self._weighed, before = size, self.selecting.worthwhile
        with contextlib.suppress(NotImplementedError):  # a method that does not declare its predictor's memory
            room, slots = self._room_for_slots(size[1])
            self.selecting.limit(room >= 0, min(1.0, max(0, room) / slots) if slots else 1.0)
        if self.selecting.worthwhile and not before:  # exact steps do not measure either way
            self._pace = Pace(self.config.look_ahead)

    def lend_slots(self, step: Step) -> None:
        """Give slots what a step leaves of the budget, most while a context is shorter than planned, or has fewer rows.
        Repeated when the context has grown by an eighth: then the step needs more, and slots are made again. Slots that
        the user has fixed stay."""
        limit, context = self.storage.account.limit, self.config.max_context
        sequences, tokens = step.sequences, step.history + step.tokens
        if limit is None or context is None or not self._following:
            return
        if sequences == self._lent_for[0] and tokens <= self._lent_for[1]:
            return
        self._lent_for = sequences, min(context, tokens + tokens // 8)
        units = [layer.history.form.group_size for layer in self._following.values() if layer.is_initialized]
        unit, geometry = max(units, default=1), Geometry.of(self.model)
        on_device = any(layer.on_device for layer in self._following.values())
        over_host = self._slots_over_host(geometry, limit) if on_device else None
        if "reuse_capacity" in self.given:
            self._lend(0, over_host)
            return
        fewest, too_many = 0, -(-self._lent_for[1] // unit)
        if over_host is not None:  # those of a complete choice may fit although fewer do not: they need no areas
            complete = slots_of_choice(geometry, self.config) or self.config.tokens_fetched(self._lent_for[1])
            enough = -(-(min(complete, self._lent_for[1]) - self.config.reuse_capacity) // unit)
            if enough > 0:
                fits = self._with_slots(geometry, enough * unit) <= limit
                fewest, too_many = (enough, too_many) if fits else (fewest, enough)
        while too_many - fewest > max(1, fewest // 16):
            tried = (fewest + too_many) // 2
            fits = self._with_slots(geometry, tried * unit) <= limit
            fewest, too_many = (tried, too_many) if fits else (fewest, tried)
        self._lend(fewest * unit, over_host)
        for layer in self._following.values():
            layer.drop_slots_beyond()

    def _lend(self, tokens: int, over_host: int | None = None) -> None:
        """As `Selecting.lend`, for all layers."""
        if self.selecting is not None:
            self.selecting.lend(tokens, over_host)
        if (indexing := self.shared.indexing) is not None:
            indexing.lent, indexing.over_host = tokens, over_host

    def _with_slots(self, geometry: Geometry, lent: int) -> int:
        """Upper bound on the bytes of a step for which slots are lent, with so many tokens more than configured. What
        is held now counts too: some of it was allocated for the longest context."""
        config = replace(self.config, reuse_capacity=self.config.reuse_capacity + lent)
        return self._beside_held(self.plan(geometry, config, self._lent_for[1], self._lent_for[0]).decode)

    def _beside_held(self, planned: Mapping[str, int]) -> int:
        """The sum of planned bytes by owner, or of those in use where they are more. Slots and what a step frees count
        as planned."""
        account = self.storage.account
        held = {owner: nbytes for owner, nbytes in account.by_owner.items() if owner not in account.host}
        held |= {SLOTS: 0, "stream buffers": 0, RECORDS: 0}
        if any(layer.on_device for layer in self._following.values()):  # which free what steps over the host had
            held |= {"staging": 0, "selection": 0, "scores": 0}
        return sum(max(held.get(owner, 0), planned.get(owner, 0)) for owner in {*held, *planned})

    def _slots_over_host(self, geometry: Geometry, limit: int) -> int:
        """Slots a row for which a step over the host has room, of layers whose steps run on a device."""
        config = replace(self.config, reuse_capacity=0)
        room = limit - self._beside_held(self.plan(geometry, config, self._lent_for[1], self._lent_for[0]).decode)
        histories = [layer.history for layer in self._following.values() if layer.is_initialized]
        each = sum(history.rows * history.form.payload_bytes for history in histories)
        return max(0, room) // max(1, each)

    def _room_for_slots(self, context: int) -> tuple[int, int]:
        """Bytes of the full KV left for slots when selecting from `context` tokens a row (negative: none), and bytes of
        all slots. Resident layers' slots are not counted, nor are those for a choice on a device, which stay."""
        kinds: dict[tuple[LayerKind, int], list[SelectiveLayer]] = {}
        for layer in self.selective:
            if layer.is_initialized:
                kinds.setdefault((layer.kind(len(self.offloaded)), id(layer.config)), []).append(layer)
        plans = [
            (type(same[0]).plan(kind, same[0].config, context), len(same), same[0].config)
            for (kind, _), same in kinds.items()
        ]
        planned, _ = LayerPlan.of_layers(((plan, count) for plan, count, _ in plans), Planned())
        usual = [(plan, count) for plan, count, config in plans if config.reuse_capacity <= self.config.reuse_capacity]
        slots = sum(plan.own.decode.get(SLOTS, 0) * count for plan, count in usual)
        host = {RECORDS, *self.storage.account.host}
        selecting = sum(held for owner, held in planned.decode.items() if owner not in host)
        apart = {*planned.decode, *host, "stream buffers", "write queue", "layers not offloaded"}
        others = sum(held for owner, held in self.storage.account.by_owner.items() if owner not in apart)
        for (kind, _), same in kinds.items() if any(plan.alone for plan, _ in usual) else ():
            least = type(same[0]).plan(kind, replace(same[0].config, reuse_capacity=0), context)
            slots -= least.own.decode.get(SLOTS, 0) * len(same)  # those of a complete choice, which a device needs
        full = sum(layer.full_bytes for layer in self.offloaded)  # state that is not offloaded is on both sides
        return full - others - selecting + slots, slots

    def room_for(self, owner: str, nbytes: int) -> bool:
        """Book `nbytes` more of device memory for `owner`. Slots that were lent are freed for it, and the next step
        makes fewer. False, with nothing booked: the budget has no room."""
        account, selecting = self.storage.account, self.selecting
        if account.limit is not None and selecting is not None and self._lent_for[0]:
            geometry, held = Geometry.of(self.model), account.by_owner[owner]
            planned = self.plan(geometry, self.config, self._lent_for[1], self._lent_for[0]).decode.get(owner, 0)
            room = account.limit - max(held + nbytes, planned) + max(held, planned)
            if self._with_slots(geometry, selecting.lent) > room:
                if not selecting.lent or self._with_slots(geometry, 0) > room:
                    return False
                for layer in self._following.values():
                    layer.drop_fetcher()
                self._lent_for = (0, 0)  # they are lent again, with what is booked here
        with account.not_sparing(), contextlib.suppress(BudgetError):
            account.hold(owner, nbytes)
            return True
        return False

    def why_no_graph(self) -> str | None:
        """Why the next step cannot be in a CUDA graph, whatever its layers say; None: it can."""
        return None

    def wants_blocks(self) -> bool:
        """Also while the look-ahead runs: it has learned enough when the other way is tried."""
        first = self._following.get(0)
        guesses = self.look_ahead is not None and self._pace.first and not (first is not None and first.on_device)
        return guesses or super().wants_blocks()

    def make_room(self, step: Step) -> None:
        """Under a limit, give slots the memory of a prefill's writes, and give a verification of candidates, which
        attends to more, the memory of a prefetch."""
        assert self.selecting is not None
        if self._queue_for != step.sequences and self.storage.account.limit is not None:
            units = [layer.history.rows * layer.history.form.record_bytes for layer in self.offloaded if layer.length]
            self.storage.limit_writes(decoding_queue(self.storage.widest_queue, units))
            self._queue_for = step.sequences
        if step.tokens == 1:
            self.selecting.areas.narrow()

    def before_selecting(self) -> None:
        """Prepare a step that selects."""

    def rest(self) -> None:
        """Free the memory that only selecting needs, before a step of several queries that does not select."""
        if self.selecting is not None:
            for layer in self.selective:
                layer.drop_fetcher()
            self.selecting.rest()
            if self.shared.indexing is not None:
                self.shared.indexing.rest()
            self.storage.limit_writes(None)
            self._queue_for, self._in_prompt = 0, True

    def end_prompt(self) -> None:
        """Let the layers fit what waits for the end of a prompt that came in pieces. Its time and reads are the
        prompt's, not those of the step that follows."""
        for layer in self.selective:
            if layer.is_filled:
                with self.timeline.span("summarise", layer.layer_idx):
                    layer.end_prompt()
        self._in_prompt = False
        self.storage.counters.begin_step(self.storage.prefetcher.seconds_in_flight)

    def enter_block(self, layer_idx: int, block: torch.nn.Module, hidden: torch.Tensor) -> None:
        if (step := self.shared.step) is not None:
            step.entered = True
        if self.look_ahead is not None and layer_idx >= 0:
            self.look_ahead.enter_block(layer_idx, block, hidden)

    def enter_attention(self, layer_idx: int, module: torch.nn.Module, hidden: torch.Tensor, rotary: Any) -> None:
        if self.look_ahead is not None:
            self.look_ahead.enter_attention(layer_idx, module, hidden, rotary)

    def leave_attention(self, layer_idx: int, output: torch.Tensor) -> None:
        """After a layer's attention: prefetch the next layer's probable selection, if that layer selects."""
        step, following, selecting = self.shared.step, self._following.get(layer_idx + 1), self.selecting
        if following is None or step is None or not step.selects or step.tokens > 1 or not self._looks_ahead:
            return
        if self.look_ahead is None or selecting is None or selecting.widened or not selecting.worthwhile:
            return  # nothing is prefetched
        if self.timeline.on:
            with self.timeline.span("look ahead", layer_idx + 1):
                following.read_ahead(self.look_ahead, output)
        else:
            following.read_ahead(self.look_ahead, output)

    def end_step(self, output: Any = None) -> Any:
        step = self.shared.step
        if self.look_ahead is not None and self.watches_blocks:
            self.look_ahead.end_step()
        changed = super().end_step(output)
        selecting = self.selecting
        tells = selecting is not None and selecting.worthwhile and not selecting.widened  # other steps do not compare
        if step is not None and step.started is not None and tells:
            self._pace.took(time.perf_counter() - step.started)
        return changed

    def end_part(self) -> None:
        if self.look_ahead is not None:
            self.look_ahead.end_step()
        super().end_part()

    def close(self) -> None:
        here = self.storage.process.is_here  # in a forked child, threads that only its parent has may hold locks
        if here and self.graphed is not None:
            self.graphed.close()
        if here and self.look_ahead is not None:
            self.look_ahead.end_step()  # for a step that did not end
        super().close()
        if here and self.selecting is not None:
            self.selecting.reset()

    # --- changes and contexts ----------------------------------------------------------------------------------

    def forget(self) -> None:
        super().forget()
        self._weighed = self._lent_for = (0, 0)
        if self.selecting is not None:
            self.selecting.reset()
            self._lend(0)

    def freeze(self) -> None:
        for layer in self.selective:
            layer.drop_ahead()  # no read may be in flight in a store that is about to change
        if self._in_prompt:
            self.check_open()
            self.contents.take_back()
            self.end_prompt()
        super().freeze()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "padded": self.selecting is not None and self.selecting.padded}

    def restore(self, tree: dict[str, Any]) -> None:
        super().restore(tree)
        if not isinstance(tree["padded"], bool):
            raise not_whole("the cache", f"padded is {tree['padded']!r:.80}")
        if self.selecting is not None and tree["padded"]:
            self.selecting.see_padding()
