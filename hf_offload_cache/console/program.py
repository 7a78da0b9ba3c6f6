"""Another Python program, found and run in this process as `python` would do it."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError

# What installers write where Python's path is too long for a first line: to a shell a command, to Python a text.
_SHELL = re.compile(rb"#!\s*/\S*sh\s*\n(?:'''exec'|'exec'|\"exec\")[ \t].*python")


def find_program(name: str) -> str:
    """The path of a script: a command of the PATH, as a shell finds it, or the file of a name that ends in ".py" or has
    a folder in it. Raises `ConfigError` where there is none, or it is not Python."""
    names_a_file = name.endswith(".py") or os.path.dirname(name) != ""
    found = name if names_a_file and Path(name).is_file() else shutil.which(name)
    if found is None:
        here = f"./{name} for the file of that name here" if Path(name).is_file() else "a file as ./NAME"
        raise ConfigError(f"there is no program {name!r}: name a command, {here}, or -m and a module")
    if not _is_python(found):
        raise ConfigError(f"program {found!r} is no Python script: only those run in this process")
    return found


@contextmanager
def as_main(place: str, rest: list[str], *, module: bool) -> Iterator[None]:
    """`sys.argv` and `sys.path` are those of the program until the end."""
    before = sys.argv, sys.path[:]
    sys.argv = [place, *rest]
    sys.path.insert(0, os.getcwd() if module else str(Path(place).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def check_module(name: str) -> None:
    """Raises `ConfigError` where `python -m` finds no module to run; imports the packages above it, as that does."""
    spec = None
    if name and not name.startswith("."):
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:  # of the packages above it, or what one of them imports
            if not f"{name}.".startswith(f"{error.name}."):
                raise
        except ValueError:  # it is here, and was not found as modules are
            spec = None
    if spec is None:
        raise ConfigError(f"there is no module {name!r} to run: name one that this environment or this folder has")


def run_program(place: str, *, module: bool) -> int:
    """Run it as `__main__`, and return what it exits with; a text that it exits with goes to stderr, as from Python."""
    try:
        if module:
            runpy.run_module(place, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(place, run_name="__main__")
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    return 0


def _is_python(place: str) -> bool:
    try:
        with open(place, "rb") as file:
            first, second = file.readline(4096), file.readline(4096)
    except OSError as error:
        raise ConfigError(f"program {place!r} cannot be read: {error.strerror}") from error
    return (
        place.endswith(".py")
        or (first.startswith(b"#!") and b"python" in first)
        or _SHELL.match(first + second) is not None
    )
