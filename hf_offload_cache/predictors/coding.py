"""How compact keys are coded: few bits for each of some components, by the error that was measured on the prompt.

Transform coding in the place of truncation: the mean is taken off, what is left is turned into the metric of the
queries, and a component gets 8, 4, 2 or no bits. At equal bytes it keeps more of what scores need than 8 bits for fewer
components do. Beyond the paper, whose compact keys are truncated (KVSwap, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from ..errors import ContextError
from ..history.captured_history import is_tensor

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
    def planned(width: int) -> int:
        """Bytes of a coding at most."""
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
        return {**vars(self), "counts": list(self.counts)}

    @classmethod
    def restore(cls, tree: dict[str, Any]) -> Self:
        """What `tree` was captured of. Raises `ContextError` where it does not hold together."""
        counts = tree["counts"]
        right = isinstance(counts, list) and len(counts) == 3 and all(type(count) is int for count in counts)
        if right:
            rank, width = sum(counts), tree["mean"].numel()
            right = min(counts) >= 0 and 0 < rank <= most_components(width)
            right = right and not counts[1] % 2 and not counts[2] % 4
            wanted = {"mean": (width,), "keys": (width, rank), "key_scale": (rank,), "queries": (width, rank)}
            wanted["query_scale"] = (rank,)
            for name, shape in wanted.items():
                dtype = torch.int8 if name in ("keys", "queries") else torch.float32
                right = right and is_tensor(tree[name], shape, dtype)
        if not right:
            raise ContextError("the coding of the compact keys of a context does not hold together: save it anew")
        values = {field.name: tree[field.name] for field in fields(cls)}
        for name in ("queries", "query_scale"):
            values[name] = values[name].cpu()
        return cls(**{**values, "counts": tuple(counts)})


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
