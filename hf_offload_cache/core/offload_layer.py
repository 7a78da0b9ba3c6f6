"""One layer of an offloaded cache: what its `update` returns, and attention over what it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..config import OffloadConfig
from ..errors import PromptError, not_whole
from ..history.autocast import without_autocast
from ..history.base import History, Sealed
from ..history.position_history import PositionHistory
from ..history.record_format import RecordFormat
from ..memory.plan import LayerPlan, Planned
from ..model.attention_call import AttentionCall
from ..model.gradients import no_backward
from ..model.tag import TAG, Tag
from ..stores.freezable import FreezableStore
from .layer_operations import LayerOperations
from .planned import LayerKind, plan_history, stream_bytes
from .rows import Rows
from .step import Step

_STATES = ("unknown", "tagged", "full")

Output = tuple[torch.Tensor, torch.Tensor | None]
"""(B, q, H, Dv), and the attention weights where the model's own function gave some."""


class OffloadLayer(LayerOperations):
    """A full-attention layer whose history lies in a store; the base of every method's layer.

    States (`state`): "unknown": `update` returns the whole history, tagged, which is right under any attention.
    "tagged": attention was seen to bring the tag back; `update` returns what the step added, and `attend` finds the
    rest. "full": attention is not ours to replace; `update` returns the whole history, brought back from the store.
    """

    heads_apart: ClassVar[bool] = False
    """Each key head has rows and records of its own; else the heads of a sequence lie together."""

    @classmethod
    def planned(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """What one layer takes at most for sequences of `context` tokens."""
        stream = LayerPlan(shared=Planned(decode={"stream buffers": stream_bytes(kind, config)}))
        return cls.plan_history(kind, config, context) + stream

    @property
    def held(self) -> int:
        """Tokens a row that have left the tail."""
        return self.history.length - self.history.recent.shape[1]

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the books that are kept on where the history lies, and on what was written there."""
        return self.history.tables_nbytes if self._filled else 0

    @property
    def full_bytes(self) -> int:
        """What `DynamicCache` would hold for this layer now."""
        return self.history.rows * self.length * self.history.form.entry_bytes if self._filled else 0

    @property
    def replica_bytes(self) -> int:
        """What of the disk holds copies, in fewer bits, of what lies there as it is."""
        return 0

    # --- taking in ---------------------------------------------------------------------------------------------

    @classmethod
    def plan_history(cls, kind: LayerKind, config: OffloadConfig, context: int) -> LayerPlan:
        """What `make_history` makes takes, and its store, and the buffers that it is streamed through in a prefill."""
        return plan_history(kind, config, context)

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        """An empty history; a method whose order is its own overrides this and `restore_history`."""
        return PositionHistory(self.shared.storage, form, rows, device, self.config, self.name)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        """The history that `tree` was captured of, over the frozen `parts`."""
        return PositionHistory.restore(self.shared.storage, tree, parts, device, self.config, self.name)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.rows = Rows(key_states.shape[1] if self.heads_apart else 1)
        keys, values = self.rows.fold(key_states), self.rows.fold(value_states)
        form = RecordFormat.of(keys, values, self.config.group_size)
        self._hold(self.make_history(form, keys.shape[0], keys.device))

    def _hold(self, history: History) -> None:
        self.history, self._filled = history, True
        self.dtype, self.device = history.form.dtype, history.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys (B, Hk, t, Dk) and values (B, Hv, t, Dv); return what the model's attention should be given.

        Returned are views of the arguments ("tagged", or an empty history), else new tensors with the whole history.
        The arguments are copied: the caller may reuse them after attention. Keys and values of two types, as
        `torch.autocast` makes them, are kept in the type that attention casts both to. Raises `SeamLostError`,
        `PromptError` and `StoreFullError` before anything is taken in; what `StoreError`s have left of it is taken
        back, or, without a forward around it, the cache is not to be used until `reset`.
        """
        shared, storage = self.shared, self.shared.storage
        if shared.step is None or storage.torn or storage.prefetcher.interrupted_by is not None:
            shared.check_open()
        if shared.unseen is not None:
            shared.check_seam()
        if not self._filled:
            self.lazy_initialization(key_states.detach(), value_states.detach())
        if key_states.shape[0] * self.rows.heads != self.history.rows:
            raise PromptError(
                f"layer {self.layer_idx} holds {self.batch} sequences and was given {key_states.shape[0]}: "
                "use a new cache, or reset(), for a batch of another size"
            )
        if self.state == "tagged":
            shared.check_front(self.layer_idx, self.history.length)
        held = self.history.length
        try:
            with without_autocast(key_states.device):
                return self._take_in(key_states, value_states)
        except BaseException as error:
            shared.step_failed(error, taken=self.history.length != held)
            raise

    def _take_in(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        history, guessed = self.history, self.guessed
        keys, values = self._kept(key_states, value_states)
        if guessed:
            keys, values = keys[:, :, :-guessed], values[:, :, :-guessed]
        length = history.length
        whole = length == 0 or self.state != "tagged"
        if not length:  # as DynamicCache returns them: the layout decides the last bits of some kernels
            key_states, value_states = key_states.contiguous(), value_states.contiguous()
        elif whole:
            old_keys, old_values = self.whole()
            key_states = torch.cat([no_backward(old_keys, key_states), key_states], 2)
            value_states = torch.cat([no_backward(old_values, value_states), value_states], 2)
        if (freed := history.sweep()) is not None:
            self.dropped(freed)
        timeline = self.shared.storage.timeline
        if timeline.on:
            with timeline.span("append", self.layer_idx):
                sealed = history.append(keys, values)
        else:
            sealed = history.append(keys, values)
        if sealed.keys:
            self.shared.books_changed = True
        if self.state == "full":
            return key_states, value_states
        self._sealed = sealed if sealed.keys else None
        tag = Tag(self, whole)
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        key_states.__dict__[TAG] = value_states.__dict__[TAG] = tag
        if not whole:
            self.shared.unseen = self.layer_idx
        return key_states, value_states

    @property
    def guessed(self) -> int:
        """See `Step.guessed`."""
        step = self.shared.step
        return 0 if step is None else step.guessed

    # --- attention ---------------------------------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> Output:
        """What the model's attention would return over the layer's whole history (a sparse method: over its choice).

        Called with what `update` returned in this step, once or (KV sharing) several times. An error loses the step
        and nothing else.
        """
        self.shared.unseen = None
        try:
            with without_autocast(call.query.device):
                return self._attend(call)
        except BaseException as error:
            self.shared.step_failed(error, taken=True)
            raise

    def _attend(self, call: AttentionCall) -> Output:
        tag, kwargs = call.tag, call.kwargs
        assert tag is not None
        replaceable = call.replaceable(self.history.length + self.guessed)
        self.state = "tagged" if replaceable and self.state != "full" else "full"
        sealed, self._sealed = self._sealed, None
        step = self.shared.step or Step.alone(self.batch, self.length - call.key.shape[2], call.key.shape[2])
        if sealed is not None and replaceable:
            with self.shared.storage.timeline.span("summarise", self.layer_idx):
                self.learn(sealed, call, step)
        if not replaceable or call.wants_weights or kwargs.get("dropout"):  # the latter two: in this step alone
            keys, values = call.key, call.value
            if not tag.whole:
                keys, values = self.joined(call)
            return call.run(keys, values, call.mask)
        if self.shared.attend_prompt is not None and call.num_queries > 1:
            return self.shared.attend_prompt(self, call)
        return self.exact(call) if tag.whole or not step.selects else self.decode(call, step)

    def decode(self, call: AttentionCall, step: Step) -> Output:
        """Attention in a step that selects; here over everything."""
        return self.exact(call)

    def exact(self, call: AttentionCall) -> Output:
        """Attention over everything held: handed whole to the model's own where it fits a block, else streamed.

        The step's own keys need not be as many as its queries: a layer that shares another's may ask for its last token
        alone.
        """
        dtype, before = self.history.form.dtype, self.before(call)
        if call.tag is not None and call.tag.whole:
            return call.run(call.key, call.value, call.mask)
        if before + call.key.shape[2] <= self.config.block_tokens:
            return call.run(*self.joined(call), call.mask)
        step, mask, seen, added = self.shared.step, call.mask, None, call.key.shape[2]
        if step is not None and mask is not None and call.num_queries == mask.shape[2] == added:
            mask, seen = step.streamed(mask)
        asked = call.query.dtype
        if asked != dtype:
            call = dataclasses.replace(call, query=call.query.to(dtype))
        own = call.key.to(dtype), call.value.to(dtype)
        output, weights = call.stream(self._blocks(before), own, mask, seen)
        return output.to(asked), weights

    def before(self, call: AttentionCall) -> int:
        """Tokens held before those that the call brings."""
        return self.length + self.guessed - call.key.shape[2]

    def joined(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything held, and what the call brings: of one query as it is kept, of several as it came."""
        if call.num_queries == 1 and not self.guessed:
            keys, values = (no_backward(tensor, call.query) for tensor in self.whole())
            return keys, values
        if not self.before(call):
            return call.key, call.value
        held = zip(self.whole(self.before(call)), (call.key, call.value), strict=True)
        keys, values = (torch.cat([no_backward(old, call.query), new], 2) for old, new in held)
        return keys, values

    def _blocks(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Keys and values (B, Hkv, t, D) of what is held before token `stop`, and positions, (B, Hkv, t) or (B, t)."""
        for block in self.history.blocks(stop):
            places = None if block.positions is None else torch.from_numpy(block.positions).to(self.history.device)
            if places is not None and self.heads_apart:
                places = places.unflatten(0, (-1, self.rows.heads))
            yield self.rows.unfold(block.keys), self.rows.unfold(block.values), places

    # --- what a method adds ------------------------------------------------------------------------------------

    def learn(self, sealed: Sealed, call: AttentionCall, step: Step) -> None:
        """Units were sealed by the `update` before this call."""

    # --- contexts ----------------------------------------------------------------------------------------------

    def freeze(self) -> Sequence[FreezableStore]:
        """See `History.freeze`; nothing for a layer that holds nothing. What no row names any more is given up."""
        if not self._filled:
            return ()
        if (freed := self.history.sweep(always=True)) is not None and len(freed):
            self.dropped(freed)
        return self.history.freeze()

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """See `History.live`; `parts` are what `freeze` gave."""
        return self.history.live(parts) if self._filled else []

    def capture(self) -> dict[str, Any]:
        """All that is held beside the records, as a tree of values and tensors for `restore`; valid until the next
        change, and not to be changed."""
        state = "unknown" if self.config.exact == "bitwise" else self.state
        tree = {"state": state, "history": self.history.capture() if self._filled else None}
        return {**tree, "heads": self.rows.heads} if self.heads_apart else tree

    @classmethod
    def upgraded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """`tree` as `capture` gives it now, of what an earlier version captured."""
        return tree

    def restore(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> None:
        """Hold what `tree` was captured of, over its frozen stores. Reads nothing back, computes nothing.

        Raises `ContextError`, `BudgetError`; `parts` belong to this layer only once it has returned.
        """
        if tree["state"] not in _STATES or (tree["history"] is None and parts):
            what = f"its state is {tree['state']!r}, of {_STATES}, and it has {len(parts)} files of records"
            raise not_whole(self.name, what)
        if tree["history"] is not None:
            heads = tree["heads"] if self.heads_apart else 1
            rows = tree["history"]["tail"].shape[0]
            if type(heads) is not int or heads < 1 or rows % heads:
                raise not_whole(self.name, f"it has {rows} rows, for {heads!r} heads each")
            self._hold(self.restore_history(tree["history"], parts, device))
            self.rows = Rows(heads)
        if self.config.exact != "bitwise":
            self.state = tree["state"]
