"""What each cache of the registry would hold in the same memory, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tuning.compare_plans import ComparedPlan
    from ..tuning.which_cache import Cell, Chosen


def comparison_of_plans(plans: list[ComparedPlan], title: str) -> Any:
    """A column a plan; of a cache that has several, how many tokens a step of the others attends to."""
    from rich.table import Table

    from ..report.text import size_text

    table = Table(title=title)
    table.add_column("", style="bold")
    for one in plans:
        wider = "" if one.num_selected is None else f"\n{one.num_selected:,} tokens"
        table.add_column(f"{one.name}{wider}", justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    def size(one: ComparedPlan, name: str) -> str:
        return "-" if one.plan is None else size_text(getattr(one.plan, name))

    row("fits", *("yes" if one.plan is not None else "no" for one in plans))
    row("held in prefill", *(size(one, "prefill_bytes") for one in plans))
    row("held in decoding", *(size(one, "decode_bytes") for one in plans))
    shares = ("-" if one.plan is None else one.plan.share.removesuffix(" of the full KV") or "-" for one in plans)
    row("of the full KV", *(share.removesuffix(" the full KV") for share in shares))
    row("on disk", *(size(one, "disk_bytes") for one in plans))
    row("in host memory, beside", *(size(one, "host_bytes") for one in plans))
    row("tokens attended, as they are", *("-" if one.attended is None else f"{one.attended:,}" for one in plans))
    reads = ("-" if one.read_bytes is None else size_text(one.read_bytes) for one in plans)
    row("read a step, if nothing is in memory", *reads)
    return table


def recommended(
    plans: list[ComparedPlan], cells: list[Cell], memory: float, context: int
) -> dict[str, Chosen]:
    """Of plans that fit the one to take, by what is wanted: each goal for a long prompt, and fidelity for long outputs.

    `cells` and `memory`, a share, as `which_cache` takes them.
    """
    from ..tuning.which_cache import which_cache

    wanted = {"fidelity": ("fidelity", "long-prompt"), "speed": ("speed", "long-prompt"),
              "fidelity of long outputs": ("fidelity", "long-output")}  # fmt: skip
    return {name: which_cache(plans, cells, memory, context, *both) for name, both in wanted.items()}
