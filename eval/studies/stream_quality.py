"""What is lost of a context that is streamed: bytes, distance to what was prefilled, facts; by level, with every layer
but the first as it comes over the network."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from hf_offload_cache.console import build_prompt, load_default_model, prefilled_tokens
from hf_offload_cache.streaming import LEVELS, ChunkShape, encode, unpack
from hf_offload_cache.tuning import distance

from ..needles import make_needles
from .common import Rows, Study, judged, main
from .contexts import Context, answer, follow, prefill, reference_texts, replay

_CHUNK = 1024
_PREFILLED = "prefilled"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096, help="of a context")
    parser.add_argument("--samples", type=int, default=4, help="texts")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded after each, teacher-forced")
    parser.add_argument("--facts", type=int, default=20, help="documents with a fact that is asked for")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))


def streamed(context: Context, level: str) -> tuple[Context, float]:
    """What a cache holds after it, and the bytes of all objects over those of keys and values."""
    keys, values, sent, whole = [context.keys[0]], [context.values[0]], 0, 0
    for own_keys, own_values in zip(context.keys[1:], context.values[1:], strict=True):
        parts = []
        for chunk_keys, chunk_values in zip(own_keys[0].split(_CHUNK, 1), own_values[0].split(_CHUNK, 1), strict=True):
            data = encode(chunk_keys, chunk_values, level)
            sizes = *chunk_keys.shape, chunk_values.shape[2]
            shape = ChunkShape(*sizes, chunk_keys.dtype)
            parts.append(unpack(data, shape, "a chunk").decode())
            sent, whole = sent + len(data), whole + shape.nbytes
        for held, of in zip((keys, values), zip(*parts, strict=True), strict=True):
            held.append(torch.cat(of, 1)[None])
    return replace(context, keys=keys, values=values), sent / whole


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    """A row for each text and level with "kl", and for each fact and level with "answered"."""
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    levels = [_PREFILLED, *arguments.levels]
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        if all(rows.has(text=sample, level=level) for level in levels):
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        reference: torch.Tensor | None = None
        for level in levels:
            held, share = (context, 1.0) if level == _PREFILLED else streamed(context, level)
            logits = follow(model, _filled(model, held), new)
            reference = logits if reference is None else reference
            if not rows.has(text=sample, level=level):
                rows.add(text=sample, level=level, share=share, **distance(reference, logits))
    for sample, needle in enumerate(make_needles(tokenizer, arguments.facts, arguments.tokens)):
        left = [level for level in levels if not rows.has(fact=sample, level=level)]
        if not left:
            continue
        ids = build_prompt(tokenizer, needle.document, needle.question)
        context = prefill(model, ids[:, : prefilled_tokens(ids.shape[1])])
        for level in left:
            held = context if level == _PREFILLED else streamed(context, level)[0]
            text = answer(model, tokenizer, _filled(model, held), ids)
            rows.add(fact=sample, level=level, answered=needle.code in text)
    return summary(rows.rows, levels)


def _filled(model: Any, context: Context) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    replay(cache, model, context)
    return cache


def summary(rows: list[dict[str, Any]], levels: list[str]) -> dict[str, Any]:
    """By level means over texts, and how many facts are answered of those that are when prefilled."""
    known = {row["fact"] for row in rows if row["level"] == _PREFILLED and row.get("answered")}
    table: dict[str, dict[str, Any]] = {}
    for level in levels:
        texts = [row for row in rows if row["level"] == level and "text" in row]
        facts = [row for row in rows if row["level"] == level and row.get("fact") in known]
        of = {name: [row[name] for row in texts] for name in ("share", "kl", "top1")}
        means = {name: sum(one) / len(one) for name, one in of.items() if one}
        table[level] = {**means, "answered": sum(row["answered"] for row in facts), "of": len(known)}
    default = table.get("default", {})
    lost = default["of"] - default["answered"] if default else None
    reached = [
        judged("bytes over 16 bits, default level", default.get("share"), most=0.28),
        judged("KL to what was prefilled, default level", default.get("kl"), most=0.015),
        judged("facts lost, default level", lost, most=0),
    ]
    return {"levels": table, "must_reach": reached}


def plot(found: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes, table = figure.subplots(), {name: of for name, of in found["levels"].items() if name != _PREFILLED}
    axes.plot([of["share"] for of in table.values()], [max(of["kl"], 1e-6) for of in table.values()], marker="o")
    for name, of in table.items():
        axes.annotate(name, (of["share"], max(of["kl"], 1e-6)))
    axes.set(xlabel="bytes over 16 bits", ylabel="KL to what was prefilled, nats", yscale="log")


STUDY = Study(
    "stream_quality", __doc__, run, plot, arguments, {"tokens": 1536, "samples": 1, "steps": 8, "facts": 2}
)

if __name__ == "__main__":
    main(STUDY)
