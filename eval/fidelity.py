"""Compare all caches and their floors on real text and planted needles: what does each lose at a memory budget?"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_offload_cache.console import build_prompt, prefilled_tokens
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.errors import BudgetError
from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import CACHES
from hf_offload_cache.tuning import distance, perplexity_over, sample_ids

from . import bench_text
from .baselines.in_memory import SINKS, quantized_share, window_tokens
from .fidelity_contenders import FIXED, FLOORS, contenders, missing
from .fidelity_pictures import draw_front, draw_layers
from .fidelity_tables import LONGEST_NEEDLES, markdown, shipped, summarised
from .kvpress_contender import PRESSES, KVPress
from .needles import make_needles
from .studies.common import Rows, Study, main, write_json
from .studies.contexts import (
    MODEL,
    Context,
    default_model,
    follow,
    open_cache,
    peak_share,
    prefill,
    reference_texts,
    replay,
    share,
)
from .studies.quality_needles_budget import NEW_TOKENS, REFERENCE, ask
from .studies.teacher_forced import measure
from .studies.watch import Look, Watch

Contenders = dict[str, dict[str, Any]]
"""Name, as "disk-swap 1/13" -> fields."""
BUDGETS = ("1/4", "1/6.5", "1/13", "1/20", "1/34")
PARTS = ("text", "needles", "perplexity", "long", "speed")


@dataclass(frozen=True)
class Run:
    """Setting that all parts share."""

    arguments: argparse.Namespace
    rows: Rows
    model: Any
    tokenizer: Any
    press: KVPress | None = None


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add rows of each "part"; existing ones are not measured again. Raises `ValueError` for kvpress with another model
    than the default one: it counts the bytes of all layers."""
    if arguments.kvpress and arguments.model:
        raise ValueError(f"--kvpress measures on the default model, got --model {arguments.model}: leave one out")
    model, tokenizer = default_model(loaded, arguments.model)
    names = []
    for name in arguments.caches:
        if (why := missing(name, model)) is None:
            names.append(name)
        else:
            rows.say(f"{name}: left out: {why}")
    everyone = contenders(names, arguments.memory)
    few = contenders([name for name in names if name not in FIXED], arguments.few)
    with contextlib.ExitStack() as stack:
        press = stack.enter_context(KVPress(arguments.kvpress, model)) if arguments.kvpress else None
        shared = Run(arguments, rows, model, tokenizer, press)
        for tokens in arguments.tokens:
            if "text" in arguments.parts:
                _texts(shared, everyone, tokens)
            if "needles" in arguments.parts:
                _needles(shared, everyone, tokens)
            if "perplexity" in arguments.parts:
                _perplexity(shared, few, tokens)
        if "long" in arguments.parts:
            _long(shared, few)
        if "speed" in arguments.parts:
            _speed(shared, everyone)
    summary = summarised(rows.rows)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(summary), encoding="utf-8")
    if arguments.shipped:
        write_json(arguments.shipped, shipped(summary))
    return summary


def _texts(shared: Run, everyone: Contenders, tokens: int) -> None:
    """Each contender follows the same texts: distance to `DynamicCache`, attention mass."""
    arguments, rows, model, press = shared.arguments, shared.rows, shared.model, shared.press
    pressed = [f"{one} {memory}" for one in PRESSES for memory in arguments.memory] if press else []
    for sample, ids in enumerate(reference_texts(shared.tokenizer, arguments.samples, tokens + arguments.steps)):
        key = {"part": "text", "tokens": tokens, "sample": sample}
        left = [name for name in (*everyone, *pressed) if not rows.has(name=name, **key)]
        if not left:
            continue
        context, new = prefill(model, ids[:, :tokens]), ids[:, tokens:]
        room = tokens + arguments.steps
        windows = {name: None for name in left if name.startswith("window")}
        reference, masses = _reference(model, context, new, [_memory(name) for name in windows], room)
        for name in left:
            try:
                row = _text(model, context, new, reference, name, everyone.get(name), arguments.path, press, room)
            except BudgetError as error:
                row = {"refused": str(error)}
            if name in windows and "kl" in row:
                layers = masses[_memory(name)]
                row |= {"mass": sum(layers) / len(layers), "worst": min(layers), "layer_mass": layers}
            rows.add(**key, name=name, **row)


def _memory(name: str) -> str:
    return name.rpartition(" ")[2]


