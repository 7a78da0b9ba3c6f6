"""Processes for tests of how an interpreter ends: each is forked from one that has imported and done nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

_STARTER = """
    import gc, importlib, json, os, sys

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the end of an interpreter looks at all that was imported, for a second
    for line in sys.stdin:
        script, *arguments, out, err = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in enumerate((os.devnull, out, err)):
                file = os.open(path, os.O_RDWR)
                os.dup2(file, number)
                os.close(file)
            sys.argv[1:] = arguments
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        sys.exit()
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
"""

RunScript = Callable[..., subprocess.CompletedProcess[str]]
"""(script, folder for its output, *arguments) -> its code and what it printed, after it ended."""


@contextlib.contextmanager
def starter(*modules: str) -> Iterator[RunScript]:
    """Start scripts in processes that have imported the `modules`, which takes seconds, and run as `python -c` does.

    They end as every interpreter does: threads are joined, exit handlers run, modules are cleared. Make it before a
    test counts its descriptors.
    """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(_STARTER), *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        files = [folder / "out.txt", folder / "err.txt"]
        for file in files:
            file.touch()
        print(json.dumps([textwrap.dedent(script), *arguments, *map(str, files)]), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            yield run
        finally:
            process.stdin.close()
        assert process.wait(30) == 0
