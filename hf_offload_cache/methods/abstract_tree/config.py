"""What a user may set of `AbstractTreeCache`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from ...config import SelectedShareConfig, parse_size
from ...errors import ConfigError

# How many tokens a chunk of the adaptive tree should have (LeoAM, section 4.2, "dynamic chunk resizing")

SIZES = (64, 32, 16, 8)
"""Tokens a chunk, the largest first."""


def expected_judged(size: int, tokens: int, open_shares: Mapping[int, float]) -> float:
    """What is judged of `tokens` that begin as chunks of `size`: the chunks, and two parts of each that is split.

    `open_shares`: of the chunks of each size, a power of two, down to the least one, the share that their bounds leave
    open, or for which there is room among the chunks read; those of the least size are not split.

    The paper's equation (2) counts each level below a chunk as if it had as many chunks as there are to begin with. So
    it is least at one chunk for every density from .05 to .9, and cannot be meant as written.
    """
    judged, least = tokens / size, min(open_shares)
    while size > least:
        judged += 2 * open_shares[size] * tokens / size
        size //= 2
    return judged


def best_size(open_shares: Mapping[int, float], sizes: Iterable[int] = SIZES) -> int:
    """Of `sizes` the one for which `expected_judged` is least, among equals the smallest, which bounds tell most of.

    One size is better than the half of it where less than a half of its chunks are split.
    """
    return min(sorted(sizes), key=lambda size: expected_judged(size, 1024, open_shares))


_LEAST_IN_MEMORY, _LEAST_ON_DISK = 8, 16
_ALL = 1 << 40
"""More tokens than any layer holds."""


@dataclass(frozen=True)
class AbstractTreeConfig(SelectedShareConfig):
    """The fields that all caches have, and those of chunks, of what is looked into, and of tiers. Sizes in tokens a
    sequence and layer; layers are counted among those that are offloaded."""

    stored_format: ClassVar[tuple[str, ...]] = (
        *SelectedShareConfig.stored_format, "chunk_size", "abstracts", "dense_layers", "dense_chunk_size",
    )  # fmt: skip
    kept_on_open: ClassVar[tuple[str, ...]] = (
        *SelectedShareConfig.kept_on_open, "compress", "abstracts", "chunk_size", "dense_layers", "dense_chunk_size",
    )  # fmt: skip

    chunk_size: int | Sequence[int] | None = None
    """Tokens a chunk, a power of two: what has an abstract, and is a record on disk; or those of each layer, which
    `calibrate_chunks` measures. None: 64."""
    abstracts: str | None = None
    """Where the abstracts of chunks are: "memory", a 64th of keys and values at chunks of 64; "disk", from where they
    are read for every query. None: in memory, or where `for_budget` finds that they fit."""
    num_opened: int | None = None
    """Tokens of the chunks that a step brings and looks into, among which it finds those that it attends to. None: four
    times as many as it attends to."""
    early_steps: int = 16
    """Steps after a prompt that look into twice as many tokens: what is stored has its chunks, and cannot have smaller
    ones for a while, as the paper would."""
    dense_layers: float = 0.0625
    """First layers, where attention is dense: they attend to `dense_share` of the tokens held, and to no fewer than the
    others, in whole chunks of `dense_chunk_size`. A whole number counts them; a float from 0 to 1 is their share of the
    offloaded layers, rounded: the default is LeoAM's 2 of 32, and none of up to 8."""
    dense_share: float = 0.5
    """Of the tokens held, those that dense layers attend to."""
    dense_chunk_size: int | None = None
    """Tokens a chunk of dense layers. None: 8 where they are resident, else 16; `chunk_size` where they attend to less
    than half."""
    resident_layers: int | None = None
    """First layers that are in memory as a whole while steps select: read at the first one after a prompt, and again
    when an eighth to a sixteenth has come to them. None: `dense_layers`, or none where `for_budget` finds that they do
    not fit."""
    compress: float | str | None = None
    """INT4 replicas of chunks on disk beside them, and the share of what steps read that comes as such: 0 to 1, those
    chunks that matter least; "auto": for each read that by which it comes soonest, from what the disk was measured to
    take, so that tokens may differ from run to run. Between 0 and 1 they may differ in forks and contexts too, and from
    run to run where `look_ahead` is left to what is measured: what has come as a replica stays so in its slot. None:
    there are no replicas."""
    host_memory: int | str | None = None
    """Bytes, or a size such as "300MiB", of host memory where chunks that are used often stay, beside the slots on the
    device; each layer that is not resident has a part of it. On a CPU it is as so many more slots. None: none."""

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
        self._check_chunk_sizes()
        if self.abstracts is None:
            object.__setattr__(self, "abstracts", "memory")
        largest = max(self.group_size or 0, self.dense_size if self.dense_layers else 0)
        if isinstance(self.block_tokens, int) and self.block_tokens < largest:
            raise ConfigError(
                f"block_tokens ({self.block_tokens}) must be at least the largest chunk ({largest}), as these are "
                f"read whole: use block_tokens={largest}"
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
                raise ConfigError("chunk_size must name the tokens a chunk of each layer, got none: use 64")
            if self.dense_chunk_size is not None:
                raise ConfigError("dense_chunk_size is given, and chunk_size names each layer's: leave it out")
            for one in size:
                self._check_chunk_size("chunk_size", one)
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
                f"group_size must be chunk_size ({size}), as a chunk is a record, got {self.group_size}: leave it out"
            )
        object.__setattr__(self, "group_size", size)

    @classmethod
    def load(cls, config: Self | str | Path | None, fields: dict[str, Any]) -> Self:
        if isinstance(config, cls) and "chunk_size" in fields:
            fields = {"group_size": None, **fields}  # an instance has it from its own chunks
        return super().load(config, fields)

    def _check_chunk_size(self, name: str, size: Any) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= 1024 or size & (size - 1):
            near = 1 << min(max(size, 2), 1024).bit_length() - 1 if isinstance(size, int) else 64
            raise ConfigError(
                f"{name} must be a power of two from 2 to 1024, as many as a record holds, got {size!r}: use "
                f"{name}={near}"
            )

    @property
    def keeps_pages(self) -> bool:
        """Abstracts lie on the disk. An exact cache judges nothing."""
        return self.abstracts == "disk" and not self.exact

    @property
    def keeps_replicas(self) -> bool:
        """What is stored is stored once more, in 4 bits."""
        return self.compress is not None and not self.exact

    @property
    def keeps_all(self) -> bool:
        """Of a layer: it is resident."""
        return self.reuse_capacity == _ALL

    @property
    def residents(self) -> float:
        """Number of first layers that are resident; like `dense_layers`, a share until `for_layers` has resolved it."""
        return self.dense_layers if self.resident_layers is None else self.resident_layers

    @property
    def dense_size(self) -> int:
        """Tokens a chunk of dense layers: the best size where they open as many chunks of any as they attend to."""
        assert self.group_size is not None
        if isinstance(self.chunk_size, tuple):
            return max(self.chunk_size)
        if self.dense_chunk_size is not None:
            return self.dense_chunk_size
        least = _LEAST_IN_MEMORY if self.residents >= self.dense_layers else _LEAST_ON_DISK
        sizes = [one for one in SIZES if least <= one <= self.group_size]
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
        if self.host_memory is not None:
            parse_size(self.host_memory, "host_memory")

    def of_layer(self, index: int) -> Self:
        assert isinstance(self.dense_layers, int), "for_layers counts them first"
        own: dict[str, Any] = {}
        if isinstance(self.chunk_size, tuple):
            if index >= len(self.chunk_size):
                raise ConfigError(
                    f"chunk_size must name each offloaded layer's, got {len(self.chunk_size)}, and there are more: see "
                    f"calibrate_chunks"
                )
            own["chunk_size"] = self.chunk_size[index]
        elif index < self.dense_layers:
            own["chunk_size"] = self.dense_size
        if index < self.residents:
            # all of it is in memory as it is: nothing is read to choose by, and nothing travels in 4 bits
            own.update(reuse_capacity=_ALL, host_memory=None, abstracts="memory", compress=None)
        if not own and index >= self.dense_layers:
            return self
        own.setdefault("chunk_size", self.chunk_size)
        own.update(group_size=own["chunk_size"], dense_layers=0, resident_layers=self.residents, dense_chunk_size=None)
        if index >= self.dense_layers:
            return dataclasses.replace(self, **own)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return cast(Self, DenseLayerConfig(**{**fields, **own}))

    def brought(self, held: int) -> int:
        wanted = self.attended(held)
        return wanted * 4 if self.num_opened is None else max(wanted, self.num_opened)

    def brought_at_most(self, held: int) -> int:
        looked_into = self.brought(held) > self.attended(held)
        return (2 if self.early_steps and looked_into else 1) * self.brought(held)

    def host_bytes_of(self, layers: int) -> int:
        """The part of `host_memory` that a layer has, one of so many: those that are not resident have all of it."""
        whole = 0 if self.host_memory is None else parse_size(self.host_memory, "host_memory")
        return whole // max(1, layers - int(self.residents))


@dataclass(frozen=True)
class DenseLayerConfig(AbstractTreeConfig):
    """What applies to a layer where attention is dense: its chunks are attended to whole."""

    def attended(self, held: int) -> int:
        return max(super().attended(held), math.ceil(self.dense_share * held))

    def brought(self, held: int) -> int:
        return self.attended(held)

    def brought_at_most(self, held: int) -> int:
        return self.attended(held)
