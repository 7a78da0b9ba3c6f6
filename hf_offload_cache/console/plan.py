"""`hf-offload-cache plan`: what a cache will take, and whether a machine has it, this one or another. The table goes to
stdout."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import OffloadConfig, parse_memory, parse_size
from ..errors import BudgetError, ConfigError, UnsupportedModelError
from ..registry import cache_class
from ..report.report import size_text
from .arguments import (
    add_cache_arguments,
    add_goal_argument,
    add_model_arguments,
    add_verb,
    check_writable,
    in_options,
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
        "Choose a cache's fields for a memory limit. Print what it will use, what a step reads, whether this machine "
        "or one elsewhere has enough memory and disk, and whether it needs a cache at all. Reads the model's "
        "configuration, not its weights. Exit codes: 0 it fits, 1 it does not.",
        max_context="--context", max_batch="--batch",
    )  # fmt: skip
    add_model_arguments(parser, "name that `models` lists")
    add_cache_arguments(parser)
    add = parser.add_argument
    add("--context", metavar="TOKENS", type=positive, required=True, help="tokens per sequence, the answer included")
    add("--batch", metavar="N", type=positive, default=1, help="sequences (default: %(default)s)")
    add("--memory", metavar="SIZE",
        help="memory limit: 300MiB, bytes, or a fraction of the full KV cache: 1/13 (default: as the fields require). "
        "With a GPU: of device memory")
    add("--device-memory", metavar="SIZE",
        help="memory of a GPU on a machine elsewhere, e.g. 24GiB, for weights and cache; with --device cuda:0")
    add("--host-memory", metavar="SIZE",
        help="with a GPU: limit of the host memory, e.g. 64GiB; with --device-memory, what the machine elsewhere has")
    add("--free-memory", metavar="SIZE",
        help="plan for a machine elsewhere with so much free memory, e.g. 12GB; with --device-memory: free host memory")
    add("--free-disk", metavar="SIZE", help="plan for a disk elsewhere with so much free space, e.g. 200GB")
    add("--disk-speed", metavar="SIZE", help="bytes that the disk reads in a second, e.g. 500MB: prints a step's time")
    add_goal_argument(parser)
    add("--compare", action="store_true", help="all caches side by side, each with the fields that fit it best")
    add("--measured", metavar="FILE",
        help="with --compare and --memory: the file that `tune --compare` wrote (default: the shipped table)")
    add("--json", metavar="FILE", type=Path, help="write the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """0: this machine has enough; 1: it does not. Raises the library's errors for a wrong request."""
    if arguments.json is not None:
        check_writable(arguments.json)

    from . import named_cache

    folder = tempfile.gettempdir() if arguments.path is None else arguments.path
    named_cache.check_folder(folder)
    fields = dict(arguments.fields)
    if arguments.host_memory is not None:
        fields["host_memory"] = arguments.host_memory
    if arguments.device_memory is not None:
        parse_size(arguments.device_memory, "device_memory")
        if not (arguments.device or "").startswith("cuda"):
            raise ConfigError(
                f"--device-memory {arguments.device_memory} is the memory of a GPU on a machine elsewhere: give "
                "--device cuda:0 too, or leave it out"
            )
    sizes = {name: _size(arguments, name) for name in ("free_memory", "free_disk", "disk_speed")}
    if sizes["disk_speed"] == 0:
        raise ConfigError("--disk-speed must be at least one byte a second: use 500MB")
    if arguments.device_memory is not None and sizes["free_memory"] is not None:
        from ..core.budget import HOST_SHARE

        fields.setdefault("host_memory", math.floor(HOST_SHARE * sizes["free_memory"]))
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
    try:
        here = arguments.device_memory is None  # the device; memory and disk may be elsewhere
        geometry, of_weights = named_cache.load_geometry(arguments.model, arguments.dtype, arguments.device, here)
    except named_cache.ModelLoadError as error:
        if (arguments.device or "").startswith("cuda") and "cannot be used here" in str(error):
            advice = "or give --device-memory, such as 24GiB, to plan for a machine that has it"
            raise named_cache.ModelLoadError(f"{error}, {advice}") from error
        raise
    if not geometry.full_kv_bytes(arguments.context, arguments.batch):
        raise UnsupportedModelError("the model stores no keys and values: there is nothing to offload, and no plan")
    room = _room(arguments, geometry, fields, folder, sizes)
    do = _compare if arguments.compare else _plan
    result, fits = do(arguments, fields, geometry, room, str(folder), of_weights)
    if arguments.json is not None:
        asked = {"model": arguments.model, "context": arguments.context, "batch": arguments.batch}
        write_json(arguments.json, {**asked, **result})
    return 0 if fits else 1


