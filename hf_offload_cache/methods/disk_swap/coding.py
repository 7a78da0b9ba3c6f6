"""How compact keys are coded: few bits for each of some components, by the error that was measured on the prompt.

Transform coding instead of truncation: the mean is taken off, what is left is turned into the metric of the
queries, and a component gets 8, 4, 2 or no bits. At equal bytes it keeps more of what scores need than 8 bits for fewer
components do. Beyond the paper, whose compact keys are truncated (KVSwap, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ...errors import not_whole, shown
from ...history.state import Array, State

# The directions that keys are kept in: those of most energy, or those that matter most to the queries

_OTHER_QUERIES = 0.3
"""Times the queries' mean energy, in every direction, is added to what was seen of them: for truncated keys."""
QUERIES_SEEN, _APART = 512, 8
"""The latest of a call that tell in what metric keys are best approximated, and how far apart they are taken."""
LEAST_QUERIES = 32
"""Of one call, for them to tell in what metric keys are best approximated."""
PART = 128
"""Tokens, of all rows together, that are taken to float32 at a time."""


def parts(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys (B, Hk, T, D) in pieces of as many tokens as are taken to float32 at a time."""
    return keys.split(max(1, PART // keys.shape[0]), 2)


def fitting_bytes(width: int, batch: int) -> int:
    """What making an adapter takes meanwhile: a moment, its eigenvectors, twice as much for LAPACK; a part in float32,
    and masked."""
    return 4 * 4 * width * width + 2 * 4 * max(batch, PART) * width


def principal_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors (W, rank), float32, of a second moment K^T K (W, W): the right singular vectors
    of K (KVSwap, section 3.2), most energy first."""
    vectors = torch.linalg.eigh(moment.float())[1]
    return vectors[:, -rank:].flip(-1).contiguous()


def query_moment(queries: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """The second moment (Hk, D, D), float32, of queries (B, H, n, D) by key head; of the last 64, taken 8 apart."""
    queries = queries[:, :, -QUERIES_SEEN:][:, :, ::_APART]
    grouped = queries.detach().float().unflatten(1, (num_key_heads, -1)).permute(1, 0, 2, 3, 4).flatten(1, 3)
    return grouped.transpose(1, 2) @ grouped / grouped.shape[1]


def identity_roots(num_key_heads: int, dim: int, device: torch.device) -> torch.Tensor:
    """The metric (Hk, D, D) in which all directions count equally."""
    return torch.eye(dim, device=device, dtype=torch.float32).expand(num_key_heads, dim, dim)


def roots_of(moment: torch.Tensor, others: float = _OTHER_QUERIES) -> torch.Tensor:
    """Square roots (Hk, D, D) of the second moment of queries: the metric that keys are to be approximated in.

    A rank spent where queries never point is lost, however large the keys are there. A part of the identity, `others`
    times the queries' mean energy, is mixed in, for what other queries may ask.
    """
    moment = moment.clone()
    level = moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    moment += others * level[:, None, None] * torch.eye(moment.shape[1], device=moment.device, dtype=torch.float32)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.transpose(1, 2)


def scaled_directions(moment: torch.Tensor, roots: torch.Tensor, rank: int) -> torch.Tensor:
    """As `principal_directions`, in the metric of `roots` (Hk, D, D): a projection (W, rank) of keys, most energy of
    scores first. With `reconstruction`, the best that scores of such queries can be approximated with at this rank."""
    scaled, shape = moment, (roots.shape[0], roots.shape[1], moment.shape[0])
    for _ in range(2):
        scaled = (roots @ scaled.view(shape)).flatten(0, 1).t().contiguous()
    directions = principal_directions(scaled, rank)
    return (roots @ directions.view(*shape[:2], rank)).flatten(0, 1)


def reconstruction(moment: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
    """(W, r): what compact keys k A (adapter A) times its transpose come nearest to the keys, in least squares under
    the second moment. For orthonormal directions of largest energy, those themselves."""
    product = moment @ adapter
    gram = adapter.t() @ product
    level = 1e-6 * gram.diagonal().mean().clamp_min(1e-30)
    gram = gram + level * torch.eye(gram.shape[0], device=gram.device, dtype=torch.float32)
    return torch.linalg.solve(gram, product.t()).t().contiguous()


@dataclass(frozen=True)
class Directions:
    """What compact keys are made with, of all keys of a layer."""

    adapter: torch.Tensor
    """(Hk D, r) float32: the projection of keys."""
    queries: torch.Tensor
    """(Hk D, r) float32: the projection of queries that goes with it."""
    deviation: torch.Tensor
    """(r,): root mean square of each component of a compact key."""

    @classmethod
    def of(
        cls,
        keys: Iterator[torch.Tensor],
        width: int,
        num_key_heads: int,
        visible: torch.Tensor | None,
        rank: int,
        adapter: torch.Tensor | None,
        seen: torch.Tensor | None,
    ) -> Self:
        """Of `keys`, parts (B, Hk, t, D) in order, one pass; `visible` (B or 1, tokens) leaves padding out.

        `adapter`: calibrated, taken as it is; else the best `rank` directions, in the metric of the queries `seen`
        (B, H, q, D), or of most energy where there are none.
        """
        moment, position, rows = torch.zeros(0, dtype=torch.float32, device="cpu"), 0, 0
        for part in (piece for block in keys for piece in parts(block)):
            flat, stop = part.transpose(1, 2).flatten(2).float(), position + part.shape[2]
            if not position:
                moment = torch.zeros(width, width, device=part.device, dtype=torch.float32)
            if visible is not None:
                flat = flat * visible[:, position:stop, None]
            position, rows = stop, part.shape[0]
            flat = flat.flatten(0, 1)
            moment.addmm_(flat.t(), flat)
        rows = rows * position if visible is None else max(1, int(visible[:, :position].expand(rows, -1).sum()))
        if adapter is not None:
            adapter = adapter.to(moment.device)
        elif seen is None:
            adapter = principal_directions(moment, min(rank, rows))
        else:
            adapter = scaled_directions(moment, roots_of(query_moment(seen, num_key_heads)), min(rank, rows))
        deviation = ((moment @ adapter * adapter).sum(0) / rows).clamp_min(0).sqrt()
        return cls(adapter, reconstruction(moment, adapter), deviation)


CLASSES = (8, 4, 2)
"""Bits that a component may have, in the order in which components lie."""
MOST_WIDE = 8
"""Components of 8 bits that a code has at most."""
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
"""By how much packed components of 2 bits, four to a byte, are shifted."""


@dataclass(frozen=True)
class Coding:
    """Of one layer, whose keys of all heads are joined: W elements. On the device of the keys, but for `queries`."""

    mean: torch.Tensor
    """(W,) float32."""
    keys: torch.Tensor
    """(W, r) int8: with `key_scale`, what a key less the mean is multiplied by. A component's code is the whole number
    below."""
    key_scale: torch.Tensor
    """(r,) float32."""
    queries: torch.Tensor
    """(W, r) int8, on the host: with `query_scale`, what a query is multiplied by for its product with codes."""
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
        """Bytes of what is in here."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    @staticmethod
    def most_own_bytes(width: int) -> int:
        """The bound of `own_bytes` for keys of `width` elements."""
        rank = most_components(width)
        return 2 * width * rank + 4 * (width + 2 * rank)

    @property
    def offsets(self) -> np.ndarray:
        """(r,) float32: what a stored code of each component stands for, less the code."""
        return np.repeat(np.array([0.5, -7.5, -1.5], dtype=np.float32), self.counts)

    # --- coding ------------------------------------------------------------------------------------------------

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """The codes (nbytes, n) uint8 of keys (n, W)."""
        codes = ((flat.float() - self.mean) @ self.keys.float() * self.key_scale).floor_().t()
        wide, four, two = codes.split(self.counts)
        four = four.clamp(-8, 7).add_(8).to(torch.uint8)
        two = two.clamp(-2, 1).add_(2).to(torch.uint8)
        low, high = four.chunk(2) if len(four) else (four, four)
        packed = [wide.clamp(-128, 127).to(torch.int8).view(torch.uint8), low | (high << 4)]
        if len(two):
            first, second, third, last = two.chunk(4)
            packed.append(first | (second << 2) | (third << 4) | (last << 6))
        return torch.cat(packed)

    @property
    def rough(self) -> int:
        """How many of the first components tell roughly what a score is: those of 8 and 4 bits, if they are neither
        few nor nearly all."""
        some = self.counts[0] + self.counts[1]
        return some if self.rank <= 3 * some <= 9 * self.rank // 4 else self.rank

    def unpacked(self, codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The components (r, ...) int8, in `out` (uint8) if given, of `codes` (nbytes, ...) uint8; `offsets` are not
        added. An `out` of fewer rows, `rough` ones, gets the first components."""
        wide, four, two = self.counts
        if out is None:
            out = torch.empty(self.rank, *codes.shape[1:], dtype=torch.uint8, device=codes.device)
        half, quarter = four // 2, two // 4
        into: Any = out
        source: Any = codes
        masked: Any = torch.bitwise_and
        shifted: Any = torch.bitwise_right_shift
        shifts: Any = _SHIFTS
        if codes.device.type == "cpu":  # numpy is done before torch's threads are awake
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
        """As a tree for `restore`: no copies."""
        return {**vars(self), "counts": torch.tensor(self.counts, device="cpu")}

    @classmethod
    def restore(cls, tree: dict[str, Any], **sizes: int) -> Self:
        """What `tree` was captured of, with these `sizes`. Raises `ContextError` where it does not hold together."""
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
        return torch.from_numpy(_SHIFTS).to(device)


def default_summary_bytes(width: int) -> int:
    """Bytes of a code when none are given: a sixteenth of a key in 16 bits, from 8 to 128."""
    return min(max(8, min(128, width // 8)), most_bytes(width))


def most_components(width: int) -> int:
    """Components that codes of keys of `width` elements may have: a third, from 64 to 256."""
    return min(width, max(64, min(256, width // 3)))


def most_bytes(width: int) -> int:
    """Bytes of a code beyond which no more are used: all components that there may be, the first `MOST_WIDE` of them
    in 8 bits and the others in 4."""
    components = most_components(width)
    wide = min(MOST_WIDE, components)
    return wide + (components - wide + 1) // 2


def bytes_of(counts: Iterable[int]) -> int:
    """Bytes of a code with so many components of 8, 4 and 2 bits."""
    return sum(bits * count for bits, count in zip(CLASSES, counts, strict=True)) // 8


# How a coding is found: which components keys have, how many bits each gets, and with which steps

_SAMPLE = 1536
"""Tokens that errors are measured on, and queries are fitted to: with 512, single layers come out much worse."""
_MEASURED = 8
"""Components whose errors are measured at a time."""
_SINKS = 16
"""First tokens, whose keys are unlike all others: they are no part of the mean, nor of what is approximated."""
_OTHER_QUERIES_OF_CODES = 1.0
"""See `roots_of`."""
_GAUSSIAN_STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""Uniform steps of least error for a normal distribution of deviation 1."""
_STEPS = (0.8, 1.0, 1.3, 1.7, 2.2, 3.2)
"""Times those: what is tried. Some layers have components of kurtosis 25."""


def coding_bytes(width: int, itemsize: int, rows: int, tokens: int) -> int:
    """What `fit_coding` takes meanwhile, of `tokens` tokens a row whose keys are of `width` elements."""
    sample = min(_SAMPLE, rows * tokens)
    solved = max(4 * 4 * width * width, 4 * 4 * _MEASURED * sample)
    return solved + sample * width * itemsize + 2 * 4 * max(rows, PART) * width


def fit_coding(
    keys: Iterable[torch.Tensor],
    tokens: int,
    num_key_heads: int,
    visible: torch.Tensor | None,
    nbytes: int,
    seen: torch.Tensor | None,
) -> Coding:
    """Of `keys`, parts (B, Hk, t, D) in order, `tokens` tokens a row in all, one pass: codes of `nbytes` bytes.

    `visible` (B or 1, tokens) leaves padding out. `seen` are queries (B, H, q, D) in whose metric the components are
    chosen; None: all directions count equally.
    """
    total, moment, count, sample = _statistics(keys, tokens, visible)
    mean = total / max(1, count)
    moment -= count * torch.outer(mean, mean)
    width = len(mean)
    roots = identity_roots(num_key_heads, width // num_key_heads, mean.device)
    if seen is not None:
        roots = roots_of(query_moment(seen, num_key_heads), _OTHER_QUERIES_OF_CODES)
    directions = scaled_directions(moment, roots, most_components(width))
    del moment
    measured = [_measured(sample, mean, some) for some in directions.split(_MEASURED, 1)]
    errors = {bits: torch.cat([each[0][bits] for each in measured]).numpy(force=True) for bits in (0, *CLASSES)}
    chosen = allocate(errors, nbytes)
    steps = []
    for bits, part in zip(CLASSES, chosen, strict=True):
        steps.append(torch.cat([each[1][bits] for each in measured])[torch.from_numpy(part).to(mean.device)])
    order = torch.from_numpy(np.concatenate(chosen)).to(mean.device)
    projection, scale = _in_8_bits(directions[:, order] / torch.cat(steps))
    counts = (len(chosen[0]), len(chosen[1]), len(chosen[2]))
    blind = Coding(mean, projection, scale, projection.cpu(), scale.cpu(), counts)
    queries, query_scale = _in_8_bits(_regression(blind, sample))
    return Coding(mean, projection, scale, queries.cpu(), query_scale.cpu(), counts)


def allocate(errors: dict[int, np.ndarray], nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which components get 8, 4 and 2 bits, so that codes have `nbytes` bytes at most and the sum of errors is least.

    `errors`: by bits (0: nothing is kept) the mean squared error of each component, (r,). Components of 4 bits come in
    pairs and those of 2 in fours, so that classes lie apart in whole bytes.
    """
    count = len(errors[0])
    by_wide = np.argsort(errors[8] - errors[4], kind="stable")  # those that gain most come first
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


def _statistics(
    keys: Iterable[torch.Tensor], tokens: int, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The sum (W,) and the second moment (W, W), float32, of keys behind the sinks, how many they are, and a sample
    (n, W) of them in their own type."""
    position, count = 0, 0
    total = moment = torch.zeros(0, dtype=torch.float32, device="cpu")
    sample: list[torch.Tensor] = []
    behind = None if visible is None else visible[:, :tokens] & (visible[:, :tokens].cumsum(1) > _SINKS)
    for part in (piece for block in keys for piece in parts(block)):
        stop, rows = position + part.shape[2], part.shape[0]
        joined = part.transpose(1, 2).flatten(2)
        if not position:
            total = torch.zeros(joined.shape[2], device=part.device, dtype=torch.float32)
            moment = torch.zeros(joined.shape[2], joined.shape[2], device=part.device, dtype=torch.float32)
        if behind is None:
            flat = joined[:, max(0, _SINKS - position) :].flatten(0, 1)
        else:
            flat = joined[behind[:, position:stop].expand(rows, -1)]
        places, all_of = torch.arange(count, count + len(flat), device="cpu"), max(rows * tokens, _SAMPLE)
        evenly = places * _SAMPLE // all_of != (places - 1) * _SAMPLE // all_of
        sample.append(flat[evenly.to(flat.device)])
        wide = flat.float()
        total += wide.sum(0)
        moment.addmm_(wide.t(), wide)
        position, count = stop, count + len(flat)
    return total, moment, count, torch.cat(sample)


def _measured(
    sample: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """By bits: the least mean squared error (r,) of the components of a sample (n, W) along directions (W, r), and with
    which step."""
    values = torch.cat([(part.float() - mean) @ directions for part in sample.split(PART)])
    deviation = values.std(0, correction=0).clamp_min(1e-12)
    errors, steps = {0: values.square().mean(0)}, {}
    for bits in CLASSES:
        limit = 2 ** (bits - 1)
        for times in _STEPS:
            step = deviation * (_GAUSSIAN_STEPS[bits] * times)
            coded = (values / step).floor_().clamp_(-limit, limit - 1).add_(0.5).mul_(step)
            error = coded.sub_(values).square_().mean(0)
            if times == _STEPS[0]:
                errors[bits], steps[bits] = error, step
                continue
            better = error < errors[bits]
            errors[bits] = torch.where(better, error, errors[bits])
            steps[bits] = torch.where(better, step, steps[bits])
    return errors, steps


def _regression(coding: Coding, sample: torch.Tensor) -> torch.Tensor:
    """(W, r): what the codes of a sample (n, W) of keys are multiplied by, its transpose, to come nearest to the sample
    less the mean."""
    device = sample.device
    gram = torch.zeros(coding.rank, coding.rank, device=device, dtype=torch.float32)
    product = torch.zeros(coding.rank, sample.shape[1], device=device, dtype=torch.float32)
    offsets = torch.from_numpy(coding.offsets).to(device)
    for part in sample.split(PART):
        values = coding.unpacked(coding.encode(part)).t().float() + offsets
        gram.addmm_(values.t(), values)
        product.addmm_(values.t(), part.float() - coding.mean)
    level = 1e-4 * gram.diagonal().mean().clamp_min(1e-30)
    gram += level * torch.eye(len(gram), device=device, dtype=torch.float32)
    return torch.linalg.solve(gram, product).t()


def _in_8_bits(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, r) int8 and scales (r,) whose product comes nearest to `matrix` (W, r)."""
    scale = matrix.abs().amax(0).clamp_min(1e-30) / 127
    return (matrix / scale).round_().to(torch.int8), scale
