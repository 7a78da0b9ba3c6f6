"""`hf-offload-cache plan`: what a cache will take, and whether this machine has it. The table goes to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import GOALS, OffloadConfig, parse_memory
from ..errors import ConfigError
from ..registry import cache_class
from ..report.report import size_text
from .arguments import (
    add_cache_arguments,
    add_model_arguments,
    add_verb,
    check_writable,
    new_console,
    new_table,
    positive,
    write_json,
)

if TYPE_CHECKING:
    from ..memory.plan import MemoryPlan
    from ..model.geometry import Geometry
    from ..tuning.which_cache import ComparedPlan


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "plan", run, "show the memory that a cache will use, before it runs",
        "Choose a cache's fields for a memory limit. Print what it will use, and whether this machine has enough "
        "memory and disk. Reads the model's configuration, not its weights. Exit codes: 0 it fits, 1 it does not.",
        max_context="--context", max_batch="--batch",
    )  # fmt: skip
    add_model_arguments(parser)
    add_cache_arguments(parser)
    add = parser.add_argument
    add("--context", metavar="TOKENS", type=positive, required=True, help="tokens per sequence, the answer included")
    add("--batch", metavar="N", type=positive, default=1, help="sequences (default: %(default)s)")
    add("--memory", metavar="SIZE",
        help="memory limit: 300MiB, bytes, or a fraction of the full KV cache: 1/13 (default: as the fields require)")
    add("--goal", choices=GOALS,
        help="with --memory: fidelity, for steps closer to full attention, or speed (default: as for_budget)")
    add("--compare", action="store_true", help="all caches side by side, each with the fields that fit it best")
    add("--measured", metavar="FILE",
        help="with --compare and --memory: the file that `tune --compare` wrote (default: the shipped table)")
    add("--json", metavar="FILE", type=Path, help="write the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """0: this machine has enough; 1: it does not. Raises the library's errors for a wrong request."""
    if arguments.json is not None:
        check_writable(arguments.json)

    from ..memory.machine import free_disk, free_memory
    from . import named_cache

    folder = tempfile.gettempdir() if arguments.path is None else arguments.path
    named_cache.check_folder(folder)
    fields = dict(arguments.fields)
    if arguments.measured is not None and not (arguments.compare and arguments.memory):
        raise ConfigError(
            f"--measured {arguments.measured} needs --compare and --memory: it tells which of all caches is best at a "
            "memory limit; give both, or leave it out"
        )
    if arguments.goal is not None and (arguments.memory is None or arguments.compare):
        raise ConfigError(
            f"--goal {arguments.goal} needs --memory: it chooses one cache's fields for that memory; give both, and no "
            "--compare, or leave it out"
        )
    if not arguments.compare:
        name = arguments.cache or named_cache.default_for(None)
        named_cache.offloading_class(name)
        named_cache.check_fields(name, fields, arguments.path, arguments.memory, arguments.goal)
    elif arguments.cache is not None:
        raise ConfigError(f"--cache {arguments.cache} and --compare: all caches are compared, leave one of both out")
    else:
        OffloadConfig.load(None, fields)
    geometry = named_cache.load_geometry(arguments.model, arguments.dtype, arguments.device)
    room = {"memory": free_memory(arguments.device or geometry.device), "disk": free_disk(folder)}
    result, fits = (_compare if arguments.compare else _plan)(arguments, fields, geometry, room, str(folder))
    if arguments.json is not None:
        asked = {"model": arguments.model, "context": arguments.context, "batch": arguments.batch}
        write_json(arguments.json, {**asked, **result})
    return 0 if fits else 1


def _memory(arguments: argparse.Namespace, geometry: Geometry) -> tuple[int | None, int]:
    """The memory limit, if any, and the full KV cache, in bytes."""
    full = geometry.full_kv_bytes(arguments.context, arguments.batch)
    return None if arguments.memory is None else parse_memory(arguments.memory, full), full


def _needs(plan: MemoryPlan) -> dict[str, int]:
    return {"memory": plan.weight_bytes + plan.peak_bytes + plan.host_bytes, "disk": plan.disk_bytes}


def _fits(plan: MemoryPlan, room: dict[str, int | None]) -> dict[str, bool | None]:
    """Whether each need fits this machine; None: unknown."""
    return {name: None if free is None else _needs(plan)[name] <= free for name, free in room.items()}


# ------------------------------------------------------------------------------------------------- one cache


def _plan(
    arguments: argparse.Namespace, fields: dict[str, Any], geometry: Geometry, room: dict[str, int | None], folder: str
) -> tuple[dict[str, Any], bool]:
    """Print the plan of one cache. Returns values for JSON, and whether this machine has enough."""
    from ..core.budget import missed_goal
    from . import named_cache

    cls = named_cache.offloading_class(arguments.cache or named_cache.default_for(None))
    fields = cls.choose_store(geometry, arguments.context, arguments.batch, fields, folder)
    memory, _ = _memory(arguments, geometry)
    missed: list[str] = []
    if memory is None:
        config = cls.config_class.load(None, fields)
    else:
        config = cls.fit(geometry, memory, arguments.context, arguments.batch, fields, arguments.goal)
        missed = missed_goal(cls, arguments.goal, config, fields)
    plan = cls.plan(geometry, config, arguments.context, arguments.batch)
    needs, fits = _needs(plan), _fits(plan, room)
    _print(arguments, plan, config, room)
    notes = [*missed, *cls.notes(plan, config, geometry, fields)]
    for note in notes:
        print(f"note: {note}")
    machine = {"needs": needs, "free": room, "fits": fits, "path": folder}
    result = {"config": dataclasses.asdict(config), "plan": plan.to_dict(), "notes": notes, "machine": machine}
    return result, False not in fits.values()


