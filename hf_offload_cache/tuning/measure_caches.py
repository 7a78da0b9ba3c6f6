"""All caches in one memory, on this model and machine: what `offload_cache` chooses from."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..config import parse_memory
from ..errors import BudgetError, ConfigError, UnsupportedModelError
from ..model.dynamic_cache import dynamic_cache
from ..model.geometry import Geometry
from ..model.inner_model import inner_model
from ..registry import CACHES, cache_class
from ..stores.engines import resolve_engine
from .progress import Progress
from .sample import sample_ids, windows
from .tunable import at_least

_FIRST = 8
"""Steps after a prompt that are not timed: caches try out what is faster."""


def measure_caches(
    model: Any,
    tokenizer: Any = None,
    *,
    memory: int | str,
    max_context: int,
    texts: Iterable[Any] | str | None = None,
    samples: int = 2,
    steps: int = 40,
    path: str | Path | None = None,
    progress: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """Each cache of the registry within `memory`, and `DynamicCache`, on the same texts, token by token.

    Args:
        model: a decoder-only `PreTrainedModel`.
        tokenizer: the model's; needed unless `texts` are token ids.
        memory: bytes, "300MiB", or a share of the full KV of a text.
        max_context: tokens of each text, or as many as the longest has; the last `steps` of them are decoded, and the
            first 8 of these not timed. `DynamicCache` holds them, too: this machine has to have memory for that.
        texts: what to measure on: a string, or strings, or token ids; None: Python's help texts.
        samples: stretches of text.
        path: folder on the disk to use; None: the temporary folder.
        progress: show a bar on stderr, where that is a terminal.
        fields: fields that all caches have, to stay as they are.

    Returns {"cells": [...]}, plain JSON values, as `measured_caches` reads them: of each cache that fits "cache",
    "tokens", "memory", "kl" in nats and "perplexity" to `DynamicCache`'s, and "seconds" of a step, the median. Raises
    `ConfigError`, `StoreError`, and `BudgetError` where no cache fits.
    """
    inner = inner_model(model)
    at_least(max_context=max_context, samples=samples, steps=steps)
    if steps < 2:
        raise ConfigError(f"steps must be at least 2, got {steps}: a perplexity is of tokens that follow another")
    geometry = Geometry.of(inner)
    if not geometry.layers:
        raise UnsupportedModelError(f"{type(inner).__name__} has no layer that could be offloaded: nothing to measure")
    stretches = windows(sample_ids(texts, tokenizer), samples, _FIRST + steps + 2, max_context)
    held = len(stretches[0])
    full = geometry.full_kv_bytes(held, 1)
    limit = parse_memory(memory, full)
    fields = resolve_engine(fields, path)
    fitted, refused = {}, []
    for name in CACHES:
        cls = cache_class(name)
        try:
            fitted[name] = cls, cls.fit(geometry, limit, held, 1, fields)
        except BudgetError as error:
            refused.append(f"{name}: {error}")
    if not fitted:
        raise BudgetError(f"no cache fits {memory}: {'; '.join(refused)}")
    found: dict[str, list[tuple[float, float, list[float]]]] = {"DynamicCache": [], **{name: [] for name in fitted}}
    with Progress(1.0, progress) as bar:
        bar.begin("sample text: ", 1.0)
        for number, ids in enumerate(stretches):
            done, row = bar.within(number, len(stretches)), ids[None].to(inner.device)
            done(0.0, "DynamicCache")
            reference, seconds = _followed(inner, dynamic_cache(inner), row, steps)
            found["DynamicCache"].append((0.0, 0.0, seconds))
            for count, (name, (cls, config)) in enumerate(fitted.items(), 1):
                done(count / (1 + len(fitted)), name)
                with cls(inner, path=path, config=config) as cache:
                    logits, seconds = _followed(inner, cache, row, steps)
                found[name].append((*_distance(reference, logits, row[0, -steps + 1 :]), seconds))
    shares = {name: f"{limit}/{full}" for name in fitted}
    cells = []
    for name, measured in found.items():
        distances, losses, times = zip(*measured, strict=True)
        cell = {"cache": name, "tokens": held, "memory": shares.get(name, "1")}
        cell |= {"kl": statistics.mean(distances), "perplexity": math.exp(statistics.mean(losses))}
        cells.append({**cell, "seconds": statistics.median(one for run in times for one in run)})
    return {"cells": cells, "refused": refused}


def _followed(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[float]]:
    """Logits (steps, V), float32, after each of the last `steps` tokens of ids (1, T), and seconds of these steps but
    for the first ones."""
    said, seconds = [], []
    with torch.no_grad():
        model(input_ids=ids[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for token in ids[:, -steps:].split(1, 1):
            start = time.perf_counter()
            said.append(model(input_ids=token, past_key_values=cache, use_cache=True).logits[0, -1].float())
            seconds.append(time.perf_counter() - start)
    return torch.stack(said), seconds[min(_FIRST, steps - 1) :]


def _distance(reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> tuple[float, float]:
    """KL in nats, and how much more the text's tokens (S - 1,) cost in nats, means over steps."""
    sure, other = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (sure.exp() * (sure - other)).sum(-1).mean()
    losses = [torch.nn.functional.nll_loss(part[:-1], following) for part in (other, sure)]
    return float(kl), float(losses[0] - losses[1])
