"""How dense is each layer's attention? Tokens that hold 0.9 of its mass: why layers get budgets of their own."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from hf_offload_cache.console import load_default_model

from .common import Rows, Study, main
from .contexts import follow, open_cache, prefill, reference_texts, replay
from .teacher_forced import text_arguments
from .watch import Look, Watch, tokens_needed


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=16, samples=4)
    parser.add_argument("--mass", type=float, default=0.9, help="share of a layer's attention mass")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 16], help="sizes of the units counted, in tokens")


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    for sample, ids in enumerate(reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)):
        if rows.has(sample=sample):
            continue
        context = prefill(model, ids[:, : arguments.tokens])
        needed: list[dict[int, list[int]]] = [{size: [] for size in arguments.groups} for _ in context.keys]

        def told(look: Look, needed: list = needed) -> None:
            for size, counts in needed[look.layer_idx].items():
                counts.append(tokens_needed(look.weights, arguments.mass, size))

        with open_cache(model, {"exact": True, "engine": "memory"}, 0) as cache:
            replay(cache, model, context)
            with Watch(cache, context.keys, told):  # type: ignore[arg-type]
                follow(model, cache, ids[:, arguments.tokens :])
        for size in arguments.groups:
            layers = [float(np.mean(part[size])) for part in needed]
            rows.add(sample=sample, group_size=size, mean=float(np.mean(layers)), layers=layers)
    table = {}
    for size in arguments.groups:
        layers = np.mean([row["layers"] for row in rows.where(group_size=size)], 0)
        found = {"mean": float(layers.mean()), "least": float(layers.min()), "most": float(layers.max())}
        table[str(size)] = {**found, "densest_layer": int(layers.argmax()), "layers": layers.tolist()}
    return {"mass": arguments.mass, "tokens_needed_in_groups_of": table}


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    table = summary["tokens_needed_in_groups_of"]
    width = 0.8 / len(table)
    for index, (size, row) in enumerate(table.items()):
        places = [layer + (index + 0.5) * width - 0.4 for layer in range(len(row["layers"]))]
        axes.bar(places, row["layers"], width, label="single tokens" if size == "1" else f"groups of {size}")
    axes.set(xlabel="layer", ylabel=f"tokens that hold {summary['mass']:g} of the attention mass")
    axes.legend()


STUDY = Study(
    "quality_layerwise", __doc__, run, plot, arguments, {"tokens": 1536, "steps": 4, "samples": 1}, size=(10.0, 4.5)
)

if __name__ == "__main__":
    main(STUDY)
