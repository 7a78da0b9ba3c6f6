"""Chunk sizes measured on sample text, by the share of chunks of each size that bounds leave open (LeoAM, section
4.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...model.place import inner_model
from ...predictors.base import Query
from ...tuning.sample import text_ids
from .cache import AbstractTreeCache
from .config import SIZES, best_size, expected_judged
from .layer import AbstractTreeLayer
from .predictor import bounds, front, likely, standing


@dataclass(frozen=True)
class ChunkSizes:
    """Measurements of `calibrate_chunks` for each offloaded layer. Prints as a table."""

    tokens: int
    """Mean tokens per text."""
    density: tuple[float, ...]
    """Share of the tokens that a step attends to."""
    left_open: tuple[dict[int, float], ...]
    """By tokens per chunk: share of the chunks that bounds leave open."""
    opened: tuple[dict[int, float], ...]
    """By tokens per chunk: share of the chunks that a step opens, at most as many as it has room to read."""
    sizes: tuple[int, ...]
    """The best sizes, for `chunk_size`."""

    def __str__(self) -> str:
        sizes = sorted(self.opened[0], reverse=True)
        lines = [
            f"judged of {self.tokens:,} tokens: chunks, and twice those that are opened (share that bounds leave open)",
            "layer  density  " + "".join(f"{f'{size} a chunk':>16}" for size in sizes) + "    best",
        ]
        for layer, (density, shares, best) in enumerate(zip(self.density, self.opened, self.sizes, strict=True)):
            cells = []
            for size in sizes:
                judged = expected_judged(size, self.tokens, shares)
                cells.append(f"{f'{judged:,.0f} ({self.left_open[layer][size]:.2f})':>16}")
            lines.append(f"{layer:5}  {density:7.2f}  " + "".join(cells) + f"{best:8}")
        return "\n".join(lines)


def calibrate_chunks(
    model: Any, texts: Iterable[Any], tokenizer: Any = None, least: int = 16, **fields: Any
) -> ChunkSizes:
    """Find, for each offloaded layer of an `AbstractTreeCache`, the chunk size with the fewest evaluations. Pass the
    result's `sizes` as `chunk_size`.

    The last query of each text is compared with the keys before it, in chunks of every size. Bounds leave open the
    chunks that could contain a wanted token. A step opens chunks in the order of its ranking, as many as it has room to
    read, except those it is sure of.

    Args:
        model: a PreTrainedModel; runs forward on its own device, one text at a time.
        texts: token ids (T,) or (B, T) as tensors, or strings (then `tokenizer` is needed). They should be as long as
            the contexts that the sizes are for.
        least: the smallest chunk size that is worth a read: a power of two from 8 to 64.
        **fields: further fields of that cache, e.g. num_selected, num_opened, dense_layers.

    Raises `ValueError` if no text is long enough to select from. Writes nothing.
    """
    if least not in SIZES:
        raise ValueError(f"least must be one of {', '.join(map(str, SIZES))}, got {least!r}: use 16")
    sizes = [size for size in SIZES if size >= least]
    inner = inner_model(model)
    measured: list[list[tuple[list[float], list[float]]]] = []
    densities, lengths = [], []
    for text in texts:
        ids = text_ids(text, tokenizer)
        ids = ids.reshape(-1, ids.shape[-1]).to(inner.device)
        with torch.inference_mode(), AbstractTreeCache(inner, **{"engine": "memory", **fields}) as cache:
            queries: dict[int, torch.Tensor] = {}
            for layer in cache.selective:
                layer.watch_query = queries.__setitem__
            inner(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            layers = [layer for layer in cache.selective if isinstance(layer, AbstractTreeLayer)]
            longer = any(layer.length > layer.config.tokens_fetched(layer.length) for layer in layers)
            if ids.shape[1] >= sizes[0] and longer:
                measured.append([_shares(layer, queries[layer.layer_idx][:, :, -1], sizes) for layer in layers])
                densities.append([layer.config.attended(layer.length) / layer.length for layer in layers])
                lengths.append(ids.shape[1])
    if not measured:
        raise ValueError("texts must include one that is longer than what a step attends to: pass longer texts")
    shares = np.mean(measured, 0)  # (layers, left open and opened, sizes)
    left_open, opened = ([dict(zip(sizes, row, strict=True)) for row in shares[:, kind].tolist()] for kind in (0, 1))
    return ChunkSizes(
        int(np.mean(lengths)), tuple(np.mean(densities, 0).tolist()), tuple(left_open), tuple(opened),
        tuple(best_size(layer, sizes) for layer in opened),
    )  # fmt: skip


def _shares(layer: AbstractTreeLayer, states: torch.Tensor, sizes: list[int]) -> tuple[list[float], list[float]]:
    """By size, the shares of the chunks that bounds leave open to a query (B, H, D), and of those that a step opens."""
    keys = layer.rows.fold(layer.whole()[0])
    length = keys.shape[2] // sizes[0] * sizes[0]
    keys = keys[:, :, :length]
    query: Query = layer.query_of(states, None)
    scaled = (query.states * query.scaling).to(keys.dtype).reshape(keys.shape[0], -1, keys.shape[3])
    wanted, to_open = layer.config.attended(length), layer.config.tokens_fetched(length)
    left_open: list[float] = []
    opened: list[float] = []
    for size in sizes:
        chunks = keys.unflatten(2, (-1, size))
        ends, enough = (chunks.amin(3), chunks.amax(3)), np.full(len(keys), wanted)
        for results, room, judge in ((left_open, None, bounds), (opened, -(-to_open // size), likely)):
            upper, lower = (bound.cpu().numpy() for bound in judge(scaled, *ends))
            most, least = standing(upper, lower, length // size)
            results.append(float(front(most, least, size, enough, room).unsure.mean()))
    return left_open, opened
