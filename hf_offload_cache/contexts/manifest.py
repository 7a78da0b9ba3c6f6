"""The manifest of a saved context: its model and cache, its files, and their checks.

A context is a directory:

    manifest.json            the manifest: JSON, read and checked before anything else
    <32 hex>.records         keys and values, or 4-bit copies of them: records of one size, as in the scratch file
    <32 hex>.state           all else: safetensors of one layer, or of the complete cache; encrypted or plain
    <32 hex>.damaged         damage that a read of a library's context found: see `mark_name`

A records file is named by a digest of its records' tags, a state by a digest of its bytes. The tags (one checksum or
authentication tag per record) are in the layer's state. The manifest's own digest, over its values in canonical form,
therefore detects accidental damage to any byte of a context, and no name leads out of its directory. Only an encrypted
context also shows that nobody rewrote all of it: see `Manifest.binding`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import MOST_JSON_BYTES, parse_json
from ..errors import ConfigError, ContextError, shown
from .folder import MANIFEST_NAME, read_small, reading

if TYPE_CHECKING:  # the console lists contexts without loading torch
    from ..stores.guard import RecordGuard

FORMAT: Final = "hf_offload_cache context"
VERSION: Final = 1
MOST_MANIFEST_BYTES = MOST_JSON_BYTES
_MOST_LAYERS = 4096
_MOST_RECORD_BYTES = 256 * 2**20
"""Maximum size of a record, which is read at once: 1,024 tokens (the largest group) of 256 KiB each."""
_MOST_SHARED_BYTES = 64 * 2**20
"""Maximum bytes of states shared by several (empty) layers, counted for each layer but the first: it keeps a small
context from taking long to read."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

_Count = Annotated[int, Field(ge=0, lt=2**48)]
_Positive = Annotated[int, Field(ge=1, lt=2**31)]
_RecordsName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.records$")]
_StateName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.state$")]
_RecordBytes = Annotated[int, Field(ge=0, le=_MOST_RECORD_BYTES, multiple_of=4096)]


def _check_date(text: str) -> str:
    datetime.fromisoformat(text)  # raises ValueError
    return text


def _check_name(text: str) -> str:
    if not text.isprintable() or len(text) > 200:
        raise ValueError("it must be printable, and have at most 200 characters")
    return text


