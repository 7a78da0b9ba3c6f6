"""Rows by trying: a method names candidates, each decodes the same texts on this machine, and every row has the
fastest of those that come nearest to an exact cache."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from ..config import SelectiveConfig
from ..errors import BudgetError
from ..stores.engines import choose_engine
from .grid import rows_for, sample_sizes
from .progress import Progress
from .task import Task
from .trial import LEAD, RECITED, Found, Trial
from .tuned import Tuned

NEAR, NOISE = 1.25, 0.005
"""A distance within so many times the least, and so many nats, is as good as it."""


def tune_by_trial(task: Task, settings: SelectiveConfig) -> Tuned:
    """Try the candidates that fit the largest batch and context, with the fields that they would have there, on samples
    of one sequence, through the disk. Raises `BudgetError` where none fits.

    Of those that fit a row, it has the fastest whose distance from an exact cache is not far over the least (`NEAR`,
    `NOISE`): the mean over text that goes on and over parts of the context that are recited.
    """
    inner, (text, recitals) = task.model, (16, 3) if task.quick else (48, 6)
    store = choose_engine(settings.engine, task.directory)[1]
    candidates = _candidates(task)
    tried = _that_fit(task, candidates)
    steps = text + recitals * (LEAD + RECITED)
    context, _ = sample_sizes(inner, settings.attended(task.max_context), task.max_context, steps)
    wanted = task.samples or (3 if task.quick else 20)
    stretches = task.stretches(wanted, 2 * settings.attended(task.max_context) + text, context + text)
    found: dict[int, list[Found]] = {index: [] for index in tried}
    with Progress(task.seconds, task.progress) as bar:
        bar.begin("sample text: ", 1.0)
        for number, ids in enumerate(stretches):
            before, done = bar.seconds_left, bar.within(number, len(stretches))
            done(0.0, f"reading {len(ids) - text:,} tokens")
            trial = Trial(inner, ids, len(ids) - text, recitals)
            for place, (index, config) in enumerate(tried.items()):
                done((place + 1) / (len(tried) + 1), _named(candidates[index]))
                with task.measured(inner, path=task.path, config=config) as cache:
                    found[index].append(trial.of(cache))
            if bar.seconds_left < before - bar.seconds_left:
                break
    means = {index: _mean(each) for index, each in found.items()}
    rows, left_out = _rows(task, candidates, means)
    results = {
        "trials": [{"candidate": candidates[index], **_rounded(mean)} for index, mean in means.items()],
        "rows": rows,
        "left_out": left_out,
    }
    sample = {"texts": len(found[min(found)]), "context": len(stretches[0]) - text, "steps": steps}
    return Tuned(task.values(store, sample, results), None)


def _candidates(task: Task) -> list[dict[str, Any]]:
    """Of the method's candidates what the user's fields leave to choose, each once."""
    left = [
        {name: value for name, value in one.items() if name not in task.fields}
        for one in task.measured.candidates(task.fields)
    ]
    return [one for place, one in enumerate(left) if one not in left[:place]]


def _fitted(task: Task, candidate: dict[str, Any], batch: int, context: int) -> Any:
    """The configuration for a row. Raises `BudgetError`."""
    return task.measured.fit(task.geometry, task.share(batch), context, batch, {**task.fields, **candidate})


def _that_fit(task: Task, candidates: list[dict[str, Any]]) -> dict[int, Any]:
    """By place of a candidate, its configuration for the largest row, without that row's limits."""
    found, refusals = {}, []
    for index, candidate in enumerate(candidates):
        try:
            config = _fitted(task, candidate, task.max_batch, task.max_context)
        except BudgetError as error:
            refusals.append(error)
        else:
            found[index] = dataclasses.replace(config, memory=None, max_context=None, max_batch=None)
    if not found:
        raise refusals[-1]
    return found


def _rows(
    task: Task, candidates: list[dict[str, Any]], means: dict[int, Found]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, and the pairs that no candidate which was tried fits."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    batches, contexts = rows_for(task.max_batch, task.max_context)
    for batch, context in ((batch, context) for batch in batches for context in contexts):
        fitting, why = {}, ""
        for index in means:
            try:
                fitting[index] = _fitted(task, candidates[index], batch, context)
            except BudgetError as error:
                why = str(error)
        if not fitting:
            left_out.append({"batch": batch, "context": context, "why": why})
            continue
        best = best_of({index: means[index] for index in fitting})
        config = fitting[best]
        rows.append(
            {
                "batch": batch,
                "context": context,
                "fields": _naming(config, {**task.fields, **candidates[best]}),
                "decided": sorted(candidates[best]),
                **_rounded(means[best]),
                "memory": task.share(batch),
                "planned_bytes": task.measured.plan(task.geometry, config, context, batch).peak_bytes,
            }
        )
    return rows, left_out


def _naming(config: SelectiveConfig, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and what else has to be named for the same configuration: what is as the others have it is not."""
    limits = ("memory", "max_context", "max_batch")
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config) if one.name not in limits}
    fields |= given
    for name in sorted(fields.keys() - given.keys()):
        others = {other: value for other, value in fields.items() if other != name}
        if getattr(type(config).load(None, others), name) == fields[name]:
            fields = others
    return fields


def best_of(means: dict[int, Found]) -> int:
    """The fastest that is near the least distance."""
    distances = {index: (mean.text_distance + mean.recital_distance) / 2 for index, mean in means.items()}
    least = min(distances.values())
    near = [index for index, distance in distances.items() if distance <= NEAR * least + NOISE]
    return min(near, key=lambda index: means[index].seconds)


def _mean(found: list[Found]) -> Found:
    return Found(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


def _rounded(found: Found) -> dict[str, float]:
    return {name: round(value, 6) for name, value in dataclasses.asdict(found).items()}


def _named(candidate: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in candidate.items()) or "the fields given"
