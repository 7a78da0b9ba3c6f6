"""The console: `hf-offload-cache VERB`. The answer goes to stdout; progress, tables and errors go to stderr.

Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 130 interrupted; 141 the output's reader has ended.
Expected errors are printed on one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from .. import errors
from . import completion, generate, inspect, plan, run, streaming, tune, verify
from . import manage as contexts
from .arguments import (
    PROGRAM,
    NobodyReads,
    OutputError,
    OutputFileError,
    PromptTooLongError,
    complain,
    flush,
    nobody_reads,
    say,
)

_VERBS = (generate, run, plan, tune, inspect, contexts, verify, streaming)
"""Modules with `add(verbs)`; their imports are light, since every call of the console loads all of them."""

_INTERRUPTED, _NOBODY_READS = 130, 141  # as a shell says of a process that SIGINT or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without a verb, print the help. `argv` None: the process's own arguments.

    Errors of a program started by `run` pass through, except for this library's errors.
    """
    arguments = None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this; `print` would take the other one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (as long as the process)
    try:
        try:
            arguments = parser().parse_args(argv)  # exits with 2 and one line by itself
            arguments.own_process = argv is None
            _set_wait_policy(restart=arguments.own_process)
            verb: Callable[[argparse.Namespace], int] = arguments.run
            with _modules_of_this_folder(getattr(arguments, "cache", None)):
                return verb(arguments)
        finally:
            flush()
    except KeyboardInterrupt:
        say(f"\n{PROGRAM}: interrupted")
        return _INTERRUPTED
    except _expected() as error:
        return _failed(error, arguments)
    except OSError as error:
        if isinstance(error, NobodyReads) or (isinstance(error, BrokenPipeError) and nobody_reads()):
            return _NOBODY_READS
        if arguments is not None and arguments.run is run.run:
            raise
        return _failed(error, arguments)


def _failed(error: Exception, arguments: argparse.Namespace | None) -> int:
    """Say so; the exit code."""
    complain(error, arguments)
    run_failed = isinstance(error, (RuntimeError, errors.StoreError, OutputError))
    return 1 if run_failed or not isinstance(error, _expected()) else 2


def parser() -> argparse.ArgumentParser:
    """All verbs with their options; what it parses has the verb's function as `run`."""
    found = argparse.ArgumentParser(prog=PROGRAM, description="Long contexts with the KV cache on disk.")
    found.add_argument("--version", action="version", version=_versions(), help="print the versions and exit")
    verbs = found.add_subparsers(metavar="VERB")
    for verb in _VERBS:
        verb.add(verbs)
    completion.add(verbs, found)

    def print_help(arguments: argparse.Namespace) -> int:
        found.print_help()
        return 0

    found.set_defaults(run=print_help, parser=found)
    return found


def _versions() -> str:
    """Of this library, and of those that it stands on; nothing is imported."""
    found = []
    for name in (PROGRAM, "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):  # a checkout on the path
            found.append(f"{name} {version(name)}")
    python = f"Python {sys.version.split()[0]}"
    return ", ".join([*(found or [f"{PROGRAM}, not installed"]), python])


def _expected() -> tuple[type[Exception], ...]:
    """The errors that are a user's to mend: those this library names. Others keep their traceback."""
    from .default_model import DefaultModelMissingError
    from .named_cache import ModelLoadError

    named = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    own = (generate.PromptFileError, tune.SampleFileError, OutputFileError, OutputError, DefaultModelMissingError)
    return (*named, *own, ModelLoadError, PromptTooLongError)


@contextlib.contextmanager
def _modules_of_this_folder(cache: str | None) -> Iterator[None]:
    """For a cache that is named module:Class, modules of the current folder can be imported, as with `python -m`."""
    added = []
    if ":" in (cache or ""):
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            added = [folder for folder in (os.getcwd(),) if folder not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        sys.path[:] = [folder for folder in sys.path if folder not in added]


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
