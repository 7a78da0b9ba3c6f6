"""Configurations: one frozen dataclass per method, checked before anything is allocated."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from .errors import ConfigError, shown

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}  # fmt: skip


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of "300MiB", "2GB" or a plain number, also as errors print them: "4,775,404", "4.6 MiB". Raises
    `ConfigError`, which names the argument `name`."""
    nbytes = _bytes_of(str(text))
    if nbytes is None:
        raise ConfigError(
            f"{name} must be a number of bytes or a size such as '300MiB' or '2GB', got {shown(repr(text))}"
        )
    return nbytes


@lru_cache(256)
def _bytes_of(text: str) -> int | None:
    """`parse_size`, or None for no size. Cached because a search for a budget parses the same sizes thousands of
    times."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:,\d{3}){1,6}|\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        return None
    return math.floor(Fraction(match[1].replace(",", "")) * _UNITS[match[2].upper()])


GOALS = ("fidelity", "speed")
"""Goals that a cache can be planned for."""
MOST_JSON_BYTES = 4 * 2**20
"""Maximum size of a JSON file. Those that this library writes have some kilobytes."""
_MOST_NESTED = 32


def parse_json(data: bytes, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The values of UTF-8 JSON from an untrusted source. Raises `ValueError`, also if it has more than `most_bytes` or
    is nested too deep."""
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    if data.count(b"[") + data.count(b"{") > most_bytes // 32:  # each takes twenty times its bytes
        raise ValueError(f"it has more than {most_bytes // 32:,} lists and objects")
    try:
        values = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested more than {_MOST_NESTED} deep") from None
    level = [values]
    for _ in range(_MOST_NESTED + 1):
        nested = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in nested for item in items]
        if not level:
            return values
    raise ValueError(f"it is nested more than {_MOST_NESTED} deep")


def read_json(path: str | Path) -> Any:
    """`parse_json` of a file, of which at most the allowed bytes are read. Raises `OSError`, `ValueError`."""
    with open(path, "rb") as file:
        return parse_json(file.read(MOST_JSON_BYTES + 1))


