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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .arguments import add_cache_argument, add_field_argument

if TYPE_CHECKING:
    from ..interop.offload import Offloading


# Another Python program, found and run in this process as `python` would do it

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


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("run", help="run another program, a server say, with its models' caches offloaded")
    parser.description = (
        "Run a Python program whose calls of generate use a cache wherever they name none, one for each request: "
        "hf-offload-cache run --memory 1/13 transformers serve. PROGRAM is a command that is a Python script, as a "
        "shell finds it, a file (NAME.py, or with its folder, ./NAME), or, after -m, a module. Exit code: the "
        "program's."
    )
    add_cache_argument(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="the most that a request's cache may hold: 300MiB, bytes, or 1/13 of the full")
    add("--floor", metavar="SIZE", help="what a sequence may hold where that share is too little (default: 64MiB)")
    add("--strict", action="store_true", help="such a request is an error")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")
    add("-m", dest="module", action="store_true", help="PROGRAM is a module")
    add("program", metavar="PROGRAM")
    add("rest", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, parser=parser)


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
    named_cache.check_fields(name, fields, arguments.path, arguments.memory)
    place = arguments.program if module else find_program(arguments.program)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_main(place, arguments.rest, module=module))
        if module:
            check_module(place)
        limits = {"memory": arguments.memory, "floor": arguments.floor or FLOOR, "strict": arguments.strict}
        done = stack.enter_context(offload_all(name, path=arguments.path, **limits, **fields))
        stack.callback(_say, done)
        if arguments.own_process:
            atexit.register(stack.pop_all().close)  # called after the handlers that the program registers
        return run_program(place, module=module)


def _say(done: Offloading) -> None:
    plain = ""
    if done.requests_left_plain:
        plain = f", {done.requests_left_plain} were left plain (short ones, or with a cache of their own)"
    if done.requests_at_floor:
        plain = f" ({done.requests_at_floor} of them in --floor, since a share did not do){plain}"
    print(f"{done.requests} requests were offloaded{plain}", file=sys.stderr)
    if done.report is not None:
        print(f"the latest one:\n{done.report}", file=sys.stderr)
