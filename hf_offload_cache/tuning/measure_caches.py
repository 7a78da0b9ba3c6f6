"""Measures all caches in one memory size, on this model and machine, for `offload_cache` to choose from."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import OffloadConfig, at_least, parse_memory
from ..core.cache import OffloadCache
from ..core.filling import prefill
from ..errors import BudgetError, ConfigError, UnsupportedModelError
from ..memory.machine import free_memory
from ..model.geometry import Geometry
from ..model.place import inner_model
from ..model.plain_caches import dynamic_cache
from ..registry import cache_class
from ..report.report import size_text
from ..stores.engines import choose_engine, resolve_engine
from .by_trial import distance, perplexity_over
from .sample import Progress, sample_ids, windows
from .task import machine_of
from .which_cache import compare_plans, identity_of, written

# Several caches decode one text in turns, so that a slower phase of the machine affects all of them

TURN = 8
"""Steps of one cache before the next one's turn."""

Followed = tuple[torch.Tensor, list[float]]
"""Logits (steps, V) and seconds of the steps."""


@dataclass(frozen=True)
class Contender:
    """A cache that decodes with others."""

    model: Any
    """The model it runs on."""
    open: Callable[[], contextlib.AbstractContextManager[Any]]
    """Creates it, empty; the end of the `with` closes it."""


