"""The project's speed targets: each is a ratio of rows of one comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .compare import compare, setting_of
from .contenders import FULL, IN_MEMORY, NO_REUSE, OWN, SINGLE
from .studies.common import judged


def over_ours(
    result: dict[str, Any], others: tuple[str, ...], overlap: str, field: str, ours: str = OWN
) -> float | None:
    """Seconds of the fastest of the others over ours, "store_seconds" or "median_seconds" of a step."""
    rows = result["rows"]
    seconds = [rows[name][overlap][field] for name in others if name in rows]
    return min(seconds) / rows[ours][overlap][field] if seconds else None


def targets(
    tokens: int = 32768, batches: tuple[int, int] = (8, 4), path: str | None = None, device: str = "cpu",
    say: Callable[[str], Any] = print, shapes: tuple[str, str] = ("replay", "smollm2"),
    keep: Callable[[dict[str, Any]], Any] = lambda runs: None, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """The speed targets as "must_reach", and their runs. `batches`: of the replay and of the model, besides 1. `keep`
    is given the runs so far after each. Other arguments are `compare`'s. Raises `ValueError` if one of ours cannot run;
    a figure without a run to compare with is None."""
    replay, model = shapes
    runs: dict[str, Any] = {}

    def run(
        name: str, shape: str, batch: int, methods: tuple[str, ...], overlaps: tuple[str, ...], profile: str = "own"
    ) -> dict[str, Any]:
        say(f"--- {name}: {shape}, batch {batch}, {profile}")
        setting = setting_of(shape, tokens, batch, path=path, device=device, profile=profile)
        runs[name] = compare(setting, methods, overlaps, say=say, **arguments)
        for one in set(methods) & set(runs[name]["left_out"]) - {FULL, *IN_MEMORY}:
            raise ValueError(f"{name}: {one} cannot run: {runs[name]['left_out'][one]}")
        keep(runs)
        return runs[name]

    one = run("replay", replay, 1, (OWN, NO_REUSE, SINGLE, FULL), ("off", "on"))
    several = run("replay, large batch", replay, batches[0], (OWN, FULL), ("off", "on"))
    emmc = run("replay, emmc", replay, 1, (OWN, NO_REUSE), ("off",), "emmc")
    small = run("model", model, 1, (OWN, *IN_MEMORY), ("on",))
    large = run("model, batch", model, batches[1], (OWN, *IN_MEMORY), ("on",))
    store, step = ("off", "store_seconds"), ("on", "median_seconds")
    reached = [
        judged("store time of a full reload over ours, batch 1", over_ours(one, (FULL,), *store), least=17),
        judged(f"the same, batch {batches[0]}", over_ours(several, (FULL,), *store), least=60),
        judged("store time of single tokens over groups", over_ours(one, (SINGLE,), *store, NO_REUSE), least=1),
        judged("store time without the reuse buffer over with it", over_ours(one, (NO_REUSE,), *store), least=1.8),
        judged("the same, emulated eMMC", over_ours(emmc, (NO_REUSE,), *store), least=3),
        judged("tokens/s over the faster cache in memory, batch 1", over_ours(small, IN_MEMORY, *step), least=1.5),
        judged(f"the same, batch {batches[1]}", over_ours(large, IN_MEMORY, *step), least=2.5),
    ]
    return {"must_reach": reached, "runs": runs}
