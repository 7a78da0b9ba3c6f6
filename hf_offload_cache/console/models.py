"""`hf-offload-cache models`: which open models fit a machine's memory, and with how long a context. The models'
configurations are data of this package, so that no Hub is asked. The table goes to stdout."""

from __future__ import annotations

import argparse
import bisect
import functools
import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import parse_size
from ..errors import BudgetError, ConfigError
from ..report.report import size_text
from .arguments import add_verb, check_writable, new_table, stdout_console, write_json

if TYPE_CHECKING:
    import torch

    from ..model.geometry import Geometry

GB = 10**9
RESERVED = {"cpu": 2 * GB, "cuda": GB}
"""Bytes of a machine's memory, and of a GPU's, that are not counted: the system, the program and its activations."""
SHARE = 13
"""The full KV takes at most this many times the memory of a cache. The pages have figures for a thirteenth."""
_CUDA, _CPU = "cuda", "cpu"


@dataclass(frozen=True)
class KnownModel:
    """One model of the shipped table."""

    name: str
    repository: str
    """Its Hub page, whose config.json has these values."""
    copy: str
    """The public copy of config.json that was read, with its commit."""
    date: str
    """Of that commit, or the day of reading for a package."""
    parameters: int
    config: dict[str, Any]
    """The fields that determine sizes, for `AutoConfig.for_model`. Others, such as those of RoPE, are left out."""
    note: str | None = None

    @property
    def text(self) -> dict[str, Any]:
        """The configuration of the text model."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def positions(self) -> int:
        return int(self.text["max_position_embeddings"])

    def geometry(self, dtype: torch.dtype, device: str = _CPU) -> Geometry:
        """As `Geometry.of` has it for the model that transformers builds, up to the bytes of its buffers; without
        transformers. Every layer is full attention, but with a window only each `sliding_window_pattern`-th is."""
        from ..model.geometry import Geometry, KeptLayer

        text, heads, window = self.text, self.text["num_attention_heads"], self.text.get("sliding_window")
        dim, key_heads = text.get("head_dim") or text["hidden_size"] // heads, text["num_key_value_heads"]
        blocks = text["num_hidden_layers"]
        full = blocks if window is None else blocks // text["sliding_window_pattern"]
        kept = (KeptLayer(0, 2 * key_heads * dim * dtype.itemsize, window - 1),) * (blocks - full) if window else ()
        return Geometry.uniform(
            full, heads, key_heads, dim, dtype, kept=kept, weight_bytes=self.parameters * dtype.itemsize,
            num_blocks=blocks, hidden_size=text["hidden_size"], vocab_size=text["vocab_size"], device=device,
        )  # fmt: skip


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """The shipped table by name, smaller models first."""
    rows = json.loads(importlib.resources.files(__package__).joinpath("models.json").read_bytes())["models"]
    return {row["name"]: KnownModel(**row) for row in rows}


@dataclass(frozen=True)
class Longest:
    """The longest contexts of one sequence in a memory, in tokens."""

    full: int
    """With `DynamicCache`."""
    cached: int
    """With `DiskSwapCache`; as `full` if that is all positions."""
    disk_bytes: int = 0
    """Records of `cached` tokens on disk; 0: no cache is needed, or they lie in host memory."""


def longest(model: KnownModel, room: int, dtype: torch.dtype, device: str = _CPU) -> Longest | None:
    """The longest contexts in `room` bytes for weights and cache; None: the weights do not fit.

    The cache's context is the longest whose full KV takes at most `SHARE` times what the weights leave, and for which
    `for_budget` finds fields. On a GPU `room` is device memory, and records go to the disk."""
    from ..registry import cache_class

    cls, geometry = cache_class("disk-swap"), model.geometry(dtype, device)
    left = room - geometry.weight_bytes
    if left <= 0:
        return None

    def most_tokens(nbytes: int) -> int:
        tokens = range(model.positions + 1)
        return bisect.bisect_right(tokens, nbytes, key=lambda count: geometry.full_kv_bytes(count, 1)) - 1

    full, context = most_tokens(left), most_tokens(SHARE * left)
    while full < context:
        try:
            config = cls.fit(geometry, left, context, 1, {})
            return Longest(full, context, cls.plan(geometry, config, context, 1).disk_bytes)
        except BudgetError:  # it needs a little more than that share
            context = context * 15 // 16
    return Longest(full, full)


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "models", run, "show which open models fit a machine, and with how long a context",
        "List open models with their weights, their KV cache per token, and the longest context of one sequence with "
        "DynamicCache and with DiskSwapCache, computed as `plan` does, from configurations that this package has. "
        "Their names can be given to plan --model.",
    )  # fmt: skip
    add = parser.add_argument
    add("--memory", metavar="SIZE", action="append",
        help="the machine's memory, e.g. 16GB, or with --device cuda its GPU's; may be repeated (default: what is free "
        "here)")
    add("--device", choices=(_CPU, _CUDA), default=_CPU, help="default: %(default)s")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights, keys and values (default: %(default)s)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="write the table as JSON, with each model's source")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Raises `ConfigError` for a memory that is no size."""
    if arguments.json is not None:
        check_writable(arguments.json)
    rooms = _rooms(arguments.memory, arguments.device)

    import torch

    dtype = getattr(torch, arguments.dtype)
    title = f"{arguments.device}, {arguments.dtype}: longest context in tokens, DynamicCache / DiskSwapCache"
    heads, found = model_header(list(rooms)), []
    table = new_table("", *heads[1:], right=heads[1:], title=title)
    for model in known_models().values():
        contexts = {memory: longest(model, room, dtype, arguments.device) for memory, room in rooms.items()}
        table.add_row(*model_cells(model, contexts, dtype))
        found.append(_values(model, contexts, dtype))
    console = stdout_console()
    console.print(table)
    for model in known_models().values():
        if model.note is not None:
            console.print(f"{model.name}: {model.note}", markup=False, soft_wrap=True)
    console.print("Each model's Hub name, source and date: --json FILE", markup=False, soft_wrap=True)
    if arguments.json is not None:
        write_json(arguments.json, {"device": arguments.device, "dtype": arguments.dtype, "models": found})
    return 0


