"""The task of tuning, with its limits, and the result."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import read_json
from ..core.budget import FORMAT
from ..core.selective_cache import SelectiveCache
from ..errors import ConfigError
from ..model.fingerprint import fingerprint
from ..model.geometry import Geometry
from ..stores.atomic_file import replace_file
from .sample import sample_ids, windows


@dataclass(frozen=True)
class Task:
    """Tune a cache of the class `measured`, for up to `max_batch` sequences of `max_context` tokens, in `budget`
    bytes."""

    model: Any
    """The inner model."""
    measured: type[SelectiveCache]
    geometry: Geometry
    budget: int
    max_context: int
    max_batch: int
    fields: dict[str, Any]
    """The user's, for every row."""
    texts: Iterable[Any] | str | None = None
    tokenizer: Any = None
    path: str | Path | None = None
    quick: bool = False
    samples: int | None = None
    seconds: float = 0.0
    """Target duration."""
    progress: bool = True
    started: float = field(default_factory=time.perf_counter)

    @property
    def directory(self) -> Path:
        return Path(tempfile.gettempdir() if self.path is None else self.path)

    def share(self, batch: int) -> int:
        """Bytes for that many of the sequences."""
        return self.budget * batch // self.max_batch

    def stretches(self, wanted: int, least: int, most: int) -> list[torch.Tensor]:
        """Stretches of the sample text, as `windows`."""
        return windows(sample_ids(self.texts, self.tokenizer), wanted, least, most)

    def values(self, store: str, sample: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """The object for `Tuned`: the request, the machine, then the `found` results."""
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
            raise ConfigError(f"{name} cannot be set: tuning decides it, or does not use it; leave it out")


def machine_of(model: Any, store: str) -> dict[str, Any]:
    """Facts that times depend on, as plain JSON values; `store`: how records are read."""
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


@dataclass(frozen=True)
class Tuned:
    """The result of tuning, a JSON object and perhaps an adapter (KVSwap, appendix A.4). `values` is the object that
    `save` writes: format, model, machine, measurements, rows; see docs/tuning.md."""

    values: dict[str, Any]
    adapter: Any = None
    """With `save(path)` and `digest()`, such as an `Adapter`; None: the rows name none."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The solution for each (batch, context): "fields" of a cache, and expected costs."""
        rows: list[dict[str, Any]] = self.values["rows"]
        return rows

    def save(self, path: str | Path) -> None:
        """Write the object to `path` and the adapter, if there is one, next to it, as
        `<stem>.adapter-<digest>.safetensors`.

        Each is written to a temporary file in the same folder, forced to the disk and moved into place, the object
        last: after an interruption the previous object and its adapter are still there, complete. An adapter that only
        the replaced object named is removed at the end. Raises `OSError`; nothing is left behind then.
        """
        path, old = Path(path), _adapters_of(Path(path))
        if self.adapter is None:
            self._write(path, self.rows)
        else:
            adapter = path.with_name(f"{path.stem}.adapter-{self.adapter.digest()}.safetensors")
            old -= {adapter}
            new = not adapter.exists()
            replace_file(adapter, self.adapter.save)
            try:
                self._write(path, [{**row, "fields": {**row["fields"], "adapter": adapter.name}} for row in self.rows])
            except BaseException:
                if new:
                    adapter.unlink(missing_ok=True)
                raise
        for place in old:
            place.unlink(missing_ok=True)

    def _write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        text = json.dumps({**self.values, "rows": rows}, indent=1) + "\n"
        replace_file(path, lambda place: place.write_text(text, encoding="utf-8"))


def _adapters_of(path: Path) -> set[Path]:
    """Adapters that an earlier object at `path` names, if it is one of ours and they are named after it."""
    try:
        rows = read_json(path)["rows"]
        names = {str(row["fields"].get("adapter")) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {path.with_name(name) for name in names if re.fullmatch(re.escape(path.stem) + r"\.adapter-\w+\.\w+", name)}
