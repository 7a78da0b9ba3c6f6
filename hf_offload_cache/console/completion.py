"""`hf-offload-cache completion`: a script by which a shell completes verbs, options and paths."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from .arguments import add_verb

_FILES, _FOLDERS = ("FILE",), ("DIR", "FOLDER", "ID_OR_PATH")
"""Placeholders of arguments that are completed with paths."""


def add(verbs: Any, console: argparse.ArgumentParser) -> None:
    """Declare the verb among the `verbs` of `console`, which the script completes."""
    parser = add_verb(
        verbs, "completion", functools.partial(run, console), "print a script that completes commands in a shell",
        "Print a completion script. In bash: eval \"$(hf-offload-cache completion bash)\"",
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(console: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    import shtab

    _mark_paths(console, shtab)
    print(shtab.complete(console, arguments.shell))
    return 0


def _mark_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Tell shtab which arguments of a parser and of its verbs are paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _mark_paths(verb, shtab)
        elif action.metavar in (*_FILES, *_FOLDERS):
            action.complete = shtab.FILE if action.metavar in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
