"""What is to be tuned, within which limits: what every way of tuning begins with, and what it hands back."""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.budget import FORMAT
from ..core.selective_cache import SelectiveCache
from ..errors import ConfigError
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from .sample import sample_ids, windows


@dataclass(frozen=True)
class Task:
    """A cache of the class `measured`, for up to `max_batch` sequences of `max_context` tokens, in `budget` bytes."""

    model: Any
    """The inner model."""
    measured: type[SelectiveCache]
    geometry: Geometry
    budget: int
    max_context: int
    max_batch: int
    fields: dict[str, Any]
    """The user's, which every row is to have."""
    texts: Iterable[Any] | str | None = None
    tokenizer: Any = None
    path: str | Path | None = None
    quick: bool = False
    samples: int | None = None
    seconds: float = 0.0
    """To aim at."""
    progress: bool = True
    started: float = field(default_factory=time.perf_counter)

    @property
    def directory(self) -> Path:
        return Path(tempfile.gettempdir() if self.path is None else self.path)

    def share(self, batch: int) -> int:
        """Bytes for so many of the sequences."""
        return self.budget * batch // self.max_batch

    def stretches(self, wanted: int, least: int, most: int) -> list[torch.Tensor]:
        """Of the sample text, as `windows`."""
        return windows(sample_ids(self.texts, self.tokenizer), wanted, least, most)

    def values(self, store: str, sample: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """The object that `Tuned` holds: what was asked, on which machine, then what was `found`."""
        return {
            "format": FORMAT,
            "cache": self.measured.__name__,
            "model": fingerprint(self.model),
            "memory": self.budget,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "machine": machine_of(self.model, store),
            "sample": {**sample, "source": "bundled" if self.texts is None else "given"},
            "quick": self.quick,
            "seconds": round(time.perf_counter() - self.started, 1),
            **found,
        }


def refuse(names: Iterable[str], fields: dict[str, Any]) -> None:
    """Raise `ConfigError` if the user's `fields` have one of `names`, which tuning decides or does without."""
    for name in names:
        if name in fields:
            raise ConfigError(f"{name} is not to be given: tuning decides it, or does without; leave it out")


def machine_of(model: Any, store: str) -> dict[str, Any]:
    """What times depend on, plain JSON values; `store`: how records are read."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "system": platform.system(),
        "device": device.type,
        "processor": name,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "store": store,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
