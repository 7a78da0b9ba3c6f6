"""What tuning found, a JSON object beside an adapter, and the row of it that a cache takes (KVSwap, appendix A.4)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..errors import ConfigError
from ..stores.atomic_file import replace_file

if TYPE_CHECKING:
    from ..caches.adapter import Adapter

FORMAT = "hf_offload_cache tuning 1"
"""The `format` of the object. The number goes up when a reader of the old one would read the new one wrong."""

_FAMILY = FORMAT.rpartition(" ")[0]


@dataclass(frozen=True)
class Tuned:
    """`values` is the object that `save` writes: format, model, machine, tables, profiles, rows; see the README."""

    values: dict[str, Any]
    adapter: Adapter

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The solution for each (batch, context): "fields" of a cache, and what is expected of them."""
        rows: list[dict[str, Any]] = self.values["rows"]
        return rows

    def save(self, path: str | Path) -> None:
        """Write the object to `path` and the adapter beside it, as `<stem>.adapter-<digest>.safetensors`.

        Each is written to a temporary file in the same folder, forced to the disk and moved into place, the object
        last: interrupted, what was at `path` before is there still, whole, with its adapter. An adapter that only the
        object replaced named is removed at the end. Raises `OSError`; nothing is left behind then.
        """
        path = Path(path)
        adapter = path.with_name(f"{path.stem}.adapter-{_digest(self.adapter)}.safetensors")
        old = _adapters_of(path) - {adapter}
        rows = [{**row, "fields": {**row["fields"], "adapter": adapter.name}} for row in self.rows]
        text = json.dumps({**self.values, "rows": rows}, indent=1) + "\n"
        new = not adapter.exists()
        replace_file(adapter, self.adapter.save)
        try:
            replace_file(path, lambda place: place.write_text(text, encoding="utf-8"))
        except BaseException:
            if new:
                adapter.unlink(missing_ok=True)
            raise
        for place in old:
            place.unlink(missing_ok=True)


def _digest(adapter: Adapter) -> str:
    digest = xxhash.xxh3_64()
    for layer_idx, projection in sorted(adapter.projections.items()):
        digest.update(f"{layer_idx} {tuple(projection.shape)}".encode())
        digest.update(projection.contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def _adapters_of(path: Path) -> set[Path]:
    """The adapters that an object which is at `path` already names, if it is one of ours, and that are named for it."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        names = {str(row["fields"]["adapter"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {path.with_name(name) for name in names if re.fullmatch(re.escape(path.stem) + r"\.adapter-\w+\.\w+", name)}


def is_tuned(values: dict[str, Any]) -> bool:
    """Whether a JSON object is one of `Tuned.save`, of whatever version."""
    return str(values.get("format", "")).rpartition(" ")[0] == _FAMILY


def tuned_fields(
    values: dict[str, Any], path: Path, max_context: int | None, max_batch: int | None, model: Any = None
) -> dict[str, Any]:
    """The fields of a cache for `max_batch` sequences of `max_context` tokens (None: the largest tuned for).

    `values` is the object read from `path`; the adapter's place is taken relative to that file. The row is `nearest`'s.
    `memory` is the row's share of the budget: for as many sequences as are asked for or tuned for in that row,
    whichever is more, and never more than was tuned for.

    Raises `ConfigError`: another version, damaged, or made for another model than `model`; the field that differs is
    named.
    """
    if values["format"] != FORMAT:
        raise ConfigError(
            f"config: {str(path)!r} has the format {values['format']!r} and this version reads {FORMAT!r}: tune again"
        )
    try:
        if model is not None:
            _check_model(values["model"], path, model)
        context = values["max_context"] if max_context is None else max_context
        batch = values["max_batch"] if max_batch is None else max_batch
        row = nearest(values["rows"], batch, context)
        fields = dict(row["fields"])
        fields["adapter"] = str(path.parent / fields["adapter"])
        sequences = min(values["max_batch"], max(batch, row["batch"]))
        memory = values["memory"] * sequences // values["max_batch"]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"config: {str(path)!r} is not what tuning wrote ({error!r}): tune again") from error
    return {**fields, "memory": memory, "max_context": context, "max_batch": batch}


def nearest(rows: list[dict[str, Any]], batch: int, context: int) -> dict[str, Any]:
    """The row for (batch, context), or else the nearest: the one with the smallest |log2 of the ratio of the batches| +
    |log2 of the ratio of the contexts|, among those whose context is no shorter where there are any (a shorter one's
    compact keys would not fit the budget); of equals the one for more sequences."""
    if not isinstance(batch, int) or not isinstance(context, int) or min(batch, context) < 1:
        raise ConfigError(
            f"max_batch and max_context must be whole numbers of at least 1, got {batch!r} and {context!r}"
        )
    if not rows:
        raise IndexError("no rows")
    longer = [row for row in rows if row["context"] >= context] or rows

    def distance(row: dict[str, Any]) -> tuple[float, int]:
        apart = abs(math.log2(row["batch"] / batch)) + abs(math.log2(row["context"] / context))
        return round(apart, 9), -row["batch"]

    return min(longer, key=distance)


def _check_model(made_for: dict[str, str], path: Path, model: Any) -> None:
    from ..model.fingerprint import fingerprint

    for name, value in fingerprint(model).items():
        if made_for.get(name) != value:
            raise ConfigError(
                f"config: {str(path)!r} was tuned for another model: {name} is {value}, the tuned one's is "
                f"{made_for.get(name)}; tune for this model"
            )
