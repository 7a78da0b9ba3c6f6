"""Directions and codes of compact keys, both fitted to the prompt.

Truncated keys follow the paper: a low-rank adapter from an SVD of the keys (KVSwap, section 3.2). Coded keys go beyond
it. They use transform coding: the mean is subtracted, the rest is rotated in the metric of the queries, and each
component gets 8, 4, 2 or no bits by its measured error. At equal bytes, codes score better than fewer components of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ...errors import not_whole, shown
from ...history.state import Array, State
from ...kernels.on_a_device import to_device, to_host

# Directions that keys are projected to: those of most energy, or those that matter most to the queries

_OTHER_QUERIES = 0.3
"""Share of the queries' mean energy that is added in every direction, for truncated keys; see `roots_of`."""
QUERIES_SEEN, APART = 512, 8
"""Latest queries of a call that define the metric in which keys are approximated, and the stride between them."""
LEAST_QUERIES = 32
"""Fewest queries of a call that may define the metric in which keys are approximated."""
PART, _PARTS_OF_A_DEVICE = 128, (1 << 14, 1 << 13, 1 << 12, 1 << 11, 1 << 10)
"""Tokens, of all rows together, that are converted to float32 at a time, and on a device with enough memory."""


def part_sizes(device: torch.device | str) -> tuple[int, ...]:
    """Tokens, of all rows together, that a fit may convert to float32 at a time on `device`: the best first.

    A processor works best on what its caches hold. On a device each part costs the same launches."""
    return (PART,) if torch.device(device).type == "cpu" else (*_PARTS_OF_A_DEVICE, PART)


