"""The beginning of a step: whether it continues what the cache holds, and what kind of step it is."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..config import OffloadConfig
from ..errors import PromptError
from .continuation import check_planned, check_positions, padding_of
from .step import MOST_CANDIDATES, Step
from .token_log import TokenLog


def begin(
    kwargs: dict[str, Any],
    config: OffloadConfig,
    tokens: TokenLog,
    lengths: list[int],
    batch: int | None,
    *,
    compare: bool,
    candidates: bool,
    rows_of_ids: int = 1,
) -> Step | None:
    """The step that a forward with these arguments makes; None: it has neither ids nor embeddings.

    Args:
        lengths: number of tokens in each layer that has a length.
        batch: number of stored sequences; None: none.
        compare: compare the mask with the stored one, however short the step.
        candidates: a step of several queries over a history may verify candidates.
        rows_of_ids: rows of ids for one sequence.

    Raises `PromptError` and `BudgetError` before anything is added.
    """
    ids, embeds, mask = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    given = ids if ids is not None else embeds
    if given is None:
        return None
    sequences, count = given.shape[:2]
    if ids is not None and ids.ndim == 2:
        sequences //= rows_of_ids
    history = max(lengths, default=tokens.length)
    if history:
        if batch is not None and sequences != batch:
            raise PromptError(
                f"the cache holds {batch} sequences and the model was given {sequences}: "
                "use a new cache, or reset(), for a batch of another size"
            )
        check_positions(kwargs.get("position_ids"), mask, history)
    check_planned(config, sequences, history + count)
    told = ids is not None and ids.ndim == 2 and rows_of_ids == 1  # several codes stand for a token, else
    padding = None
    if not isinstance(mask, torch.Tensor) or len(mask) != sequences * rows_of_ids or rows_of_ids == 1:
        padding = padding_of(tokens, mask, history, history + count, compare=compare or count > 1)
    several = candidates and not config.exact and count <= min(MOST_CANDIDATES, config.num_recent)
    selects = history > 0 and (count == 1 or several)
    return Step(
        sequences,
        history,
        count,
        selects,
        started=time.perf_counter() if selects else None,
        ids=ids if told else torch.full((sequences, count), TokenLog.UNKNOWN, device="cpu"),
        padding=padding,
        lengths=lengths,
    )
