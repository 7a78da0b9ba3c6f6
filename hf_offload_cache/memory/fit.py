"""The best configuration that a budget allows, by what every cache has: streams, then what is selected and kept."""

from __future__ import annotations

from .search import SHORT_TAIL, Config, Search

LEAST_SELECTED = 64
LOST_BY = "(measured on SmolLM2-135M): give more memory, or fewer tokens"
"""Of facts that a budget costs."""


def fit_stream(search: Search[Config]) -> Config:
    """For a cache that streams all it holds.

    The largest `block_tokens` up to 1024 and the largest `write_queue` up to 4 MiB that take a tenth of the budget
    each, at most; else a twentieth, a fortieth, or what they need; then fewer `num_recent`, 32 down to 4, for the
    rolling tail. Raises `BudgetError` with the least memory that would do.
    """
    chosen = {}
    for chosen in (*search.all_streams(), *search.short_tails()):
        if search.fits(chosen):
            return search.config(chosen)
    raise search.refusal(chosen)


def fit_selective(search: Search[Config]) -> Config:
    """For a cache that selects, and knows no better: all of `num_selected`, with the largest streams that leave room
    for it; what is left goes to slots. Where it does not fit, a shorter tail, then fewer selected tokens.

    Raises `BudgetError` with the least memory that would do.
    """
    selected: int = search.config(search.least_streams()).num_selected  # type: ignore[attr-defined]
    full = {"num_selected": selected, "reuse_capacity": 0}
    group = max((tokens for _, tokens in search.records), default=1)
    chosen = {}
    tried = [{**streams, **full} for streams in (*search.all_streams(), search.least_streams(SHORT_TAIL))]
    tried += [{**tried[-1], "num_selected": fewer} for fewer in range(selected - group, LEAST_SELECTED, -group)]
    for chosen in (*tried, {**tried[-1], "num_selected": min(selected, LEAST_SELECTED)}):
        if search.fits(chosen):
            return search.config(search.most(chosen, "reuse_capacity", search.max_context))
    raise search.refusal(chosen)
