"""The console: `hf-offload-cache VERB`. The answer goes to stdout; progress, tables and errors go to stderr.

Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 130 interrupted. Expected errors are one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import errors
from . import generate, inspect, plan, run, streaming, tune, verify
from . import manage as contexts
from . import saved_documents as documents
from .arguments import OutputFileError
from .terminal import printable

_PROG = "hf-offload-cache"

_VERBS = (generate, run, plan, tune, inspect, contexts, verify, streaming)
"""Modules with `add(verbs)`; their imports are light, since every call of the console loads all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code. `argv` None: the process's own arguments."""
    arguments = parser().parse_args(argv)  # exits with 2 and one line by itself
    arguments.own_process = argv is None
    _set_wait_policy(restart=arguments.own_process)
    try:
        verb: Callable[[argparse.Namespace], int] = arguments.run
        return verb(arguments)
    except KeyboardInterrupt:
        print(f"\n{_PROG}: interrupted", file=sys.stderr)
        return 130
    except _expected() as error:
        print(f"{_PROG}: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, (RuntimeError, errors.StoreError)) else 2


def parser() -> argparse.ArgumentParser:
    """All verbs with their options; what it parses has the verb's function as `run`."""
    found = argparse.ArgumentParser(prog=_PROG, description="Long contexts with the KV cache on disk.")
    verbs = found.add_subparsers(metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add(verbs)
    return found


def _expected() -> tuple[type[Exception], ...]:
    """The errors that are a user's to mend: those this library names. Others keep their traceback."""
    from .answer import PromptTooLongError
    from .default_model import DefaultModelMissingError
    from .load_model import ModelLoadError

    named = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    own = (documents.PromptFileError, tune.SampleFileError, OutputFileError, DefaultModelMissingError)
    return (*named, *own, ModelLoadError, PromptTooLongError)


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))  # names and values in it may come from a disk


def _set_wait_policy(restart: bool) -> None:
    """OpenMP reads the policy once, as torch is imported: where torch is there already, this process starts anew."""
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # some milliseconds: long enough to meet the next operation
    if restart and "torch" in sys.modules:
        os.execv(sys.executable, [sys.executable, "-m", "hf_offload_cache.console.main", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
