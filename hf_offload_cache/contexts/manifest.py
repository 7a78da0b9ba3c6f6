"""The manifest of a saved context: its model and cache, the place of its parts, and their checks.

A context is a directory:

    manifest.json            this: JSON, read and checked before anything else
    <32 hex>.records         keys and values, or replicas of them in 4 bits: records of one size one after another, as
                             they lay in the scratch file
    <32 hex>.state           all else: safetensors of one layer, or of the complete cache; encrypted or plain
    <32 hex>.damaged         damage that a read of a library's context found: see `mark_name`

A records file is named by a digest of its records' tags, a state by a digest of its bytes. The tags (a checksum for
each record, or its authentication tag) are in the state of the records' layer. The manifest's own digest, over its
values in canonical form, therefore detects any accident to any byte of a context, and a name leads only into its
directory. Only an encrypted context also shows that nobody rewrote all of it: see `Manifest.binding`.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import MOST_JSON_BYTES, parse_json
from ..errors import ContextError, shown

if TYPE_CHECKING:  # the console lists contexts without loading torch
    from ..stores.guard import RecordGuard

FORMAT: Final = "hf_offload_cache context"
VERSION: Final = 1
MOST_MANIFEST_BYTES = MOST_JSON_BYTES
_MOST_LAYERS = 4096
_MOST_RECORD_BYTES = 256 * 2**20
"""Of a record, which is read as a whole: 1,024 tokens, as many as a group may have, of 256 KiB each."""
_MOST_SHARED_BYTES = 64 * 2**20
"""Of states that several layers name, those of layers that hold nothing, counted for each layer but the first: so a
small context is not a long way to read."""

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
        raise ValueError("it must be printable, and of 200 characters at most")
    return text


_Name = Annotated[str, AfterValidator(_check_name)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RecordsFile(_Checked):
    """Records of one layer that were frozen together. The ids of a layer's records run on from file to file."""

    file: _RecordsName
    records: _Count
    guard: dict[str, str]
    """How they are checked: `RecordGuard.describe`."""
    record_bytes: _RecordBytes = 0
    """Of one record, where it differs from the layer's."""


class StateFile(_Checked):
    """Tensors and values of one layer, or of the cache; the name is the digest of the bytes."""

    file: _StateName
    bytes: _Count


class LayerEntry(_Checked):
    """One layer of the model."""

    kind: Literal["offloaded", "kept"]
    """"kept": a layer of transformers' own, all of it in its state."""
    state: StateFile
    record_bytes: _RecordBytes = 0
    parts: tuple[RecordsFile, ...] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> LayerEntry:
        if self.parts and (self.kind != "offloaded" or not self.record_bytes):
            raise ValueError("records belong to an offloaded layer and have a size")
        return self

    def size_of(self, part: RecordsFile) -> int:
        """Bytes of a record of one of the parts."""
        return part.record_bytes or self.record_bytes


class Manifest(_Checked):
    """What `manifest.json` says. Instances are valid: `parse` raises `ContextError` for everything else."""

    format: Literal["hf_offload_cache context"] = FORMAT
    version: Literal[1] = VERSION
    library: _Name
    """The version of this library that wrote it."""
    created: Annotated[_Name, AfterValidator(_check_date)]
    """ISO 8601, UTC."""
    cache: _Name
    """Name of the class."""
    tokens: _Count
    """Tokens a sequence, padding included."""
    batch: _Positive
    config: dict[str, Any]
    """The configuration's fields that go with the context."""
    identity: dict[str, str]
    """`full_fingerprint` of the model."""
    key_check: str | None
    """Tells the right encryption key from another; None: not encrypted."""
    state: StateFile
    """Of the cache: token ids, padding, budgets of the layers."""
    layers: Annotated[tuple[LayerEntry, ...], Field(max_length=_MOST_LAYERS)]

    @model_validator(mode="after")
    def _is_no_larger_than_it_looks(self) -> Manifest:
        shared = sum(layer.state.bytes for layer in self.layers)
        shared -= sum({layer.state.file: layer.state.bytes for layer in self.layers}.values())
        if shared > _MOST_SHARED_BYTES:
            raise ValueError(f"states that several layers share have {shared:,} bytes, above {_MOST_SHARED_BYTES:,}")
        return self

    def to_bytes(self) -> bytes:
        """The file's content. Raises `ContextError` if it would exceed the limit for reading."""
        values = self.model_dump(mode="json")
        data = (json.dumps({"manifest": values, "digest": _digest(values)}, indent=1) + "\n").encode()
        if len(data) > MOST_MANIFEST_BYTES:
            raise ContextError(f"the manifest has {len(data):,} bytes, and {MOST_MANIFEST_BYTES:,} are read: save less")
        return data

    @classmethod
    def parse(cls, data: bytes, place: str) -> Manifest:
        """From the bytes of the file at `place`. Raises `ContextError`: damaged, of another version, or absurd."""
        try:
            found = parse_json(data)
        except ValueError as error:
            raise ContextError(f"{place}: the manifest is no JSON, so it is damaged; save it anew ({error})") from None
        values = found.get("manifest") if isinstance(found, dict) else None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ContextError(f"{place}: this is no manifest of a saved context")
        if type(version := values.get("version")) is not int or version != VERSION:
            raise ContextError(
                f"{place}: its format has version {shown(version)} and this library reads {VERSION}: save the context "
                "anew"
            )
        if found.get("digest") != _digest(values):
            raise ContextError(f"{place}: the manifest is damaged, its digest differs; save the context anew")
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors()[0]
            where, what = shown(".".join(map(str, first["loc"]))), shown(first["msg"], 200)
            raise ContextError(f"{place}: the manifest is not valid: {where}: {what}") from None

    @property
    def binding(self) -> bytes:
        """What the state of the cache is encrypted for: a digest of all else that is in here. So whoever has not the
        key cannot exchange a part for that of another context with the same key."""
        values = self.model_dump(mode="json")
        del values["state"]
        return hashlib.sha256(_canonical(values)).digest()

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's values, 64 hex digits: it distinguishes this context from any other, older ones
        included."""
        return hashlib.sha256(_canonical(self.model_dump(mode="json"))).hexdigest()

    @property
    def mark_name(self) -> str:
        """Name of the file whose presence says that this context was found damaged. It never applies to another context
        that has replaced this one."""
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


def records_name(guard: RecordGuard, record_bytes: int) -> str:
    """What a file of the records that `guard` has the tags of is called."""
    digest = xxhash.xxh3_128(f"{guard.describe()} {record_bytes} ".encode())
    digest.update(guard.tags.tobytes())
    return f"{digest.hexdigest()}.records"


def _digest(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(values))


def _canonical(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