def without_seams(model: Any) -> Any:
    """A copy of `model` that shares its weights, for caches that are not ours, because our hooks on a model slow down
    every cache. The model itself if its weights are spread over devices, which its own modules know."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return model
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def together(needs: Mapping[str, int], room: int | None) -> list[list[str]]:
    """Names in their order, grouped so that each group fits `room` bytes (None: all in one); what does not fit is
    alone."""
    groups: list[list[str]] = []
    taken = 0
    for name, needed in needs.items():
        if groups and (room is None or taken + needed <= room):
            groups[-1].append(name)
            taken += needed
        else:
            groups.append([name])
            taken = needed
    return groups


def follow_in_turns(
    contenders: Mapping[str, Contender], ids: torch.Tensor, steps: int,
    on_step: Callable[[float, str], object] = lambda done, name: None,
) -> dict[str, Followed]:  # fmt: skip
    """Run ids (1, T) through each cache. They are prefilled in pieces if the model allows it, and the last `steps`
    tokens are decoded one by one, whatever the model would predict. Each turn takes `TURN` tokens, forth and back over
    the caches. All caches are open, and use memory, at the same time.

    Returns by name the logits (steps, V), float32 on the host, after each token, and the seconds of each step, at whose
    end the model's device has finished. `on_step` gets the finished share, from 0 to 1, and a name, in this thread.
    """
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = {}
        for number, (name, one) in enumerate(contenders.items()):
            on_step(number / (2 * len(contenders)), name)
            opened[name] = stack.enter_context(one.open())
            prefill(one.model, ids[:, :-steps], opened[name])
        for number, turn in enumerate(ids[:, -steps:].split(TURN, 1)):
            for name in opened if number % 2 == 0 else reversed(opened):
                on_step((1 + number * TURN / steps) / 2, name)
                model = contenders[name].model
                for token in turn.split(1, 1):
                    start = time.perf_counter()
                    logits = model(input_ids=token, past_key_values=opened[name], use_cache=True).logits[0, -1]
                    outputs[name].append(logits.float().cpu())
                    seconds[name].append(time.perf_counter() - start)
    return {name: (torch.stack(outputs[name]), seconds[name]) for name in contenders}


_DYNAMIC, _EXACT = "DynamicCache", "an exact OffloadCache"
_OF_ONE = ("max_batch", "trace")
"""Fields that caches open at once do not share."""


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
    """Measure each cache of the registry within `memory`, and `DynamicCache`, on the same texts, token by token.

    Texts are prefilled in pieces. Caches are open at once and decode in turns, so that a slower phase of the machine
    affects all of them: that takes `memory` for each of them, and the full KV for `DynamicCache`. If that is more than
    half of this machine's free memory, those that fit decode in turns, and the others after them. If the full KV is
    more on its own, `DynamicCache` is left out, and distances are from an exact `OffloadCache`, which gives the same
    output.

    Args:
        model: a decoder-only `PreTrainedModel`.
        tokenizer: the model's; needed unless `texts` are token ids.
        memory: of each cache: bytes, "300MiB", or a share of the full KV of a text.
        max_context: tokens of each text, or as many as the longest has; the last `steps` of them are decoded, and the
            first 8 of these not timed.
        texts: texts to measure on: a string, or strings, or token ids; None: Python's help texts.
        samples: stretches of text.
        path: folder on the disk to use; None: the temporary folder.
        progress: show a bar on stderr; in a notebook a widget, without a terminal one line at the end.
        fields: fields for all caches.

    Returns plain JSON values, as `measured_caches` reads them. "cells": for each cache that fits, "cache", "tokens",
    "memory", "kl" in nats and "perplexity" relative to the reference's, and "seconds" per step, the median; "refused":
    why the others are missing; "turns": the groups timed together; "reference", "model" (another one refuses the
    table), "fields", "machine". Raises `ConfigError`, `StoreError`, and `BudgetError` if no cache fits.
    """
    inner = inner_model(model)
    at_least(max_context=max_context, samples=samples, steps=steps)
    if steps < 2:
        raise ConfigError(f"steps must be at least 2, got {steps}: perplexity needs a token that follows another")
    for name in _OF_ONE:
        if name in fields:
            raise ConfigError(f"{name} cannot be set: caches open at the same time do not share it; leave it out")
    geometry = Geometry.of(inner)
    if not geometry.layers:
        raise UnsupportedModelError(f"{type(inner).__name__} has no layer that could be offloaded: nothing to measure")
    stretches = windows(sample_ids(texts, tokenizer), samples, TURN + steps + 2, max_context)
    held = len(stretches[0])
    full, free = geometry.full_kv_bytes(held, 1), free_memory(geometry.device)
    used, room = resolve_engine(fields, path), None if free is None else free // 2
    limit = parse_memory(memory, full)
    plans = compare_plans(geometry, limit, held, 1, fields, installed=True, path=path)
    refused = [f"{one.name}: {one.refused}" for one in plans if one.plan is None]
    fitting = {one.name: one for one in plans if one.plan is not None}
    if not fitting:
        raise BudgetError(f"no cache fits {memory}: {'; '.join(refused)}")
    contenders, needs = {}, {}
    for name, one in fitting.items():
        cls: Any = cache_class(name)
        contenders[name] = Contender(inner, functools.partial(cls, inner, path=path, config=one.config))
        assert one.plan is not None
        needs[name] = one.plan.peak_bytes + (0 if geometry.device == "cuda" else one.plan.host_bytes)
    if room is None or full <= room:
        plain = without_seams(inner)
        whole = Contender(plain, lambda: contextlib.nullcontext(dynamic_cache(plain)))
        reference, contenders, needs = _DYNAMIC, {_DYNAMIC: whole, **contenders}, {_DYNAMIC: full, **needs}
    else:
        reference = _EXACT
        refused.append(f"{_DYNAMIC}: needs {size_text(full)}, half of this machine's free memory is {size_text(room)}")
    turns = together(needs, room)
    passes = [{name: contenders[name] for name in names} for names in turns]
    if reference == _EXACT:
        common = {field.name for field in dataclasses.fields(OffloadConfig)}
        shared = {name: value for name, value in used.items() if name in common and name != "exact"}
        make = functools.partial(OffloadCache, inner, path=path, exact=True, **shared)
        passes.insert(0, {_EXACT: Contender(inner, make)})
    measurements: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name in contenders}
    with Progress(1.0, progress) as bar:
        bar.begin("sample text: ", 1.0)
        for number, ids in enumerate(stretches):
            row = ids[None].to(inner.device)
            ran: dict[str, Followed] = {}
            for count, opened in enumerate(passes):
                done = bar.within(number * len(passes) + count, len(stretches) * len(passes))
                ran |= follow_in_turns(opened, row, steps, done)
            exact = ran[reference][0]
            for name, measured in measurements.items():
                logits, seconds = ran[name]
                worse = perplexity_over(exact, logits, ids[None, -steps:])
                assert worse is not None
                measured.append((distance(exact, logits)["kl"], worse, seconds[min(TURN, steps - 1) :]))
    cells = []
    for name, measured in measurements.items():
        distances, perplexities, times = zip(*measured, strict=True)
        cell = {"cache": name, "tokens": held, "memory": f"{limit}/{full}" if name in fitting else "1"}
        cell |= {"kl": statistics.mean(distances), "perplexity": statistics.geometric_mean(perplexities)}
        cells.append({**cell, "seconds": statistics.median(one for run in times for one in run)})
    store = choose_engine(used["engine"], tempfile.gettempdir() if path is None else path)[1]
    return {"model": identity_of(inner), "machine": machine_of(inner, store), "fields": written(fields),
            "reference": reference, "turns": turns, "cells": cells, "refused": refused}  # fmt: skip
