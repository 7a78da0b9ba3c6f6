"""Slots on a device that hold records of host memory: which records are in which, their reads, and attention to them;
and the records of entries that leave the latest ones.

The tables are tensors of the device, so that a step neither waits for the host nor tells it anything. Slots are filled
as `SlotTable` fills them: first in, first out (KVSwap, section 3.4.3), or those of the least used units first (LeoAM,
section 4.3). Slots that a step attends to stay.

Shapes: R rows (sequences, or their key heads if these choose apart) of U units and M slots each; a step selects at most
S and at most M units of a row, and rows with fewer than others have -1 for the missing ones; a record holds the entries
of G tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .on_a_device import with_kernel
from .ranking import PROGRAMS

LATER, MOST_WEIGHT = 1.25, 2.0**66
"""Weight of a use over that of a use one step before, so that a use keeps .8 of its weight. At 8K tokens of text, with
slots for an eighth to one selection, .8 and .9 have a fifth to a quarter more hits than first in, first out; .97 has as
many up to half a selection, then fewer. Beyond the second, all weights are divided by the latest."""
EVERY_STEP = LATER / (LATER - 1)
"""Uses of a unit that is used in each step, in weights of the latest."""


def slots_bytes(form: Any, batch: int, heads: int, rows: int, selected: int, count: int, recent: int) -> int:
    """Upper bound on the device memory of a step's exchange and attention, for `count` slots a row of which so many are
    `selected`, and so many `recent` entries."""
    key_heads = rows * form.num_key_heads
    queries = max(16, 1 << (batch * heads // key_heads - 1).bit_length())
    parts = max(1, min(PROGRAMS // key_heads, selected * form.group_size // 64)) + recent // 16 + 1
    sums = key_heads * parts * queries
    return 4 * (sums + batch * heads) * (form.value_dim + 2) + 8 * rows * (count + 2 * selected + 1)


def at_addresses(begins: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy of the `nbytes` bytes of host memory at each address of `begins` (n,) int64: (n, `nbytes`) uint8."""
    if not len(begins):
        return begins.new_empty(0, nbytes, dtype=torch.uint8)
    first, last = int(begins.min()), int(begins.max())
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(first))
    each = np.lib.stride_tricks.as_strided(memory, (last - first + 1, nbytes), (1, 1))  # only what is asked for is read
    return torch.from_numpy(each[(begins - first).numpy()])


