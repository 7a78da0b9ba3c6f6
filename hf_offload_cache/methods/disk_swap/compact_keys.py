"""Compact keys of one layer, the paper's K_lr (KVSwap, section 3.2), and their scores (section 3.3, equation 1)."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...history.state import Array, State
from ...kernels.on_a_device import has_step, to_device, to_host
from ...kernels.ranking import Asks, encode
from ...memory.account import ADAPTERS, MemoryAccount, Workspace
from ...memory.dry_run import DryRun
from .coding import PART, Coding, most_bytes, most_components, parts
from .token_rows import TokenRows, taken

BLOCK = 4096
"""Tokens scored at a time, so that intermediate results stay in the processor's cache. Twice as many if there are more
than four times as many tokens, because calls then cost more than memory."""
HIDDEN = np.float32(-1e30)
"""The score of padding."""


# Products of low-rank queries and 8-bit components (equation 1), by the processor's fastest instructions

_WIDENED = 1 << 15
"""Components converted to float32 at a time."""
_MOST_COMPONENTS = 1024
"""Components of a token whose 8-bit products sum to at most 2 ** 24. Up to there, float32 holds every integer."""


def rounded(weights: np.ndarray, device: torch.device) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Round low-rank queries (h, r) float32 for `multiplied`: to 8 bits on a CPU, to bfloat16 elsewhere.

    Returns the rounded queries on `device`, the factors (h, 1) that products are multiplied by, and the rounded
    queries (h, r) in units of those factors. Factors and the latter are float32, on the host.
    """
    if device.type != "cpu":
        whole = torch.from_numpy(weights).bfloat16().float().numpy()
        return to_device(whole, device).bfloat16(), np.ones((len(weights), 1), dtype=np.float32), whole
    unit = np.maximum(np.maximum.reduce(np.abs(weights), -1, keepdims=True), 1e-30) / np.float32(127)
    whole = np.rint(weights / unit)
    return torch.from_numpy(whole.astype(np.int8)), unit, whole


