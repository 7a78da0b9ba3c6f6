"""`hf-offload-cache run`: another program in this process, whose models have their KV cache offloaded."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from .arguments import add_cache_argument, add_field_argument


def add(verbs: Any) -> None:
    """Declare the verb among the console's `verbs`."""
    parser = verbs.add_parser("run", help="run another program, a server say, with its models' caches offloaded")
    parser.description = (
        "Run a Python program whose calls of generate use a cache wherever they name none, one for each request: "
        "hf-offload-cache run --memory 1/13 transformers serve. PROGRAM is a command that is a Python script, a file, "
        "or, after -m, a module. Exit code: the program's."
    )
    add_cache_argument(parser)
    add_field_argument(parser)
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="the most that a request's cache may hold: 300MiB, bytes, or 1/13 of the full")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")
    add("-m", dest="module", action="store_true", help="PROGRAM is a module")
    add("program", metavar="PROGRAM")
    add("rest", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """What the program exits with. Raises the library's errors for a wrong request, before it begins."""
    from ..errors import ConfigError
    from ..interop.offload import offload_all
    from . import named_cache

    name = arguments.cache or named_cache.default_for(None)
    fields = dict(arguments.fields)
    named_cache.offloading_class(name)
    named_cache.check_fields(name, fields, arguments.path, arguments.memory)
    if arguments.module:
        place = arguments.program
    else:
        found = arguments.program if Path(arguments.program).is_file() else shutil.which(arguments.program)
        if found is None:
            raise ConfigError(f"there is no program {arguments.program!r}: name a command, a file, or -m and a module")
        place = found
        if not _is_python(place):
            raise ConfigError(f"program {place!r} is no Python script: only those run in this process")
    before = sys.argv, sys.path[:]
    sys.argv = [place, *arguments.rest]
    sys.path.insert(0, os.getcwd() if arguments.module else str(Path(place).resolve().parent))
    with offload_all(name, memory=arguments.memory, path=arguments.path, **fields) as done:
        try:
            if arguments.module:
                runpy.run_module(place, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(place, run_name="__main__")
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        finally:
            sys.argv, sys.path[:] = before
            print(f"{done.requests} requests were offloaded", file=sys.stderr)
            if done.report is not None:
                print(f"the latest one:\n{done.report}", file=sys.stderr)
    return 0


def _is_python(place: str) -> bool:
    if place.endswith(".py"):
        return True
    with open(place, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first
