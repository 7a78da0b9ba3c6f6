"""The fields of `AbstractTreeCache`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from ...config import SelectedShareConfig
from ...errors import ConfigError

# Tokens per chunk (LeoAM, section 4.2, "dynamic chunk resizing")

SIZES = (64, 32, 16, 8)
"""Tokens a chunk, the largest first."""


def expected_judged(size: int, tokens: int, open_shares: Mapping[int, float]) -> float:
    """Importance evaluations of `tokens` that start as chunks of `size` (LeoAM, equation 2, corrected): the chunks, and
    two parts of each chunk that is split.

    `open_shares`: for each size, a power of two, down to the smallest, the share of its chunks that bounds leave open,
    or that a step has room to read. Chunks of the smallest size are not split.

    The paper's equation 2 counts each level below a chunk as if it had as many chunks as the first. It is then least at
    one chunk for every density from .05 to .9, so it cannot be meant as printed.
    """
    judged, least = tokens / size, min(open_shares)
    while size > least:
        judged += 2 * open_shares[size] * tokens / size
        size //= 2
    return judged


def best_size(open_shares: Mapping[int, float], sizes: Iterable[int] = SIZES) -> int:
    """The size with the fewest evaluations by `expected_judged` (LeoAM, equation 3); of equals the smallest, which has
    the tightest bounds.

    A size beats its half if less than half of its chunks are split.
    """
    return min(sorted(sizes), key=lambda size: expected_judged(size, 1024, open_shares))


_LEAST_IN_MEMORY, _LEAST_ON_DISK = 8, 16
_ALL = 1 << 40
"""More tokens than any layer can store."""


@dataclass(frozen=True)
class AbstractTreeConfig(SelectedShareConfig):
    """The fields of all caches, and those of chunks, of examined tokens, and of tiers. Sizes are tokens per sequence
    and layer; layers are counted among the offloaded ones."""

    stored_format: ClassVar[tuple[str, ...]] = (
        *SelectedShareConfig.stored_format, "chunk_size", "abstracts", "dense_layers", "dense_chunk_size",
    )  # fmt: skip
    kept_on_open: ClassVar[tuple[str, ...]] = (
        *SelectedShareConfig.kept_on_open, "compress", "abstracts", "chunk_size", "dense_layers", "dense_chunk_size",
    )  # fmt: skip
    renamed: ClassVar[dict[str, str]] = {**SelectedShareConfig.renamed, "host_memory": "host_slots"}

    chunk_size: int | Sequence[int] | None = None
    """Tokens per chunk, a power of two. A chunk has one abstract, and is one record on disk. A sequence has one value
    for each offloaded layer, as `calibrate_chunks` measures them. None: 64."""
    abstracts: str | None = None
    """Storage of the chunks' abstracts: "memory", a 64th of keys and values at chunks of 64; or "disk", from where each
    query reads them. None: in memory, or on disk if `for_budget` has no room for them."""
    num_opened: int | None = None
    """Tokens in the chunks that a step reads and examines to select those it attends to. None: four times the attended
    tokens."""
    early_steps: int = 16
    """Steps after a prompt that examine twice as many tokens. The paper uses smaller chunks in these steps, but stored
    chunks keep their size."""
    dense_layers: float = 0.0625
    """First layers, where attention is dense. They attend to `dense_share` of the stored tokens, but to no fewer than
    other layers, in complete chunks of `dense_chunk_size`. An int is their number. A float from 0 to 1 is their share
    of the offloaded layers, rounded: the default gives LeoAM's 2 of 32, and none of up to 8."""
    dense_share: float = 0.5
    """Share of the stored tokens that dense layers attend to."""
    dense_chunk_size: int | None = None
    """Tokens per chunk in dense layers. None: 8 if these are resident, else 16; `chunk_size` if they attend to less
    than half."""
    resident_layers: int | None = None
    """First layers that are completely in memory while steps select. They are read at the first step after a prompt,
    and again when they have grown by an eighth to a sixteenth. None: `dense_layers`, or none if `for_budget` has no
    room for them."""
    compress: float | str | None = None
    """Share of a step's reads that uses INT4 replicas, 0 to 1: the least important chunks. The replicas are on disk
    next to the chunks. "auto": per read, the share that minimises predicted latency on the measured disk, so tokens may
    differ between runs. A chunk read as a replica stays one in its slot. With a share between 0 and 1, tokens may
    therefore differ in forks and contexts, and between runs if `look_ahead` is measured. None: no replicas."""

    def on_a_cpu(self) -> Self:
        """As `OffloadConfig.on_a_cpu`; there `host_memory`, its earlier name, is `host_slots`."""
        if self.host_memory is None or self.host_slots is not None:
            return super().on_a_cpu()
        return dataclasses.replace(self, host_memory=None, host_slots=self.host_memory)

    def __post_init__(self) -> None:
        self._check_dense_layers()
        if self.resident_layers is not None:
            self._at_least("resident_layers", 0)
        self._share("dense_share")
        share = self.compress
        if share not in (None, "auto") and (
            isinstance(share, bool | str) or not isinstance(share, int | float) or not 0 <= share <= 1
        ):
            raise ConfigError(f"compress must be a share from 0 to 1, 'auto' or None, got {share!r}: use 'auto'")
        if share is not None and self.entry_bits is not None:
            raise ConfigError(
                f"compress={share!r} reads 4-bit replicas of entries in the model's own type, which entry_bits="
                f"{self.entry_bits} does not keep: leave out one of the two (a saved context keeps its entry_bits)"
            )
        self._check_chunk_sizes()
        if self.abstracts is None:
            object.__setattr__(self, "abstracts", "memory")
        largest = max(self.group_size or 0, self.dense_size if self.dense_layers else 0)
        if isinstance(self.least_block, int) and self.least_block < largest:
            raise ConfigError(
                f"block_tokens ({self.least_block}) must be at least the largest chunk ({largest}), because chunks "
                f"are read completely: use block_tokens={largest}"
            )
        super().__post_init__()

    def _check_dense_layers(self) -> None:
        dense = self.dense_layers
        if not isinstance(dense, float):
            self._at_least("dense_layers", 0)
        elif not 0 <= dense <= 1:
            raise ConfigError(
                "dense_layers must be a whole number, or a share of the offloaded layers from 0.0 to 1.0, got "
                f"{dense!r}: use dense_layers=2"
            )

    def for_layers(self, layers: int) -> Self:
        dense = self.dense_layers
        return dataclasses.replace(self, dense_layers=round(dense * layers)) if isinstance(dense, float) else self

    def _check_chunk_sizes(self) -> None:
        size = self.chunk_size
        if isinstance(size, Sequence) and not isinstance(size, str):
            object.__setattr__(self, "chunk_size", tuple(size))
            if not size:
                raise ConfigError("chunk_size must have one value for each offloaded layer, got an empty list: use 64")
            if self.dense_chunk_size is not None:
                raise ConfigError("dense_chunk_size must be left out if chunk_size has a value for each layer")
            for layer_size in size:
                self._check_chunk_size("chunk_size", layer_size)
            size = max(size)
        else:
            if size is None:
                size = 64 if self.group_size is None else self.group_size
                object.__setattr__(self, "chunk_size", size)
            self._check_chunk_size("chunk_size", size)
            if self.dense_chunk_size is not None:
                self._check_chunk_size("dense_chunk_size", self.dense_chunk_size)
        if self.group_size not in (None, size):
            raise ConfigError(
                f"group_size must equal chunk_size ({size}), got {self.group_size}: leave group_size out"
            )
        object.__setattr__(self, "group_size", size)

    @classmethod
    def load(cls, config: Self | str | Path | None, fields: dict[str, Any]) -> Self:
        if isinstance(config, cls) and "chunk_size" in fields:
            fields = {"group_size": None, **fields}  # an instance has set it from its own chunks
        return super().load(config, fields)

    def _check_chunk_size(self, name: str, size: Any) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= 1024 or size & (size - 1):
            nearest = 1 << min(max(size, 2), 1024).bit_length() - 1 if isinstance(size, int) else 64
            raise ConfigError(f"{name} must be a power of two from 2 to 1024, got {size!r}: use {name}={nearest}")

    @property
    def heads_apart(self) -> bool:
        return True

    @property
    def keeps_pages(self) -> bool:
        """True if abstracts are on disk. An exact cache has none."""
        return self.abstracts == "disk" and not self.exact

    @property
    def keeps_replicas(self) -> bool:
        """True if every record has a 4-bit replica on disk."""
        return self.compress is not None and not self.exact

    @property
    def keeps_all(self) -> bool:
        """True if the whole layer is kept in memory."""
        return self.reuse_capacity == _ALL

    @property
    def residents(self) -> float:
        """Number of resident first layers; like `dense_layers`, a share until `for_layers` has resolved it."""
        return self.dense_layers if self.resident_layers is None else self.resident_layers

    @property
    def dense_size(self) -> int:
        """Tokens per chunk in dense layers: the best size if they open as many chunks as they attend to."""
        assert self.group_size is not None
        if isinstance(self.chunk_size, tuple):
            return max(self.chunk_size)
        if self.dense_chunk_size is not None:
            return self.dense_chunk_size
        least = _LEAST_IN_MEMORY if self.residents >= self.dense_layers else _LEAST_ON_DISK
        sizes = [size for size in SIZES if least <= size <= self.group_size]
        return best_size(dict.fromkeys(SIZES, self.dense_share), sizes) if sizes else self.group_size

    def as_saved(self) -> Self:
        if isinstance(self.chunk_size, tuple):
            return self
        return dataclasses.replace(self, dense_chunk_size=self.dense_size)

    def _check_selection(self) -> None:
        self._one_of("abstracts", ("memory", "disk"))
        self._at_least("early_steps", 0)
        super()._check_selection()
        if self.num_opened is not None:
            self._at_least("num_opened", self.num_selected or 1)

    def of_layer(self, index: int) -> Self:
        assert isinstance(self.dense_layers, int), "for_layers counts them first"
        changes: dict[str, Any] = {}
        if isinstance(self.chunk_size, tuple):
            if index >= len(self.chunk_size):
                raise ConfigError(
                    f"chunk_size must have one value for each offloaded layer, got {len(self.chunk_size)} for more "
                    "layers: measure them on this model with calibrate_chunks"
                )
            changes["chunk_size"] = self.chunk_size[index]
        elif index < self.dense_layers:
            changes["chunk_size"] = self.dense_size
        if index < self.residents:
            # the complete layer is in memory: it reads no abstracts and no replicas
            changes.update(reuse_capacity=_ALL, host_slots=None, abstracts="memory", compress=None)
        if not changes and index >= self.dense_layers:
            return self
        changes.setdefault("chunk_size", self.chunk_size)
        changes.update(group_size=changes["chunk_size"], dense_layers=0, resident_layers=self.residents)
        changes["dense_chunk_size"] = None
        if index >= self.dense_layers:
            return dataclasses.replace(self, **changes)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return cast(Self, DenseLayerConfig(**{**fields, **changes}))

    def tokens_fetched(self, held: int) -> int:
        wanted = self.attended(held)
        return wanted * 4 if self.num_opened is None else max(wanted, self.num_opened)

    def most_tokens_fetched(self, held: int) -> int:
        looked_into = self.tokens_fetched(held) > self.attended(held)
        return (2 if self.early_steps and looked_into else 1) * self.tokens_fetched(held)

    def host_bytes_of(self, layers: int) -> int:
        """As `SelectiveConfig.host_bytes_of`: the layers that are not resident share it."""
        return super().host_bytes_of(layers - int(self.residents))


@dataclass(frozen=True)
class DenseLayerConfig(AbstractTreeConfig):
    """The configuration of a dense layer, which attends to complete chunks."""

    def attended(self, held: int) -> int:
        return max(super().attended(held), math.ceil(self.dense_share * held))

    def tokens_fetched(self, held: int) -> int:
        return self.attended(held)

    def most_tokens_fetched(self, held: int) -> int:
        return self.attended(held)
