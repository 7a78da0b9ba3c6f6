"""What a user may set: one frozen dataclass a method, checked before anything is allocated."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Self

from .errors import ConfigError, shown

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of "300MiB", "2GB" or a plain number, also as errors print them: "4,775,404", "4.6 MiB". Raises
    `ConfigError`, which calls the argument `name`."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:,\d{3}){1,6}|\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"{name} must be a number of bytes or a size such as '300MiB' or '2GB', got {shown(repr(text))}"
        )
    return math.floor(Fraction(match[1].replace(",", "")) * _UNITS[match[2].upper()])


MOST_JSON_BYTES = 4 * 2**20
"""Of a JSON file that is read: what this library writes has some kilobytes."""
_MOST_NESTED = 32


def parse_json(data: bytes, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Values of UTF-8 JSON from an untrusted source. Raises `ValueError`, also for more than `most_bytes`, and for
    nesting so deep that walking through it would fail."""
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    if data.count(b"[") + data.count(b"{") > most_bytes // 32:  # each takes twenty times its bytes, and time
        raise ValueError(f"it has more than {most_bytes // 32:,} lists and objects")
    try:
        values = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested more than {_MOST_NESTED} deep") from None
    level = [values]
    for _ in range(_MOST_NESTED + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values_of in inner for value in values_of]
        if not level:
            return values
    raise ValueError(f"it is nested more than {_MOST_NESTED} deep")


def read_json(path: str | Path) -> Any:
    """Apply `parse_json` to a file, reading no more than the allowed bytes. Raises `OSError`, `ValueError`."""
    with open(path, "rb") as file:
        return parse_json(file.read(MOST_JSON_BYTES + 1))