def at_least(**numbers: object) -> None:
    """Raise `ConfigError` unless all are whole numbers of at least 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def parse_memory(text: int | str, full_kv_bytes: int) -> int:
    """Bytes of a number, a size such as "300MiB", or a fraction of the full KV such as "1/13". Raises `ConfigError`."""
    fraction = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", str(text))
    if fraction is not None and int(fraction[2]):
        memory = full_kv_bytes * int(fraction[1]) // int(fraction[2])
    else:
        try:
            memory = parse_size(text, "memory")
        except ConfigError as error:
            raise ConfigError(
                "memory must be bytes, a size such as '300MiB', or a fraction of the full KV such as '1/13', "
                f"got {text!r}"
            ) from error
    if memory < 1:
        raise ConfigError(
            f"memory must be at least one byte, got {text!r}: a share is written '1/13', a size '300MiB'"
        )
    return memory


BLOCK_TOKENS = 1024
"""Usual tokens per sequence in a block of a streamed history."""


@dataclass(frozen=True)
class OffloadConfig:
    """Fields of all caches. Sizes are in tokens per sequence and layer.

    Each method's class extends the tuples below, which say what its fields mean for saved contexts.
    """

    stored_format: ClassVar[tuple[str, ...]] = ("group_size", "indexer_bits")
    """Fields that the stored format fixes: a context cannot be opened with another value."""
    of_a_run: ClassVar[tuple[str, ...]] = (
        "memory", "host_memory", "max_context", "max_batch", "candidates", "trace", "engine", "verify", "io_timeout",
        "encryption_key", "progress",
    )  # fmt: skip
    """Fields of a machine or a run, which a context does not store. Those that are in `stored_format` too are stored in
    the layers' states, and cannot be given when a context is opened."""
    added_later: ClassVar[tuple[str, ...]] = ("indexer_bits",)
    """Fields that contexts of earlier versions do not have. Their defaults mean what those versions did."""
    renamed: ClassVar[dict[str, str]] = {}
    """Fields by their names in earlier versions, which contexts of these have."""
    kept_on_open: ClassVar[tuple[str, ...]] = ("group_size", "exact", "num_sinks", "indexer_bits")
    """Fields that keep their saved values when a context is opened with a budget that its configuration does not
    fit."""
    not_with_exact: ClassVar[tuple[str, ...]] = ()
    """Fields that have no effect with `exact`, and cannot be given together with it."""

    num_sinks: int = 4
    """First tokens of a sequence, always attended to; rounded up to complete units."""
    num_recent: int = 32
    """Latest tokens, always attended to and kept in memory."""
    group_size: int | None = None
    """Tokens per record on disk. None: as many as fit 16 KiB, a power of two from 4 to 16."""
    indexer_bits: int | None = None
    """Bits in memory of a value of an indexer's key, for a model that chooses by an indexer what it attends to. None:
    the model's own type. 8: codes; the keys are on the disk in the model's own type, in which the tokens at the edge of
    a choice are scored. 0: none; each step reads all keys from the disk. Without effect on other models, and on
    indexers that score blocks of tokens."""
    exact: bool | str = False
    """True: attend to everything, streamed in blocks. "bitwise": pass a complete layer to the model's own attention."""
    block_tokens: int | None = None
    """Tokens per sequence in a block of a streamed history. None: 1,024; on a GPU without `memory` up to 16,384, a
    power of two that fits 32 MiB."""
    engine: str = "auto"
    """Read engine: "uring" (io_uring), "direct" (O_DIRECT, threads), "mapped" (memory map with advice), "memory" (no
    disk), or "auto": the first of uring, direct, mapped that works here. For a model on a GPU "auto" is "memory" if
    `max_context` and `max_batch` are given and the records fit into host memory."""
    write_queue: int | str = "4MiB"
    """Maximum bytes waiting to be written; `update` blocks until there is room. With `memory`, while steps select, at
    most one unit of each layer, or two of one layer."""
    memory: int | str | None = None
    """Memory limit of the cache, in bytes or as "300MiB". A step that would exceed it raises `BudgetError`. With a
    model on a GPU it limits device memory."""
    host_memory: int | str | None = None
    """With a model on a GPU: limit of the host memory, in bytes or as "64GiB", for records, host slots, tables, and
    buffers of reads and writes. A step that would exceed it raises `BudgetError`. With a model on a CPU it raises
    `ConfigError`, because `memory` limits everything there."""
    max_context: int | None = None
    """Maximum tokens per sequence; a step that would exceed it raises `BudgetError`. None: no limit."""
    max_batch: int | None = None
    """Maximum sequences; a step that would exceed it raises `BudgetError`. None: no limit."""
    candidates: bool = True
    """Reserve memory of a budget for steps that verify the candidates of an assistant or a prompt lookup. False: such a
    step raises `BudgetError` before it adds tokens."""
    verify: bool = True
    """Check every record read from the disk against what was written. False: trust the disk; encrypted records are
    checked anyway."""
    io_timeout: float | None = 60.0
    """Seconds that a read or a write may take before it raises `StalledError`. None: no limit."""
    encryption_key: str | Path | Callable[[], bytes] | None = None
    """A file with 32 bytes or 64 hexadecimal digits, or a function that returns 32 bytes: everything written to the
    disk is encrypted with this key (AES-256-GCM, extra `[crypto]`). None: no encryption."""
    trace: str | None = None
    """File for a trace of the cache's activity, which ui.perfetto.dev and chrome://tracing show. It is complete when
    the cache is closed."""
    progress: bool = False
    """Show progress on stderr while the model reads a prompt, with the time left: a bar on a terminal, a widget in a
    notebook, one line at the end elsewhere."""

    def __post_init__(self) -> None:
        self._at_least("num_sinks", 0)
        self._at_least("num_recent", 1)
        if self.block_tokens is not None:
            self._at_least("block_tokens", 16)
        if self.group_size is not None:
            self._at_least("group_size", 1)
            self._at_most("group_size", 1024)
            if self.least_block < self.group_size:
                raise ConfigError(
                    f"block_tokens ({self.least_block}) must be at least group_size ({self.group_size}), since whole "
                    f"groups are read: use block_tokens={self.group_size} or group_size={self.least_block}"
                )
        self._one_of("indexer_bits", (None, 0, 8))
        self._one_of("exact", (False, True, "bitwise"))
        self._one_of("engine", ("auto", "uring", "direct", "mapped", "memory"))
        if parse_size(self.write_queue, "write_queue") < 2**16:
            raise ConfigError(f"write_queue must be at least 64KiB, got {self.write_queue!r}: use '64KiB'")
        if self.memory is not None and parse_size(self.memory, "memory") < 1:
            raise ConfigError(f"memory must be at least one byte, got {self.memory!r}: see `hf-offload-cache plan`")
        if self.host_memory is not None and parse_size(self.host_memory, "host_memory") < 1:
            raise ConfigError(f"host_memory must be at least one byte, got {self.host_memory!r}: use '64GiB'")
        for name in ("max_context", "max_batch"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        self._one_of("candidates", (True, False))
        self._one_of("verify", (True, False))
        timeout, key = self.io_timeout, self.encryption_key
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0 and timeout == timeout):
            raise ConfigError(f"io_timeout must be seconds above 0, or None, got {timeout!r}: use 60")
        if key is not None and not isinstance(key, str | Path) and not callable(key):
            raise ConfigError(
                f"encryption_key must be the path of a file, a function that returns 32 bytes, or None, got a "
                f"{type(key).__name__}: keep the key out of the configuration itself"
            )
        if self.trace is not None and not isinstance(self.trace, str | Path):
            raise ConfigError(f"trace must be a path or None, got {type(self.trace).__name__}")
        self._one_of("progress", (True, False))

    @property
    def least_block(self) -> int:
        """`block_tokens`, or what None means on a CPU."""
        return BLOCK_TOKENS if self.block_tokens is None else self.block_tokens

    @property
    def leave_together(self) -> int:
        """Minimum tokens that leave the latest ones at once, in complete groups."""
        return 1

    @property
    def stored_bits(self) -> int | None:
        """Bits of a stored element, if they are fewer than the model's type has; None: it is stored in that type."""
        return None

    def kept_values(self) -> dict[str, Any]:
        """The values of `kept_on_open`, without fields that are None."""
        values = {name: getattr(self, name) for name in self.kept_on_open}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def heads_apart(self) -> bool:
        """Whether each key head has its own rows and records; otherwise a sequence's heads lie together."""
        return False

    @property
    def records_apart(self) -> bool:
        """Whether records in host memory are outside the budget on a CPU too."""
        return False

    def on_a_cpu(self) -> Self:
        """This configuration for a model on a CPU. Raises `ConfigError` if it has a limit for host memory apart."""
        if self.host_memory is None:
            return self
        raise ConfigError(
            f"host_memory={self.host_memory!r} is a limit for a model on a GPU, and this one is on a CPU, where memory "
            "limits everything: leave host_memory out"
        )

    def as_saved(self) -> Self:
        """This configuration with values for open fields that a context fixes."""
        return self

    def for_layers(self, layers: int) -> Self:
        """Resolve shares of the offloaded `layers` into counts; call before `of_layer`."""
        return self

    def of_layer(self, index: int) -> Self:
        """The configuration of the offloaded layer `index`. Limits of the complete cache stay as they are."""
        return self

    @classmethod
    def load(cls, config: Self | str | Path | None, fields: dict[str, Any]) -> Self:
        """The configuration from an instance, the path of a JSON object of fields, or None, overridden by `fields`.
        Raises `ConfigError`."""
        if config is None:
            base: dict[str, Any] = {}
        elif isinstance(config, cls):
            base = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        elif isinstance(config, str | Path):
            base = cls.read(config)
        else:
            raise ConfigError(f"config must be a {cls.__name__}, a path or None, got {type(config).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in (*base, *fields):
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
        return cls(**{**base, **fields})

    @staticmethod
    def read(path: str | Path) -> dict[str, Any]:
        """The JSON object in a file. Raises `ConfigError`."""
        try:
            values = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"config: cannot read {str(path)!r} as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"config: {str(path)!r} must contain a JSON object of fields")
        return values

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
        return value

    def _at_least(self, name: str, least: int) -> None:
        if self._number(name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}: use {name}={least}")

    def _at_most(self, name: str, most: int) -> None:
        if self._number(name) > most:
            raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}: use {name}={most}")

    def _one_of(self, name: str, values: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if not any(value == v and type(value) is type(v) for v in values):
            raise ConfigError(f"{name} must be one of {values}, got {value!r}")


@dataclass(frozen=True)
class SelectiveConfig(OffloadConfig):
    """Fields of every cache that selects tokens."""

    sets_memory: ClassVar[tuple[str, ...]] = ("num_selected", "reuse_capacity", "host_slots", "memory")
    """Fields with which a user sets the memory for selecting: see `SelectiveCache.weigh`."""
    of_a_run: ClassVar[tuple[str, ...]] = (*OffloadConfig.of_a_run, "graphs")

    num_selected: int = 400
    """Tokens attended to beyond sinks and latest ones, rounded up to complete units."""
    reuse_capacity: int = 400
    """Tokens of units read earlier that stay resident in each layer; 0 for none. Within a budget slots also get
    what a step leaves of it, unless this field is given. With at least `num_selected`, steps that can run on a GPU
    without the host do so within a budget."""
    look_ahead: bool | None = None
    """Guess the next layer's query, or what its indexer chooses, and prefetch for it. None: if that is measured to be
    faster. The guess takes processor time, which does not pay on a fast disk. The selection always uses the true query.
    """
    host_slots: int | str | None = None
    """Bytes, or a size such as "300MiB", of slots in host memory for records that were read, in addition to the slots
    on the device: a cache of the disk. Layers share it equally. On a CPU it gives that many more slots. None: none."""
    graphs: bool = False
    """With a model on a GPU and records in host memory, reserve memory of a budget for the CUDA graph of
    `graphed_step`. False: a graph gets the memory of slots that were lent; without them steps run without a graph."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_selection()
        self._at_least("reuse_capacity", 0)
        self._one_of("look_ahead", (None, True, False))
        if self.host_slots is not None:
            parse_size(self.host_slots, "host_slots")
        self._one_of("graphs", (False, True))

    def _check_selection(self) -> None:
        self._at_least("num_selected", 1)

    def attended(self, held: int) -> int:
        """Tokens that a step attends to beyond sinks and latest ones, of `held` tokens per row."""
        return self.num_selected

    def tokens_fetched(self, held: int) -> int:
        """Tokens of the units that a step reads for that: more if it attends only to parts of units."""
        return self.attended(held)

    def most_tokens_fetched(self, held: int) -> int:
        """As `tokens_fetched`, including widened steps (see `Selecting.widen`)."""
        return self.tokens_fetched(held)

    def host_bytes_of(self, layers: int) -> int:
        """A layer's part of `host_slots`, of so many layers."""
        return 0 if self.host_slots is None else parse_size(self.host_slots, "host_slots") // max(1, layers)


@dataclass(frozen=True)
class EntryBitsConfig(SelectiveConfig):
    """Fields of a cache that may store keys and values in 8 bits."""

    stored_format: ClassVar[tuple[str, ...]] = (*SelectiveConfig.stored_format, "entry_bits")
    added_later: ClassVar[tuple[str, ...]] = (*SelectiveConfig.added_later, "entry_bits")
    kept_on_open: ClassVar[tuple[str, ...]] = (*SelectiveConfig.kept_on_open, "entry_bits")

    entry_bits: int | None = None
    """8: keys and values are stored in 8 bits, with a scale for each token and head, on the disk and in slots; latest
    tokens are not. None: in the model's own type."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("entry_bits", (None, 8))
        if self.exact and self.entry_bits is not None:
            raise ConfigError(
                f"exact={self.exact!r} attends to the model's own keys and values, which entry_bits={self.entry_bits} "
                "does not keep: leave out one of the two (a saved context keeps its entry_bits)"
            )

    @property
    def stored_bits(self) -> int | None:
        return self.entry_bits

    def kept_values(self) -> dict[str, Any]:
        return {**super().kept_values(), "entry_bits": self.entry_bits}  # None is a format too


@dataclass(frozen=True)
class SelectedShareConfig(EntryBitsConfig):
    """Fields of a cache that may attend to a share of its tokens."""

    num_selected: int | None = 400  # type: ignore[assignment]
    """Tokens attended to beyond sinks and latest ones. None: `selected_share` of the stored tokens."""
    selected_share: float = 0.1
    """Share of the stored tokens attended to if `num_selected` is None."""

    def _check_selection(self) -> None:
        self._share("selected_share")
        if self.num_selected is not None:
            super()._check_selection()

    def _share(self, name: str) -> None:
        share = getattr(self, name)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"{name} must be a number above 0, at most 1, got {share!r}: use 0.1")

    def attended(self, held: int) -> int:
        return math.ceil(self.selected_share * held) if self.num_selected is None else self.num_selected
