"""`hf-offload-cache plan`: what a cache will hold, and whether this machine holds it. The table goes to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    add_cache_argument,
    add_field_argument,
    add_model_arguments,
    check_writable,
    new_console,
    positive,
    write_json,
)

if TYPE_CHECKING:
    from ..config import OffloadConfig
    from ..memory.plan import MemoryPlan
    from ..tuning.which_cache import Cell, Chosen, ComparedPlan


# What each cache of the registry would hold in the same memory, as a table

def comparison_of_plans(plans: list[ComparedPlan], title: str) -> Any:
    """A column a plan; of a cache that has several, how many tokens a step of the others attends to."""
    from rich.table import Table

    from ..report.report import size_text

    table = Table(title=title)
    table.add_column("", style="bold")
    for one in plans:
        wider = "" if one.num_selected is None else f"\n{one.num_selected:,} tokens"
        table.add_column(f"{one.name}{wider}", justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    def size(one: ComparedPlan, name: str) -> str:
        return "-" if one.plan is None else size_text(getattr(one.plan, name))

    row("fits", *("yes" if one.plan is not None else "no" for one in plans))
    row("held in prefill", *(size(one, "prefill_bytes") for one in plans))
    row("held in decoding", *(size(one, "decode_bytes") for one in plans))
    shares = ("-" if one.plan is None else one.plan.share.removesuffix(" of the full KV") or "-" for one in plans)
    row("of the full KV", *(share.removesuffix(" the full KV") for share in shares))
    row("on disk", *(size(one, "disk_bytes") for one in plans))
    row("in host memory, beside", *(size(one, "host_bytes") for one in plans))
    row("tokens attended, as they are", *("-" if one.attended is None else f"{one.attended:,}" for one in plans))
    reads = ("-" if one.read_bytes is None else size_text(one.read_bytes) for one in plans)
    row("read a step, if nothing is in memory", *reads)
    return table


def recommended(
    plans: list[ComparedPlan], cells: list[Cell], memory: float, context: int
) -> dict[str, Chosen]:
    """Of plans that fit the one to take, by what is wanted: each goal for a long prompt, and fidelity for long outputs.

    `cells` and `memory`, a share, as `which_cache` takes them.
    """
    from ..tuning.which_cache import which_cache

    wanted = {"fidelity": ("fidelity", "long-prompt"), "speed": ("speed", "long-prompt"),
              "fidelity of long outputs": ("fidelity", "long-output")}  # fmt: skip
    return {name: which_cache(plans, cells, memory, context, *both) for name, both in wanted.items()}


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("plan", help="what a cache will hold in a given memory, before it runs")
    parser.description = (
        "Choose a cache's fields for a budget and print what it will hold, and whether this machine's memory and disk "
        "hold it. Reads a model's configuration, not its weights. Exit codes: 0 it fits, 1 it does not."
    )
    add_model_arguments(parser)
    add_cache_argument(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("--context", metavar="TOKENS", type=positive, required=True, help="tokens a sequence, the answer included")
    add("--batch", metavar="N", type=positive, default=1, help="sequences (default: %(default)s)")
    add("--memory", metavar="SIZE", help="300MiB, bytes, or of the full KV: 1/13 (default: what the fields take)")
    add("--compare", action="store_true", help="all caches side by side, each with the fields that fit it best")
    add("--measured", metavar="FILE",
        help="with --compare and --memory: what `tune --compare` wrote of it (default: the shipped table)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="write the plan as JSON")
    parser.set_defaults(run=run, parser=parser)
    parser.set_defaults(argument_names={"max_context": "--context", "max_batch": "--batch"})


def run(arguments: argparse.Namespace) -> int:
    """0: this machine holds it; 1: it does not. Raises the library's errors for a wrong request."""
    if arguments.json is not None:
        check_writable(arguments.json)

    from ..config import parse_memory
    from ..errors import ConfigError
    from ..memory.machine import free_disk, free_memory
    from ..stores.engines import choose_engine
    from . import named_cache

    folder = tempfile.gettempdir() if arguments.path is None else arguments.path
    named_cache.check_folder(folder)
    fields = dict(arguments.fields)
    if arguments.measured is not None and not (arguments.compare and arguments.memory):
        raise ConfigError(
            f"--measured {arguments.measured} needs --compare and --memory: it tells which of all caches is best in a "
            "memory; give both, or leave it out"
        )
    if arguments.compare:
        return _compare(arguments, fields, str(folder))
    name = arguments.cache or named_cache.default_for(None)
    cls = named_cache.offloading_class(name)
    named_cache.check_fields(name, fields, arguments.path, arguments.memory)
    geometry = named_cache.load_geometry(arguments.model, arguments.dtype, arguments.device)
    if fields.get("engine", "auto") == "auto":
        fields["engine"] = choose_engine("auto", folder)[0]
    full = geometry.full_kv_bytes(arguments.context, arguments.batch)
    if arguments.memory is None:
        config = cls.config_class.load(None, fields)
    else:
        memory = parse_memory(arguments.memory, full)
        config = cls.fit(geometry, memory, arguments.context, arguments.batch, fields)
    plan = cls.plan(geometry, config, arguments.context, arguments.batch)
    room = {"memory": free_memory(arguments.device or geometry.device), "disk": free_disk(folder)}
    needs = {"memory": plan.weight_bytes + plan.peak_bytes + plan.host_bytes, "disk": plan.disk_bytes}
    fits = {name: None if free is None else needs[name] <= free for name, free in room.items()}
    _print(arguments, plan, config, needs, room, fits)
    notes = cls.notes(plan, config, geometry, fields)
    for note in notes:
        print(f"note: {note}")
    if arguments.json is not None:
        chosen = dataclasses.asdict(config)
        values = {"model": arguments.model, "context": arguments.context, "batch": arguments.batch}
        machine = {"needs": needs, "free": room, "fits": fits, "path": str(folder)}
        result = {**values, "config": chosen, "plan": plan.to_dict(), "notes": notes, "machine": machine}
        write_json(arguments.json, result)
    return 1 if False in fits.values() else 0