def parts(keys: torch.Tensor, part: int) -> tuple[torch.Tensor, ...]:
    """Keys (B, Hk, T, D) in pieces of `part` tokens, of all rows together, to convert to float32 at a time."""
    return keys.split(max(1, part // keys.shape[0]), 2)


def _less(keys: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Keys (n, W) less their mean, float32: a difference of two types would convert the keys apart from its result."""
    return keys.to(torch.float32, copy=True).sub_(mean)


def fitting_bytes(width: int, batch: int, rank: int, tokens: int, part: int = PART) -> int:
    """Bytes in use while an adapter of `rank` is fitted to `tokens` tokens a row: a moment, its eigenvectors and
    LAPACK's workspace of twice that size, and a part of the keys in float32 with its masked copy, or the directions;
    or, of a large rank, a moment, adapters and their products. `part`: one of `part_sizes`."""
    solved = 4 * 4 * width * width + 2 * 4 * max(batch, min(part, batch * tokens)) * width
    return max(solved, 4 * (width * width + 4 * rank * width + 2 * rank * rank + 112 * width))


@torch.no_grad()
def principal_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """The paper's adapter A (KVSwap, section 3.2): the `rank` leading right singular vectors of the keys K.

    They are the eigenvectors (W, rank) float32 of the second moment K^T K (W, W), most energy first.
    """
    return _leading(moment.to(torch.float32, copy=True), rank)


def _leading(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """`principal_directions` of a float32, contiguous moment, whose memory LAPACK uses for all eigenvectors."""
    columns, values = moment.mT, moment.new_empty(len(moment))  # LAPACK's order, so without a copy
    torch.linalg.eigh(columns, out=(values, columns))
    return columns[:, -rank:].flip(-1).contiguous()


def query_moment(queries: torch.Tensor, num_key_heads: int, part: int = PART, apart: int = APART) -> torch.Tensor:
    """Second moment (Hk, D, D) float32 of queries (B, H, n, D), by key head: every 8th (`apart`) of the latest 512
    queries, of which `part`, of all rows and heads together, are converted to float32 at a time. What is not finite
    counts as 0."""
    rows, heads, dim = queries.shape[0], queries.shape[1], queries.shape[3]
    seen = queries[:, :, -QUERIES_SEEN:][:, :, ::apart].detach().unflatten(1, (num_key_heads, -1))
    moment = torch.zeros(num_key_heads, dim, dim, dtype=torch.float32, device=queries.device)
    for some in seen.split(max(1, part // (rows * heads)), 3):
        flat = some.transpose(0, 1).flatten(1, 3).nan_to_num(0, 0, 0).float()
        moment.baddbmm_(flat.transpose(1, 2), flat)
    return moment.div_(seen[:, 0].numel() // dim)


@torch.no_grad()
def roots_of(moment: torch.Tensor, others: float = _OTHER_QUERIES) -> torch.Tensor:
    """Metric in which keys are approximated: roots R (Hk, D, D) of the queries' second moment R^T R (Hk, D, D).

    A component is wasted on a direction where no query points, however large the keys are there. The identity times
    `others` times the queries' mean energy is added for queries not seen yet.
    """
    return _roots(moment.clone(), others)


def _roots(moment: torch.Tensor, others: float) -> torch.Tensor:
    """`roots_of` a moment whose memory is used: Cholesky's factors. Symmetric roots give the same directions, but take
    longer, and `eigh` waits for a device."""
    level = moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    moment.diagonal(dim1=1, dim2=2).add_(others * level[:, None])
    return torch.linalg.cholesky_ex(moment, upper=True).L


@torch.no_grad()
def scaled_directions(moment: torch.Tensor, roots: torch.Tensor, rank: int) -> torch.Tensor:
    """`principal_directions` in the metric of `roots` (Hk, D, D): a projection (W, rank) of keys.

    Directions with the most energy of scores come first. With `reconstruction` this is the best approximation of the
    scores of such queries at this rank.
    """
    scaled = moment.clone()
    _scale(scaled, roots)
    return _rooted(_leading(scaled, rank), roots)


def _scale(moment: torch.Tensor, roots: torch.Tensor) -> None:
    """Express a moment (W, W) of keys in the metric of `roots` (Hk, D, D), in place."""
    shape, product = (*roots.shape[:2], len(moment)), torch.empty_like(moment)
    for _ in range(2):
        torch.matmul(roots, moment.view(shape), out=product.view(shape))
        moment.copy_(product.t())


def _rooted(directions: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """The projection (W, r) of keys for directions (W, r) in the metric of `roots` (Hk, D, D)."""
    return (roots.mT @ directions.view(*roots.shape[:2], -1)).flatten(0, 1)


def reconstruction(moment: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    """Projection (W, r) of queries: the R for which k A R^T approximates keys k best, in least squares under `moment`.

    It equals the adapter A (W, r) if that holds the orthonormal directions of most energy, as in KVSwap's equation 1.
    """
    product = moment @ adapter
    gram = adapter.t() @ product
    level = 1e-6 * gram.diagonal().mean().clamp_min(1e-30)
    gram = gram + level * torch.eye(gram.shape[0], device=gram.device, dtype=torch.float32)
    return torch.linalg.solve_ex(gram, product.t()).result.t().contiguous()


@dataclass(frozen=True)
class Directions:
    """Projections for truncated keys, fitted to all keys of a layer."""

    adapter: torch.Tensor
    """(Hk D, r) float32: projection of keys."""
    queries: torch.Tensor
    """(Hk D, r) float32: matching projection of queries."""
    deviation: torch.Tensor
    """(r,) float32: root mean square of each component of a compact key."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        keys: Iterator[torch.Tensor],
        width: int,
        num_key_heads: int,
        visible: torch.Tensor | None,
        rank: int,
        adapter: torch.Tensor | None,
        seen: torch.Tensor | None,
        part: int = PART,
        apart: int = APART,
    ) -> Self:
        """Fit directions to `keys`, parts (B, Hk, t, D) in order, in one pass. `visible` (B or 1, tokens) excludes
        padding. `part`: one of `part_sizes`. `apart`: as in `query_moment`. Raises `LinAlgError` as `fit_coding` does.

        A calibrated `adapter` is used unchanged. Otherwise the best `rank` directions are fitted in the metric of the
        queries `seen` (B, H, q, D); without queries, the directions of most energy.
        """
        moment, position, rows = torch.zeros(0, dtype=torch.float32, device="cpu"), 0, 0
        for piece in (piece for block in keys for piece in parts(block, part)):
            flat, stop = piece.transpose(1, 2).flatten(2).float(), position + piece.shape[2]
            if not position:
                moment = torch.zeros(width, width, device=piece.device, dtype=torch.float32)
            if visible is not None:  # padding may be NaN
                flat = flat.masked_fill(~visible[:, position:stop, None], 0)
            position, rows = stop, piece.shape[0]
            flat = flat.flatten(0, 1)
            moment.addmm_(flat.t(), flat)
        rows = rows * position if visible is None else max(1, int(visible[:, :position].expand(rows, -1).sum()))
        if adapter is not None:
            adapter = adapter.to(moment.device)
        elif seen is None:
            adapter = principal_directions(moment, min(rank, rows))
        else:
            metric = _roots(query_moment(seen, num_key_heads, part, apart), _OTHER_QUERIES)
            scaled = moment.clone()
            _scale(scaled, metric)
            del metric  # as in `fit_coding`
            directions = _leading(scaled, min(rank, rows))
            del scaled
            adapter = _rooted(directions, _roots(query_moment(seen, num_key_heads, part, apart), _OTHER_QUERIES))
        deviation = ((moment @ adapter * adapter).sum(0) / rows).clamp_min(0).sqrt()
        if not bool(deviation.isfinite().all()):
            raise torch.linalg.LinAlgError("a key is not finite")
        return cls(adapter, reconstruction(moment, adapter), deviation)


CLASSES = (8, 4, 2)
"""Bits a component may have, in the order in which components are stored."""
MOST_WIDE = 8
"""Most 8-bit components of a code."""
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
"""Bit shifts of 2-bit components, which are packed four to a byte."""


@dataclass(frozen=True)
class Coding:
    """How one layer's keys are coded. The keys of all heads are joined: W elements. Tensors are on the keys' device,
    except `queries` and `query_scale`."""

    mean: torch.Tensor
    """(W,) float32."""
    keys: torch.Tensor
    """(W, r) int8: times `key_scale`, the projection of a key less the mean. A component's code is the floor of its
    projection."""
    key_scale: torch.Tensor
    """(r,) float32."""
    queries: torch.Tensor
    """(W, r) int8, on the host: times `query_scale`, the projection of a query before its product with codes."""
    query_scale: torch.Tensor
    """(r,) float32, on the host."""
    counts: tuple[int, int, int]
    """Components of 8, 4 and 2 bits."""
    STATE: ClassVar[State] = State(
        "coding",
        mean=Array("width", torch.float32),
        keys=Array("width rank", torch.int8),
        key_scale=Array("rank", torch.float32),
        queries=Array("width rank", torch.int8),
        query_scale=Array("rank", torch.float32),
        counts=Array("classes", torch.int64, low=0),
    )

    @property
    def rank(self) -> int:
        return sum(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of a code."""
        return bytes_of(self.counts)

    @property
    def own_bytes(self) -> int:
        """Bytes of this object's tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    @property
    def host_bytes(self) -> int:
        """Bytes of those that are on the host. Of these, and of `offsets`, there are copies where a device scores."""
        return self.queries.nbytes + self.query_scale.nbytes

    @staticmethod
    def most_own_bytes(width: int, nbytes: int, device_type: str) -> int:
        """Upper bound of `own_bytes` for keys of `width` elements in codes of `nbytes` bytes; on a device, of those
        there and of copies."""
        rank = most_components(width, nbytes)
        return 2 * width * rank + 4 * (width + 2 * rank) + (4 * rank if device_type == "cuda" else 0)

    @staticmethod
    def most_host_bytes(width: int, nbytes: int) -> int:
        """As `most_own_bytes`, of `host_bytes`."""
        return (width + 4) * most_components(width, nbytes)

    @property
    def offsets(self) -> np.ndarray:
        """(r,) float32: the value that each component's stored code stands for, less the code."""
        return np.repeat(np.array([0.5, -7.5, -1.5], dtype=np.float32), self.counts)

    # --- coding ------------------------------------------------------------------------------------------------

    def floors(self, flat: torch.Tensor) -> torch.Tensor:
        """The floors (r, n) float32 of the projections of keys (n, W), new: codes, but for the range of their bits."""
        return (_less(flat, self.mean) @ self.keys.float()).mul_(self.key_scale).floor_().t()

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """The codes (nbytes, n) uint8 of keys (n, W)."""
        wide, four, two = self.floors(flat).split(self.counts)
        packed = [wide.clamp_(-128, 127).remainder_(256)]
        if len(four):  # bytes as sums: fewer operations than shifts of integers
            low, high = four.clamp_(-8, 7).chunk(2)
            packed.append(torch.add(low, high, alpha=16).add_(8 * 17))
        if len(two):
            first, second, third, last = two.clamp_(-2, 1).chunk(4)
            packed.append(torch.add(first, second, alpha=4).add_(third, alpha=16).add_(last, alpha=64).add_(2 * 85))
        return torch.cat(packed).to(torch.uint8)

    @property
    def rough(self) -> int:
        """Number of leading components that give a rough score: those of 8 and 4 bits, or all components if the former
        are less than a third or more than three quarters of them."""
        leading = self.counts[0] + self.counts[1]
        return leading if self.rank <= 3 * leading <= 9 * self.rank // 4 else self.rank

    def unpacked(self, codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Unpack `codes` (nbytes, ...) uint8 to components (r, ...) int8, in `out` (uint8) if given. `offsets` are not
        added. If `out` has only `rough` rows, it gets the leading components."""
        wide, four, two = self.counts
        if out is None:
            out = torch.empty(self.rank, *codes.shape[1:], dtype=torch.uint8, device=codes.device)
        half, quarter = four // 2, two // 4
        into: Any = out
        source: Any = codes
        masked: Any = torch.bitwise_and
        shifted: Any = torch.bitwise_right_shift
        shifts: Any = _SHIFTS
        if codes.device.type == "cpu":  # numpy finishes before torch's threads wake
            into, source, masked, shifted = into.numpy(), source.numpy(), np.bitwise_and, np.right_shift
        else:
            shifts = _shifts_on(codes.device)
        into[:wide] = source[:wide]
        if half:
            pairs = source[wide : wide + half]
            masked(pairs, 15, out=into[wide : wide + half])
            shifted(pairs, 4, out=into[wide + half : wide + four])
        if quarter and len(out) == self.rank:
            part = into[wide + four :]
            shifts = shifts.reshape(4, *[1] * codes.ndim)
            shifted(source[wide + half :], shifts, out=part.reshape(4, quarter, *codes.shape[1:]))
            part &= 3
        return out.view(torch.int8)

    # --- contexts ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """A tree for `restore`, without copies."""
        return {**vars(self), "counts": torch.tensor(self.counts, device="cpu")}

    @classmethod
    def restore(cls, tree: dict[str, Any], **sizes: int) -> Self:
        """The coding that `tree` was captured from, with these `sizes`. Raises `ContextError` if they contradict it."""
        sizes = cls.STATE.check(tree, "a layer", **sizes, classes=len(CLASSES))
        rank, width = sizes["rank"], sizes["width"]
        counts = tuple(tree["counts"].tolist())
        if not 0 < sum(counts) == rank <= most_components(width) or counts[1] % 2 or counts[2] % 4:
            raise not_whole("a layer", f"its coding has {shown(counts)} components, of {rank}")
        on_host = {name: tree[name].cpu() for name in ("queries", "query_scale")}
        return cls(**{**tree, **on_host, "counts": counts})


@functools.cache
def _shifts_on(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, 8, 2, dtype=torch.uint8, device=device)


def default_summary_bytes(width: int) -> int:
    """Default bytes of a code: a sixteenth of a key in 16 bits, from 8 to 128."""
    return min(max(8, min(128, width // 8)), most_bytes(width))


def most_components(width: int, nbytes: int | None = None) -> int:
    """Most components of a code, for keys of `width` elements: a third of them, from 64 to 256, or if they fill
    `nbytes` bytes in the fewest bits."""
    most = min(width, max(64, min(256, width // 3)))
    return most if nbytes is None else min(most, nbytes * 8 // CLASSES[-1])


def most_bytes(width: int) -> int:
    """Most bytes that a code can use: `most_components`, the first `MOST_WIDE` of them in 8 bits, the others in 4."""
    components = most_components(width)
    wide = min(MOST_WIDE, components)
    return wide + (components - wide + 1) // 2


def bytes_of(counts: Iterable[int]) -> int:
    """Bytes of a code with `counts` components of 8, 4 and 2 bits."""
    return sum(bits * count for bits, count in zip(CLASSES, counts, strict=True)) // 8


# How a coding is fitted: the components of a key, the bits of each, and its quantisation step

_SAMPLE = 1536
"""Tokens on which errors are measured and the queries' projection is fitted. With 512, some layers are much worse."""
_PROJECTED, _MEASURED = 16, 40
"""Components of a sample that are computed at a time, and measured at a time, as divisors of a part's tokens."""
_SINKS = 16
"""First tokens, whose keys differ from all others: the mean and the fit exclude them."""
_OTHER_QUERIES_OF_CODES = 1.0
"""`others` of `roots_of`, for coded keys."""
_GAUSSIAN_STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""Bits -> uniform step of least error for a normal distribution of deviation 1."""
_STEPS = (0.8, 1.0, 1.3, 1.7, 2.2, 3.2)
"""Multiples of the normal steps to try, because some layers have components with a kurtosis of 25."""
_TRIED = np.outer([_GAUSSIAN_STEPS[bits] for bits in CLASSES], _STEPS).astype(np.float32)[..., None]
"""The steps to try for a component of deviation 1, (classes, steps, 1)."""
_LIMITS = np.array([[[[[end]]] for end in ends] for ends in ((-128, -8, -2), (127, 7, 1))], dtype=np.float32)
"""The least and the largest code of each class, (2, classes, 1, 1, 1)."""


def coding_bytes(width: int, itemsize: int, rows: int, tokens: int, part: int = PART) -> int:
    """Bytes that `fit_coding` uses while it runs, for `tokens` tokens a row with keys of `width` elements. In turn: two
    moments and a part of the keys; a moment with LAPACK's workspace of twice its size, and the directions; and the
    sample, with the directions and a part of the keys, with these and errors, or with three projections and their
    products. `part`: one of `part_sizes`."""
    sample, square = min(_SAMPLE, rows * tokens), 4 * width * width
    components = most_components(width)
    projected, at_once = (min(components, most) for most in (part // _PROJECTED, _measured_at_once(part)))
    read = max(rows, min(part, rows * tokens)) * width
    directions = 4 * width * components
    kept = square if part > PART else 0  # the queries' metric
    counted, solved = 2 * square + (4 + 2 * itemsize) * read + kept, 3 * square + directions + 64 * width + kept
    tried = len(_STEPS) * (1 if part == PART else len(CLASSES))
    measured = directions + max(3 * itemsize * read, 4 * (projected + (tried + 1) * at_once) * sample)
    regressed = 3 * directions + 4 * min(sample, part // 2) * width + 4 * components * components + 16 * width
    return max(counted, solved, sample * width * itemsize + max(measured, regressed))


@torch.no_grad()
def fit_coding(
    keys: Callable[[], Iterable[torch.Tensor]],
    tokens: int,
    num_key_heads: int,
    visible: torch.Tensor | None,
    nbytes: int,
    seen: torch.Tensor | None,
    part: int = PART,
    apart: int = APART,
) -> Coding:
    """Fit a coding of at most `nbytes` bytes to `keys`, in two passes: the first for the directions, and the second for
    a sample, which would add to the memory that these take. `part`: one of `part_sizes`.

    The steps: subtract the mean, find the directions in the queries' metric, measure each component's error at each
    number of bits, allocate bits (`allocate`), and fit the projection of queries to the codes by regression. Raises
    `LinAlgError` if a visible key is not finite.

    Args:
        keys: makes parts (B, Hk, t, D) in order, `tokens` tokens a row in total.
        visible: (B or 1, tokens), excludes padding.
        seen: queries (B, H, q, D) that define the metric; None: all directions count equally.
        apart: as in `query_moment`.
    """
    def roots() -> torch.Tensor | None:
        asked = num_key_heads, part, apart
        return None if seen is None else _roots(query_moment(seen, *asked), _OTHER_QUERIES_OF_CODES)

    metric = roots()
    total, moment, count = _statistics(_beyond_sinks(keys(), tokens, visible, part))
    mean = total / max(1, count)
    moment.addr_(mean, mean, alpha=-count)
    width = len(mean)
    if metric is not None:
        _scale(moment, metric)
    if part == PART:
        del metric  # it is computed again: held, it would add to the memory that solving takes
    directions = _leading(moment, most_components(width))
    del moment
    if part == PART:
        metric = roots()
    if metric is not None:
        directions = _rooted(directions, metric)
    del metric
    sample = _sample(_beyond_sinks(keys(), tokens, visible, part), tokens)
    measured: list[tuple[torch.Tensor, torch.Tensor]] = []
    for some in directions.split(part // _PROJECTED, 1):
        at_once = _projected(sample, mean, some, part).split(_measured_at_once(part))
        measured += [_measured(each, part > PART) for each in at_once]
        del at_once
    errors, steps = (torch.cat(each, 1) for each in zip(*measured, strict=True))
    (on_host,) = to_host(errors)
    if not bool(on_host.isfinite().all()):  # not every device's `eigh` raises
        raise torch.linalg.LinAlgError("a key is not finite")
    chosen = allocate(dict(zip((0, *CLASSES), on_host.numpy(), strict=True)), nbytes)
    counts = (len(chosen[0]), len(chosen[1]), len(chosen[2]))
    bits, order = to_device(np.stack([np.arange(3).repeat(counts), np.concatenate(chosen)]), mean.device)
    projection, scale = _in_8_bits(directions[:, order] / steps[bits, order])
    del directions, some
    blind = Coding(mean, projection, scale, projection, scale, counts)
    queries, query_scale = to_host(*_in_8_bits(_regression(blind, sample, part)))
    return Coding(mean, projection, scale, queries, query_scale, counts)


def allocate(errors: dict[int, np.ndarray], nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of the components that get 8, 4 and 2 bits: the least total error in at most `nbytes` bytes.

    `errors`: bits (0: the component is dropped) -> mean squared error (r,) of each component. There is an even number
    of 4-bit components and a multiple of four 2-bit components, so that each class fills whole bytes.
    """
    count = len(errors[0])
    by_wide = np.argsort(errors[8] - errors[4], kind="stable")  # largest gain first
    best: tuple[float, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
    for wide in range(min(nbytes, count, MOST_WIDE) + 1):
        first, rest = by_wide[:wide], by_wide[wide:]
        by_four = rest[np.argsort((errors[4] - errors[2])[rest], kind="stable")]
        for four in range(0, min(len(rest), 2 * (nbytes - wide)) + 1, 2):
            second, others = by_four[:four], by_four[four:]
            two = min(4 * (nbytes - wide - four // 2), len(others) // 4 * 4)
            by_two = others[np.argsort((errors[2] - errors[0])[others], kind="stable")]
            third, none = by_two[:two], by_two[two:]
            parts_of = zip((8, 4, 2, 0), (first, second, third, none), strict=True)
            error = float(sum(errors[bits][part].sum() for bits, part in parts_of))
            if best is None or error < best[0]:
                best = error, (first, second, third)
    assert best is not None
    return best[1]


def _beyond_sinks(
    keys: Iterable[torch.Tensor], tokens: int, visible: torch.Tensor | None, part: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Keys (n, W) after the sinks, in their own type, a part at a time, and the number of rows they are of. A consumer
    drops a part before it asks for the next."""
    position = 0
    behind = None if visible is None else visible[:, :tokens] & (visible[:, :tokens].cumsum(1) > _SINKS)
    for piece in (piece for block in keys for piece in parts(block, part)):
        stop, rows = position + piece.shape[2], piece.shape[0]
        joined = piece.transpose(1, 2).flatten(2)
        if behind is None:
            flat = joined[:, max(0, _SINKS - position) :].flatten(0, 1)
        else:
            flat = joined[behind[:, position:stop].expand(rows, -1)]
        position = stop
        yield flat, rows
        del joined, flat


def _statistics(keys: Iterator[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sum (W,) and second moment (W, W), float32, of the keys of `_beyond_sinks`, and their number."""
    total = moment = torch.zeros(0, dtype=torch.float32, device="cpu")
    count = 0
    for flat, _ in keys:
        if not total.numel():
            width = flat.shape[1]
            total = torch.zeros(width, device=flat.device, dtype=torch.float32)
            moment = torch.zeros(width, width, device=flat.device, dtype=torch.float32)
        wide, count = flat.float(), count + len(flat)
        total += wide.sum(0)
        moment.addmm_(wide.t(), wide)
        del flat, wide
    return total, moment, count


def _sample(keys: Iterator[tuple[torch.Tensor, int]], tokens: int) -> torch.Tensor:
    """At most `_SAMPLE` keys (n, W) of `_beyond_sinks`, evenly spread, of `tokens` tokens a row. If none, one of 0."""
    sample = torch.empty(0, dtype=torch.float32, device="cpu")
    count = sampled = 0
    for flat, rows in keys:
        if not sample.numel():
            sample = flat.new_zeros(min(_SAMPLE, rows * tokens), flat.shape[1])
        all_of = max(rows * tokens, _SAMPLE)
        first, stop = ((at - 1) * _SAMPLE // all_of + 1 for at in (count, count + len(flat)))
        places = to_device((np.arange(first, stop) * all_of + _SAMPLE - 1) // _SAMPLE - count, flat.device)
        torch.index_select(flat, 0, places, out=sample[sampled : sampled + stop - first])
        sampled, count = sampled + stop - first, count + len(flat)
        del flat
    return sample[: max(1, sampled)]


def _projected(sample: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor, part: int) -> torch.Tensor:
    """Components (r, n) float32 of a sample (n, W) along directions (W, r)."""
    return torch.cat([(_less(some, mean) @ directions).t() for some in sample.split(part)], 1)


def _measured_at_once(part: int) -> int:
    """Components that are measured at a time, in as much memory as reading takes if parts are long."""
    return max(min(part, 1024) // _MEASURED, part // (2 * _MEASURED))


def _measured(values: torch.Tensor, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared errors (4, r) of components (r, n): dropped, and the least in each of `CLASSES`; and the steps
    (3, r) that reach these. `together`: of all classes at once, in three times the memory."""
    deviation = values.std(1, correction=0).clamp_min(1e-12)
    errors, steps, each = [values.square().mean(1)[None]], [], len(CLASSES) if together else 1
    limits, multiples = (to_device(table, values.device) for table in (_LIMITS, _TRIED))
    for first in range(0, len(CLASSES), each):
        least, most = limits if together else (-(2 ** (CLASSES[first] - 1)), 2 ** (CLASSES[first] - 1) - 1)
        tried = (multiples[first : first + each] * deviation)[..., None]
        coded = (values / tried).floor_().clamp_(least, most).add_(0.5).mul_(tried)
        error, at = coded.sub_(values).square_().mean(3).min(1)
        del coded
        errors.append(error)
        steps.append(tried[..., 0].gather(1, at[:, None])[:, 0])
    return torch.cat(errors), torch.cat(steps)


def _regression(coding: Coding, sample: torch.Tensor, part: int) -> torch.Tensor:
    """Projection (W, r) whose transpose maps a sample's (n, W) codes to the sample less the mean, in least squares."""
    device = sample.device
    gram = torch.zeros(coding.rank, coding.rank, device=device, dtype=torch.float32)
    product = torch.zeros(coding.rank, sample.shape[1], device=device, dtype=torch.float32)
    least, most = to_device(np.repeat(_LIMITS[..., 0, 0], coding.counts, 1), device)
    for some in sample.split(part // 2):  # next to three projections
        values = coding.floors(some).contiguous().clamp_(least, most).add_(0.5).t()
        gram.addmm_(values.t(), values)
        product.addmm_(values.t(), _less(some, coding.mean))
        del values
    level = 1e-4 * gram.diagonal().mean().clamp_min(1e-30)
    gram.diagonal().add_(level)
    return torch.linalg.solve_ex(gram, product).result.t()


def _in_8_bits(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matrix` (W, r) rounded to int8, and the scales (r,) float32 of its columns."""
    scale = torch.linalg.vector_norm(matrix, torch.inf, 0).clamp_min_(1e-30) / 127
    return (matrix / scale).round_().to(torch.int8), scale
