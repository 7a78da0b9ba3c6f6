"""A layer that attends to a selection: decoding, written once for every method."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ..config import OffloadConfig, SelectiveConfig
from ..errors import BudgetError, not_whole, shown
from ..fetch.areas import records_soon
from ..fetch.choice import Choice, DeviceChoice, Estimate, Estimates
from ..fetch.device_slots import DeviceSlots
from ..fetch.fetcher import Fetched, Fetcher
from ..fetch.policy import FirstIn, Policy
from ..fetch.replica_link import Link
from ..fetch.tier import Tier, slot_tiers
from ..history.base import Sealed, all_sealed
from ..history.records import without_autocast
from ..memory.dry_run import DryRun
from ..memory.plan import LayerPlan
from ..model.attention_call import AttentionCall
from ..model.look_ahead import LookAhead
from ..model.place import no_backward
from ..predictors.base import Learner, Predictor, Query
from ..report.trace import NOTHING
from ..stores.base import FreezableStore
from . import device_step
from .captured import CapturedLayer
from .device_step import LOOKED_AT
from .gathered_mask import biased_mask, gathered_mask, millionths
from .layer import OffloadLayer, Output
from .plan import LayerKind
from .selecting import Selecting
from .shared import Shared
from .step import MOST_CANDIDATES, Step


class SelectiveLayer(OffloadLayer):
    """A method sets `predictor_class`, or overrides `make_predictor`; it may have its own history, tiers and `combine`.

    The predictor keeps the summaries of stored tokens by which it selects.
    """

    predictor_class: ClassVar[Any] = None
    """Makes a predictor from (form, rows, configuration, account), as `SummaryPredictor` does."""
    needs_slots: ClassVar[bool] = True
    """Steps on a device alone need slots for all that they select."""
    by_use: ClassVar[bool] = False
    """These slots are filled by use, not first in, first out."""
    captured_class: ClassVar[type[CapturedLayer]] = CapturedLayer
    """This layer in a CUDA graph: see `GraphedStep`."""

    config: SelectiveConfig

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.selecting: Selecting | None = None
        """Set by the cache; None: the cache is exact, and nothing is learned."""
        self.watch_query: Callable[[int, torch.Tensor], object] | None = None
        """Called with the layer's index and queries (B, H, q, D) in each call of attention, until it returns True; set
        by the cache."""
        self.given_state: dict[str, Any] | None = None
        """Fitted state from elsewhere, for keys that come without queries: see `Learner.fitted_state`."""
        self.refused: str | None = None
        """Why the fitted state from elsewhere was rejected."""
        self.scaling, self.num_heads = 1.0, 0

    def _clear(self) -> None:
        super()._clear()
        self.predictor: Learner | None = None
        self._fetcher: Fetcher | None = None
        self._capacity, self._budget = -1, (-1, -1, -1, 0)
        self._made_for: tuple[int, int, int] | None = None  # version of the budgets, rows, units
        self.on_device = False
        """Steps run on a CUDA device that reads records by itself, where that is possible: see `device_step`."""
        self.device_slots: DeviceSlots | None = None
        """Their slots; None: no step has needed them."""
        self.over_host: str | None = None
        """Why the latest of these steps needed the host in spite of that; None: it did not."""

    # --- what a method is --------------------------------------------------------------------------------------

    def make_predictor(self) -> Learner:
        """The predictor of this layer's new history; a plain learner if the method overrides `choose`."""
        if self.predictor_class is None:
            raise NotImplementedError(f"{type(self).__name__} has no predictor: give it a `predictor_class`")
        given = self.history.form, self.history.rows, self.config, self.shared.storage.account
        return cast(Learner, self.predictor_class(*given))

    def make_tiers(self, capacity: int) -> Sequence[Tier]:
        """The tiers in which read payloads stay, fastest first, `capacity` payloads in all."""
        history, account = self.history, self.shared.storage.account
        return slot_tiers(history.form, history.device, account, self.near_slots, capacity, self.policy)

    def make_link(self) -> Link | None:
        """The link that reads some records as replicas; None: it reads none."""
        return None

    def prompted(self, call: AttentionCall) -> None:
        """Observe a call of several queries; for a method that learns from a prompt's."""

    def fetched(self, choice: Choice, fetched: Fetched) -> None:
        """Observe a step's fetched entries; for a method that learns from them."""

    def attended_on_device(self, choice: DeviceChoice) -> None:
        """Observe a step on a device, after its attention; for a method whose units change then."""

    def kind(self, layers: int) -> LayerKind:
        """This layer's present properties for planning; `layers`: number of offloaded layers."""
        form = self.history.form
        heads = self.num_heads or form.num_key_heads * self.rows.heads  # until the first attention
        return LayerKind(form, heads, self.history.rows, self.batch, self.history.device.type, layers)

    # --- upper bounds ------------------------------------------------------------------------------------------

    @classmethod
    def most_records(cls, config: SelectiveConfig, group_size: int, units: int) -> int:
        """Upper bound on the records a row that contain the entries of `units` full units of `group_size` entries."""
        return units

    def most_kept(self, context: int) -> int:
        """Upper bound on the tokens a row that a choice keeps of its units; 0: a step attends to complete units."""
        return 0

    @property
    def estimates(self) -> bool:
        """Whether steps may estimate what they do not attend to."""
        return False

    @classmethod
    def plan(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """As `OffloadLayer.plan`. Steps over the host of a layer whose others run on a device have no slots within a
        budget, because their buffers need the memory."""
        plan = super().plan(kind, config, context)
        if not plan.alone:
            return plan
        own = config if config.memory is None else replace(cast(SelectiveConfig, config), reuse_capacity=0)
        return replace(plan, over_host=super().plan(replace(kind, over_host=True), own, context))

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        """Rehearse the history, the predictor, and a step on a device, or tiers and a step's gather."""
        self.rehearse_history(run, kind, context)
        ahead = 0 if self.config.look_ahead is False else 1
        self.selecting = selecting = Selecting(self.config, self.shared.storage, ahead, kind.layers, padded=True)
        wanted = selecting.units(self.config, kind.form.group_size, context)
        self.predictor = self.make_predictor()
        self.predictor.rehearse(run, context, kind.num_heads * kind.batch // kind.rows, wanted)
        packing, fitting = run.passing("packing")[0], run.passing("fitting")[0]
        run.passes("fitting", prefill=max(0, fitting - packing) - fitting, together=True)  # one after the other
        run.decoding()
        run.keeps("tables", self.predictor.tables_nbytes)
        if not device_step.rehearse(self, run, kind, context):
            self.rehearse_slots(run)
            twice = self.config.candidates or self.widens(context)
            self.rehearse_gather(run, kind, context, wanted, wanted * (1 + twice))

    def widens(self, context: int) -> bool:
        """Whether some steps are widened: see `Selecting.widen`."""
        return self.config.most_tokens_fetched(context) > self.config.tokens_fetched(context)

    def rehearse_slots(self, run: DryRun) -> None:
        """Rehearse tiers with the maximum number of slots."""
        store: Any = self.history.store
        for tier in self.make_tiers(self.slots):
            tier.rehearse(store.records)
            run.keeps("tables", tier.tables_nbytes)

    def rehearse_gather(self, run: DryRun, kind: LayerKind, context: int, wanted: int, verified: int) -> None:
        """Rehearse the buffers of a step's reads and gather: a step of one token selects `wanted` units a row, one of
        candidates `verified`."""
        history, form, rows, config = self.history, kind.form, kind.rows, self.config
        assert self.selecting is not None
        records, soon = self.most_records(config, form.group_size, wanted), records_soon(history.records)
        waiting = 0 if history.extra_entries is None else history.extra_entries[0].shape[1]
        behind = history.recent.shape[1] + waiting
        estimates = kind.num_heads * kind.batch // (kind.rows * form.num_key_heads) if self.estimates else 0
        rest = estimates, (MOST_CANDIDATES if config.candidates else 1) * estimates
        latest, last = (-(-(behind + more) // form.group_size) for more in rest)
        record = rows * form.record_width * form.dtype.itemsize
        view, widest = (min(records, soon) + latest) * record, (min(max(records, verified), soon) + last) * record
        kept = self.most_kept(context)
        kept = rows * (kept + latest * form.group_size) * form.entry_bytes if kept else 0
        whole = widest if waiting else 0  # complete units are copied too if other entries follow them
        area = rows * min(records, soon) * form.record_bytes
        whole = kept if self.widens(context) else whole
        self.selecting.areas.rehearse(run, area, (view, widest), (kept, whole))

    # --- memory ------------------------------------------------------------------------------------------------

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the history's, the predictor's and the fetcher's tables."""
        held = super().tables_nbytes + (0 if self.predictor is None else self.predictor.tables_nbytes)
        if self.device_slots is not None:
            held += self.device_slots.tables_nbytes
        return held + (0 if self._fetcher is None else self._fetcher.tables_nbytes)

    def whole(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OffloadLayer.whole`. Frees the memory that only selecting needs, because reading all needs as much."""
        if self.selecting is not None:
            self.selecting.rest()
        return super().whole(stop)

    # --- learning ----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.selecting is not None:
            self.predictor, state = self.make_predictor(), self.given_state
            if state is not None:
                self.use_fitted_state(state)
            self.on_device = device_step.is_possible(self)

    def use_fitted_state(self, state: dict[str, Any]) -> None:
        """Learn the stored keys again, beginning with the fitted state from elsewhere. If that state does not match
        this layer, `refused` says why, and the layer keeps its own."""
        self.given_state, self.refused = state, None
        if self.predictor is None:
            return
        predictor = self.make_predictor()
        try:
            predictor.restore({**state, "units": 0})
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            predictor.close()
            what = f"{type(error).__name__}: {shown(str(error), 200)}"
            self.given_state, self.refused = None, f"layer {self.layer_idx} is fitted again ({what})"
            return
        self.predictor.close()
        self.predictor = predictor
        tokens, group = 0, self.history.form.group_size
        for block in self.history.blocks(self.history.units * group):
            tokens += block.keys.shape[2]
            self.learn_keys(replace(all_sealed(self.history, tokens // group), parts=[(block.keys, block.values)]))

    def learn_rest(self) -> None:
        """Run postponed fitting on all stored keys; without queries, unless the predictor kept some."""
        self.end_prompt()
        if self.predictor is not None and (units := self.history.units) and not self.predictor.ready(units):
            self.learn_keys(all_sealed(self.history))

    def end_prompt(self) -> None:
        """See `Learner.end_prompt`."""
        if self.predictor is not None and self.history.units:
            self.predictor.end_prompt(all_sealed(self.history))

    def learn(self, sealed: Sealed, call: AttentionCall, step: Step) -> None:
        if self.predictor is not None:
            self.predictor.learn(sealed, call.query.detach(), step.visible(call.mask))

    def learn_keys(self, sealed: Sealed) -> None:
        if self.predictor is not None:
            form, device = self.history.form, self.history.device
            shape = self.batch, self.rows.heads * form.num_key_heads, 0, form.key_dim
            queries = torch.empty(shape, dtype=form.dtype, device=device)
            self.predictor.learn(sealed, queries, self.shared.visible)

    # --- selecting ---------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Units a row that one query of this layer attends to, sinks included."""
        selecting = self.selecting
        assert selecting is not None
        version, length, held, units = self._budget
        if length != self.history.length or version != selecting.version:
            now = self.held  # changes only with the length
            if now != held or version != selecting.version:
                units = selecting.units(self.config, self.history.form.group_size, now)
            self._budget = selecting.version, self.history.length, now, units
        return units

    def can_choose(self) -> bool:
        """Whether a step can select: there is no choice to make, or the predictor knows all units."""
        history, predictor = self.history, self.predictor
        return predictor is not None and (history.records <= self.budget or predictor.ready(history.units))

    def query_of(self, states: torch.Tensor, visible: torch.Tensor | None) -> Query:
        """A `Query` of states (B, H, D)."""
        return Query(states, self.scaling, visible, self._recent_keys)

    def _recent_keys(self) -> torch.Tensor:
        """The tail's keys: see `Query.recent`."""
        return self.history.form.split(self.history.recent)[0]

    def choose(self, query: Query, *, guess: bool = False, again: bool = False) -> Choice:
        """The units that a query attends to; `again`: another query of the same keys follows."""
        budget, history, predictor = self.budget, self.history, self.predictor
        if predictor is None or history.records <= budget:
            return Choice.all_of(history.rows, history.units)
        decision = cast(Predictor, predictor).select(query, budget, guess)
        if isinstance(decision, Choice):
            return decision
        try:  # entries that the predictor asks for are read; a guess keeps those it looked at for the query itself
            asked, fetcher = next(decision), self.fetcher
            while True:
                if isinstance(asked, Choice):
                    found = fetcher.bring(history, asked)
                else:
                    found = fetcher.look(history, asked, again=guess or again)
                asked = decision.send(found)
        except StopIteration as end:
            return cast(Choice, end.value)
        finally:
            decision.close()  # frees what it has while it waits for a look that failed

    def choose_for(self, call: AttentionCall, visible: torch.Tensor | None) -> tuple[Choice, Estimate | None]:
        """A step's choice, and the function that estimates the units it drops; None: none are. For several queries
        (candidates) it is the union of their choices, up to two budgets."""
        if call.query.shape[2] == 1:
            query = Query(call.query[:, :, 0], self.scaling, visible, self._recent_keys)
            choice = self.choose(query)
            return choice, None if choice.next is None else partial(self._estimate, choice, [query], [choice.next])
        queries = [self.query_of(states, visible) for states in call.query.unbind(2)]
        choices = [self.choose(query, again=query is not queries[-1]) for query in queries]
        least = self.most_records(self.config, self.history.form.group_size, self.budget)  # the most for one query
        union = Choice.union(choices, max(least, (1 if self.widened else 2) * self.budget))
        left = [choice.next for choice in choices if choice.next is not None]
        return union, None if len(left) < len(choices) else partial(self._estimate, union, queries, left)

    def _estimate(self, choice: Choice, queries: list[Query], left: list[np.ndarray]) -> Estimates | None:
        """Estimates for each query's units `left` (rows, n) that are not in `choice`."""
        if len(queries) > 1:
            left = [np.where((units[:, :, None] == choice.units[:, None]).any(2), -1, units) for units in left]
        return cast(Predictor, self.predictor).estimate(queries, left)

    def _attend(self, call: AttentionCall) -> Output:
        query = call.query
        self.scaling, self.num_heads = call.kwargs.get("scaling") or query.shape[-1] ** -0.5, query.shape[1]
        if self.watch_query is not None and self.watch_query(self.layer_idx, query):
            self.watch_query = None
        if call.query.shape[2] > 1:
            self.prompted(call)
        return super()._attend(call)

    # --- decoding ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Number of slots for `make_tiers`; when it changes, tiers are made again."""
        history, selecting, near = self.history, self.selecting, self.near_slots
        assert selecting is not None
        return near + selecting.host_slots(self.config, history.form, history.rows, history.records, near)

    @property
    def near_slots(self) -> int:
        """Slots on the device, for steps over the host."""
        assert self.selecting is not None
        slots, most = device_step.planned_slots(self), self.selecting.over_host
        return self.history.rows * (slots if most is None or not self.on_device else min(slots, most))

    @property
    def policy(self) -> Callable[[int], Policy]:
        """Makes the replacement policy of a number of slots."""
        return FirstIn

    @property
    def fetcher(self) -> Fetcher:
        """This layer's fetcher, with the slots that its budget and history allow now. Raises `BudgetError`."""
        selecting, history = self.selecting, self.history
        assert selecting is not None
        units, group = history.records, history.form.group_size
        made_for = selecting.version, history.rows, units
        if self._fetcher is not None and self._fetcher.closed:  # its memory was needed elsewhere
            self.drop_fetcher()
        if self._fetcher is None or made_for != self._made_for:
            capacity = self.slots
            if self._fetcher is None or capacity != self._capacity:
                self.drop_fetcher()
                made = self.make_tiers(capacity), 0, self.layer_idx, selecting.looks, self.make_link()
                self._fetcher = Fetcher(self.shared.storage, selecting.areas, *made)
            most = self.most_records(self.config, group, selecting.units(self.config, group, self.held, usual=True))
            self._fetcher.most_records, self._fetcher.read_at_once = most, self.read_at_once(most)
            self._capacity, self._made_for = capacity, made_for
            self.shared.books_changed = True
        return self._fetcher

    def read_at_once(self, most: int) -> int:
        """As in `Fetcher`; `most`: maximum records a row that a step selects."""
        return most

    def drop_fetcher(self) -> None:
        """Free the slots, after waiting for prefetches in flight."""
        if self.device_slots is not None:
            self.device_slots.close()
            self.device_slots = None
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher, self._capacity, self._made_for = None, -1, None

    def drop_slots_beyond(self) -> None:
        """Free the slots if their budget is smaller now; the next step makes fewer."""
        if self._fetcher is not None and self.slots < self._capacity:
            self.drop_fetcher()
        if self.device_slots is not None and device_step.planned_slots(self) < self.device_slots.count:
            self.drop_fetcher()

    def decode(self, call: AttentionCall, step: Step) -> Output:
        """Attention over the selected units and the latest tokens, by the model's own function on the gathered KV."""
        selecting, storage = self.selecting, self.shared.storage
        visible = None if call.mask is None else step.visible(call.mask)
        if selecting is None or not selecting.worthwhile or not self.can_choose():
            return self.exact(call)
        if call.mask is not None and call.query.shape[2] == 1 and not step.changes(call.mask):
            call = replace(call, mask=None)
        if visible is not None:
            selecting.see_padding()
        if storage.stream_buffers:
            storage.release_stream_buffers()
        with torch.no_grad():
            output, weights = self.attend_sparsely(call, visible)
        return no_backward(output, call.query) if call.query.requires_grad else output, weights

    def attend_sparsely(self, call: AttentionCall, visible: torch.Tensor | None) -> Output:
        """Select, gather and attend."""
        if self.on_device and (output := device_step.attend_on_device(self, call)) is not None:
            return output
        storage, selecting, step = self.shared.storage, self.selecting, self.shared.step
        assert selecting is not None
        timeline, layer_idx = storage.timeline, self.layer_idx
        with timeline.span("rank", layer_idx) if timeline.on else NOTHING:
            choice, estimate = self.choose_for(call, visible)
        count, most = call.query.shape[2], 0
        if estimate is not None:
            most = count * (call.query.shape[1] // (self.rows.heads * self.history.form.num_key_heads))
        with timeline.span("gather", layer_idx) if timeline.on else NOTHING:
            fetched = self.fetcher.gather(self.history, choice, estimate, most)
        self.fetched(choice, fetched)
        if selecting.watch is not None:
            selecting.watch(self.layer_idx, choice)
        queries = call.query.shape[0] * (count - (0 if step is None else step.guessed))
        estimated = 0 if fetched.estimates is None else fetched.estimates.entries.shape[1]
        storage.counters.attend(queries, self.history.length, fetched.entries.shape[1] - estimated)
        if count == 1 and (storage.counters.decode_steps + layer_idx) % LOOKED_AT == 0:
            self._count_lost(choice, self.query_of(call.query[:, :, 0], visible), fetched.estimates is not None)
        with timeline.span("attend", layer_idx) if timeline.on else NOTHING:
            return self.combine(call, choice, fetched, visible)

    def _count_lost(self, choice: Choice, query: Query, estimated: bool) -> None:
        """Count the attention mass of a step that is on nothing that it attends to."""
        counters, lost = self.shared.storage.counters, None
        if self.history.records > self.budget and hasattr(self.predictor, "lost"):  # a learner has no such method
            lost = cast(Predictor, self.predictor).lost(query, choice, estimated)
        if lost is not None and math.isfinite(lost):
            counters.lost_millionths += round(lost * 1e6)
            counters.times_lost += 1

    def combine(self, call: AttentionCall, choice: Choice, fetched: Fetched, visible: torch.Tensor | None) -> Output:
        """Attention over the fetched entries."""
        keys, values = self.history.form.split(fetched.entries)
        if self.rows.heads > 1:
            shape = -1, self.rows.heads  # as `Rows.unfold`
            keys, values = keys.squeeze(1).unflatten(0, shape), values.squeeze(1).unflatten(0, shape)
        mask = None
        if call.mask is not None or fetched.valid is not None or call.query.shape[2] > 1:
            mask = gathered_mask(call, self.history, choice, fetched)
        if fetched.estimates is not None:
            mask = biased_mask(call, mask, fetched.estimates, keys.shape[2])
            counters = self.shared.storage.counters
            if (counters.decode_steps + self.layer_idx) % LOOKED_AT == 0:
                counters.times_estimated += 1
                own = fetched.estimates.bias.shape[3]
                counters.later(estimated_millionths=millionths(call, self.scaling, keys, mask, own))
        return call.attend(keys, values, mask)

    # --- prefetching -------------------------------------------------------------------------------------------

    def read_ahead(self, look_ahead: LookAhead, output: torch.Tensor) -> None:
        """Prefetch this layer's probable selection, predicted from the output (B, q, hidden) of the attention before
        it."""
        states = look_ahead.predict(self.layer_idx, output)
        if states is None or self.shared.step is None:
            self.prefetch_again()
        else:
            self.prefetch_for(states[:, :, 0], self.shared.step.seen)

    def prefetch_for(self, states: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Prefetch what a guessed query (B, H, D) selects and no tier has. A guess that fails is dropped."""
        selecting, device = self.selecting, states.device
        if selecting is None or selecting.widened or not self._sparse() or not self.can_choose():
            return
        account, on = self.shared.storage.account, torch.is_autocast_enabled
        sparing, account.sparing = account.sparing, False
        try:
            with without_autocast(device) if on(device.type) or on("cpu") else NOTHING:
                query = Query(states, self.scaling, visible, self._recent_keys)
                self._ahead(self.choose(query, guess=True))  # may look at stored entries
        except (OSError, BudgetError):
            pass
        finally:
            account.sparing = sparing

    def prefetch_again(self) -> None:
        """Prefetch what the last step selected and no tier has: most of it is selected again."""
        if self._sparse() and self._fetcher is not None and self._fetcher.latest is not None:
            self.ahead(self._fetcher.latest)

    @property
    def widened(self) -> bool:
        """Whether steps are widened, which leaves no memory to prefetch to: see `Selecting.widen`."""
        return self.selecting is not None and self.selecting.widened

    @property
    def selects(self) -> bool:
        """Whether steps select, because that needs less memory than the full KV: see `SelectiveCache.weigh`."""
        return self.selecting is not None and self.selecting.worthwhile

    def why_over_host(self) -> str | None:
        """See `device_step.why_over_host`."""
        return device_step.why_over_host(self)

    def _sparse(self) -> bool:
        selecting = self.selecting
        selects = selecting is not None and selecting.worthwhile and self.device_slots is None
        return selects and self.is_filled and self.state == "tagged"

    def ahead(self, choice: Choice) -> None:
        """Prefetch for this layer's next gather. A guess that fails is dropped."""
        with self.shared.storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
            if not self.widened:
                self._ahead(choice)

    def _ahead(self, choice: Choice) -> None:
        fetcher = self.fetcher
        fetcher.ahead(self.history, choice, None if choice is fetcher.latest else fetcher.latest)

    def drop_ahead(self) -> None:
        """Wait for prefetches in flight and drop them."""
        if self.device_slots is not None:
            self.drop_fetcher()
        if self._fetcher is not None:
            self._fetcher.drop_reads()

    # --- changes -----------------------------------------------------------------------------------------------

    def cropped(self) -> None:
        self._budget = -1, -1, -1, 0

    def truncated(self, units: int) -> None:
        if self.predictor is not None:
            self.predictor.truncate(units)
        if self.device_slots is not None:  # other units will have the same numbers
            self.drop_fetcher()

    def dropped(self, records: np.ndarray) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(records)  # a device's slots hold records of rows, and of no row these

    def select_rows(self, rows: torch.Tensor) -> None:
        fewer = len(rows) < self.batch
        super().select_rows(rows)
        if self.predictor is not None:
            self.predictor.select_rows(self.rows.expand(rows))
        if self._fetcher is not None:
            self._fetcher.rows_changed()
        if self.device_slots is not None:
            self.device_slots.select_rows(self.rows.expand(rows))
        if fewer and self.selecting is not None:
            self.selecting.rest()  # frees buffers that were made for more rows

    def reset(self) -> None:
        super().reset()
        self.given_state = None

    def close(self) -> None:
        self.drop_fetcher()
        if self.predictor is not None:
            self.predictor.close()
        super().close()

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        fitted = None if self.predictor is None else self.predictor.capture()
        return {**super().capture(), "predictor": fitted, "scaling": self.scaling}

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        scaling = tree["scaling"]
        if type(scaling) not in (int, float) or not math.isfinite(scaling):
            raise not_whole(self.name, f"its scaling is {scaling!r:.80}")
        super().restore(tree, parts, device)
        if self.selecting is not None and self.is_filled:
            self.predictor = self.make_predictor()
            if tree["predictor"] is not None:
                self.predictor.restore({**tree["predictor"], "units": self.history.units})
            self.on_device = device_step.is_possible(self)
        self.scaling = scaling