def _print(
    arguments: argparse.Namespace, plan: MemoryPlan, config: OffloadConfig, room: dict[str, int | None]
) -> None:
    columns = ("prefill", "decode")
    table = new_table("", *columns, right=columns, title=f"{arguments.batch} x {arguments.context:,} tokens")
    table.add_row("weights", *[size_text(plan.weight_bytes)] * 2)
    table.add_row("full KV (DynamicCache)", *[size_text(plan.full_kv_bytes)] * 2, end_section=True)
    for owner in dict.fromkeys((*plan.prefill, *plan.decode)):
        table.add_row(owner, *(size_text(each.get(owner, 0)) for each in (plan.prefill, plan.decode)))
    table.add_section()
    table.add_row("this cache", size_text(plan.prefill_bytes), size_text(plan.decode_bytes))
    table.add_row("budget", *[size_text(int(config.memory)) if config.memory else "-"] * 2)
    table.add_row("on disk", *[size_text(plan.disk_bytes)] * 2)
    if plan.host_bytes:
        table.add_row("in host memory, outside the budget", *[size_text(plan.host_bytes)] * 2)
    console = new_console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"peak: {size_text(plan.peak_bytes)}" + (f" ({plan.share})" if plan.share else ""))
    values, defaults = dataclasses.asdict(config), dataclasses.asdict(type(config)())
    changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
    console.print("fields: " + (" ".join(changed) or "all default"))
    verdicts = {True: "fits", False: "[red]does not fit[/red]", None: "it is unknown whether that fits"}
    for name, fits in _fits(plan, room).items():
        parts = {"memory": "weights and cache", "disk": "records"}[name]
        free = "unknown" if (free_bytes := room[name]) is None else size_text(free_bytes)
        console.print(f"{name}: {parts} need {size_text(_needs(plan)[name])}, free {free}: {verdicts[fits]}")


# ------------------------------------------------------------------------------------------------- all caches


def _compare(
    arguments: argparse.Namespace, fields: dict[str, Any], geometry: Geometry, room: dict[str, int | None], folder: str
) -> tuple[dict[str, Any], bool]:
    """Print the plans of all caches. Returns values for JSON, and whether this machine has enough for any."""
    from ..tuning.which_cache import compare_plans, measured_caches, shape_of, which_cache

    cells = measured_caches(arguments.measured, shape_of(arguments.model or "the default model", geometry), fields)
    memory, full = _memory(arguments, geometry)
    plans = compare_plans(geometry, memory, arguments.context, arguments.batch, fields, path=folder)
    fitting = [one for one in plans if one.plan is not None and False not in _fits(one.plan, room).values()]
    names = [one.name for one in fitting]
    chosen = {}
    if memory is not None and names:
        goals = {"fidelity": ("fidelity", "long-prompt"), "speed": ("speed", "long-prompt"),
                 "fidelity of long outputs": ("fidelity", "long-output")}  # fmt: skip
        chosen = {
            goal: which_cache(fitting, cells, memory / full, arguments.context, *hints) for goal, hints in goals.items()
        }
    console = new_console(highlight=False, soft_wrap=True)
    console.print(_side_by_side(plans, f"{arguments.batch} x {arguments.context:,} tokens"))
    for one in plans:
        missing = cache_class(one.name).missing()
        for note in (*(one.notes if one.plan is not None else (one.refused,)), *((missing,) if missing else ())):
            console.print(f"{one.name}: {note}", markup=False)
    console.print(f"these fit this machine: {', '.join(names) or 'none of them'}")
    for goal, choice in chosen.items():
        console.print(f"for {goal}: {choice.why.splitlines()[0]}", markup=False)
    result = {
        "plans": [one.to_dict() for one in plans],
        "machine": {"free": room, "fits": names, "path": folder},
        "chosen": {goal: choice.plan.to_dict() for goal, choice in chosen.items()},
    }
    return result, bool(names)


def _side_by_side(plans: list[ComparedPlan], title: str) -> Any:
    """A table with a column for each plan."""
    columns = [one.name for one in plans]
    table = new_table("", *columns, right=columns, title=title)

    def sizes(name: str) -> list[str]:
        return ["-" if one.plan is None else size_text(getattr(one.plan, name)) for one in plans]

    shares = ["-" if one.plan is None else one.plan.share.removesuffix(" of the full KV") or "-" for one in plans]
    rows = {
        "fits": ["no" if one.plan is None else "yes" for one in plans],
        "memory in prefill": sizes("prefill_bytes"),
        "memory in decoding": sizes("decode_bytes"),
        "share of the full KV": [share.removesuffix(" the full KV") for share in shares],
        "on disk": sizes("disk_bytes"),
        "in host memory, outside the budget": sizes("host_bytes"),
        "tokens attended to in full": ["-" if one.attended is None else f"{one.attended:,}" for one in plans],
        "read per step, none in memory": [
            "-" if one.read_bytes is None else size_text(one.read_bytes) for one in plans
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
