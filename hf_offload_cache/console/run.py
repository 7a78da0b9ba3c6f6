"""`hf-offload-cache run`: another program in this process, whose models have their KV cache offloaded."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .arguments import add_cache_arguments, add_library_arguments, add_request_arguments, add_verb, check_floor

if TYPE_CHECKING:
    from ..contexts.library import ContextLibrary
    from ..interop.offload import Offloading

_SHELL = re.compile(rb"#!\s*/\S*sh\s*\n(?:'''exec'|'exec'|\"exec\")[ \t].*python")
"""First lines that installers write if Python's path is too long for one: to a shell a command, to Python a text."""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "run", run, "run another program, such as a server, with its models' caches offloaded",
        "Run a Python program. Its calls of generate that pass no cache use one of this library, one per request: "
        "hf-offload-cache run --memory 1/13 transformers serve. PROGRAM is a Python script that the shell finds as a "
        "command, a file (NAME.py, or with its folder, ./NAME), or a module after -m. The exit code is the program's.",
        max_context="the length of requests", max_batch="", max_bytes="--library-bytes", key="--key",
        encryption_key="--key", folder="--library",
    )  # fmt: skip
    add_cache_arguments(parser)
    add = parser.add_argument
    add_request_arguments(parser)
    add_library_arguments(parser)
    add("--library-memory", metavar="SIZE", help="memory for contexts of the library that stay open (default: none)")
    add("-m", dest="module", action="store_true", help="PROGRAM is a module")
    add("program", metavar="PROGRAM")
    add("rest", metavar="ARGUMENT", nargs=argparse.REMAINDER)


def run(arguments: argparse.Namespace) -> int:
    """Run the program and return its exit code. Raises the library's errors for a wrong request, before the program
    begins.

    In the console's own process the program's threads and `atexit` handlers are offloaded too: the closing lines are
    printed after them, as the process exits.
    """
    from ..interop.offload import FLOOR, offload_all
    from . import named_cache

    name, module = arguments.cache or named_cache.default_for(None), arguments.module
    fields = dict(arguments.fields)
    named_cache.offloading_class(name)
    named_cache.check_fields(name, fields, arguments.path, arguments.memory, arguments.goal)
    named_cache.check_library_key(arguments.library, fields)
    check_floor(arguments.floor, arguments.memory, arguments.library)
    place = arguments.program if module else _find_program(arguments.program)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_main(place, arguments.rest, module=module))
        if module:
            _check_module(place)
        limits = {"memory": arguments.memory, "goal": arguments.goal, "floor": arguments.floor or FLOOR}
        library = {"library": _library(arguments), "library_memory": arguments.library_memory or 0}
        where = {"path": arguments.path, "strict": arguments.strict, **library}
        done = stack.enter_context(offload_all(name, **where, **limits, **fields))
        stack.callback(_say, done)
        if arguments.own_process:
            atexit.register(stack.pop_all().close)  # called after the handlers that the program registers
        return _run_program(place, module=module)


def _library(arguments: argparse.Namespace) -> ContextLibrary | None:
    """The library of `--library`. Raises `ConfigError`, `ContextError`, `EncryptionKeyError`."""
    if arguments.library is None:
        for name in ("library_bytes", "library_memory", "key"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a library: give --library DIR too")
        return None
    from ..contexts.library import ContextLibrary

    limit = {} if arguments.library_bytes is None else {"max_bytes": arguments.library_bytes}
    return ContextLibrary(arguments.library, key=arguments.key, **limit)


def _say(done: Offloading) -> None:
    print(str(done).replace("`floor`", "--floor").replace("`memory`", "--memory"), file=sys.stderr)


def _find_program(name: str) -> str:
    """Path of the Python script that a command of the PATH or of this environment runs, or of the file of a name that
    ends in ".py" or has a folder in it. Raises `ConfigError`."""
    is_file_name = name.endswith(".py") or os.path.dirname(name) != ""
    path = name if is_file_name and Path(name).is_file() else shutil.which(name)
    if path is None and not is_file_name:  # this environment is not on the PATH
        path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        here = f"./{name} for the file of that name here" if Path(name).is_file() else "a file as ./NAME"
        raise ConfigError(f"there is no program {name!r}: name a command, {here}, or -m and a module")
    try:
        with open(path, "rb") as file:
            first, second = file.readline(4096), file.readline(4096)
    except OSError as error:
        raise ConfigError(f"program {path!r} cannot be read: {error.strerror}") from error
    started_by_python = (first.startswith(b"#!") and b"python" in first) or _SHELL.match(first + second)
    if not path.endswith(".py") and not started_by_python:
        raise ConfigError(f"{path!r} is not a Python script; `run` can only run Python programs")
    return path


def _check_module(name: str) -> None:
    """Raise `ConfigError` if `python -m` would find no module to run. Imports the packages above it, as that does."""
    spec = None
    if name and not name.startswith("."):
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:  # of the packages above it, or of something that one of them imports
            if not f"{name}.".startswith(f"{error.name}."):
                raise
        except ValueError:  # it is loaded, but was not found as modules are
            spec = None
    if spec is None:
        raise ConfigError(f"there is no module {name!r} to run: name one in this environment or folder")


@contextlib.contextmanager
def _as_main(place: str, rest: list[str], *, module: bool) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as the program expects them, and restore both."""
    before = sys.argv, sys.path[:]
    sys.argv = [place, *rest]
    sys.path.insert(0, os.getcwd() if module else str(Path(place).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _run_program(place: str, *, module: bool) -> int:
    """Run it as `__main__` and return its exit code; like Python, print a text that it exits with to stderr."""
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
