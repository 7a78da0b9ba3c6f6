"""How many tokens a chunk of the adaptive tree should have (LeoAM, section 4.2, "dynamic chunk resizing")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SIZES = (64, 32, 16, 8)
"""Tokens a chunk, the largest first."""


def judged_by_equation_2(chunks: int, tokens: int, density: float) -> float:
    """The paper's equation (2): what is judged of `tokens` in `chunks` chunks, where a share `density` of the tokens is
    important. Each level judges twice the share `density` of the one before.

    It is least at one chunk for every density from .05 to .9, since the levels below a chunk are counted as if all of
    them were of as many chunks as there are to begin with. So it cannot be meant as written, and `expected_judged` is
    what is minimised here.
    """
    levels = max(1, (tokens // chunks).bit_length() - 1)
    return float(sum(chunks * (2 * density) ** level for level in range(levels)))


def expected_judged(size: int, tokens: int, open_shares: Mapping[int, float]) -> float:
    """What is judged of `tokens` that begin as chunks of `size`: the chunks, and two parts of each that is split.

    `open_shares`: of the chunks of each size, a power of two, down to the least one, the share that their bounds leave
    open, or for which there is room among what is brought; those of the least size are not split.
    """
    judged, least = tokens / size, min(open_shares)
    while size > least:
        judged += 2 * open_shares[size] * tokens / size
        size //= 2
    return judged


def best_size(open_shares: Mapping[int, float], sizes: Iterable[int] = SIZES) -> int:
    """Of `sizes` the one for which `expected_judged` is least, among equals the smallest, which bounds tell most of.

    One size is better than the half of it where less than a half of its chunks are split.
    """
    return min(sorted(sizes), key=lambda size: expected_judged(size, 1024, open_shares))
