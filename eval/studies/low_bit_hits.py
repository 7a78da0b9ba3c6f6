"""How much of a token's attention lies on the tokens that a guess of it selected? (SpeCache, section 3.3)"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from .common import Rows, Study, main
from .contexts import default_model, follow, open_cache, prefill, reference_texts, replay
from .teacher_forced import text_options
from .watch import Look, Watch


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each text, number of selected tokens, and selection by the guess or by the token itself."""
    model, tokenizer = default_model(loaded)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        left = [(count, guess) for count in arguments.selected for guess in (True, False)]
        left = [one for one in left if not rows.has(sample=sample, selected=one[0], guess=one[1])]
        if not left:
            continue
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        for count, guess in left:
            masses: list[list[tuple[float, float]]] = [[] for _ in context.keys]
            fields = {"cache": "spec", "bits": arguments.bits, "quant_group": arguments.group, "num_selected": count}
            with open_cache(model, {**fields, "speculative": guess}, 0, arguments.path) as cache:
                replay(cache, model, context)

                def told(look: Look, cache: Any = cache, masses: Any = masses) -> None:
                    copied = cache.layers[look.layer_idx].predictor.copy.tokens
                    masses[look.layer_idx].append(look.between(cache.config.num_sinks, copied))

                with Watch(cache, context.keys, told):  # type: ignore[arg-type]
                    follow(model, cache, new)
            held, best = np.array(masses).mean(1).T
            mean = {"mass": float(held.mean()), "best": float(best.mean()), "worst": float(held.min())}
            rows.add(sample=sample, selected=count, guess=guess, **mean, layer_mass=held.tolist())
    return {"means": _means(rows)}


def _means(rows: Rows) -> list[dict[str, Any]]:
    means = []
    for selected, guess in dict.fromkeys((row["selected"], row["guess"]) for row in rows.rows):
        same = rows.where(selected=selected, guess=guess)
        mean = {name: float(np.mean([row[name] for row in same])) for name in ("mass", "best")}
        layers = np.mean([row["layer_mass"] for row in same], 0).tolist()
        means.append({"selected": selected, "guess": guess, **mean, "worst": min(layers), "layer_mass": layers})
    return means


STUDY = Study(
    "low_bit_hits", __doc__, run,
    {
        **text_options(tokens=4096, steps=32, samples=4),
        "selected": ([16, 32, 64, 128, 256], "tokens selected by each key head"),
        "bits": (2, "bits of the copy"),
        "group": (64, "quantization group"),
    },
    {"tokens": 1536, "steps": 6, "samples": 1, "selected": [16, 64]},
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
