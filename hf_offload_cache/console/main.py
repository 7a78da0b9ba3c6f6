"""The console: `hf-offload-cache VERB`. The answer goes to stdout; progress, tables and errors go to stderr.

Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 130 interrupted; 141 the output's reader has ended.
Expected errors are printed on one line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import errors
from . import chat, generate, lm_eval, models, plan, run, saved, streaming, tune
from .arguments import (
    PROGRAM,
    NobodyReads,
    OutputError,
    OutputFileError,
    PromptFileError,
    PromptTooLongError,
    add_verb,
    complain,
    flush,
    nobody_reads,
    say,
)

_VERBS = (generate, chat, run, lm_eval, plan, models, tune, saved, streaming)
"""Modules with `add(verbs)`. Their imports are light, because every call of the console loads all of them."""

_INTERRUPTED, _NOBODY_READS = 130, 141  # a shell's codes for processes that SIGINT or SIGPIPE ended

_FILES, _FOLDERS = ("FILE",), ("DIR", "FOLDER", "ID_OR_PATH")
"""Placeholders of arguments that are completed with paths."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; without a verb, print the help. `argv` None: the process's own arguments.

    Errors of a program started by `run`, and of lm-eval, pass through, except for this library's errors.
    """
    arguments = None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent; `print` would use the other one
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
        if arguments is not None and arguments.run in (run.run, lm_eval.run):
            raise
        return _failed(error, arguments)


def _failed(error: Exception, arguments: argparse.Namespace | None) -> int:
    """Print the error and return the exit code."""
    complain(error, arguments)
    run_failed = isinstance(error, (RuntimeError, errors.StoreError, OutputError))
    return 1 if run_failed or not isinstance(error, _expected()) else 2


def parser() -> argparse.ArgumentParser:
    """All verbs with their options. Parsed arguments have the verb's function as `run`."""
    console = argparse.ArgumentParser(prog=PROGRAM, description="Long contexts with the KV cache on disk.")
    console.add_argument("--version", action="version", version=_versions(), help="print the versions and exit")
    verbs = console.add_subparsers(metavar="VERB")
    for verb in _VERBS:
        verb.add(verbs)
    _add_completion(verbs, console)

    def print_help(arguments: argparse.Namespace) -> int:
        console.print_help()
        return 0

    console.set_defaults(run=print_help, parser=console)
    return console


def _add_completion(verbs: Any, console: argparse.ArgumentParser) -> None:
    """Declare the verb `completion`: a script by which a shell completes verbs, options and paths of `console`."""
    parser = add_verb(
        verbs, "completion", functools.partial(_complete, console), "print a script that completes commands in a shell",
        "Print a completion script. In bash: eval \"$(hf-offload-cache completion bash)\"",
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _complete(console: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
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


def _versions() -> str:
    """Versions of this library, torch, transformers and Python, without importing them."""
    versions = []
    for name in (PROGRAM, "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):  # a checkout on the path
            versions.append(f"{name} {version(name)}")
    python = f"Python {sys.version.split()[0]}"
    return ", ".join([*(versions or [f"{PROGRAM}, not installed"]), python])


def _expected() -> tuple[type[Exception], ...]:
    """Errors that a user can fix. Others keep their traceback."""
    from .default_model import DefaultModelMissingError
    from .named_cache import ModelLoadError

    files = (PromptFileError, tune.SampleFileError, OutputFileError, OutputError)
    return (*errors.OURS, *files, DefaultModelMissingError, ModelLoadError, PromptTooLongError)


@contextlib.contextmanager
def _modules_of_this_folder(cache: str | None) -> Iterator[None]:
    """Let a cache named module:Class be imported from the current folder, as with `python -m`."""
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
    """Make OpenMP's threads wait passively. It reads the policy when torch is imported; if that was earlier, `restart`
    starts this process anew."""
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # some milliseconds: long enough to meet the next operation
    if restart and "torch" in sys.modules:
        os.execv(sys.executable, [sys.executable, "-m", "hf_offload_cache.console.main", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
