"""The manifest of a published context.

    stream.json              this
    <40 hex>                 objects named by a digest of their bytes: a chunk of tokens in one layer, state that the
                             cache has fitted to the prompt, active blocks

No name in it leads out of its folder. It contains no tokens: readers have the text. For each chunk it has a digest of
all ids up to its end, so that a text that continues differently can still use the common part.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import parse_json
from ..errors import ContextError, shown
from .codec import ChunkShape

NAME: Final = "stream.json"
FORMAT: Final = "hf_offload_cache stream"
VERSION: Final = 1
WITH_INDEXERS: Final = 2
"""Version of a manifest whose cells have an indexer's keys, which earlier readers do not know."""
FITTED, ACTIVE = "fitted state", "active blocks"
"""Names of the objects besides the cells."""
MOST_BYTES: Final = 64 * 2**20
"""Most bytes of fitted state, and of active blocks."""
MOST_MANIFEST_BYTES: Final = 16 * 2**20
"""Most bytes of a manifest. A cell takes some 75 bytes, and parsing up to thirty times the memory."""

_Name = Annotated[str, Field(pattern=r"^\w[\w-]{0,199}$")]
_Count = Annotated[int, Field(ge=0, lt=2**40)]
_Positive = Annotated[int, Field(ge=1, lt=2**24)]
_MOST_LAYERS = 4096
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


def digest(data: bytes | bytearray | memoryview) -> str:
    """The name of an object with these bytes: 40 hex digits."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def ids_digests(ids: torch.Tensor, chunk_tokens: int) -> list[str]:
    """For each chunk of ids (T,), a digest of all ids up to its end."""
    digests, state = [], hashlib.blake2b(digest_size=20)
    for part in ids.to("cpu", torch.int64).split(chunk_tokens):
        state.update(part.numpy().astype("<i8").tobytes())
        digests.append(state.copy().hexdigest())
    return digests


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamObject(_Checked):
    """An object's name and size."""

    name: _Digest
    bytes: _Count


class StreamManifest(_Checked):
    """Instances are valid: `parse` raises `ContextError` for anything else."""

    format: Literal["hf_offload_cache stream"] = FORMAT
    version: Literal[1, 2] = VERSION
    cache: _Name
    """Class of the cache that was published."""
    config: dict[str, Any]
    """Its fields, see `form_of`."""
    identity: dict[str, str]
    """The model's fingerprint, as in saved contexts."""
    level: _Name
    tokens: _Count
    chunk_tokens: Annotated[int, Field(ge=64, le=8192)]
    layers: _Positive
    heads: _Positive
    key_dim: _Positive
    value_dim: _Positive
    dtype: Literal["bfloat16", "float16", "float32"]
    indexers: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**24)], ...], Field(max_length=_MOST_LAYERS)] = ()
    """Width of the keys of each layer's own indexer, 0: it has none; empty: the model has none."""
    prefixes: tuple[_Digest, ...]
    """Digest of all ids up to the end of each chunk."""
    cells: tuple[Annotated[tuple[StreamObject | None, ...], Field(max_length=_MOST_LAYERS)], ...]
    """By chunk and layer; None: not published. The first layer's cells never are."""
    fitted: StreamObject | None = None
    active: StreamObject | None = None
    """The blocks of keys that its queries attend to most, if they were measured."""
    context: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random: encrypted objects are bound to it."""

    @model_validator(mode="after")
    def _holds_together(self) -> StreamManifest:
        chunks = -(-self.tokens // self.chunk_tokens)
        if len(self.prefixes) != chunks or len(self.cells) != chunks:
            raise ValueError(f"{self.tokens} tokens are {chunks} chunks of {self.chunk_tokens}")
        if any(item is not None and item.bytes > MOST_BYTES for item in (self.fitted, self.active)):
            raise ValueError(f"fitted state and active blocks may have at most {MOST_BYTES:,} bytes")
        if (self.version == WITH_INDEXERS) != any(self.indexers) or len(self.indexers) not in (0, self.layers):
            raise ValueError(f"version {WITH_INDEXERS}, and no other, has a width of indexer keys for each layer")
        most = 2 * self.largest.nbytes + 65536 if chunks else 0
        for row in self.cells:
            if len(row) != self.layers or row[0] is not None:
                raise ValueError("a chunk has a cell for each layer, and none is published of the first one")
            if any(cell is not None and cell.bytes > most for cell in row):
                raise ValueError(f"a cell has {most:,} bytes at most")
        return self

    @property
    def chunks(self) -> int:
        return len(self.cells)

    def tokens_of(self, chunk: int, most: int | None = None) -> int:
        """All chunks but the last have `chunk_tokens`. `most`: count the context's first `most` tokens only."""
        tokens = self.tokens if most is None else min(most, self.tokens)
        return max(0, min(self.chunk_tokens, tokens - chunk * self.chunk_tokens))

    def shape(self, chunk: int, layer: int) -> ChunkShape:
        """The shape of a chunk in a layer."""
        return self._shape(chunk, self.indexers[layer] if self.indexers else 0)

    @property
    def largest(self) -> ChunkShape:
        """The shape of the largest chunk."""
        return self._shape(0, max(self.indexers, default=0))

    def _shape(self, chunk: int, indexer_dim: int) -> ChunkShape:
        sizes = self.heads, self.tokens_of(chunk), self.key_dim, self.value_dim
        return ChunkShape(*sizes, getattr(torch, self.dtype), indexer_dim)

    def common(self, ids: torch.Tensor) -> int:
        """Number of complete chunks that ids (T,) begin with."""
        pairs = zip(ids_digests(ids[: self.tokens], self.chunk_tokens), self.prefixes, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def dumped(self) -> bytes:
        return self.model_dump_json(exclude=None if self.indexers else {"indexers"}).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, 64 hex digits, for `stream_context(expect=...)`. Each publication has its own."""
        return hashlib.sha256(self.dumped()).hexdigest()

    @classmethod
    def parse(cls, data: bytes, place: str) -> StreamManifest:
        """Raises `ContextError` that names `place`."""
        try:
            tree = parse_json(data, MOST_MANIFEST_BYTES)  # checks its size and depth
        except ValueError as error:
            raise ContextError(f"{place} is no manifest of a published context: {error}") from None
        stated, version = (tree.get("format"), tree.get("version")) if isinstance(tree, dict) else (None, None)
        del tree  # takes memory
        if stated != FORMAT:
            raise ContextError(f"{place} is no manifest of a published context: its format is {shown(stated)}")
        if type(version) is not int or version not in (VERSION, WITH_INDEXERS):
            raise ContextError(
                f"{place}: its format has version {shown(version)} and this library reads {VERSION} and "
                f"{WITH_INDEXERS}: publish the context anew"
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where, what = shown(".".join(map(str, first["loc"])) or "it"), shown(first["msg"], 200)
            raise ContextError(f"{place} is no manifest of a published context: {where}: {what}") from None


def binding(manifest_context: str, what: str) -> bytes:
    """The associated data of an encrypted object: its context, and its place in it."""
    return f"published {what}\0{manifest_context}".encode()