@with_kernel()
def exchange(
    units: torch.Tensor, slot_of: torch.Tensor, unit_in: torch.Tensor, order: torch.Tensor | None,
    uses: torch.Tensor | None = None, weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Give a slot to each of a step's `units` (R, S) int32: distinct and ascending, or -1. Changes the tables. The
    step's units that are in slots keep these.

    Args:
        slot_of: (R, U) int32, the slot of each unit, or -1.
        unit_in: (R, M) int32, the unit in each slot, or -1.
        order: (R, M) int32, the slots in the order in which they will be filled again. A slot that is filled becomes
            the last. None: empty slots are filled, and then those of the least used units, of equal ones the first.
        uses, weight: without `order`, (R, U) float32, how often each unit was used, in a slot or not, and (R,) float64,
            the weight of a use now. It grows in a step that reads a unit, so earlier uses count less: see `MostUsed`
            in `fetch`. That leaves little used units without a slot, and fills slots in another order.

    Returns the units' slots (R, S) int32, -1 for those of -1; `absent` (R, S) int32, each unit that was in no slot and
    has to be read into its new one, -1 for the others; and `counts` (2, R) int64, how many these are, and how many
    units were in slots. All are new.
    """
    (rows, count), held, last = units.shape, unit_in.shape[1], slot_of.shape[1]
    asked = units >= 0
    slots = torch.where(asked, slot_of.gather(1, units.clamp(min=0).long()), -1)
    new = asked & (slots < 0)
    absent, counts = torch.where(new, units, -1), torch.stack([new.sum(1), (slots >= 0).sum(1)])
    used = torch.zeros(rows, held + 1, dtype=torch.bool, device=units.device)
    used.scatter_(1, torch.where(slots < 0, held, slots).long(), True)
    if order is None:
        assert uses is not None and weight is not None
        _count_uses(units, new, uses, weight)
        worth = torch.where(unit_in < 0, -1, uses.gather(1, unit_in.clamp(min=0).long()))
        worth.masked_fill_(used[:, :-1], torch.inf)
        filled = worth.sort(dim=1, stable=True).indices.sort(dim=1).indices < counts[0][:, None]
        queue, rank = torch.arange(held, dtype=torch.int32, device=units.device).expand(rows, -1), filled.cumsum(1)
    else:
        queue = order
        free = ~used.gather(1, order.long())
        rank = free.cumsum(1)
        filled = free & (rank <= counts[0][:, None])
    given = torch.zeros(rows, count + 1, dtype=torch.int32, device=units.device)
    given.scatter_(1, torch.where(filled, rank - 1, count), queue)
    slots = torch.where(new, given.gather(1, (new.cumsum(1) - 1).clamp_(min=0)), slots)
    old = unit_in.gather(1, queue.long())
    places, inside = torch.nn.functional.pad(slot_of, (0, 1)), torch.nn.functional.pad(unit_in, (0, 1))
    places.scatter_(1, torch.where(filled & (old >= 0), old, last).long(), -1)  # the last is nobody's
    places.scatter_(1, torch.where(asked, units, last).long(), slots)
    inside.scatter_(1, torch.where(asked, slots, held).long(), units)
    slot_of.copy_(places[:, :-1])
    unit_in.copy_(inside[:, :-1])
    if order is not None:
        order.copy_(order.gather(1, filled.int().sort(dim=1, stable=True).indices))
    return slots, absent, counts


def _count_uses(units: torch.Tensor, new: torch.Tensor, uses: torch.Tensor, weight: torch.Tensor) -> None:
    """Count a use of each of `units`, of those that are not `new` up to `EVERY_STEP`: see `exchange`."""
    count = uses.gather(1, units.clamp(min=0).long()) + weight.float()[:, None]
    count = torch.where(new, count, torch.minimum(count, (weight * EVERY_STEP).float()[:, None]))
    counted = torch.nn.functional.pad(uses, (0, 1))  # the last is nobody's
    counted.scatter_(1, torch.where(units < 0, uses.shape[1], units).long(), count)
    now = torch.where(new.any(1), weight * LATER, weight)
    beyond = now > MOST_WEIGHT
    uses.copy_(torch.where(beyond[:, None], counted / now.float()[:, None], counted)[:, :-1])
    weight.copy_(torch.where(beyond, 1.0, now))


@with_kernel()
def seal(tail: torch.Tensor, length: int, records: torch.Tensor, form: Any) -> torch.Tensor:
    """Take the oldest entries out of a rolling tail and write them to records (KVSwap, section 3.4.1). The later ones
    move to the tail's begin.

    Args:
        tail: (R, T, entry width), contiguous, of which the first `length` entries of a row are defined; changed.
        records: (R n, record bytes) uint8, contiguous: n records of each row, one row after the other. They are filled
            as `RecordFormat.fill` does, with the first n G entries of their row, which has so many.
        form: the records' `RecordFormat`. In 8 bits, entries have at most 32.

    Returns the entries that left, (R, n G, entry width), new.
    """
    count = len(records) // len(tail) * form.group_size
    left = tail[:, :count].clone()
    form.fill(left.view(-1, form.group_size, form.entry_width), records)
    tail[:, : length - count] = tail[:, count:length].clone()
    return left


@with_kernel()
def bring(addresses: torch.Tensor, absent: torch.Tensor, slots: torch.Tensor, data: torch.Tensor) -> None:
    """Read records from host memory into slots: unit `absent[r, i]` of each row, if it is not -1, into its slot
    `slots[r, i]`.

    Args:
        addresses: (R, U) int64, the begin of each unit's record in pinned host memory, which must stay until this has
            run, a multiple of 16.
        absent, slots: (R, S) int32, of `exchange`; what is -1 is not read.
        data: (R, M, E), contiguous, of any type: the payloads in the slots.
    """
    rows, places = (absent >= 0).nonzero().unbind(1)
    begins = addresses[rows, absent[rows, places].long()]
    records = at_addresses(begins, data[0, 0].nbytes)
    data.view(torch.uint8)[rows, slots[rows, places].long()] = records


@with_kernel()
def units_at(places: torch.Tensor, stored: int, group: int, count: int) -> torch.Tensor:
    """The units of the tokens at `places`, (R, `count`) int32: distinct and ascending, followed by -1.

    Args:
        places: (R, K) integers, contiguous in the last dimension: positions, each at most once; -1 for none.
        stored: number of tokens that are in units of `group` tokens, the first ones. The others are in none.
        count: at least the number of different units, and at most K.
    """
    last = stored // group
    units = torch.where((places >= 0) & (places < stored), places // group, last).int().sort(1).values
    again = torch.nn.functional.pad(units[:, 1:] == units[:, :-1], (1, 0))
    units = units.masked_fill(again, last).sort(1).values[:, :count]
    return units.masked_fill(units == last, -1)


@with_kernel()
def tokens_at(
    places: torch.Tensor, slot_of: torch.Tensor, data: torch.Tensor, recent: torch.Tensor, stored: int, group: int,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The entries (R, K, width) of the tokens at `places`, zeros for none, and their mask (R, K), which hides those.

    Args:
        places, stored, group: as of `units_at`.
        slot_of: (R, U) int32, of `exchange`: each token's unit is in a slot.
        data: (R, M, group * width), contiguous: the entries in the slots.
        recent: (R, t, width), contiguous in the last dimension: the entries of the tokens from `stored` on, at least 1.
        mask: (R or 1, T), contiguous in the last dimension: bool, or added to scores. None: all are visible, in bool.
    """
    there, width = places >= 0, recent.shape[2]
    slots = slot_of.gather(1, (places // group).clamp(0, stored // group - 1).long())
    inside = (slots * group + places % group).long().clamp(min=0)
    entries = data.unflatten(2, (group, width)).flatten(1, 2).gather(1, inside[..., None].expand(-1, -1, width))
    late = (places - stored).clamp(min=0).long()
    entries = torch.where((places < stored)[..., None], entries, recent.gather(1, late[..., None].expand_as(entries)))
    entries = entries.masked_fill(~there[..., None], 0)
    if mask is None:
        return entries, there
    seen = mask.expand(len(places), -1).gather(1, places.clamp(min=0).long())
    return entries, seen.masked_fill(~there, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


@with_kernel()
def attend(
    query: torch.Tensor, data: torch.Tensor, slots: torch.Tensor, recent: torch.Tensor, form: Any, scaling: float,
    value: torch.Tensor | None, weight: torch.Tensor | None, keep: torch.Tensor | None = None,
    seen: torch.Tensor | None = None, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query a sequence to the entries in slots, the latest ones, and an estimate of the rest, in one
    softmax in single precision. At least one of these counts in each row.

    Args:
        query: (B, H, D).
        data: (R, M, E) payloads of `form`, a `RecordFormat`: entries, or entries in 8 bits with their scales.
        slots: (R, S) int32: the entries of these slots count; none of -1.
        recent: (R, t, entry width), the latest entries, contiguous in the last dimension.
        scaling: factor of the scores.
        value, weight: (B, H, Dv) and (B, H) float32, of `ranking.rest`: a further entry of each query head, with this
            value and score; None: there is none.
        keep: (R, S, G) bool, contiguous: which entries in the slots count; None: all. The others may be anything.
        count: () int64, on the device: number of the first `recent` entries that exist; None: all.
        seen: (R, t) bool, contiguous in the last dimension: which of the latest entries count; None: all. The others
            are finite.

    Returns the output (B, H, Dv) in the query's type, and the logarithm (B, H) float32 of each softmax's sum. Both are
    new.
    """
    (batch, heads, dim), rows = query.shape, len(slots)
    at = slots.clamp(min=0).long()[..., None].expand(-1, -1, data.shape[2])
    entries = form.unpacked(data.gather(1, at).flatten(0, 1)).reshape(rows, -1, form.entry_width)
    counts = (slots >= 0)[..., None].expand(-1, -1, form.group_size)
    hidden = ~(counts if keep is None else counts & keep).flatten(1)
    if count is not None:
        missing = torch.arange(recent.shape[1], device=recent.device) >= count
        recent = recent.masked_fill(missing[:, None], 0)  # there may be anything
    keys, values = form.split(torch.cat([entries.masked_fill(hidden[..., None], 0), recent], 1))
    grouped = query.float().reshape(rows, keys.shape[1], -1, dim)
    products = (grouped @ keys.float().transpose(2, 3)) * scaling
    products[..., : hidden.shape[1]].masked_fill_(hidden[:, None, None], -torch.inf)
    if count is not None:
        products[..., hidden.shape[1] :].masked_fill_(missing, -torch.inf)
    if seen is not None:
        products[..., hidden.shape[1] :].masked_fill_(~seen[:, None, None], -torch.inf)
    scores = products.view(batch, heads, -1)
    if weight is not None:
        scores = torch.cat([scores, weight[..., None]], 2)
    logarithm = scores.logsumexp(2)
    weights = (scores - logarithm[..., None]).exp_()
    stored = keys.shape[2]
    output = weights[..., :stored].view(rows, keys.shape[1], -1, stored) @ values.float()
    output = output.view(batch, heads, -1)
    if value is not None:
        output = output + weights[..., stored:] * value
    return output.to(query.dtype), logarithm
