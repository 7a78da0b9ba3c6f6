"""What does streaming a context lose, by level: bytes, distance to a prefilled one, needles? All layers but the first
are streamed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from hf_offload_cache.console import build_prompt, prefilled_tokens
from hf_offload_cache.streaming import LEVELS, ChunkShape, encode, unpack
from hf_offload_cache.tuning import distance

from ..needles import make_needles
from .common import Rows, Study, main
from .contexts import Context, answer, default_model, follow, prefill, reference_texts, replay

_CHUNK = 1024
_PREFILLED = "prefilled"
_LEVELS = (_PREFILLED, *LEVELS)


def streamed(context: Context, level: str) -> tuple[Context, float]:
    """The context as it arrives, and the bytes of all objects over those of keys and values."""
    keys, values, sent, whole = [context.keys[0]], [context.values[0]], 0, 0
    for own_keys, own_values in zip(context.keys[1:], context.values[1:], strict=True):
        parts = []
        for chunk_keys, chunk_values in zip(own_keys[0].split(_CHUNK, 1), own_values[0].split(_CHUNK, 1), strict=True):
            data = encode(chunk_keys, chunk_values, level)
            shape = ChunkShape(*chunk_keys.shape, chunk_values.shape[2], chunk_keys.dtype)
            parts.append(unpack(data, shape, "a chunk").decode())
            sent, whole = sent + len(data), whole + shape.nbytes
        for held, of in zip((keys, values), zip(*parts, strict=True), strict=True):
            held.append(torch.cat(of, 1)[None])
    return replace(context, keys=keys, values=values), sent / whole


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each text and level with "kl", and for each needle and level with "answered"."""
    model, tokenizer = default_model(loaded)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        if all(rows.has(text=sample, level=level) for level in _LEVELS):
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        reference: torch.Tensor | None = None
        for level in _LEVELS:
            held, share = (context, 1.0) if level == _PREFILLED else streamed(context, level)
            logits = follow(model, replay(DynamicCache(config=model.config), model, held), new)
            reference = logits if reference is None else reference
            if not rows.has(text=sample, level=level):
                rows.add(text=sample, level=level, share=share, **distance(reference, logits))
    for sample, needle in enumerate(make_needles(tokenizer, arguments.needles, arguments.tokens)):
        if not (left := [level for level in _LEVELS if not rows.has(needle=sample, level=level)]):
            continue
        ids = build_prompt(tokenizer, needle.document, needle.question)
        context = prefill(model, ids[:, : prefilled_tokens(ids.shape[1])])
        for level in left:
            held = context if level == _PREFILLED else streamed(context, level)[0]
            text = answer(model, tokenizer, replay(DynamicCache(config=model.config), model, held), ids)
            rows.add(needle=sample, level=level, answered=needle.code in text)
    return summary(rows.rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By level: means over texts, and needles found of those found when prefilled."""
    known = {row["needle"] for row in rows if row["level"] == _PREFILLED and row.get("answered")}
    table: dict[str, dict[str, Any]] = {}
    for level in _LEVELS:
        texts = [row for row in rows if row["level"] == level and "text" in row]
        needles = [row for row in rows if row["level"] == level and row.get("needle") in known]
        means = {name: sum(row[name] for row in texts) / len(texts) for name in ("share", "kl", "top1") if texts}
        table[level] = {**means, "answered": sum(row["answered"] for row in needles), "of": len(known)}
    return {"levels": table}


STUDY = Study(
    "stream_quality", __doc__, run,
    {
        "tokens": (4096, "tokens of a context"),
        "samples": (4, "texts"),
        "steps": (32, "tokens decoded after each, teacher-forced"),
        "needles": (20, "documents with a needle"),
    },
    {"tokens": 1536, "samples": 1, "steps": 8, "needles": 2},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
