"""`hf-offload-cache lm-eval`, which also finds the tasks in `tasks/`.

    python -m eval.lm_eval --memory 1/13 --tasks needle_single
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from hf_offload_cache.console.main import main as console

TASKS = Path(__file__).parent / "tasks"


class _OurTasks(TaskManager):
    """Knows the tasks of `TASKS`, and those in a user's folder, which come first where both have a name."""

    def __init__(self, *args: Any, include_path: Any = None, **kwargs: Any) -> None:
        given = include_path if isinstance(include_path, list | tuple) else [include_path] if include_path else []
        super().__init__(*args, include_path=[TASKS, *given], **kwargs)


def main(words: Sequence[str]) -> int:
    """Run `lm-eval` of the console with these arguments and return the exit code."""
    theirs = lm_eval.tasks.TaskManager
    lm_eval.tasks.TaskManager = _OurTasks  # its command line has place for one folder, the user's
    try:
        return console(["lm-eval", *words])
    finally:
        lm_eval.tasks.TaskManager = theirs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
