"""Contenders side by side on the same texts, teacher-forced: attention mass captured, distance to `DynamicCache`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import distance, perplexity_over

from ..needles import parse_setting
from .common import Rows
from .contexts import Context, follow, open_cache, prefill, reference_texts, replay
from .watch import Look, Watch, overlap


@dataclass(frozen=True)
class Contender:
    """A cache to compare, as `open_cache` takes it; `rolling` as in `Watch`."""

    fields: dict[str, Any] | None
    rolling: bool = True


def text_arguments(parser: argparse.ArgumentParser, tokens: int, steps: int, samples: int) -> None:
    """What every teacher-forced study asks."""
    parser.add_argument("--tokens", type=int, default=tokens, help="of the context that is prefilled")
    parser.add_argument("--steps", type=int, default=steps, help="tokens decoded after it, teacher-forced")
    parser.add_argument("--samples", type=int, default=samples, help="texts")


def setting_argument(parser: argparse.ArgumentParser) -> None:
    """Contenders of the user's own."""
    explained = "a contender, instead of the usual ones; repeatable. memory=1/13 plans it, memory=none does not"
    parser.add_argument("--set", action="append", default=[], metavar="NAME:FIELD=VALUE,...", help=explained)


def contenders_of(
    arguments: argparse.Namespace, usual: dict[str, dict[str, Any]], **shared: Any
) -> dict[str, Contender]:
    """The contenders of `--set`, else the usual ones; `shared` fields hold where a contender has none of its own.
    "rolling" among the fields is `Contender`'s."""
    given = dict(map(parse_setting, arguments.set)) or usual
    found = {}
    for name, own in given.items():
        fields = {**shared, **own}
        rolling = fields.pop("rolling", True)
        found[name] = Contender(fields, rolling)
    return found


def compare(
    arguments: argparse.Namespace, rows: Rows, contenders: dict[str, Contender], model: Any = None,
    tokenizer: Any = None,
) -> None:  # fmt: skip
    """A row for each text and contender: `measure`. Each text is prefilled once."""
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        left = {name: one for name, one in contenders.items() if not rows.has(sample=sample, name=name)}
        if not left:
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        reference = reference_logits(model, context, new)
        for name, contender in left.items():
            rows.add(sample=sample, name=name, **measure(model, context, new, contender, reference, arguments.path))


def reference_logits(model: PreTrainedModel, context: Context, new: torch.Tensor) -> torch.Tensor:
    """What `DynamicCache` says after the context to each token of new (1, S): (S, V)."""
    with open_cache(model, None, 0) as cache:
        replay(cache, model, context)
        return follow(model, cache, new)


def measure(
    model: PreTrainedModel, context: Context, new: torch.Tensor, contender: Contender, reference: torch.Tensor,
    path: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One contender on one text: `mass`, mean over layers, steps and heads; `worst` and `worst_layer`, the layer with
    the least mean; `important`, the share of what is attended to that is among the most important tenth of the
    tokens; `kl` in nats and `top1` to `DynamicCache`; `perplexity`, of the text, over that of `DynamicCache`;
    `attended` tokens; `overlap` of successive selections; `hit_rate`; `peak_share` of the full KV; `judged`, what
    was judged over what judging all tokens would be, where a method counts it; and the same by layer: `layer_mass`,
    `layer_overlap`, `layer_hits`."""
    count = len(context.keys)
    mass: list[list[float]] = [[] for _ in range(count)]
    groups: list[list[np.ndarray]] = [[] for _ in range(count)]
    attended: list[float] = []
    important: list[float] = []
    hits = [0] * count

    def told(look: Look) -> None:
        mass[look.layer_idx].append(look.mass)
        columns = look.columns
        attended.append(look.weights.shape[1] if columns is None else float(np.mean([len(own) for own in columns])))
        important.append(look.important(0.1))
        if look.groups is not None:
            groups[look.layer_idx].append(look.groups)
            hits[look.layer_idx] += look.resident

    with open_cache(model, contender.fields, context.tokens + new.shape[1], path) as cache:
        replay(cache, model, context)
        with Watch(cache, context.keys, told, contender.rolling):  # type: ignore[arg-type]
            logits = follow(model, cache, new)
        report = cache.report()  # type: ignore[attr-defined]
        predictors = [getattr(layer, "predictor", None) for layer in cache.offloaded]  # type: ignore[attr-defined]
    layers = [float(np.mean(part)) for part in mass]
    selected = [sum(map(len, part)) for part in groups]
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
    row["layer_mass"] = layers
    row["layer_overlap"] = [float(np.mean(part)) if part else None for part in alike]
    row["layer_hits"] = [hit / of if of else None for hit, of in zip(hits, selected, strict=True)]
    return row


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contender, in order: what `measure` gives, mean over texts; the worst layer is that of the mean."""
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
