"""Where selected groups meet: slots that keep what was read before, staging for what is read now, one view for all.

The mapping table of KVSwap's section 3.4.4: attention gets one tensor, whatever each part of it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..caches.disk_swap_config import DiskSwapConfig
from ..core.offload_layer import OffloadLayer
from ..core.shared import Shared
from ..errors import ContextError
from ..memory.buffers import Workspace, lasting_empty
from .slot_table import ABSENT, SlotTable
from .staging import Staging
from .ticket import Ticket


@dataclass
class _Slots:
    """The reuse buffer of one layer: `capacity` payloads on the layer's device."""

    table: SlotTable
    data: torch.Tensor


@dataclass
class _Ahead:
    """Reads under way for one layer: row i of the staging area gets record `records[i]` (ascending)."""

    layer_idx: int
    groups: np.ndarray
    records: np.ndarray
    ticket: Ticket


class SelectionBuffer:
    """Shared by the layers of a cache; used by the thread that runs the model.

    Memory: a staging area for what a gather misses and, once a look-ahead reads, two more that it uses in turns; the
    gathered view; each for the largest selection of the whole batch; and the slots of each layer. Held in the account
    as "staging", "selection" and "reuse slots"; the predictor's workspace as "scores".
    """

    def __init__(self, shared: Shared, settings: DiskSwapConfig) -> None:
        self.shared = shared
        self.settings = settings
        self.visible: torch.Tensor | None = None
        self._padded = False
        self.generator = torch.Generator().manual_seed(0)
        self.workspace = Workspace(shared.account, "scores")
        self._share: dict[int, float] = {}
        self._given: dict[int, float] = {}
        self._missed: Staging | None = None
        self._areas: list[Staging] = []
        self._ahead: list[_Ahead | None] = [None, None]
        self._turn = 0
        self._view: torch.Tensor | None = None
        self._slots: dict[int, _Slots] = {}
        self._last: dict[int, np.ndarray] = {}

    def spread(self, tokens: dict[int, int], *, given: bool = False) -> None:
        """Give layers (by index) budgets of their own: `num_selected` becomes `tokens`, `reuse_capacity` in proportion.

        A layer that is not named keeps the mean. Valid until the next `spread`, or until all layers are dropped; then
        those that were `given` apply again.
        """
        share = {layer_idx: count / self.settings.num_selected for layer_idx, count in tokens.items()}
        for layer_idx in list(self._slots):
            if share.get(layer_idx) != self._share.get(layer_idx):
                self._drop_slots(layer_idx)  # all before any is made anew: together they would be above the budget
        self._share = share
        if given:
            self._given = share

    def groups_selected(self, layer: OffloadLayer) -> int:
        """M: groups a row and step of `layer`, sinks included."""
        return self._groups(layer, self._share.get(layer.layer_idx, 1.0))

    def _most_groups(self, layer: OffloadLayer) -> int:
        """M of the layer with the largest budget, if its groups were as `layer`'s."""
        return self._groups(layer, max(self._share.values(), default=1.0))

    def _groups(self, layer: OffloadLayer, share: float) -> int:
        group = layer.history.form.group_size
        return -(-round(share * self.settings.num_selected) // group) + self.sink_groups(group)

    def sink_groups(self, group_size: int) -> int:
        """Groups a row that the sinks may lie in. Those of a padded row may begin anywhere in a group."""
        sinks = self.settings.num_sinks
        early = group_size - 1 if self._padded and sinks else 0
        return -(-(sinks + early) // group_size)

    def see(self, visible: torch.Tensor | None) -> None:
        """What of the history the step's tokens see (·, T), None: all. Valid for the rest of the step."""
        self.visible = visible
        self._padded = self._padded or visible is not None

    def begin_step(self) -> None:
        """A new step: nothing is known of its padding, and nobody comes for what an interrupted one was reading."""
        self.visible = None
        self.settle()

    def settle(self) -> None:
        """Wait for the reads ahead; what they decided is void."""
        self._settle(0)
        self._settle(1)

    def capture(self) -> dict[str, Any]:
        """What is known of the rows and was given to the layers, as a tree for `restore`."""
        return {"padded": self._padded, "share": dict(self._share), "given": dict(self._given)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on with what was captured. The configuration decides the layers' budgets; where it says that they are
        measured, those that were captured as measured apply. Raises `ContextError`."""
        shares = [*tree["share"].values(), *tree["given"].values()]
        if not isinstance(tree["padded"], bool) or not all(type(one) is float and 0 <= one < 2**31 for one in shares):
            raise ContextError(f"budgets of the layers in a context must be numbers from 0, got {shares[:8]!r}")
        self._padded = tree["padded"]
        if self.settings.layer_budgets == "measured" and not tree["given"]:
            self._share = dict(tree["share"])

    # --- reading -----------------------------------------------------------------------------------------------

    def prefetch(self, layer: OffloadLayer, groups: np.ndarray) -> None:
        """Start reading the records of groups (B, M) of `layer` that lie in no slot; of its last step's, where there
        is room."""
        self._drop_ahead(layer)
        self._turn = 1 - self._turn
        self._settle(self._turn)
        area = self._areas_ahead(layer)[self._turn]
        area.wait_uploaded()
        missing = self._absent(layer, groups)
        if self.settings.selection == "default" and layer.layer_idx in self._last:
            others = np.setdiff1d(self._absent(layer, self._last[layer.layer_idx]), missing, assume_unique=True)
            missing = np.sort(np.concatenate([missing, others[: area.host.shape[0] - len(missing)]]))
        ticket = self.shared.prefetcher.read(layer.history.store, missing, area.host[: len(missing)])
        self._ahead[self._turn] = _Ahead(layer.layer_idx, groups, missing, ticket)

    def _absent(self, layer: OffloadLayer, groups: np.ndarray) -> np.ndarray:
        """The records of groups (B, M) that lie in no slot, ascending."""
        records = np.unique(layer.history.table.records(groups))
        return records[self._slots_of(layer).table.locate(records) == ABSENT]

    def prefetch_again(self, layer: OffloadLayer) -> None:
        """Start reading what the layer's last step selected and no slot holds: for a layer without a look-ahead."""
        if layer.layer_idx in self._last:
            self.prefetch(layer, self._last[layer.layer_idx])

    def decided(self, layer_idx: int) -> np.ndarray | None:
        """The groups that the look-ahead chose for this layer in this step, if it did."""
        return next((a.groups for a in self._ahead if a is not None and a.layer_idx == layer_idx), None)

    def gather(self, layer: OffloadLayer, groups: np.ndarray) -> torch.Tensor:
        """Entries (B, M G + tail, entry_width) of groups (B, M) and of the tail, each row in order of position.

        Valid until the next `gather`. Waits for what was prefetched, reads what is still missing, and keeps what was
        read in the layer's slots. Raises `StoreError`; then no slot has changed.
        """
        form, slots, counters = layer.history.form, self._slots_of(layer), self.shared.counters
        batch, wanted = groups.shape
        records = layer.history.table.records(groups).reshape(-1)
        lies_in = slots.table.locate(records)
        absent = np.flatnonzero(lies_in == ABSENT)
        missing, which = np.unique(records[absent], return_inverse=True)
        fresh, ready, ticket = self._fetch(layer, missing)
        counters.units_selected += len(records)
        counters.units_resident += len(records) - len(absent)
        counters.units_ready += len(records) - len(absent) + int(ready[which].sum())

        self._last[layer.layer_idx] = groups
        view, tail_units = self._view_for(layer, wanted)
        unit = view.view(-1, form.payload_width)
        target = (np.arange(batch)[:, None] * (wanted + tail_units) + np.arange(wanted)).reshape(-1)
        held = np.flatnonzero(lies_in != ABSENT)
        if len(held):
            _copy_rows(unit, target[held], slots.data, lies_in[held])  # while the reads run
        if ticket is not None:
            fresh.append(self._read(layer, ticket, np.flatnonzero(~ready)))
        if len(absent):
            taken, into = slots.table.insert(missing, lies_in[held])
            for source, places, rows in fresh:  # of `missing`, which lie where in what was read
                where = np.full(len(missing), ABSENT)
                where[places] = rows
                here = where[which] != ABSENT
                _copy_rows(unit, target[absent[here]], source, where[which[here]])
                kept = where[taken] != ABSENT
                _copy_rows(slots.data, into[kept], source, where[taken[kept]])
        entries = view.view(batch, -1, form.entry_width)[:, : wanted * form.group_size + layer.history.tail.length]
        entries[:, wanted * form.group_size :] = layer.history.tail.entries
        return entries

    def _fetch(
        self, layer: OffloadLayer, missing: np.ndarray
    ) -> tuple[list[tuple[torch.Tensor, np.ndarray, np.ndarray]], np.ndarray, Ticket | None]:
        """Where those of the records `missing` (ascending) that were read ahead lie now: payloads (·, payload_width),
        which of the records are in them, and in which rows; which of the records these are; and the read of the
        others, which has begun. Valid until the next `prefetch`."""
        form = layer.history.form
        ready = np.zeros(len(missing), dtype=bool)
        fresh = []
        for turn, ahead in enumerate(self._ahead):
            if ahead is None or ahead.layer_idx != layer.layer_idx:
                continue
            self._settle(turn)
            position = np.searchsorted(ahead.records, missing).clip(max=max(len(ahead.records) - 1, 0))
            if len(ahead.records):
                ready = ahead.records[position] == missing
            area = self._areas[turn]
            area.upload(0, len(ahead.records))
            fresh.append((form.payload(area.device), np.flatnonzero(ready), position[ready]))
        rest = missing[~ready]
        if not len(rest):
            return fresh, ready, None
        area = self._area_missed(layer)
        area.wait_uploaded()
        return fresh, ready, self.shared.prefetcher.read(layer.history.store, rest, area.host[: len(rest)])

    def _read(
        self, layer: OffloadLayer, ticket: Ticket, rest: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """What `ticket` reads, `rest` of what was missing, once it is there; as `_fetch` says."""
        self.shared.wait_for(ticket, layer.layer_idx)
        area = self._area_missed(layer)
        area.upload(0, len(rest))
        return layer.history.form.payload(area.device), rest, np.arange(len(rest))

    def _settle(self, turn: int) -> None:
        """Wait for the reads into an area, which is free then. Interrupted, they are still under way."""
        ahead = self._ahead[turn]
        if ahead is not None:
            try:
                self.shared.wait_for(ahead.ticket, ahead.layer_idx)
            except OSError:
                self._ahead[turn] = None
                raise
            self._ahead[turn] = None

    def _drop_ahead(self, layer: OffloadLayer) -> None:
        for turn, ahead in enumerate(self._ahead):
            if ahead is not None and ahead.layer_idx == layer.layer_idx:
                self._settle(turn)

    # --- memory ------------------------------------------------------------------------------------------------

    def _area_missed(self, layer: OffloadLayer) -> Staging:
        if not self._fits(self._missed, layer):
            if self._missed is not None:
                self._missed.release()
            self._missed = None  # the old memory goes before the new one comes
            self._missed = self._new_area(layer)
        assert self._missed is not None
        return self._missed

    def _areas_ahead(self, layer: OffloadLayer) -> list[Staging]:
        if not self._areas or not self._fits(self._areas[0], layer):
            self.settle()
            for area in self._areas:
                area.release()
            self._areas = []
            self._areas = [self._new_area(layer), self._new_area(layer)]
        return self._areas

    def _fits(self, area: Staging | None, layer: OffloadLayer) -> bool:
        if area is None:
            return False
        least = layer.batch * min(self.groups_selected(layer), layer.history.num_groups)
        rows, size = area.host.shape
        same = size == layer.history.form.record_bytes and area.device.device == layer.history.device
        return same and least <= rows <= 2 * self._room(layer)

    def _room(self, layer: OffloadLayer) -> int:
        return layer.batch * min(self._most_groups(layer), layer.history.num_groups * 9 // 8 + 8)

    def _new_area(self, layer: OffloadLayer) -> Staging:
        size, device = layer.history.form.record_bytes, layer.history.device
        return Staging(self._room(layer), size, device, self.shared.account, "staging")

    def _view_for(self, layer: OffloadLayer, wanted: int) -> tuple[torch.Tensor, int]:
        form = layer.history.form
        tail_units = -(-layer.history.tail.capacity // form.group_size)
        shape = (layer.batch, wanted + tail_units, form.payload_width)
        size = shape[0] * shape[1] * shape[2]
        view, device = self._view, layer.history.device
        same = view is not None and (view.dtype, view.device) == (form.dtype, device)
        room = layer.batch * (max(wanted, self._room(layer) // layer.batch) + tail_units) * form.payload_width
        if view is None or not same or not size <= view.numel() <= 2 * room:
            if view is not None:
                self.shared.account.release("selection", view.nbytes)
            self._view = view = None  # the old memory goes before the new one comes
            self.shared.account.hold("selection", room * form.dtype.itemsize)
            view = self._view = lasting_empty(room, dtype=form.dtype, device=device)
        return view[:size].view(shape), tail_units

    def _slots_of(self, layer: OffloadLayer) -> _Slots:
        group = layer.history.form.group_size
        share = self._share.get(layer.layer_idx, 1.0)
        capacity = -(-round(share * self.settings.reuse_capacity) // group)
        if capacity:
            exist = 1 << max(layer.history.num_groups - 1, 0).bit_length()  # no more than groups, in powers of two
            capacity = layer.batch * min(capacity + -(-self.settings.num_sinks // group), exist)
        slots = self._slots.get(layer.layer_idx)
        if slots is None or slots.table.capacity != capacity:
            self._drop_slots(layer.layer_idx)
            form = layer.history.form
            self.shared.account.hold("reuse slots", capacity * form.payload_width * form.dtype.itemsize)
            data = lasting_empty(capacity, form.payload_width, dtype=form.dtype, device=layer.history.device)
            slots = self._slots[layer.layer_idx] = _Slots(SlotTable(capacity), data)
        return slots

    def _drop_slots(self, layer_idx: int) -> None:
        slots = self._slots.pop(layer_idx, None)
        if slots is not None:
            self.shared.account.release("reuse slots", slots.data.nbytes)

    def rows_changed(self, layer: OffloadLayer) -> None:
        """Rows of `layer` are no longer what they were: what was decided for them is void. Slots stay valid."""
        self._last.pop(layer.layer_idx, None)
        self.visible = None
        self._drop_ahead(layer)

    def table_nbytes(self, layer: OffloadLayer) -> int:
        """Bytes of the layer's slot table."""
        return self._slots[layer.layer_idx].table.nbytes if layer.layer_idx in self._slots else 0

    def forget(self, layer: OffloadLayer, records: np.ndarray) -> None:
        """These records of `layer` are free: nothing read of them is valid."""
        self.rows_changed(layer)
        if layer.layer_idx in self._slots:
            self._slots[layer.layer_idx].table.forget(records)

    def drop(self, layer: OffloadLayer) -> None:
        """The layer holds nothing any more; with the last one, nothing is kept here."""
        self._last.pop(layer.layer_idx, None)
        self._ahead = [ahead if ahead is None or ahead.layer_idx != layer.layer_idx else None for ahead in self._ahead]
        self._drop_slots(layer.layer_idx)
        if not self._slots:
            self._padded = False
            self._share = self._given
            self.generator.manual_seed(0)
            self._release_areas()

    def rest(self) -> None:
        """A step of several queries comes, which selects nothing: give back what only selecting needs, but the slots.

        What an interrupted step was reading is waited for.
        """
        self.settle()
        self._release_areas()

    def _release_areas(self) -> None:
        for area in (*self._areas, *filter(None, [self._missed])):
            area.release()
        self._areas, self._missed = [], None
        self.workspace.release()
        if self._view is not None:
            self.shared.account.release("selection", self._view.nbytes)
            self._view = None


def _copy_rows(out: torch.Tensor, target: np.ndarray, source: torch.Tensor, rows: np.ndarray) -> None:
    """out[target] = source[rows]. On a CPU by numpy: a copy this small is done before torch's threads are awake."""
    if not len(rows):
        return
    if out.device.type == "cpu":
        _bytes(out)[target] = _bytes(source)[rows]
    else:
        into, of = (torch.from_numpy(np.ascontiguousarray(index)).to(out.device) for index in (target, rows))
        out.index_copy_(0, into, source.index_select(0, of))


def _bytes(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.uint8).numpy()