def multiplied(queries: torch.Tensor, components: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`rounded` queries (h, r) times components (r, n) int8: (h, n).

    On a CPU the product is exact, in int32 or float32. It lies in the first bytes of `memory` (uint8, at least 4 h n).
    Elsewhere it is bfloat16, and the components are copied to bfloat16 first.
    """
    if components.device.type != "cpu":
        return queries @ components.to(torch.bfloat16)
    (heads, rank), count = queries.shape, components.shape[1]
    out = memory[: 4 * heads * count]
    if rank > _MOST_COMPONENTS or multiplies_bytes():
        return torch._int_mm(queries, components, out=out.view(torch.int32).view(heads, count))
    return _widened(queries, components, out.view(torch.float32).view(heads, count))


def _widened(queries: torch.Tensor, components: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`multiplied` in float32, into `out` (h, n), with 128 KiB of converted components at a time."""
    wide, piece = queries.float(), max(1, _WIDENED // len(components))
    for first in range(0, components.shape[1], piece):
        columns = slice(first, first + piece)
        torch.mm(wide, components[:, columns].float(), out=out[:, columns])
    return out


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this processor multiplies 8-bit matrices faster than it converts them to float32 and multiplies those.

    With only AVX2 the 8-bit product takes 2 to 14 times as long for many tokens. Timed once a process, in a few
    milliseconds, because torch does not say which instructions it uses. Both ways give the same product.
    """
    queries, components = (torch.ones(shape, dtype=torch.int8, device="cpu") for shape in ((9, 24), (24, 2048)))
    out = torch.empty(9, 2048, dtype=torch.int32, device="cpu")

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(4):  # the first run allocates what the others reuse
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        return min(times)

    integers = seconds(lambda: torch._int_mm(queries, components, out=out))
    return integers <= seconds(lambda: _widened(queries, components, out.view(torch.float32)))


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies small bfloat16 matrices faster than it converts them to float32 first.

    The bfloat16 product takes 0.5 to 0.8 of the time with AVX-512, but 4 to 7 times as long with only AVX2.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


# Compact keys

class Asked(NamedTuple):
    """Low-rank queries, ready to be multiplied by compact keys."""

    queries: torch.Tensor
    """(h, components), in 8 bits for integer products."""
    factor: np.ndarray
    """(h, 1) float32, or (1, 1): products times `factor`, plus `constant`, are scores."""
    constant: np.ndarray
    """(h, 1) float32, or (1, 1)."""

    def of(self, heads: slice) -> Asked:
        """The same of some query heads."""
        shape = len(self.queries), 1
        factor, constant = (np.broadcast_to(part, shape)[heads] for part in (self.factor, self.constant))
        return Asked(self.queries[heads], factor, constant)


class Scored(NamedTuple):
    """Some units of a row, scored token by token. Valid until the keys' next product."""

    products: torch.Tensor
    """(h, tokens), of any type, in the order of `CompactKeys._products`; padding has a very small one."""
    asked: Asked
    components: torch.Tensor
    """(leading, tokens), of any type, in the same order, without `CompactKeys.offsets`."""
    shape: tuple[int, int, int]
    """(h, tokens of a unit, units), or (h, units, tokens of a unit) if each unit's tokens lie together."""
    together: bool
    hidden: torch.Tensor | None = None
    """(tokens,) bool, in the order of `products`: padding; None: there is none."""

    def best(self) -> np.ndarray:
        """Largest score (h, units) float32 of each unit."""
        products, axis = self.products.view(self.shape), 2 if self.together else 1
        if not self.together and products.is_cpu and products.dtype != torch.bfloat16:
            largest: np.ndarray = np.maximum.reduce(products.numpy(), 1).astype(np.float32)
        else:
            largest = products.amax(axis).float().numpy(force=True)
        largest *= self.asked.factor
        largest += self.asked.constant
        return largest

    def scores(self, less: np.ndarray | None = None) -> np.ndarray:
        """Scores (h, tokens) float32, new, in the order of `products`; minus `less` (h, 1), if given. Padding has the
        score `HIDDEN`."""
        scores: np.ndarray = self.products.float().numpy(force=True) * self.asked.factor
        scores += self.asked.constant if less is None else self.asked.constant - less
        if self.hidden is not None:
            scores[:, self.hidden.numpy(force=True)] = HIDDEN
        return scores

    def by_unit(self, tokens: np.ndarray) -> np.ndarray:
        """Values (h, tokens) in the order of `products`, as (h, tokens of a unit, units): the same memory."""
        parted = tokens.reshape(self.shape)
        return parted.swapaxes(1, 2) if self.together else parted

    def of_units(self, units: np.ndarray, heads: slice | None = None) -> Scored:
        """The same of some units (n,), and of some query heads (None: all): a copy."""
        if heads is not None:
            shape = (heads.stop - heads.start, *self.shape[1:])
            return self._replace(products=self.products[heads], asked=self.asked.of(heads), shape=shape).of_units(units)
        axis = 1 if self.together else 2

        def some(values: torch.Tensor) -> torch.Tensor:
            return taken(values.reshape(len(values), *self.shape[1:]), units, axis).flatten(1)

        hidden = None if self.hidden is None else some(self.hidden[None])[0]
        return self._replace(products=some(self.products), components=some(self.components), hidden=hidden)


def leading(rank: int) -> int:
    """Number of leading components, of `rank`, from which values are estimated. The others would make estimates hardly
    better, and a step slower."""
    return -(-2 * rank // 3)


def scored_at_once(tokens: int) -> int:
    """Most tokens that are scored at a time, of `tokens` tokens."""
    return min(tokens, BLOCK if tokens <= 4 * BLOCK else 2 * BLOCK)


class CompactKeys(ABC):
    """A small approximation of every key of every row, which gives approximate scores of a query.

    For the thread that runs the model. The account books its memory. Scores are not scaled by softmax's factor.
    """

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows

    # An attrgetter makes no Python frame, unlike a function: steps read this often.
    tokens: int = property(attrgetter("_rows.tokens"))  # type: ignore[assignment]
    """Tokens a row."""

    @property
    def device(self) -> torch.device:
        return self._rows.data.device

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row. Raises `BudgetError`."""
        self._rows.reserve(tokens)

    @abstractmethod
    def append(self, keys: torch.Tensor, part: int = PART) -> None:
        """Add keys (B, Hk, t, D), about `part` tokens of all rows together at a time. Raises `BudgetError`."""

    def appending_bytes(self, width: int, tokens: int, part: int) -> int:
        """Bytes that `append` uses while it runs, for so many tokens of all rows with keys of `width` elements."""
        return 4 * min(tokens, part) * (width + 2 * self.rank)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of every row."""
        self._rows.truncate(tokens)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self._rows.select_rows(rows)

    @abstractmethod
    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """Low-rank query (B, H, ·) float32 on the host, linear in query (B, H, D) (KVSwap, equation 1). `best_of_units`
        takes one row of it."""

    def asking(self, query: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-rank queries (B, H, r) float32 on the keys' device, times `scaling`, of query (B, H, D), and what is
        added to their products with `components` (B, H, 1)."""
        low = self.low_rank_query(query) * np.float32(scaling)
        low, constant = low[..., : self.rank], low[..., self.rank :].sum(2) + low[..., : self.rank] @ self.offsets
        low_rank, added = (to_device(np.ascontiguousarray(each), self.device) for each in (low, constant[..., None]))
        return low_rank, added

    @property
    def has_rough_form(self) -> bool:
        """True if leading components give a rough score in less time."""
        return False

    @abstractmethod
    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        """Prepare low-rank queries `low` (h, ·). `roughly`: only the leading components."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of components r."""

    @property
    def leading(self) -> int:
        """Number of leading components from which values are estimated."""
        return leading(self.rank)

    @property
    def offsets(self) -> np.ndarray:
        """(r,) float32: what stored components stand for, less the components."""
        return np.zeros(self.rank, dtype=np.float32)

    @abstractmethod
    def components(self, rows: slice, tokens: torch.Tensor) -> torch.Tensor:
        """Components (b, r, n), of any type, of `tokens` (n,) of some rows, without `offsets`, on the keys' device. The
        product of both with a row of `low_rank_query`, plus its last component if that has one more, is a score."""

    @abstractmethod
    def _products(
        self, asked: Asked, stored: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Products (h, n), of any type, with the `stored` entries of n tokens of a row, and the components (r, n), of
        any type: valid until the next call. If units lie along the axis, each unit's first token precedes all second
        tokens, and so on. `memory`: bytes to use instead of the workspace."""

    def best_of_units(
        self,
        low: np.ndarray,
        row: int,
        unit_size: int,
        visible: torch.Tensor | None,
        roughly: bool = False,
        units: np.ndarray | None = None,
    ) -> np.ndarray:
        """Largest score (h, n) float32 in each unit of a row, for low-rank queries `low` (h, ·): the ReduceMax within
        groups of KVSwap, section 3.3.

        `units` (n,) limits it to these units; None: all. `visible` (·, tokens) puts padding below every score.
        `roughly`: by the leading components only, if that is faster.
        """
        rows, asked = self._rows, self._asked(low, roughly)
        stored = rows.data[row] if units is None else rows.of_units(row, units, unit_size)
        axis, each = rows.axis - 1, rows.each
        tokens, best = stored.shape[axis] * each, []
        seen = None if visible is None else self._seen(visible, row, units, unit_size)
        block = (scored_at_once(tokens) // unit_size or 1) * unit_size
        for first in range(0, tokens, block):
            count = block if first + block <= tokens else tokens - first
            part = stored if count == tokens else stored.narrow(axis, first // each, count // each)
            shown = None if seen is None else seen[first : first + count]
            best.append(self._scored(asked, part, unit_size, shown).best())
        return best[0] if len(best) == 1 else np.concatenate(best, 1)

    def scored(
        self, low: np.ndarray, row: int, units: np.ndarray | None, unit_size: int, visible: torch.Tensor | None,
        own_memory: bool = False,
    ) -> Scored:  # fmt: skip
        """All tokens of `units` (n,) of a row, or of all units (None), scored by low-rank queries `low` (h, ·).
        `own_memory`: in new memory instead of the workspace."""
        asked, rows, memory = self._asked(low, False), self._rows, None
        stored = rows.data[row] if units is None else rows.of_units(row, units, unit_size)
        if own_memory:
            size = stored.shape[rows.axis - 1] * rows.each * (self.rank + 4 * len(low))
            memory = torch.empty(size, dtype=torch.uint8, device=stored.device)
        seen = None if visible is None else self._seen(visible, row, units, unit_size)
        return self._scored(asked, stored, unit_size, seen, memory)

    def _scored(
        self, asked: Asked, stored: torch.Tensor, unit_size: int, seen: torch.Tensor | None,
        memory: torch.Tensor | None = None,
    ) -> Scored:  # fmt: skip
        """The `stored` entries of complete units, scored. `seen` (n,), in token order, puts padding below all."""
        products, components = self._products(asked, stored, memory)
        hidden = None if seen is None else ~self._in_order(seen)
        if hidden is not None:
            least = -(2**30) if asked.queries.dtype == torch.int8 else torch.finfo(products.dtype).min / 2
            products.masked_fill_(hidden, least)
        heads, each = len(asked.queries), self._rows.each
        shape = (heads, each, -1) if each > 1 else (heads, -1, unit_size)
        return Scored(products, asked, components[: self.leading], shape, each == 1, hidden)

    def _seen(self, visible: torch.Tensor, row: int, units: np.ndarray | None, unit_size: int) -> torch.Tensor:
        """(n,) bool: the tokens of `units` of a row that are not padding, in token order."""
        seen = visible[min(row, len(visible) - 1), : self.tokens]
        if units is None:
            return seen
        return seen.unflatten(0, (-1, unit_size))[torch.from_numpy(units).to(seen.device)].flatten()

    def _in_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """Values (n,) in token order, rearranged to the order of `_products`."""
        return tokens if self._rows.each == 1 else tokens.view(-1, self._rows.each).t().flatten()

    @abstractmethod
    def fitted_state(self) -> dict[str, Any]:
        """As `capture`, without tokens: only the fitted state that makes keys compact."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """A tree of all state for `restore`: no copies, not to be changed. Later changes do not show in it."""

    def close(self) -> None:
        """Free the memory."""
        self._rows.close()


# Compact keys of a few bits a component, unpacked block by block and multiplied as integers

_ALIGNED = {"cuda": 16}
"""Units that a device reads in one load of a byte each: a line of codes has room for a multiple of them, so that each
line begins where such a load may."""
_ENCODED, _OF_A_WIDTH = 3 << 16, 1.5
"""Elements of keys and their components that a processor converts to float32 at a time, and the most tokens for each
element of a key: less memory than the fit of a coding takes."""


def _encoded_at_once(width: int, rank: int, part: int) -> int:
    return max(part, min(_ENCODED // (width + 3 * rank), int(_OF_A_WIDTH * width)))


def encoding_bytes(width: int, rank: int, tokens: int, part: int) -> int:
    """Bytes in use while `CodedKeys` encodes so many tokens, of all rows together: a piece of the keys in float32, its
    components, and the projection in float32."""
    return 4 * (min(tokens, _encoded_at_once(width, rank, part)) * (width + 3 * rank) + width * rank)


class CodedKeys(CompactKeys):
    """`CompactKeys` by a `Coding`, beyond the paper: (B, bytes * tokens of a unit, units) uint8 on the keys' device.

    In this layout, a few operations on complete rows unpack each class of bits and find each unit's best token.

    Args:
        unit_size: tokens of a unit; 1: any units, because tokens then lie along the axis.
        workspace: for unpacked codes and their scores; shared by layers.
    """

    STATE: ClassVar[State] = State("coded keys", codes=Array("rows bytes places", torch.uint8))

    def __init__(
        self,
        coding: Coding,
        num_key_heads: int,
        batch: int,
        account: MemoryAccount,
        workspace: Workspace,
        unit_size: int = 1,
    ) -> None:
        shape = batch, coding.nbytes * unit_size, 0
        device = coding.keys.device
        aligned = _ALIGNED.get(device.type, 1)
        super().__init__(TokenRows(shape, 2, torch.uint8, device, account, unit_size, aligned))
        self.coding = coding
        self._key_heads, self._account, self._workspace = num_key_heads, account, workspace
        self._rank, self._offsets = coding.rank, coding.offsets
        self._queries, self._scale = coding.queries.numpy(), coding.query_scale.numpy()
        self._mean = coding.mean.numpy() if self.device.type == "cpu" else None
        self._asks: Asks | None = None
        self._booked = {ADAPTERS: coding.own_bytes}
        if self.device.type == "cuda":
            own = Counter({ADAPTERS: coding.own_bytes + self._offsets.nbytes})
            own[account.of_host(ADAPTERS)] += coding.host_bytes
            self._booked = dict(own)
        for owner, held in self._booked.items():
            account.hold(owner, held)

    @classmethod
    def rehearse(
        cls, run: DryRun, width: int, nbytes: int, tokens: int, rows: int, heads: int, unit_size: int, wanted: int
    ) -> None:
        """Declare the memory for `rows` rows of `tokens` tokens in a dry run, before a coding is fitted.

        `width`: elements of a key; `heads`: query heads; `wanted`: candidate units that are scored with all components.
        """
        nbytes, cpu = min(nbytes, most_bytes(width)), torch.device("cpu")
        made_of = torch.uint8, cpu, run, unit_size, _ALIGNED.get(run.device_type, 1)
        codes = TokenRows((rows, nbytes * unit_size, 0), 2, *made_of)
        codes.rehearse(run, tokens)
        run.keeps(ADAPTERS, Coding.most_own_bytes(width, nbytes, run.device_type))
        if run.device_type == "cuda":
            run.keeps(run.of_host(ADAPTERS), Coding.most_host_bytes(width, nbytes))
        most = max(scored_at_once(tokens), wanted * unit_size)
        scores = most * (most_components(width, nbytes) + 4 * heads) + 4 * heads * -(-tokens // unit_size)
        run.passes("scores", decode=scores)

    def append(self, keys: torch.Tensor, part: int = PART) -> None:
        self.reserve(self.tokens + keys.shape[2])
        rows, heads, tokens, dim = keys.shape
        if has_step(keys.device, dim):
            coding, first, each = self.coding, self.tokens, self._rows.each
            made_of = coding.mean, coding.keys, coding.key_scale, coding.counts
            encode(keys, *made_of, self._rows.memory, each, first)
            self._rows.extend(tokens)
            return
        for piece in parts(keys, _encoded_at_once(heads * dim, self._rank, part)):
            codes = self.coding.encode(piece.transpose(1, 2).flatten(2).flatten(0, 1))
            self._rows.append(codes.unflatten(1, (rows, -1)).transpose(0, 1))

    def appending_bytes(self, width: int, tokens: int, part: int) -> int:
        alone = has_step(self.device, width // self._key_heads)  # a kernel needs no memory
        return 0 if alone else encoding_bytes(width, self._rank, tokens, part)

    def close(self) -> None:
        super().close()
        for owner, held in self._booked.items():
            self._account.release(owner, held)
        self._booked = {}

    # --- scores ------------------------------------------------------------------------------------------------

    def low_rank_query(self, query: torch.Tensor) -> np.ndarray:
        """(B, H, r + 1) float32; the last component is the query's product with the mean."""
        heads = self._key_heads
        batch, _, dim = query.shape
        states = query.float().numpy(force=True).reshape(batch, heads, -1, dim)
        low = np.empty((*states.shape[:3], self._rank + 1), dtype=np.float32)
        np.matmul(states, self._queries.astype(np.float32).reshape(heads, dim, -1), out=low[..., :-1])
        low[..., :-1] *= self._scale
        if self._mean is None:
            self._mean = to_host(self.coding.mean)[0].numpy()
        np.matmul(states, self._mean.reshape(heads, dim, 1), out=low[..., -1:])
        return low.reshape(batch, query.shape[1], -1)

    def asking(self, query: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        if self.device.type == "cpu":
            return super().asking(query, scaling)
        queries, scale, mean, offsets = self.asks  # nothing waits for the device
        by_head = query.unflatten(1, (self._key_heads, -1)).transpose(0, 1)  # (Hk, B, h, D)
        states = by_head.flatten(1, 2).float()
        products = torch.bmm(states, torch.cat([queries.float().mul_(scale), mean[..., None]], 2)).mul_(scaling)
        products = products.view(*by_head.shape[:3], -1).transpose(0, 1).flatten(1, 2)  # (B, H, r + 1)
        low, constant = products.split([self._rank, 1], 2)
        return low, (low @ offsets)[..., None].add_(constant)

    @property
    def codes(self) -> torch.Tensor:
        """(B, bytes * tokens of a unit, units) uint8 on the keys' device: a view, valid until the next change."""
        return self._rows.data

    @property
    def memory(self) -> torch.Tensor:
        """All memory of `codes`, with room for units to come: the same tensor until it is too small."""
        return self._rows.memory

    @property
    def asks(self) -> Asks:
        """What makes scores of queries on the keys' device, kept there."""
        if self._asks is None:
            shape, host = (self._key_heads, -1, self._rank), (self._queries, self._scale, self._offsets)
            with torch.inference_mode(False):
                queries, scale, offsets = (to_device(array, self.device) for array in host)
                self._asks = Asks(queries.view(shape), scale, self.coding.mean.view(shape[:2]), offsets)
        return self._asks

    @property
    def has_rough_form(self) -> bool:
        return self.coding.rough < self._rank

    def _asked(self, low: np.ndarray, roughly: bool) -> Asked:
        count = self.coding.rough if roughly else self._rank
        queries, unit, used = rounded(low[:, :count], self.device)
        return Asked(queries, unit, low[:, -1:] + (used @ self._offsets[:count])[:, None] * unit)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def offsets(self) -> np.ndarray:
        return self._offsets

    def components(self, rows: slice, tokens: torch.Tensor) -> torch.Tensor:
        each, codes = self._rows.each, self._rows.data[rows]
        some = codes.unflatten(1, (-1, each))[:, :, tokens % each, tokens // each]
        return self.coding.unpacked(some.transpose(0, 1)).transpose(0, 1)

    def _products(
        self, asked: Asked, stored: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (heads, rank), each = asked.queries.shape, self._rows.each
        code_rows, places = stored.shape
        count = places * each
        wide, most = 4 * heads * count, max(count, scored_at_once(self._rows.tokens))
        if memory is None:
            memory = self._workspace.take(most * (self._rank + 4 * heads), dtype=torch.uint8, device=stored.device)
        codes, out = stored.view(code_rows // each, each, places), memory[wide : wide + rank * count]
        unpacked = self.coding.unpacked(codes, out.view(rank, each, places)).view(rank, count)
        return multiplied(asked.queries, unpacked, memory), unpacked

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        return {**self.fitted_state(), "codes": self._rows.lend()}

    def fitted_state(self) -> dict[str, Any]:
        return {"coding": self.coding.capture(), "codes": self._rows.data[..., :0].clone()}

    @classmethod
    def restore(
        cls, tree: dict[str, Any], num_key_heads: int, account: MemoryAccount, workspace: Workspace, unit_size: int, /,
        **sizes: int,
    ) -> CodedKeys:  # fmt: skip
        """The keys that `tree` was captured from, with these `sizes`: rows, places, and the keys' width.

        Other holders of `tree` share the codes until one of them changes; each account books them. Raises
        `ContextError` if `tree` is inconsistent, `BudgetError`.
        """
        coding, codes = Coding.restore(tree["coding"], **sizes), tree["codes"]
        cls.STATE.check({"codes": codes}, "a layer", bytes=coding.nbytes * unit_size, **sizes)
        compact = cls(coding, num_key_heads, 0, account, workspace, unit_size)
        compact._rows = TokenRows.shared(codes, 2, account, unit_size, _ALIGNED.get(codes.device.type, 1))
        return compact
