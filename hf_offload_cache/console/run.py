"""`hf-offload-cache run`: another program in this process, whose models have their KV cache offloaded."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from .arguments import add_cache_argument, add_field_argument

if TYPE_CHECKING:
    from ..interop.offload import Offloading


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
    from .program import as_main, check_module, find_program, run_program

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