def _memory(arguments: argparse.Namespace, geometry: Geometry) -> tuple[int | None, int]:
    """The memory limit, if any, and the full KV cache, in bytes."""
    full = geometry.full_kv_bytes(arguments.context, arguments.batch)
    return None if arguments.memory is None else parse_memory(arguments.memory, full), full


def _room(
    arguments: argparse.Namespace, geometry: Geometry, fields: dict[str, Any], folder: str | Path,
    sizes: dict[str, int | None],
) -> dict[str, int | None]:  # fmt: skip
    """Free bytes of each kind on the machine to plan for; None: unknown, as the disk of a machine elsewhere is. This
    machine is not asked for the `sizes` that the user gave."""
    from ..memory.machine import free_disk, free_memory

    memory, disk = sizes["free_memory"], sizes["free_disk"]
    if disk is None and _is_here(arguments):
        disk = free_disk(folder)
    if geometry.device != "cuda":
        return {"memory": free_memory(arguments.device or "cpu") if memory is None else memory, "disk": disk}
    host = None if fields.get("host_memory") is None else parse_size(fields["host_memory"], "host_memory")
    if arguments.device_memory is not None:
        device: int | None = parse_size(arguments.device_memory, "device_memory")
    else:
        device, memory = free_memory(arguments.device or "cuda"), free_memory() if memory is None else memory
    free = [one for one in (host, memory) if one is not None]
    return {"device memory": device, "host memory": min(free, default=None), "disk": disk}


def _size(arguments: argparse.Namespace, name: str) -> int | None:
    """The bytes of an option; "500MB/s" too. Raises `ConfigError`."""
    given: str | None = getattr(arguments, name)
    return None if given is None else parse_size(given.removesuffix("/s"), name)


def _speed_text(arguments: argparse.Namespace) -> str:
    return f"{arguments.disk_speed.removesuffix('/s')}/s"


def _is_here(arguments: argparse.Namespace) -> bool:
    """Whether the plan is for this machine: its memory and the engines that its disk has count then."""
    return arguments.device_memory is None and arguments.free_memory is None and arguments.free_disk is None


def _none_needed(arguments: argparse.Namespace, geometry: Geometry, room: dict[str, int | None]) -> str | None:
    """Why this machine needs no cache: weights and the full KV fit its memory. None if they do not, or may not."""
    name, whole = next(iter(room)), geometry.weight_bytes + _memory(arguments, geometry)[1]
    if (free := room[name]) is None or whole > free:
        return None
    return (
        f"you need no cache: weights and the full KV (DynamicCache) take {size_text(whole)}, and {size_text(free)} of "
        f"{name} are free; activations come on top"
    )


def _step(arguments: argparse.Namespace, config: OffloadConfig, read: int) -> tuple[str, float | None]:
    """A sentence that says what a step reads; with --disk-speed also its seconds, here and as a number."""
    place = "host memory" if config.engine == "memory" else "the disk"
    said = f"a step reads {size_text(read)} from {place} if it finds nothing in memory"
    speed = _size(arguments, "disk_speed")
    if speed is None:
        return said, None
    if config.engine == "memory":
        return f"{said}; --disk-speed does not matter for that", None
    return f"{said}: {read / speed:.3g} s at {_speed_text(arguments)}, less what runs while it computes", read / speed


def _needs(plan: MemoryPlan) -> dict[str, int]:
    own = plan.weight_bytes + plan.peak_bytes
    if plan.device == "cuda":
        return {"device memory": own, "host memory": plan.host_bytes, "disk": plan.disk_bytes}
    return {"memory": own + plan.host_bytes, "disk": plan.disk_bytes}


