"""Tunes by trial: caches decode the same texts on this machine with the values that a method names, and each row gets
the fastest of those closest to an exact cache."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..config import SelectiveConfig
from ..core.selective_cache import SelectiveCache
from ..errors import BudgetError
from ..stores.engines import choose_engine
from .fill import ObservedCache, attention_modules, fill, observed
from .sample import Progress, rows_for, sample_sizes
from .task import Task, Tuned

# Distances between the outputs of two caches, for tuning and benchmarks

def divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) in nats, per step: logits (..., V), or log probabilities, to (...)."""
    sure, other = reference.log_softmax(-1), logits.log_softmax(-1)
    return (sure.exp() * (sure - other)).sum(-1)


def distance(reference: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """For logits (..., V): the mean `divergence` over steps, and the share of steps with the same most likely token."""
    same = reference.argmax(-1) == logits.argmax(-1)
    return {"kl": float(divergence(reference, logits).mean()), "top1": float(same.float().mean())}


def perplexity_over(reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> float | None:
    """Perplexity of ids (1, S) by logits (S, V), each after the token at its position, over that by the reference's;
    None for a single token."""
    following = ids[0, 1:]
    if not following.numel():
        return None
    losses = [torch.nn.functional.cross_entropy(scores[:-1].float(), following) for scores in (logits, reference)]
    return float((losses[0] - losses[1]).exp())


# Fidelity and speed of a cache on one text

LEAD, RECITED = 8, 16
"""Tokens of a recital: its beginning, which identifies the place, and the tokens that can be known from there."""
RECITAL = LEAD + RECITED


@dataclass(frozen=True)
class Nearness:
    """Results of one cache."""

    seconds: float
    """Per step, the median."""
    text_distance: float
    """KL from the exact cache, nats per token, where the text continues; 0 if it does not."""
    recital_distance: float
    """The same where earlier parts of the text are recited: a cache that misses the place cannot predict them."""


class Trial:
    """Measures caches on `ids` (T,): the first `context` are put into each cache, then the others are decoded, and then
    `recitals` parts of the context, from evenly spaced places. Holds keys and values of the context in memory."""

    def __init__(self, model: Any, ids: torch.Tensor, context: int, recitals: int) -> None:
        ids = ids.to(model.device)
        self._text = len(ids) - context
        places = [(2 * part + 1) * (context - RECITAL) // (2 * recitals) for part in range(recitals)]
        self._fed = torch.cat([ids[context:], *(ids[place : place + RECITAL] for place in places)])
        self._model, self._modules = model, attention_modules(model)
        with ObservedCache(model, exact=True, engine="memory") as whole, torch.no_grad():
            model(input_ids=ids[None, :context], past_key_values=whole, use_cache=True, logits_to_keep=1)
            self._layers = {}
            for layer in whole.offloaded:
                keys, values = (part.clone() for part in layer.whole()[:2])
                self._layers[layer.layer_idx] = keys, values, observed(layer)
            logits = model(input_ids=self._fed[None], past_key_values=whole, use_cache=True).logits[0]
            self._exact = logits.float().cpu()

    def of(self, cache: SelectiveCache) -> Nearness:
        """Measure an empty cache, which is used up by this call."""
        for layer in cache.offloaded:
            fill(layer, self._modules[layer.layer_idx], *self._layers[layer.layer_idx])
        cache.storage.prefetcher.flush()
        logits, seconds = self._decode(cache)
        distances = divergence(self._exact, logits)
        recited = distances[self._text :].unflatten(0, (-1, RECITAL))[:, LEAD:]
        text = float(distances[: self._text].mean()) if self._text else 0.0
        return Nearness(statistics.median(seconds), text, float(recited.mean()))

    def _decode(self, cache: Any) -> tuple[torch.Tensor, list[float]]:
        """Logits (n, V), float32, after each token, and the seconds of each step."""
        all_logits, seconds = [], []
        with torch.no_grad():
            for token in self._fed.split(1):
                start = time.perf_counter()
                logits = self._model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0, -1]
                all_logits.append(logits.float().cpu())
                seconds.append(time.perf_counter() - start)
        return torch.stack(all_logits), seconds


_SAMPLE = 4096
"""Upper bound on a sample's tokens."""
NEAR, NOISE = 1.25, 0.005
"""A distance within this factor of the smallest, plus so many nats, counts as equal."""


def tune_by_trial(task: Task, settings: SelectiveConfig) -> Tuned:
    """Try the method's values, and those of `for_budget`, at the largest batch and context, on samples of one sequence.

    Each row gets the fastest configuration that fits it and whose distance from an exact cache is close to the smallest
    (`NEAR`, `NOISE`): the mean over continued text and over recited parts of the context. Raises `BudgetError` if not
    even the configuration of `for_budget` fits, and `ConfigError`.
    """
    inner, (text, recitals) = task.model, (16, 3) if task.quick else (48, 6)
    store = choose_engine(settings.engine, task.directory)[1]
    tried = _that_fit(task)
    context, steps = sample_sizes(inner, settings.attended(_SAMPLE), task.max_context, text + recitals * RECITAL)
    least = _least([config for _, config in tried], context)
    stretches = task.stretches(task.samples or (3 if task.quick else 20), least + text, context + text)
    measured: list[list[Nearness]] = [[] for _ in tried]
    with Progress(task.seconds, task.progress) as bar:
        bar.begin("sample text: ", 1.0)
        for number, ids in enumerate(stretches):
            before, done = bar.seconds_left, bar.within(number, len(stretches))
            done(0.0, f"reading {len(ids) - text:,} tokens")
            trial = Trial(inner, ids, len(ids) - text, recitals)
            places = range(len(tried))
            for count, place in enumerate(places if number % 2 == 0 else reversed(places)):
                fields, config = tried[place]
                done((count + 1) / (len(tried) + 1), _named(fields))
                with task.measured(inner, path=task.path, config=config) as cache:
                    measured[place].append(trial.of(cache))
            if bar.seconds_left < before - bar.seconds_left:
                break
    trials = [(fields, _mean(each)) for (fields, _), each in zip(tried, measured, strict=True)]
    rows, left_out = _rows(task, trials)
    results = {
        "trials": [{"fields": fields, **_rounded(mean)} for fields, mean in trials],
        "rows": rows,
        "left_out": left_out,
    }
    sample = {"texts": len(measured[0]), "context": len(stretches[0]) - text, "steps": steps}
    return Tuned(task.values(store, sample, results), None)


def _least(configs: list[SelectiveConfig], context: int) -> int:
    """Tokens of which each configuration leaves a third unread, and which are long enough to recite from; at most
    `context`."""
    lengths = range(4 * RECITAL, context, 32)
    long_enough = (held for held in lengths if all(one.tokens_fetched(held) * 3 // 2 <= held for one in configs))
    return next(long_enough, context)


def _fitted(task: Task, fields: dict[str, Any], batch: int, context: int) -> Any:
    """The configuration for a row. Raises `BudgetError`."""
    return task.measured.fit(task.geometry, task.share(batch), context, batch, {**task.fields, **fields})


def _that_fit(task: Task) -> list[tuple[dict[str, Any], Any]]:
    """Candidate fields next to the user's, with their configuration for the largest row, without that row's limits;
    each configuration once. The first is that of `for_budget`, and names no fields."""
    candidates: list[tuple[dict[str, Any], Any]] = []
    for one in ({}, *task.measured.to_try(task.fields)):
        fields = {name: value for name, value in one.items() if name not in task.fields}
        try:
            config = _fitted(task, fields, task.max_batch, task.max_context)
        except BudgetError:
            if not candidates:
                raise
            continue
        config = dataclasses.replace(config, memory=None, max_context=None, max_batch=None)
        if not any(config == other for _, other in candidates):
            candidates.append((fields, config))
    return candidates


def _rows(
    task: Task, trials: list[tuple[dict[str, Any], Nearness]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, and the pairs for which the budget is too small."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    batches, contexts = rows_for(task.max_batch, task.max_context)
    for batch, context in ((batch, context) for batch in batches for context in contexts):
        fitting: list[tuple[Nearness, dict[str, Any], Any]] = []
        try:
            for fields, mean in trials:
                with contextlib.suppress(BudgetError) if fitting else contextlib.nullcontext():
                    fitting.append((mean, fields, _fitted(task, fields, batch, context)))
        except BudgetError as error:
            left_out.append({"batch": batch, "context": context, "why": str(error)})
            continue
        mean, fields, config = fitting[best_of([mean for mean, *_ in fitting])]
        rows.append(
            {
                "batch": batch,
                "context": context,
                "fields": _naming(config, {**task.fields, **fields}),
                "tried": fields,
                **_rounded(mean),
                "memory": task.share(batch),
                "planned_bytes": task.measured.plan(task.geometry, config, context, batch).peak_bytes,
            }
        )
    return rows, left_out


def _naming(config: SelectiveConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that name this configuration: those `given`, and others whose values do not follow from the rest."""
    limits = ("memory", "max_context", "max_batch")
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config) if one.name not in limits}
    fields |= given
    for name in sorted(fields.keys() - given.keys()):
        others = {other: value for other, value in fields.items() if other != name}
        if getattr(type(config).load(None, others), name) == fields[name]:
            fields = others
    return fields


def best_of(means: list[Nearness]) -> int:
    """Index of the fastest close to the smallest distance."""
    distances = [(mean.text_distance + mean.recital_distance) / 2 for mean in means]
    least = min(distances)
    near = [place for place, distance in enumerate(distances) if distance <= NEAR * least + NOISE]
    return min(near, key=lambda place: means[place].seconds)


def _mean(found: list[Nearness]) -> Nearness:
    return Nearness(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


def _rounded(found: Nearness) -> dict[str, float]:
    return {name: round(value, 6) for name, value in dataclasses.asdict(found).items()}


def _named(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "what for_budget chooses"