_Name = Annotated[str, AfterValidator(_check_name)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RecordsFile(_Checked):
    """Records of one layer that were frozen together. Record numbers continue from file to file."""

    file: _RecordsName
    records: _Count
    guard: dict[str, str]
    """How they are checked: see `RecordGuard.describe`."""
    record_bytes: _RecordBytes = 0
    """Size of a record, if it differs from the layer's."""


class StateFile(_Checked):
    """Tensors and values of one layer, or of the cache, in a file named by a digest of its bytes."""

    file: _StateName
    bytes: _Count


class LayerEntry(_Checked):
    """One layer of the model."""

    kind: Literal["offloaded", "kept"]
    """"kept": one of transformers' own layers, stored in its state."""
    state: StateFile
    record_bytes: _RecordBytes = 0
    parts: tuple[RecordsFile, ...] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> LayerEntry:
        if self.parts and (self.kind != "offloaded" or not self.record_bytes):
            raise ValueError("records need an offloaded layer and a size")
        return self

    def size_of(self, part: RecordsFile) -> int:
        """Bytes of a record of one of the parts."""
        return part.record_bytes or self.record_bytes


class Manifest(_Checked):
    """The values of `manifest.json`. `parse` raises `ContextError` for invalid ones."""

    format: Literal["hf_offload_cache context"] = FORMAT
    version: Literal[1] = VERSION
    library: _Name
    """Version of the library that wrote it."""
    created: Annotated[_Name, AfterValidator(_check_date)]
    """ISO 8601, UTC."""
    cache: _Name
    """Name of the cache class."""
    tokens: _Count
    """Tokens per sequence, including padding."""
    batch: _Positive
    config: dict[str, Any]
    """The saved fields of the configuration."""
    identity: dict[str, str]
    """The model's `full_fingerprint`."""
    key_check: str | None
    """A check value of the encryption key; None: not encrypted."""
    state: StateFile
    """The cache's state: token ids, padding, budgets of the layers."""
    layers: Annotated[tuple[LayerEntry, ...], Field(max_length=_MOST_LAYERS)]

    @model_validator(mode="after")
    def _shares_few_bytes(self) -> Manifest:
        shared = sum(layer.state.bytes for layer in self.layers)
        shared -= sum({layer.state.file: layer.state.bytes for layer in self.layers}.values())
        if shared > _MOST_SHARED_BYTES:
            raise ValueError(f"states that several layers share have {shared:,} bytes, above {_MOST_SHARED_BYTES:,}")
        return self

    def to_bytes(self) -> bytes:
        """The file's content. Raises `ContextError` if it exceeds the limit for reading."""
        values = self.model_dump(mode="json")
        data = (json.dumps({"manifest": values, "digest": _digest(values)}, indent=1) + "\n").encode()
        if len(data) > MOST_MANIFEST_BYTES:
            raise ContextError(f"the manifest has {len(data):,} bytes, above {MOST_MANIFEST_BYTES:,}: save less")
        return data

    @classmethod
    def parse(cls, data: bytes, place: str) -> Manifest:
        """The manifest in the file at `place`. Raises `ContextError` if it is damaged, invalid or of another
        version."""
        try:
            parsed = parse_json(data)
        except ValueError as error:
            raise ContextError(f"{place}: the manifest is not JSON, so it is damaged; save it anew ({error})") from None
        values = parsed.get("manifest") if isinstance(parsed, dict) else None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ContextError(f"{place}: this is not the manifest of a saved context")
        if type(version := values.get("version")) is not int or version != VERSION:
            raise ContextError(
                f"{place}: its format has version {shown(version)} and this library reads {VERSION}: save the context "
                "anew"
            )
        if parsed.get("digest") != _digest(values):
            raise ContextError(f"{place}: the manifest is damaged, its digest differs; save the context anew")
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors()[0]
            where, what = shown(".".join(map(str, first["loc"]))), shown(first["msg"], 200)
            raise ContextError(f"{place}: the manifest is not valid: {where}: {what}") from None

    @property
    def binding(self) -> bytes:
        """A digest of everything but the cache's state, which is encrypted for it. Without the key, nobody can exchange
        a part for that of another context with the same key."""
        values = self.model_dump(mode="json")
        del values["state"]
        return hashlib.sha256(_canonical(values)).digest()

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's values, 64 hex digits: differs from any other context's, even an older one's."""
        return hashlib.sha256(_canonical(self.model_dump(mode="json"))).hexdigest()

    @property
    def mark_name(self) -> str:
        """Name of the file that marks this context as damaged. It does not apply to a context that replaces this
        one."""
        return f"{self.digest[:32]}.damaged"

    @property
    def file_names(self) -> set[str]:
        """Names of all data files."""
        states = [self.state, *(layer.state for layer in self.layers)]
        return {state.file for state in states} | {p.file for layer in self.layers for p in layer.parts}

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.size_of(part) * part.records for layer in self.layers for part in layer.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return self.state.bytes + sum(layer.state.bytes for layer in self.layers)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of the context in `directory`. Raises `ContextError`, and `StoreError` if it cannot be read."""
    return reading(directory, lambda folder_fd: manifest_in(folder_fd, os.fspath(directory)))


def manifest_in(folder_fd: int, place: str) -> Manifest:
    """As `read_manifest`, for the context that `folder_fd` is open on; errors call it `place`."""
    return Manifest.parse(read_small(folder_fd, MANIFEST_NAME, MOST_MANIFEST_BYTES), place)


def check_digest(digest: object) -> None:
    """Raise `ConfigError` unless `digest` has the form that `save` and `publish_context` return."""
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ConfigError(f"expect must be a digest of 64 hexadecimal digits, got {digest!r:.80}")


def records_name(guard: RecordGuard, record_bytes: int) -> str:
    """Name of the file of the records whose tags `guard` has."""
    digest = xxhash.xxh3_128(f"{guard.describe()} {record_bytes} ".encode())
    digest.update(guard.tags.tobytes())
    return f"{digest.hexdigest()}.records"


def _digest(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(values))


def _canonical(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
