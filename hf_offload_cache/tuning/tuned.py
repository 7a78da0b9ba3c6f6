"""What tuning found, a JSON object beside an adapter, and the row of it that a cache takes (KVSwap, appendix A.4)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import read_json
from ..stores.atomic_file import replace_file


@dataclass(frozen=True)
class Tuned:
    """`values` is the object that `save` writes: format, model, machine, what was measured, rows; see
    docs/tuning.md."""

    values: dict[str, Any]
    adapter: Any = None
    """With `save(path)` and `digest()`, such as an `Adapter`; None: the rows name none."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The solution for each (batch, context): "fields" of a cache, and what is expected of them."""
        rows: list[dict[str, Any]] = self.values["rows"]
        return rows

    def save(self, path: str | Path) -> None:
        """Write the object to `path` and the adapter, if there is one, beside it, as
        `<stem>.adapter-<digest>.safetensors`.

        Each is written to a temporary file in the same folder, forced to the disk and moved into place, the object
        last: interrupted, what was at `path` before is there still, whole, with its adapter. An adapter that only the
        object replaced named is removed at the end. Raises `OSError`; nothing is left behind then.
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
    """The adapters that an object which is at `path` already names, if it is one of ours, and that are named for it."""
    try:
        rows = read_json(path)["rows"]
        names = {str(row["fields"].get("adapter")) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {path.with_name(name) for name in names if re.fullmatch(re.escape(path.stem) + r"\.adapter-\w+\.\w+", name)}
