"""A step of `SpecCache` without the host: attention over a low-bit copy, some entries of which are replaced by stored
ones, and each token's share of it (SpeCache, section 3.3). Then stored entries are exchanged, and read out of records.
And `merge`, for attention to a history in blocks.

Shapes: B sequences, H query heads, K key heads, q queries a sequence, n = H / K q queries a key head, head by head; D
channels of a key and Dv of a value; T tokens of the copy, m stored entries a key head, t latest tokens.

A step that is captured as a CUDA graph has room for more tokens of the copy, and more latest ones, than there are: see
`ranking`.
"""

from __future__ import annotations

from typing import Any

import torch

from .low_bit import unpacked
from .on_a_device import with_kernel
from .slots import at_addresses

PROGRAMS = 528
"""Most programs that share a call's sums over tokens, if the key heads are fewer."""
PART = 64
"""Least tokens of a program's sum."""


def attention_bytes(
    batch: int, heads: int, key_heads: int, queries: int, tokens: int, entries: int, latest: int, value_dim: int
) -> int:
    """Upper bound on the device memory of `attend`, of `share` and of a choice: with `tokens` of a copy, `entries`
    instead of some a key head, and so many `latest` ones."""
    programs = batch * key_heads
    parts = max(1, min(PROGRAMS // programs, tokens // (2 * PART))) + entries // PART + latest // PART + 2
    sums = parts * batch * heads * queries * (value_dim + 2) * 4
    chosen = programs * min(entries, tokens) * 20  # in the order of tokens, and those that are read
    results = batch * heads * queries * (tokens + value_dim + 1) * 4
    return sums + results + programs * tokens * 5 + chosen


@with_kernel()
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: int, tokens: torch.Tensor,
    entry_keys: torch.Tensor, entry_values: torch.Tensor, latest_keys: torch.Tensor, latest_values: torch.Tensor,
    guess_keys: torch.Tensor | None, guess_values: torch.Tensor | None, mask: torch.Tensor | None,
    sink: torch.Tensor | None, scaling: float, softcap: float | None, scored: bool,
    exist: torch.Tensor | None = None, count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Attention of `query` (B, H, q, D) over a copy, stored entries instead of some of it, and the latest tokens, in
    one softmax in single precision (SpeCache, equation 1).

    Args:
        keys: (B, K, T / group, D, row bytes) uint8, the copy's, rows of `low_bit`, of a group of tokens each.
        values: (B, K, parts, T, row bytes) uint8, likewise, of a part of the channels each; at least Dv in all.
        bits: of an element of the copy.
        tokens: (B, K, m) int64, distinct tokens of the copy that are replaced, -1: an empty place.
        entry_keys, entry_values: their keys (B, K, m, D) and values (B, K, m, Dv), contiguous.
        latest_keys, latest_values: (B, K, t, D) and (B, K, t, Dv), contiguous in the last dimension.
        guess_keys, guess_values: the same of tokens that follow; None: there are none.
        mask: (1 or B, 1, q, T + all later tokens), boolean (True: visible) or additive; None: causal, aligned at the
            lower right.
        sink: (H,): a logit of each head that joins the denominator only; None: there is none.
        scaling, softcap: factor of the scores, and then their bound by tanh; None: no bound.
        scored: return the scores, too.
        exist, count: () int64 each, on the device: number of the copy's tokens, and of the latest ones, that exist;
            None: all. Then there is no mask. There may be anything in the others.

    Returns the output (B, q, H, Dv) in the query's type, the scores (B, K, n, T) float32 of the copy's tokens or of the
    entries instead of them, -inf: hidden, anything for those that do not exist; None unless `scored`; and the logarithm
    (B, K, n) float32 of each softmax's sum. A query that sees nothing has an output and a logarithm of 0. All are new.
    """
    (batch, heads, queries, dim), key_heads, copied = query.shape, keys.shape[1], values.shape[3]
    states = query.float().reshape(batch, key_heads, -1, dim) * scaling
    if guess_keys is not None and guess_values is not None:
        latest_keys = torch.cat([latest_keys, guess_keys.to(latest_keys.dtype)], 2)
        latest_values = torch.cat([latest_values, guess_values.to(latest_values.dtype)], 2)
    value_dim, later = latest_values.shape[3], latest_keys.shape[2]
    order = torch.arange(later, device=query.device)  # of the latest tokens and the guesses
    last: int | torch.Tensor = later - 1
    absent: torch.Tensor | None = None
    if count is not None:
        guesses = 0 if guess_keys is None else guess_keys.shape[2]
        room = later - guesses
        absent, last = (order >= count) & (order < room), count + guesses - 1
        order = torch.where(order < room, order, order - room + count)
        latest_keys, latest_values = (part.masked_fill(absent[:, None], 0) for part in (latest_keys, latest_values))
    of_copy = unpacked(keys, bits).transpose(2, 3).flatten(3) if copied else states.new_empty(batch, key_heads, dim, 0)
    low, full = states @ of_copy, states @ entry_keys.float().transpose(2, 3)
    late = states @ latest_keys.float().transpose(2, 3)
    if softcap is not None:
        low, full, late = (torch.tanh(part / softcap) * softcap for part in (low, full, late))
    missing = None if exist is None else torch.arange(copied, device=query.device) >= exist
    if missing is not None:
        low = low.masked_fill(missing, -torch.inf)
    places = tokens.masked_fill(tokens < 0, copied)
    if mask is None:
        turn = torch.arange(queries, device=query.device)
        own = order <= (last - (queries - 1) + turn)[:, None]
        own = own if absent is None else own & ~absent
        late = late.masked_fill(~own.repeat(heads // key_heads, 1), -torch.inf)
    else:
        every = mask.expand(batch, key_heads, -1, -1).repeat(1, 1, heads // key_heads, 1)
        at = places.clamp(max=every.shape[3] - 1)[:, :, None].expand(-1, -1, every.shape[2], -1)
        of_each = every[..., :copied], every.gather(3, at), every[..., copied:]
        if mask.dtype == torch.bool:
            hidden = zip((low, full, late), of_each, strict=True)
            low, full, late = (part.masked_fill(~seen, -torch.inf) for part, seen in hidden)
        else:
            low, full, late = (part + bias.float() for part, bias in zip((low, full, late), of_each, strict=True))
    full = full.masked_fill((tokens < 0)[:, :, None], -torch.inf)
    at = places[:, :, None].expand(-1, -1, low.shape[2], -1)
    low = torch.nn.functional.pad(low, (0, 1)).scatter(3, at, -torch.inf)[..., :copied]
    joined = torch.cat([low, full, late], 3)
    total = joined
    if sink is not None:
        logits = sink.float().view(key_heads, -1).repeat_interleave(queries, 1)
        total = torch.cat([joined, logits[None, :, :, None].expand(batch, -1, -1, -1)], 3)
    logarithm = total.logsumexp(3)
    logarithm = logarithm.masked_fill(logarithm == -torch.inf, 0)
    weights = (joined - logarithm[..., None]).exp_()
    exact = torch.cat([entry_values.float(), latest_values.float()], 2)
    output = weights[..., copied:] @ exact
    if copied:
        stored = unpacked(values, bits).transpose(2, 3).flatten(3)[..., :value_dim]
        stored = stored if missing is None else stored.masked_fill(missing[:, None], 0)
        output = output + weights[..., :copied] @ stored
    output = output.view(batch, heads, queries, value_dim).transpose(1, 2).contiguous().to(query.dtype)
    scores = torch.nn.functional.pad(low, (0, 1)).scatter(3, at, full)[..., :copied].contiguous() if scored else None
    return output, scores, logarithm


@with_kernel()
def share(
    scores: torch.Tensor, logarithm: torch.Tensor, queries: int, first: int, stop: int, held: torch.Tensor | None,
    loyalty: float, sinks: int, begin: torch.Tensor | None, exist: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Importance (B K, T) float32 of the copy's tokens, new: their shares of attention in the queries `first` to `stop`
    of each head, summed. Those of queries before the last one count for the next token, too. A NaN counts as 0.

    Args:
        scores, logarithm: of `attend`, with so many `queries` a sequence.
        held: (B, K, m) int64, distinct tokens whose importance counts `loyalty` times, -1: none; None: there are none.
        sinks: number of first tokens, whose importance is infinite. They follow `begin` (1 or B,) int64, None: 0.
        exist: as for `attend`; the others' importance is -inf.
    """
    batch, key_heads, _, tokens = scores.shape
    shares = (scores - logarithm[..., None]).exp_().unflatten(2, (-1, queries)).sum(2)[:, :, first:stop]
    before, found = shares[:, :, :-1].sum(2), shares[:, :, -1] + shares[:, :, :-1].sum(2)
    found[..., 1:] += before[..., :-1]
    found.masked_fill_(found.isnan(), 0)
    if held is not None:
        times = scores.new_ones(batch, key_heads, tokens + 1)
        times.scatter_(2, held.masked_fill(held < 0, tokens), loyalty)
        found *= times[..., :tokens]
    start = torch.zeros(1, dtype=torch.int64, device=scores.device) if begin is None else begin
    at = (start[:, None] + torch.arange(min(sinks, tokens), device=scores.device)).clamp(max=tokens - 1)
    found.scatter_(2, at[:, None].expand(batch, key_heads, -1), torch.inf)
    if exist is not None:
        found.masked_fill_(torch.arange(tokens, device=scores.device) >= exist, -torch.inf)
    return found.flatten(0, 1)


# Stored entries of single tokens, each key head its own, in n places a key head; a record holds the entries of G tokens

MOST_EXCHANGED = 256
"""Upper bound on the entries per head of `exchange`."""


@with_kernel()
def exchange(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `tokens` (B, K, n) int64, -1: an empty place, those that are `wanted`. Tokens that stay keep their places,
    the others get the first free ones, in their order.

    Args:
        wanted: (B, K, m) of integers, distinct, -1: none; m at most n, and n at most `MOST_EXCHANGED`.

    Returns the new tokens at their places (B, K, n) int64, -1: none, and their number (B, K) int64.
    """
    same = (tokens[..., None] == wanted[:, :, None]) & (wanted >= 0)[:, :, None]
    stays, absent = same.any(3), (wanted >= 0) & ~same.any(2)
    counts = absent.sum(2)
    first = wanted.gather(2, (~absent).byte().sort(dim=2, stable=True).indices).long()
    turn = (~stays).cumsum(2)  # of each free place
    comes = first.gather(2, (turn - 1).clamp(0, wanted.shape[2] - 1)) if wanted.shape[2] else torch.zeros_like(tokens)
    new = torch.where(~stays & (turn <= counts[..., None]), comes, -1)
    tokens.copy_(torch.where(stays, tokens, new))
    return new, counts


@with_kernel()
def bring(
    addresses: torch.Tensor, tokens: torch.Tensor, form: Any, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Read each head's entries of `tokens` (B, K, n) int64 from host memory into keys (B, K, n, D) and values (B, K, n,
    Dv), contiguous, in `form`'s type. Places without a token, -1, stay as they are.

    Args:
        addresses: (B, units) int64, the begin of each record, of `form.group_size` tokens, in pinned host memory, which
            must stay until this has run.
        form: a `RecordFormat`. Each head has both a key and a value.
    """
    item, units = form.dtype.itemsize, tokens // form.group_size
    of_head = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    begin = addresses.gather(1, units.clamp(min=0).flatten(1)).view(tokens.shape)
    begin = begin + tokens % form.group_size * form.entry_width * item
    parts = (keys, begin + of_head * form.key_dim * item), (
        values, begin + (form.key_width + of_head * form.value_dim) * item
    )  # fmt: skip
    places = (tokens >= 0).flatten().nonzero()[:, 0]
    for into, at in parts:
        nbytes = into.shape[3] * item
        into.view(-1, into.shape[3]).view(torch.uint8)[places] = at_addresses(at.flatten()[places], nbytes)


# Attention over parts of a history, merged by log-sum-exp

@with_kernel()
def merge(
    total: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, part_log_sum: torch.Tensor
) -> None:
    """Merge attention over a further part into that over all before it, in place: then it is that of one softmax.

    Args:
        total: (B, H, q, Dv) float32; changed. It and `part` are contiguous in the last dimension.
        log_sum: (B, H, q) float32, the logarithm of each softmax's sum, -inf for a query that sees nothing; changed.
        part: (B, H, q, Dv) of any type, finite.
        part_log_sum: as `log_sum`, of the part.
    """
    share = torch.sigmoid(part_log_sum - log_sum).nan_to_num_(0.0)  # the part's weight; nan: neither sees anything
    total.lerp_(part.float(), share.unsqueeze(-1))
    log_sum.copy_(torch.logaddexp(log_sum, part_log_sum))
