"""How much of a token's attention lies on what a guess of it chose, and on what the token before it wanted? (SpeCache,
section 3.3)"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from hf_offload_cache.console import load_default_model

from .common import Rows, Study, main
from .contexts import follow, open_cache, prefill, reference_texts, replay
from .teacher_forced import text_arguments
from .watch import Look, Watch


def arguments(parser: argparse.ArgumentParser) -> None:
    text_arguments(parser, tokens=4096, steps=32, samples=4)
    parser.add_argument("--selected", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="tokens a key head")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--group", type=int, default=64)


def run(arguments: argparse.Namespace, rows: Rows, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    if model is None:
        model, tokenizer = load_default_model(torch.bfloat16)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        left = [(count, guess) for count in arguments.selected for guess in (True, False)]
        left = [one for one in left if not rows.has(sample=sample, selected=one[0], guess=one[1])]
        if not left:
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        for count, guess in left:
            found: list[list[tuple[float, float]]] = [[] for _ in context.keys]
            fields = {"cache": "spec", "bits": arguments.bits, "quant_group": arguments.group, "num_selected": count}
            with open_cache(model, {**fields, "speculative": guess}, 0, arguments.path) as cache:
                replay(cache, model, context)

                def told(look: Look, cache: Any = cache, found: Any = found) -> None:
                    copied = cache.layers[look.layer_idx].predictor.copy.tokens
                    found[look.layer_idx].append(look.between(cache.config.num_sinks, copied))

                with Watch(cache, context.keys, told):  # type: ignore[arg-type]
                    follow(model, cache, new)
            held, best = np.array(found).mean(1).T
            mean = {"mass": float(held.mean()), "best": float(best.mean()), "worst": float(held.min())}
            rows.add(sample=sample, selected=count, guess=guess, **mean, layer_mass=held.tolist())
    return {"means": _means(rows.rows)}


def _means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for selected, guess in dict.fromkeys((row["selected"], row["guess"]) for row in rows):
        own = [row for row in rows if (row["selected"], row["guess"]) == (selected, guess)]
        mean = {name: float(np.mean([row[name] for row in own])) for name in ("mass", "best")}
        layers = np.mean([row["layer_mass"] for row in own], 0).tolist()
        found.append({"selected": selected, "guess": guess, **mean, "worst": min(layers), "layer_mass": layers})
    return found


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Any) -> None:
    axes = figure.subplots()
    for row in summary["means"]:
        if row["guess"]:
            axes.plot(row["layer_mass"], marker=".", label=f"{row['selected']} a key head: {row['mass']:.2f}")
    axes.set(xlabel="layer", ylabel="attention mass on what the guess chose", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()


STUDY = Study(
    "low_bit_hits", __doc__, run, plot, arguments, {"tokens": 1536, "steps": 6, "samples": 1, "selected": [16, 64]}
)

if __name__ == "__main__":
    main(STUDY)