def room_of(memory: str, device: str) -> int:
    """Bytes for weights and cache on a machine, or a GPU, with so much memory. Raises `ConfigError`."""
    room = parse_size(memory, "memory") - RESERVED[device]
    if room <= 0:
        kept = f"{RESERVED[device] // GB} GB that are left for the system, the program and its activations"
        raise ConfigError(f"memory must be more than the {kept}, got {memory!r}: use 16GB")
    return room


def _rooms(memory: list[str] | None, device: str) -> dict[str, int]:
    """Bytes for weights and cache by the column's name."""
    if memory is not None:
        return {size: room_of(size, device) for size in memory}
    from ..memory.machine import free_memory

    try:
        free = free_memory(device)
    except (AssertionError, RuntimeError) as error:  # no driver, or torch without CUDA
        raise ConfigError("memory must be given with --device cuda: this machine has no GPU: use 24GB") from error
    if free is None:
        raise ConfigError("memory must be given: this system does not tell what is free: use 16GB")
    return {f"{size_text(free)} free": free - GB}  # the system's memory is not free


def model_header(memory: list[str]) -> list[str]:
    """The columns of `model_cells`."""
    return ["model", "parameters", "weights", "KV a token", "positions", *memory]


def model_cells(model: KnownModel, contexts: dict[str, Longest | None], dtype: torch.dtype) -> list[str]:
    """One row of the table as text: "full / cached" tokens of each memory, rounded down to hundreds; "-": the weights
    do not fit; one number: no cache is needed."""
    geometry = model.geometry(dtype)
    row = [model.name, _billions(model.parameters), size_text(geometry.weight_bytes), size_text(_token_bytes(geometry))]
    for one in contexts.values():
        if one is None:
            row.append("-")
        else:
            counts = [n if n == model.positions else n // 100 * 100 for n in dict.fromkeys((one.full, one.cached))]
            row.append(" / ".join(f"{count:,}" for count in counts))
    return [*row[:4], f"{model.positions:,}", *row[4:]]


def _billions(count: int) -> str:
    return f"{count / 1e6:.0f} M" if count < 0.99 * GB else f"{count / GB:.2f} B"


def _token_bytes(geometry: Geometry) -> int:
    """Bytes of a token's keys and values in the layers that keep all tokens."""
    return sum(form.entry_bytes for form in geometry.forms(1))


def _values(model: KnownModel, contexts: dict[str, Longest | None], dtype: torch.dtype) -> dict[str, Any]:
    """One row for JSON."""
    geometry = model.geometry(dtype)
    return {
        **{name: getattr(model, name) for name in ("name", "repository", "copy", "date", "parameters", "note")},
        "positions": model.positions, "weight_bytes": geometry.weight_bytes, "token_bytes": _token_bytes(geometry),
        "contexts": {memory: None if one is None else vars(one) for memory, one in contexts.items()},
    }  # fmt: skip