def _reference(
    model: Any, context: Context, new: torch.Tensor, windows: list[str], room: int
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """An exact cache's logits, and the share of its attention mass, by layer, that each window would see."""
    kept = {}
    for memory in windows:
        with contextlib.suppress(BudgetError):
            kept[memory] = window_tokens(share(memory), room)
    seen: dict[str, dict[int, list[float]]] = {memory: {one: [] for one in context.full} for memory in kept}

    def told(look: Look) -> None:
        for memory, count in kept.items():
            own = look.weights.shape[1]
            latest = look.weights[:, max(SINKS, own - 1 - count + SINKS) :]
            seen[memory][look.layer_idx].append(float((look.weights[:, :SINKS].sum(-1) + latest.sum(-1)).mean()))

    with open_cache(model, {"exact": True, "engine": "memory"}, room) as cache:
        replay(cache, model, context)
        with Watch(cache, context.keys, told):  # type: ignore[arg-type]
            logits = follow(model, cache, new)
    return logits, {memory: [sum(own) / len(own) for own in layers.values()] for memory, layers in seen.items()}


def _text(
    model: Any, context: Context, new: torch.Tensor, reference: torch.Tensor, name: str, fields: dict[str, Any] | None,
    path: str | None, press: KVPress | None, room: int,
) -> dict[str, Any]:  # fmt: skip
    kind, _, memory = name.rpartition(" ")
    if fields is not None and kind not in (*FIXED, "window"):
        row = measure(model, context, new, fields, reference, path)
        return {field: row[field] for field in _KEPT if field in row}
    if fields is None:
        assert press is not None
        logits, held = press.follow(kind, share(memory), context.ids, new)
        held_share = held / context.full_bytes
    else:
        with open_cache(model, fields, room) as cache:
            logits = follow(model, replay(cache, model, context), new)
        bits = int(kind[0]) if kind in FIXED else 0
        held_share = quantized_share(model, bits, room) if bits else window_tokens(share(memory), room) / room
    return {**distance(reference, logits), "perplexity": perplexity_over(reference, logits, new),
            "peak_share": held_share}  # fmt: skip


_KEPT = (
    "kl", "top1", "perplexity", "peak_share", "window_bytes", "mass", "worst", "layer_mass", "attended", "hit_rate",
)  # fmt: skip


def _needles(shared: Run, everyone: Contenders, tokens: int) -> None:
    """Needles are asked for, of those that `DynamicCache` knows."""
    arguments, rows, tokenizer = shared.arguments, shared.rows, shared.tokenizer
    known = argparse.Namespace(path=arguments.path, known=True)
    for planted in (1, 4):
        key = {"part": "needles", "tokens": tokens, "planted": planted}
        needles = list(make_needles(tokenizer, arguments.documents, min(tokens, LONGEST_NEEDLES), 0, planted))
        ask(known, rows, everyone, needles, shared.model, tokenizer, **key)
        for sample, needle in enumerate(needles) if shared.press else ():
            if not rows.has(sample=sample, name=REFERENCE, answered=True, **key):
                continue
            ids = build_prompt(tokenizer, needle.document, needle.question)
            for name in (f"{one} {memory}" for one in PRESSES for memory in arguments.memory):
                if not rows.has(sample=sample, name=name, **key):
                    row = _pressed_answer(shared, name, ids, needle.code)
                    rows.add(sample=sample, name=name, **key, depth=needle.depth, prompt=ids.shape[1], **row)


def _pressed_answer(shared: Run, name: str, ids: torch.Tensor, code: str) -> dict[str, Any]:
    assert shared.press is not None
    kind, _, memory = name.rpartition(" ")
    ends = shared.model.generation_config.eos_token_id
    end = list(ends) if isinstance(ends, list) else [ends]
    said = shared.press.answer(kind, share(memory), ids, prefilled_tokens(ids.shape[1]), NEW_TOKENS, end)
    text = str(shared.tokenizer.decode(said, skip_special_tokens=True)).strip()
    return {"code": code, "answered": code in text, "text": text}


PROMPT, LAST = 512, 256
"""Tokens before a long output, and those at its end that are compared."""


def _long(shared: Run, everyone: Contenders) -> None:
    """A short prompt, then a long text token by token: distance at its end."""
    tokens = PROMPT + shared.arguments.output
    ids = sample_ids(None, shared.tokenizer)[0][: tokens + 1].unsqueeze(0)
    _go_on(shared, everyone, ids, PROMPT, LAST + 1, {"part": "long", "tokens": tokens})


def _perplexity(shared: Run, everyone: Contenders, tokens: int) -> None:
    """Over many more tokens than distances need: perplexities of few tell nothing."""
    samples, scored = shared.arguments.samples, shared.arguments.scored
    for sample, ids in enumerate(reference_texts(shared.tokenizer, samples, tokens + scored)):
        _go_on(shared, everyone, ids, tokens, scored, {"part": "perplexity", "tokens": tokens, "sample": sample})


def _go_on(shared: Run, everyone: Contenders, ids: torch.Tensor, prompt: int, last: int, key: dict[str, Any]) -> None:
    """Each contender reads ids (1, T) token by token behind a prompt: distance over the last."""
    rows, model = shared.rows, shared.model
    if all(rows.has(name=name, **key) for name in everyone):
        return
    context, end = prefill(model, ids[:, :prompt]), ids[:, -last:]

    def said(cache: Any) -> torch.Tensor:
        replay(cache, model, context)
        if prompt < ids.shape[1] - last:
            follow(model, cache, ids[:, prompt:-last])
        return follow(model, cache, end)

    with open_cache(model, None, 0) as cache:
        reference = said(cache)
    for name, fields in everyone.items():
        if rows.has(name=name, **key):
            continue
        try:
            with open_cache(model, fields, ids.shape[1], shared.arguments.path) as cache:
                logits = said(cache)
                peak = peak_share(cache) if isinstance(cache, OffloadCache) else {}
            row = {**distance(reference, logits), "perplexity": perplexity_over(reference, logits, end)}
            row |= {"uncertain": uncertainty(reference, logits, end), **peak}
        except BudgetError as error:
            row = {"refused": str(error)}
        rows.add(**key, name=name, **row)


def uncertainty(reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> float:
    """The standard error of the logarithm of `perplexity_over`, steps taken as independent; of three tokens or more."""
    following, cost = ids[0, 1:], torch.nn.functional.cross_entropy
    one, other = (cost(said[:-1].float(), following, reduction="none") for said in (logits, reference))
    return float((one - other).std() / len(following) ** 0.5)


def _speed(shared: Run, everyone: Contenders) -> None:
    """Steps of all caches in turns, with those in memory; needs an idle machine, and all of torch's threads. Caches
    timed in an earlier run are timed again with the others: times of two runs are of two machines."""
    arguments, rows, model = shared.arguments, shared.rows, shared.model
    for tokens in arguments.tokens:
        key = {"part": "speed", "tokens": tokens}
        ours = {}
        earlier = [row["name"].rpartition(" ") for row in rows.where(**key)]
        before = {name: one for cache, _, memory in earlier for name, one in contenders([cache], [memory]).items()}
        for name, fields in {**before, **everyone}.items():
            if name.split()[0] in CACHES:
                with contextlib.suppress(BudgetError), open_cache(model, fields, tokens + _TIMED, arguments.path):
                    ours[name] = fields
        if all(rows.has(name=name, **key) for name in ours):
            continue
        rows.drop(**key)
        ids = bench_text.text_rows(sample_ids(None, shared.tokenizer)[0], 1, tokens + _TIMED + 1)
        options: dict[str, Any] = {"shared_prefill": True, "path": arguments.path}
        if Geometry.of(model).kept:  # a StaticCache keeps windows in an order of its own
            options["in_memory"] = (bench_text.DYNAMIC,)
        found = bench_text.run(model, ids, tokens, _TIMED, tokens, ours, say=rows.say, **options)
        for name, row in found.items():
            rows.add(**key, name=name, **{field: row[field] for field in ("median_seconds", "quartiles")})


_TIMED = 48

STUDY = Study(
    "fidelity", __doc__, run,
    {
        "tokens": ([1024, 2048, 4096, 7936], "tokens of contexts"),
        "steps": (48, "tokens decoded after a text, teacher-forced"),
        "samples": (2, "texts of each length"),
        "documents": (8, "documents of each length, with one needle, and with four"),
        "scored": (1024, "tokens of a perplexity, after a text"),
        "output": (1024, "tokens of a long output, teacher-forced"),
        "memory": (list(BUDGETS), "shares of the full KV"),
        "few": (["1/4", "1/13"], "shares of the full KV, for parts of many tokens"),
        "caches": ([*CACHES, *FLOORS, *FIXED], "names (default: all)"),
        "parts": (list(PARTS), "what to measure", PARTS),
        "kvpress": (str, "an interpreter that has kvpress, whose presses are then measured too"),
        "markdown": (Path, "file for the tables"),
        "shipped": (Path, "file for the table that offload_cache chooses from"),
        **MODEL,
    },
    {"tokens": [768], "steps": 6, "samples": 1, "documents": 1, "scored": 12, "output": 300, "memory": ["1/4", "1/13"]},
    plots={"plot": draw_front, "plot-layers": draw_layers}, size=(7.5, 4.2), module="eval.fidelity",
    of_a_run=("parts", "tokens", "memory", "few", "caches", "kvpress", "markdown", "shipped"),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
