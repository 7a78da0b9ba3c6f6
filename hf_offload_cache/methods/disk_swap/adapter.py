"""A calibrated low-rank adapter, KVSwap's matrix A (section 3.2): made from sample text, saved with a fingerprint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...config import parse_json
from ...errors import AdapterError, shown
from ...model.fingerprint import fingerprint

_FORMAT = "hf_offload_cache adapter 1"
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class Adapter:
    """Projections (Hk D, r) float32 by layer index, most energy first: the first s columns form the one of rank s."""

    projections: dict[int, torch.Tensor]
    made_for: dict[str, str]

    def save(self, path: str | Path) -> None:
        """Write safetensors with the model's fingerprint as metadata."""
        tensors = {f"layer.{index}": tensor.contiguous() for index, tensor in self.projections.items()}
        save_file(tensors, path, metadata={"format": _FORMAT, "model": json.dumps(self.made_for)})

    def digest(self) -> str:
        """Hash of layers, shapes and values, in eight hexadecimal digits."""
        digest = xxhash.xxh3_64()
        for layer_idx, projection in sorted(self.projections.items()):
            digest.update(f"{layer_idx} {tuple(projection.shape)}".encode())
            digest.update(projection.contiguous().numpy().tobytes())
        return digest.hexdigest()[:8]

    @classmethod
    def load(cls, path: Path, model: torch.nn.Module) -> Adapter:
        """Read an adapter for `model`. Raises `AdapterError` if the file is unreadable, corrupt, of another version, or
        made for another model."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if (stated := metadata.get("format")) != _FORMAT:
                    raise ValueError(f"its format is {shown(repr(stated))} and this library reads {_FORMAT!r}")
                if len(file.keys()) > _MOST_LAYERS:
                    raise ValueError(f"it has {len(file.keys()):,} tensors")
                projections = {int(name.rpartition(".")[2]): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            made_for = dict(parse_json(metadata["model"].encode()))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            why = shown(str(error), 200)
            raise AdapterError(f"adapter {str(path)!r} cannot be read ({why}): make it with calibrate()") from error
        for name, value in fingerprint(model).items():
            if made_for.get(name) != value:
                raise AdapterError(
                    f"adapter {str(path)!r} was made for another model: {name} is {value}, the adapter's is "
                    f"{shown(made_for.get(name))}; make one for this model with calibrate()"
                )
        return cls(projections, made_for)

    def of_layer(self, layer_idx: int, rank: int | None, width: int | None = None) -> torch.Tensor:
        """One layer's projection, cut to `rank` columns. `width`: Hk D, if known. Raises `AdapterError` if the layer is
        missing, or its projection has a wrong shape or type, too few columns, or values that are not finite."""
        projection = self.projections.get(layer_idx)
        if projection is None:
            raise AdapterError(f"the adapter has no layer {layer_idx}; it has {sorted(self.projections)}")
        right = projection.ndim == 2 and projection.shape[0] == (width or projection.shape[0])
        if not right or not 0 < projection.shape[1] <= projection.shape[0] or not projection.is_floating_point():
            raise AdapterError(
                f"the adapter of layer {layer_idx} has shape {tuple(projection.shape)} {projection.dtype}; it must be "
                f"({width or 'Hk D'}, rank), with no more columns than rows: make one with calibrate()"
            )
        if not torch.isfinite(projection).all():
            raise AdapterError(f"the adapter of layer {layer_idx} is not finite: make a new one with calibrate()")
        if rank is not None and rank > projection.shape[1]:
            raise AdapterError(f"rank is {rank}, the adapter was calibrated with {projection.shape[1]}: use less")
        return projection if rank is None else projection[:, :rank].contiguous()


def adapter_rank(path: str | Path) -> int:
    """Smallest rank among the layers of a calibrated adapter. Raises `AdapterError`."""
    try:
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        rank = min(min(shape[1], shape[0]) for shape in shapes)
        if rank < 1:
            raise ValueError("it has no columns")
    except (OSError, SafetensorError, ValueError, IndexError) as error:
        why = shown(str(error), 200)
        raise AdapterError(f"adapter {str(path)!r} cannot be read ({why}): make it with calibrate()") from error
    return rank
