"""The best configuration that a budget allows, by what every cache has: streams, then what is selected and kept."""

from __future__ import annotations

from ..config import OffloadConfig
from .search import SHORT_TAIL, Config, Search

LEAST_SELECTED = 64
LOST_BY = "(measured on SmolLM2-135M): give more memory, or fewer tokens"
"""Of facts that a budget costs."""

FAST_BLOCK = 256
"""Tokens a block from which on a prefill in pieces takes less than a tenth longer than with blocks of 1024."""
_LONG_CONTEXT = 2048
"""Tokens a sequence from which on blocks are told of: below, a history is a few of them."""
_SLOWER = {16: 2.4, 32: 1.7, 48: 1.5, 64: 1.35, 128: 1.2}
"""Processor time of a prefill of 4,096 tokens in pieces of 1,024, one core of x86, over that with blocks of 1024, by
the tokens of a block: of three layers of SmolLM2-135M's shape. Two of Gemma 3 270M's took a tenth less more."""


def slow_blocks(config: OffloadConfig) -> str | None:
    """Text about the cost of small blocks for a prefill in pieces, which attends to the earlier tokens block by block;
    None: they are not small."""
    block, context = config.block_tokens, config.max_context
    if block >= FAST_BLOCK or context is None or context < _LONG_CONTEXT:
        return None
    times = next((slower for tokens, slower in _SLOWER.items() if block <= tokens), 1.1)
    return (
        f"a prefill in pieces takes about {times:g} times the processor time: there is only room for blocks of {block} "
        f"tokens (block_tokens), and with {FAST_BLOCK} it takes hardly more; give more memory, or fewer tokens"
    )


def fit_stream(search: Search[Config]) -> Config:
    """For a cache that streams all it holds.

    The largest `block_tokens` up to 1024 and the largest `write_queue` up to 4 MiB that take a tenth of the budget
    each, at most; else a twentieth, a fortieth, or what they need; then fewer `num_recent`, 32 down to 4, for the
    rolling tail. Raises `BudgetError` with the least memory that would do.
    """
    return search.config(search.first_fit((*search.all_streams(), *search.short_tails())))


def fit_selective(search: Search[Config]) -> Config:
    """For a cache that selects, and knows no better: all of `num_selected`, with the largest streams that leave room
    for it; what is left goes to slots. Where it does not fit, a shorter tail, then fewer selected tokens.

    Raises `BudgetError` with the least memory that would do.
    """
    selected: int = search.config(search.least_streams()).num_selected  # type: ignore[attr-defined]
    full = {"num_selected": selected, "reuse_capacity": 0}
    group = max((tokens for _, tokens in search.records), default=1)
    tried = [{**streams, **full} for streams in (*search.all_streams(), search.least_streams(SHORT_TAIL))]
    tried += [{**tried[-1], "num_selected": fewer} for fewer in range(selected - group, LEAST_SELECTED, -group)]
    chosen = search.first_fit((*tried, {**tried[-1], "num_selected": min(selected, LEAST_SELECTED)}))
    return search.config(search.most(chosen, "reuse_capacity", search.max_context))
