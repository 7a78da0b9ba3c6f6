"""Contenders on the same texts, teacher-forced: captured attention mass and distance to `DynamicCache`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_offload_cache.tuning import distance, perplexity_over

from ..needles import parse_setting
from .common import Rows
from .contexts import Context, default_model, follow, open_cache, peak_share, prefill, reference_texts, replay
from .watch import Look, Watch

Fields = dict[str, Any]
"""Fields of a cache, as `open_cache` takes them."""


def contenders_of(arguments: argparse.Namespace, usual: dict[str, Fields], **shared: Any) -> dict[str, Fields]:
    """The contenders of --set, or the usual ones; `shared` fields are their defaults."""
    given = dict(map(parse_setting, arguments.set)) or usual
    return {name: {**shared, **fields} for name, fields in given.items()}


def compare(arguments: argparse.Namespace, rows: Rows, contenders: dict[str, Fields], loaded: Any = None) -> None:
    """Add a row of `measure` for each text and contender. Each text is prefilled once."""
    model, tokenizer = default_model(loaded, getattr(arguments, "model", None))
    last = arguments.tokens + arguments.steps
    texts = reference_texts(tokenizer, arguments.samples, last)
    for sample, ids in enumerate(texts):
        left = {name: one for name, one in contenders.items() if not rows.has(sample=sample, name=name)}
        if not left:
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        with open_cache(model, None, 0) as cache:
            reference = follow(model, replay(cache, model, context), new)
        for name, fields in left.items():
            rows.add(sample=sample, name=name, **measure(model, context, new, fields, reference, arguments.path))


def measure(
    model: PreTrainedModel, context: Context, new: torch.Tensor, fields: Fields, reference: torch.Tensor,
    path: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure one contender on one text, teacher-forced.

    Returns:
        `mass`: attention mass on what is attended to, mean over layers with full attention, steps and heads; `worst`:
        of the layer with the least; `layer_mass`: by layer; `outside` and `outside_worst`: the same of the mass outside
        sinks and tail.
        `important`: share of the `attended` tokens that are among the most important tenth. `kl` in nats and `top1` to
        `DynamicCache`; `perplexity` over `DynamicCache`'s. `hit_rate`; `judged`: evaluations over those of judging all
        tokens, if the method counts them. `peak_share` of the full KV, as the function has it. A step's `megabytes` and
        `reads`, and those `written`; `clusters` a key head at the end, if there are any.
    """
    mass, outside = ({layer_idx: list[float]() for layer_idx in context.full} for _ in range(2))
    attended: list[float] = []
    important: list[float] = []

    def told(look: Look) -> None:
        mass[look.layer_idx].append(look.mass)
        columns = look.columns
        if columns is not None:
            history = cache.layers[look.layer_idx].history  # type: ignore[union-attr]
            last = history.length - history.recent.shape[1]
            outside[look.layer_idx].append(look.between(cache.config.num_sinks, last)[0])  # type: ignore[attr-defined]
        attended.append(look.weights.shape[1] if columns is None else float(np.mean([len(own) for own in columns])))
        important.append(look.important(0.1))

    with open_cache(model, fields, context.tokens + new.shape[1], path) as cache:
        replay(cache, model, context)
        before = cache.report()  # type: ignore[attr-defined]
        with Watch(cache, context.keys, told):  # type: ignore[arg-type]
            logits = follow(model, cache, new)
        report, peak = cache.report(), peak_share(cache)  # type: ignore[attr-defined, arg-type]
        predictors = [getattr(layer, "predictor", None) for layer in cache.offloaded]  # type: ignore[attr-defined]
        kept = [getattr(layer.history, "clustered", None) for layer in cache.offloaded]  # type: ignore[attr-defined]
        clusters = float(np.mean([own.partition.used for own in kept])) if all(kept) else None
    layers, steps = [float(np.mean(part)) for part in mass.values()], new.shape[1]
    row: dict[str, Any] = {
        "mass": float(np.mean(layers)), "worst": min(layers), "attended": float(np.mean(attended)),
        **distance(reference, logits), "hit_rate": report.hit_rate, "clusters": clusters,
        **peak,
        "megabytes": (report.bytes_read - before.bytes_read) / 1e6 / steps,
        "written": (report.bytes_written - before.bytes_written) / 1e6 / steps,
        "reads": (report.reads - before.reads) / steps,
        "perplexity": perplexity_over(reference, logits, new), "important": float(np.mean(important)),
    }  # fmt: skip
    counted = [each for each in predictors if getattr(each, "judged", 0)]
    # two bounds of a chunk are as much to compare with as the keys of two tokens
    tokens = sum(each.judged for each in counted) / 2
    row["judged"] = sum(each.evaluations for each in counted) / tokens if tokens else None
    if all(outside.values()):
        there = [float(np.mean(part)) for part in outside.values()]
        row |= {"outside": float(np.mean(there)), "outside_worst": min(there)}
    return {**row, "layer_mass": layers}


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means of `measure` over texts, by contender; the worst layer is the mean's."""
    table = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        layers = np.mean([row["layer_mass"] for row in own], 0)
        found: dict[str, Any] = {"mass": float(layers.mean()), "worst": float(layers.min())}
        shown = ("attended", "important", "judged", "kl", "top1", "perplexity", "hit_rate", "peak_share")
        shown += ("outside", "outside_worst", "megabytes", "reads", "written", "clusters")
        for field in shown:
            values = [row[field] for row in own if row.get(field) is not None]
            found[field] = float(np.mean(values)) if values else None
        table[name] = {**found, "layer_mass": layers.tolist()}
    return table