def _compare(arguments: argparse.Namespace, fields: dict[str, Any], folder: str) -> int:
    """0: some cache fits the memory and this machine's; 1: none does."""

    from ..config import OffloadConfig, parse_memory
    from ..errors import ConfigError
    from ..memory.machine import free_disk, free_memory
    from ..registry import cache_class
    from ..stores.engines import choose_engine
    from ..tuning.which_cache import compare_plans, measured_caches, shape_of
    from . import named_cache

    if arguments.cache is not None:
        raise ConfigError(f"--cache {arguments.cache} and --compare: all caches are compared, leave one of both out")
    OffloadConfig.load(None, dict(fields))
    geometry = named_cache.load_geometry(arguments.model, arguments.dtype, arguments.device)
    cells = measured_caches(arguments.measured, shape_of(arguments.model or "the default model", geometry), fields)
    if fields.get("engine", "auto") == "auto":
        fields["engine"] = choose_engine("auto", folder)[0]
    full = geometry.full_kv_bytes(arguments.context, arguments.batch)
    memory = None if arguments.memory is None else parse_memory(arguments.memory, full)
    every = compare_plans(geometry, memory, arguments.context, arguments.batch, fields, wider=memory is not None)
    room, disk = free_memory(arguments.device or geometry.device), free_disk(folder)
    held = []
    for one in every:
        if one.plan is not None:
            needed = one.plan.weight_bytes + one.plan.peak_bytes + one.plan.host_bytes
            if (room is None or needed <= room) and (disk is None or one.plan.disk_bytes <= disk):
                held.append(one)
    fitting = [one.name for one in held if one.num_selected is None]
    chosen = {}
    if memory is not None and fitting:
        chosen = recommended(held, cells, memory / full, arguments.context)
    best = [found.plan for found in chosen.values()]
    plans = [one for one in every if one.num_selected is None or one in best]
    console = new_console(highlight=False, soft_wrap=True)
    console.print(comparison_of_plans(plans, f"{arguments.batch} x {arguments.context:,} tokens"))
    for one in (one for one in every if one.num_selected is None):
        missing = cache_class(one.name).missing()
        for said in (*(one.notes if one.plan is not None else (one.refused,)), *((missing,) if missing else ())):
            console.print(f"{one.name}: {said}", markup=False)
    console.print(f"this machine holds: {', '.join(fitting) or 'none of them'}")
    for wanted, found in chosen.items():
        console.print(f"for {wanted}: {found.why.splitlines()[0]}", markup=False)
    if arguments.json is not None:
        values = {"model": arguments.model, "context": arguments.context, "batch": arguments.batch}
        machine = {"free": {"memory": room, "disk": disk}, "fits": fitting, "path": folder}
        taken = {wanted: found.plan.to_dict() for wanted, found in chosen.items()}
        write_json(arguments.json, {**values, "plans": [one.to_dict() for one in plans], "machine": machine,
                                    "chosen": taken})  # fmt: skip
    return 0 if fitting else 1


def _print(
    arguments: argparse.Namespace,
    plan: MemoryPlan,
    config: OffloadConfig,
    needs: dict[str, int],
    room: dict[str, int | None],
    fits: dict[str, bool | None],
) -> None:
    from rich.table import Table

    from ..report.report import size_text

    table = Table(title=f"{arguments.batch} x {arguments.context:,} tokens")
    table.add_column("", style="bold")
    table.add_column("prefill", justify="right")
    table.add_column("decode", justify="right")
    table.add_row("weights", *[size_text(plan.weight_bytes)] * 2)
    table.add_row("full KV (DynamicCache)", *[size_text(plan.full_kv_bytes)] * 2, end_section=True)
    for owner in dict.fromkeys((*plan.prefill, *plan.decode)):
        table.add_row(owner, *(size_text(rows.get(owner, 0)) for rows in (plan.prefill, plan.decode)))
    ratio = f" ({plan.share})" if plan.share else ""
    table.add_section()
    table.add_row("this cache", size_text(plan.prefill_bytes), size_text(plan.decode_bytes))
    table.add_row("budget", *[size_text(int(config.memory)) if config.memory else "-"] * 2)
    table.add_row("on disk", *[size_text(plan.disk_bytes)] * 2)
    if plan.host_bytes:
        table.add_row("in host memory, beside the budget", *[size_text(plan.host_bytes)] * 2)
    console = new_console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"peak: {size_text(plan.peak_bytes)}{ratio}")
    default = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    chosen = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}
    console.print("fields: " + (" ".join(f"{name}={value}" for name, value in chosen.items()) or "all default"))
    words = {True: "fits", False: "[red]does not fit[/red]", None: "cannot be told here"}
    for name, what in (("memory", "weights and cache"), ("disk", "records")):
        held = room[name]
        free = "unknown" if held is None else size_text(held)
        console.print(f"{name}: {what} need {size_text(needs[name])}, free {free}: {words[fits[name]]}")
