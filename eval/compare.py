"""Methods side by side on one model's weights and one context, in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from .contenders import SLOW, Setting, models, needs, reason_against
from .replay import REPLAY_LIKENESS, Replay, replay_shape
from .synthetic import LLAMA_1B, LLAMA_8B, SMOLLM2, Shape

LIKENESS = 0.97
"""Of successive inputs of a shape with a model's weights: gives about the hit rate of the real model on text, 0.75."""

SHAPES: dict[str, Shape] = {"smollm2": SMOLLM2, "llama-1b": LLAMA_1B, "replay": replay_shape()}


def setting_of(name: str, tokens: int, batch: int = 1, **fields: Any) -> Setting:
    """A setting on one of `SHAPES`; a replay's staging buffers are shared by as many layers as the large model has."""
    depth = LLAMA_8B.layers if name == "replay" else None
    return Setting(SHAPES[name], tokens, batch, depth=depth, **fields)


def compare(
    setting: Setting, methods: Iterable[str], overlaps: tuple[str, ...] = ("on", "off"), steps: int = 20,
    reload_steps: int = 3, repetitions: int = 5, disk_limit: int = 20 << 30, memory_limit: int = 8 << 30,
    say: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """All methods on one model's weights and one context, in turns, forth and back (ABBA); a row a method.

    A method of `SLOW`, which moves the whole history in each step, takes `reload_steps` a repetition. What cannot run,
    or would take more disk or memory than the limits beside those before it, is named in "left_out" with the reason.
    Times are cold: each row's "cold" says by which means.
    """
    likeness = REPLAY_LIKENESS if setting.shape.hidden <= 8 * setting.shape.heads else LIKENESS
    room = 32 + steps * (repetitions * len(overlaps) + 1)
    setting = replace(setting, room=max(setting.room, room))
    left_out: dict[str, str] = {}
    memory, disk = 0, 0
    with contextlib.ExitStack() as stack:
        plain, attached = models(setting)
        contenders: list[Replay] = []
        for name in methods:
            own_memory, own_disk = needs(name, setting)
            reason = reason_against(name, setting)
            if reason is None and (memory + own_memory > memory_limit or disk + own_disk > disk_limit):
                reason = f"takes {own_memory >> 20:,} MiB of memory and {own_disk >> 20:,} of disk beside the others"
            if reason is not None:
                left_out[name] = reason
                continue
            memory, disk = memory + own_memory, disk + own_disk
            say(f"{name}: a context of {setting.batch} x {setting.tokens:,} tokens")
            contenders.append(Replay(name, setting, plain, attached, likeness, room))
            stack.callback(contenders[-1].close)
        for one in contenders:
            one.settle()
        for turn in range(repetitions):
            for one in contenders if turn % 2 == 0 else contenders[::-1]:
                for overlap in overlaps:
                    one.steps(reload_steps if one.name in SLOW else steps, overlap)
        rows = {one.name: one.summary() for one in contenders}
        for name, row in rows.items():
            for mode in overlaps:
                say(f"{name}, overlap {mode}: {_shown(row[mode])}")
    return {
        **{key: value for key, value in asdict(setting).items() if key not in ("shape", "memory")},
        "shape": asdict(setting.shape), "memory": None if setting.memory is None else str(setting.memory),
        "full_kv_bytes": setting.full_kv_bytes, "likeness": likeness, "threads": torch.get_num_threads(), "rows": rows,
        "left_out": left_out,
    }  # fmt: skip


def _shown(row: dict[str, Any]) -> str:
    text = f"{1e3 * row['median_seconds']:.1f} ms a step"
    text += f" (p95 {1e3 * row['p95_seconds']:.1f}, spread {row['spread']:.0%})"
    if "store_seconds" in row:
        text += f", in the store {1e3 * row['store_seconds']:.2f} ms"
    elif "stall_share" in row:
        text += f", waited {row['stall_share']:.1%}"
    return text
