"""Contenders on the same texts, teacher-forced: captured attention mass and distance to `DynamicCache`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_offload_cache.tuning import distance, perplexity_over

from ..needles import parse_setting
from .common import Options, Rows
from .contexts import Context, default_model, follow, open_cache, prefill, reference_texts, replay
from .watch import Look, Watch, overlap

Fields = dict[str, Any]
"""Fields of a cache, as `open_cache` takes them."""


def text_options(tokens: int, steps: int, samples: int) -> Options:
    """Options of every teacher-forced study."""
    return {
        "tokens": (tokens, "prefilled tokens"),
        "steps": (steps, "tokens decoded after them, teacher-forced"),
        "samples": (samples, "texts"),
    }


def contenders_of(arguments: argparse.Namespace, usual: dict[str, Fields], **shared: Any) -> dict[str, Fields]:
    """The contenders of --set, or the usual ones; `shared` fields are their defaults."""
    given = dict(map(parse_setting, arguments.set)) or usual
    return {name: {**shared, **fields} for name, fields in given.items()}


def compare(arguments: argparse.Namespace, rows: Rows, contenders: dict[str, Fields], loaded: Any = None) -> None:
    """Add a row of `measure` for each text and contender. Each text is prefilled once."""
    model, tokenizer = default_model(loaded)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        left = {name: one for name, one in contenders.items() if not rows.has(sample=sample, name=name)}
        if not left:
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        reference = reference_logits(model, context, new)
        for name, fields in left.items():
            rows.add(sample=sample, name=name, **measure(model, context, new, fields, reference, arguments.path))


def reference_logits(model: PreTrainedModel, context: Context, new: torch.Tensor) -> torch.Tensor:
    """`DynamicCache`'s logits (S, V) for new (1, S) after the context."""
    with open_cache(model, None, 0) as cache:
        replay(cache, model, context)
        return follow(model, cache, new)


def measure(
    model: PreTrainedModel, context: Context, new: torch.Tensor, fields: Fields, reference: torch.Tensor,
    path: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure one contender on one text. `mass`: mean over layers, steps and heads; `worst` and `worst_layer`: the
    layer with the least mean; `layer_mass`: by layer; `important`: share of the attended tokens that are among the most
    important tenth; `kl` in nats and `top1` to `DynamicCache`; `perplexity` over `DynamicCache`'s; `attended` tokens;
    `overlap` of successive selections; `hit_rate`; `peak_share` of the full KV; `judged`: evaluations over those of
    judging all tokens, if the method counts them."""
    count = len(context.keys)
    mass: list[list[float]] = [[] for _ in range(count)]
    groups: list[list[np.ndarray]] = [[] for _ in range(count)]
    attended: list[float] = []
    important: list[float] = []

    def told(look: Look) -> None:
        mass[look.layer_idx].append(look.mass)
        columns = look.columns
        attended.append(look.weights.shape[1] if columns is None else float(np.mean([len(own) for own in columns])))
        important.append(look.important(0.1))
        if look.groups is not None:
            groups[look.layer_idx].append(look.groups)

    with open_cache(model, fields, context.tokens + new.shape[1], path) as cache:
        replay(cache, model, context)
        with Watch(cache, context.keys, told):  # type: ignore[arg-type]
            logits = follow(model, cache, new)
        report = cache.report()  # type: ignore[attr-defined]
        predictors = [getattr(layer, "predictor", None) for layer in cache.offloaded]  # type: ignore[attr-defined]
    layers = [float(np.mean(part)) for part in mass]
    row: dict[str, Any] = {"mass": float(np.mean(layers)), "worst": min(layers)}
    row |= {"worst_layer": int(np.argmin(layers)), "attended": float(np.mean(attended)), **distance(reference, logits)}
    row |= {"hit_rate": report.hit_rate, "peak_share": report.peak_memory_bytes / report.full_kv_bytes}
    row["perplexity"] = perplexity_over(reference, logits, new)
    row["important"] = float(np.mean(important))
    counted = [each for each in predictors if getattr(each, "judged", 0)]
    # two bounds of a chunk are as much to compare with as the keys of two tokens
    tokens = sum(each.judged for each in counted) / 2
    row["judged"] = sum(each.evaluations for each in counted) / tokens if tokens else None
    alike = [overlap(part) for part in groups]
    row["overlap"] = float(np.mean([share for part in alike for share in part])) if any(alike) else None
    return {**row, "layer_mass": layers}


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means of `measure` over texts, by contender; the worst layer is the mean's."""
    table = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        layers = np.mean([row["layer_mass"] for row in own], 0)
        found: dict[str, Any] = {"mass": float(layers.mean()), "worst": float(layers.min())}
        found["worst_layer"] = int(layers.argmin())
        shown = ("attended", "important", "judged", "kl", "top1", "perplexity", "hit_rate", "overlap", "peak_share")
        for field in shown:
            values = [row[field] for row in own if row.get(field) is not None]
            found[field] = float(np.mean(values)) if values else None
        table[name] = {**found, "layer_mass": layers.tolist()}
    return table