def _fits(plan: MemoryPlan, room: dict[str, int | None]) -> dict[str, bool | None]:
    """Whether each need fits the machine; None: unknown."""
    needs = _needs(plan)
    return {
        name: True if not needs[name] else None if free is None else needs[name] <= free for name, free in room.items()
    }


# ------------------------------------------------------------------------------------------------- one cache


def _plan(
    arguments: argparse.Namespace, fields: dict[str, Any], geometry: Geometry, room: dict[str, int | None], folder: str,
    of_weights: str | None,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Print the plan of one cache, and notes about the model. Returns values for JSON, and whether there is enough."""
    from ..core.budget import missed_goal, steps_over_host
    from ..tuning.which_cache import step_bytes
    from . import named_cache

    cls = named_cache.offloading_class(arguments.cache or named_cache.default_for(None))
    memory, here = _memory(arguments, geometry)[0], _is_here(arguments)
    limits = memory, arguments.context, arguments.batch
    fields = cls.choose_store(geometry, limits, fields, folder, arguments.goal, here)
    missed, none_needed = list[str](), _none_needed(arguments, geometry, room)
    if memory is None:
        config = cls.config_class.load(None, fields)
    else:
        try:
            config = cls.fit(geometry, memory, arguments.context, arguments.batch, fields, arguments.goal)
        except BudgetError as error:
            if none_needed is None:
                raise
            raise BudgetError(f"{error}; or leave the cache out: {none_needed}") from error
        missed = missed_goal(cls, arguments.goal, config, fields)
    plan = cls.plan(geometry, config, arguments.context, arguments.batch)
    needs, fits = _needs(plan), _fits(plan, room)
    _print(arguments, plan, config, room)
    read = step_bytes(geometry, config, arguments.context, arguments.batch)
    step, seconds = _step(arguments, config, read)
    print(step)
    over_host = steps_over_host(cls, geometry, config, arguments.context, arguments.batch)
    found = (*missed, *cls.notes(plan, config, geometry, fields), *over_host, none_needed)
    found += tuple(_of_model(arguments, of_weights))
    notes = [in_options(note, arguments) for note in found if note is not None]
    for note in notes:
        print(f"note: {note}")
    machine = {"needs": needs, "free": room, "fits": fits, "path": folder, "here": here}
    result = {
        "config": dataclasses.asdict(config), "plan": plan.to_dict(), "notes": notes, "machine": machine,
        "step": {"read_bytes": read, "seconds": seconds}, "none_needed": none_needed is not None,
    }  # fmt: skip
    return result, False not in fits.values()


def _of_model(arguments: argparse.Namespace, of_weights: str | None) -> list[str]:
    """Whether it has fewer positions, how its weights were counted, and where the configuration of a model that
    `models` lists comes from."""
    from .named_cache import known_model, load_positions

    said, positions = [], load_positions(arguments.model)
    if positions is not None and positions < arguments.context:
        said.append(f"the model has {positions:,} positions, and was not made for {arguments.context:,} tokens")
    said += [] if of_weights is None else [of_weights]
    if (known := known_model(arguments.model)) is not None:
        said.append(f"the configuration of {known.repository} is the one of {known.date} that this package has")
        said[-1] += "" if known.note is None else f"; {known.note}"
    return said


def _print(
    arguments: argparse.Namespace, plan: MemoryPlan, config: OffloadConfig, room: dict[str, int | None]
) -> None:
    columns = ("prefill", "decode")
    table = new_table("", *columns, right=columns, title=f"{arguments.batch} x {arguments.context:,} tokens")
    table.add_row("weights", *[size_text(plan.weight_bytes)] * 2)
    table.add_row("full KV (DynamicCache)", *[size_text(plan.full_kv_bytes)] * 2, end_section=True)
    limits = (config.memory, config.host_memory) if plan.device == "cuda" else (config.memory, None)
    for (*owners, (kind, *sums)), limit in zip((rows for rows in plan.rows() if rows), limits, strict=False):
        for row in owners:
            table.add_row(*row)
        table.add_section()
        table.add_row("this cache" if kind == "sum" else f"{kind} of this cache", *sums)
        budget = "-" if limit is None else size_text(parse_size(limit))
        table.add_row("budget" if kind == "sum" else f"{kind} budget", *[budget] * 2, end_section=True)
    table.add_row("on disk", *[size_text(plan.disk_bytes)] * 2)
    console = new_console(highlight=False, soft_wrap=True)
    console.print(table)
    of_device, host = (" of device memory", size_text(plan.host_bytes)) if plan.device == "cuda" else ("", "")
    peak = f"peak: {size_text(plan.peak_bytes)}{of_device}" + (f" ({plan.share})" if plan.share else "")
    console.print(peak + (f", {host} of host memory" if host else ""))
    values, defaults = dataclasses.asdict(config), dataclasses.asdict(type(config)())
    changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
    console.print("fields: " + (" ".join(changed) or "all default"))
    verdicts = {True: "fits", False: "[red]does not fit[/red]", None: "it is unknown whether that fits"}
    for name, fits in _fits(plan, room).items():
        parts = {"disk": "records", "host memory": "records, tables and buffers"}.get(name, "weights and cache")
        free = "unknown" if (free_bytes := room[name]) is None else size_text(free_bytes)
        console.print(f"{name}: {parts} need {size_text(_needs(plan)[name])}, free {free}: {verdicts[fits]}")


# ------------------------------------------------------------------------------------------------- all caches


def _compare(
    arguments: argparse.Namespace, fields: dict[str, Any], geometry: Geometry, room: dict[str, int | None], folder: str,
    of_weights: str | None,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Print the plans of all caches, and notes about the model. Returns values for JSON, and whether any fits."""
    from ..tuning.which_cache import compare_plans, measured_caches, shape_of, which_cache

    cells = measured_caches(arguments.measured, shape_of(arguments.model or "the default model", geometry), fields)
    memory, full = _memory(arguments, geometry)
    here = _is_here(arguments)
    plans = compare_plans(geometry, memory, arguments.context, arguments.batch, fields, path=folder, here=here)
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
    table = _side_by_side(plans, f"{arguments.batch} x {arguments.context:,} tokens")
    if (speed := _size(arguments, "disk_speed")) is not None:
        table.add_row(f"seconds for that at {_speed_text(arguments)}", *[_seconds(one, speed) for one in plans])
    console.print(table)
    none_needed = _none_needed(arguments, geometry, room)
    for note in (none_needed, *_of_model(arguments, of_weights)):
        if note is not None:
            print(f"note: {note}")
    for one in plans:
        missing = cache_class(one.name).missing()
        said = one.notes if one.plan is not None else (one.refused or "",)
        for note in (*said, *((missing,) if missing else ())):
            console.print(f"{one.name}: {in_options(note, arguments)}", markup=False)
    console.print(f"these fit {'this' if here else 'that'} machine: {', '.join(names) or 'none of them'}")
    for goal, choice in chosen.items():
        console.print(f"for {goal}: {choice.why.splitlines()[0]}", markup=False)
    result = {
        "plans": [one.to_dict() for one in plans],
        "machine": {"free": room, "fits": names, "path": folder, "here": here},
        "none_needed": none_needed is not None,
        "chosen": {goal: choice.plan.to_dict() for goal, choice in chosen.items()},
    }
    return result, bool(names)


def _seconds(one: ComparedPlan, speed: int) -> str:
    """The seconds in which the disk reads what a step needs; "-" if nothing is read from it, or it is unknown."""
    unknown = one.read_bytes is None or one.config is None or one.config.engine == "memory"
    return "-" if unknown else f"{(one.read_bytes or 0) / speed:.3g}"


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
        "in host memory, outside --memory": sizes("host_bytes"),
        "tokens attended to in full": ["-" if one.attended is None else f"{one.attended:,}" for one in plans],
        "read per step, none in memory": [
            "-" if one.read_bytes is None else size_text(one.read_bytes) for one in plans
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
