"""Answers to one question, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answer import Answer


def comparison(answers: Sequence[Answer]) -> Any:
    """The answers as columns of one table."""
    from rich.table import Table

    from ..report.text import share_text, size_text

    table = Table(title=f"{answers[0].prompt_tokens:,} tokens of prompt", show_lines=False)
    table.add_column("", style="bold")
    for answer in answers:
        table.add_column(answer.cache, overflow="fold")
    reports = [answer.report for answer in answers]
    peaks = [answer.report.peak_memory_bytes if answer.report else answer.memory_bytes for answer in answers]
    rates = [answer.tokens_per_second for answer in answers]
    rows: dict[str, list[str]] = {
        "answer": [answer.text for answer in answers],
        "KV memory": [size_text(answer.memory_bytes) for answer in answers],
        "KV memory, peak": [size_text(peak) for peak in peaks],
        "memory budget": [size_text(r.memory_budget) if r and r.memory_budget else "-" for r in reports],
        "on disk": [size_text(answer.disk_bytes) for answer in answers],
        "tokens/s, decode": [f"{rate:.1f}" if rate else "-" for rate in rates],
        "time to first token": [f"{answer.first_token_seconds:.1f} s" for answer in answers],
        "hit rate, before prefetch": [share_text(r.hit_rate) if r else "-" for r in reports],
        "hit rate, when asked": [share_text(r.prefetch_hit_rate) if r else "-" for r in reports],
        "time waited": [f"{r.stall_seconds:.3f} s" if r else "-" for r in reports],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