def at_least(**numbers: object) -> None:
    """Raises `ConfigError` for what is no whole number of at least 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def parse_memory(text: int | str, full_kv_bytes: int) -> int:
    """Bytes of a number, of "300MiB", or of a fraction of the full KV such as "1/13". Raises `ConfigError`."""
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


@dataclass(frozen=True)
class OffloadConfig:
    """Fields that every cache of the family has. Sizes are in tokens a sequence and layer.

    A method's class says itself what its fields mean to a saved context, in the tuples below, which it adds to.
    """

    stored_format: ClassVar[tuple[str, ...]] = ("group_size",)
    """Fields that what is stored fixes: another value is refused when a context is opened."""
    of_a_run: ClassVar[tuple[str, ...]] = (
        "memory", "max_context", "max_batch", "trace", "engine", "verify", "io_timeout", "encryption_key",
    )  # fmt: skip
    """Fields of a machine or a run, which a context does not keep. What is in `stored_format` too lies in the states of
    the layers, and is not to be given when a context is opened."""
    kept_on_open: ClassVar[tuple[str, ...]] = ("group_size", "exact", "num_sinks")
    """Fields that stay as they were saved when a context is opened with a budget that they do not fit as they are."""
    not_beside_exact: ClassVar[tuple[str, ...]] = ()
    """Fields that `exact` leaves without effect, and which are refused beside it."""

    num_sinks: int = 4
    """First tokens of a sequence, always attended (rounded up to whole units)."""
    num_recent: int = 32
    """Latest tokens, always attended, kept in memory."""
    group_size: int | None = None
    """Tokens a record on disk. None: as many as fit 16 KiB, a power of two from 4 to 16."""
    exact: bool | str = False
    """True: attend to everything, streamed in blocks. "bitwise": hand the model's own attention a whole layer."""
    block_tokens: int = 1024
    """Tokens a sequence of one block, when a history is streamed."""
    engine: str = "auto"
    """How records are read: "uring" (io_uring), "direct" (O_DIRECT, threads), "mapped" (advised map), "memory" (no
    disk), "auto": the first of uring, direct, mapped that works here."""
    write_queue: int | str = "4MiB"
    """Bytes that may wait to be written; `update` blocks while more would. With `memory`, while steps select, no more
    than a unit of each layer, or two of one."""
    memory: int | str | None = None
    """Most that the cache may ever hold, in bytes or as "300MiB"; `BudgetError` before it would hold more."""
    max_context: int | None = None
    """Tokens a sequence that are planned for; `BudgetError` before there would be more. None: no limit."""
    max_batch: int | None = None
    """Sequences that are planned for; `BudgetError` before there would be more. None: no limit."""
    verify: bool = True
    """Check what is read from the disk against what was written, record by record. False: trust the disk; what is
    encrypted is checked all the same."""
    io_timeout: float | None = 60.0
    """Seconds that a read or a write may take before the device counts as stalled (`StalledError`). None: no limit."""
    encryption_key: str | Path | Callable[[], bytes] | None = None
    """A file that holds 32 bytes or 64 hexadecimal digits, or a function that returns 32 bytes: all that is written to
    the disk is encrypted with it (AES-256-GCM, extra `[crypto]`). None: nothing is."""
    trace: str | None = None
    """File for a trace of what the cache does and when, which ui.perfetto.dev and chrome://tracing show. It is written
    while the cache is used, and complete when that is closed."""

    def __post_init__(self) -> None:
        self._at_least("num_sinks", 0)
        self._at_least("num_recent", 1)
        self._at_least("block_tokens", 16)
        if self.group_size is not None:
            self._at_least("group_size", 1)
            self._at_most("group_size", 1024)
            if self.block_tokens < self.group_size:
                raise ConfigError(
                    f"block_tokens ({self.block_tokens}) must be at least group_size ({self.group_size}), since whole "
                    f"groups are read: use block_tokens={self.group_size} or group_size={self.block_tokens}"
                )
        self._one_of("exact", (False, True, "bitwise"))
        self._one_of("engine", ("auto", "uring", "direct", "mapped", "memory"))
        if parse_size(self.write_queue, "write_queue") < 2**16:
            raise ConfigError(f"write_queue must be at least 64KiB, got {self.write_queue!r}: use '64KiB'")
        if self.memory is not None and parse_size(self.memory, "memory") < 1:
            raise ConfigError(f"memory must be at least one byte, got {self.memory!r}: see `hf-offload-cache plan`")
        for name in ("max_context", "max_batch"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
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

    @property
    def leave_together(self) -> int:
        """Tokens that leave the latest ones together, at least; in whole groups."""
        return 1

    @property
    def records_apart(self) -> bool:
        """Whether budgets leave out what is stored, since it is kept in host memory beside the compute memory."""
        return False

    def as_saved(self) -> Self:
        """With values for what was left open and a context has to stay with."""
        return self

    def for_layers(self, layers: int) -> Self:
        """Resolve shares of the offloaded `layers` into counts; call before `of_layer`."""
        return self

    def of_layer(self, index: int) -> Self:
        """What applies to the layer `index` of those that are offloaded. Limits of the whole stay as they are."""
        return self

    @classmethod
    def load(cls, config: Self | str | Path | None, fields: dict[str, Any]) -> Self:
        """The configuration from an instance, the path of a JSON object of fields, or None, with `fields` on top.
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
            raise ConfigError(f"config: {str(path)!r} must hold a JSON object of fields")
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
    """Fields of every cache that attends to a choice."""

    num_selected: int = 400
    """Tokens attended beyond sinks and latest ones, rounded up to whole units."""
    reuse_capacity: int = 400
    """Tokens of units read before that stay resident in each layer; 0 for none."""
    look_ahead: bool | None = None
    """Guess the next layer's query and read ahead for it. None: where that is measured to be faster. The guess takes
    processor time, which a fast disk does not give back; the selection is the true query's either way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_selection()
        self._at_least("reuse_capacity", 0)
        self._one_of("look_ahead", (None, True, False))

    def _check_selection(self) -> None:
        self._at_least("num_selected", 1)

    def attended(self, held: int) -> int:
        """Tokens that a step attends to, beyond sinks and latest ones, of `held` tokens a row."""
        return self.num_selected

    def brought(self, held: int) -> int:
        """Tokens of the units that a step brings for that: more where it keeps a part of each unit alone."""
        return self.attended(held)

    def brought_at_most(self, held: int) -> int:
        """As `brought`, of steps that are widened too (see `Selecting.widen`)."""
        return self.brought(held)


@dataclass(frozen=True)
class SelectedShareConfig(SelectiveConfig):
    """Of a cache that may attend to a share of what it holds."""

    num_selected: int | None = 400  # type: ignore[assignment]
    """Tokens attended beyond sinks and latest ones. None: `selected_share` of those that are held."""
    selected_share: float = 0.1
    """Of the tokens held, those that are attended to where `num_selected` is None."""

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
