"""`hf-offload-cache lm-eval`: lm-eval's command line, whose Hugging Face model uses a cache of this library."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import OURS, ConfigError
from ..registry import CACHES
from .arguments import (
    add_cache_arguments,
    add_library_arguments,
    add_request_arguments,
    add_verb,
    check_floor,
    complain,
)

_INSTALL = "pip install 'hf-offload-cache[eval]'"
_PLAIN_NAMES = ("hf", "hf-auto", "huggingface")
"""lm-eval's names of its Hugging Face model."""
_NAME = "hf-offload"
"""lm-eval's name of `OffloadLM`, once that is imported."""
_OPTIONS = ("cache", "memory", "goal", "floor", "strict", "path", "library", "library_bytes", "key")
"""Options of this verb that are arguments of `OffloadLM`."""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs, "lm-eval", run, "run lm-eval with the model's KV cache offloaded",
        "Run lm-eval. All its options and commands may follow, unchanged: hf-offload-cache lm-eval --memory 1/13 "
        "--model hf --model_args pretrained=MODEL --tasks TASKS. Its model hf gets one cache of this library per "
        "request. lm_eval --help lists its options.",
        max_context="the length of requests", max_batch="--batch_size", max_bytes="--library-bytes",
        folder="--library", encryption_key="--key",
    )  # fmt: skip
    parser.allow_abbrev = False  # an abbreviation is lm-eval's
    add_cache_arguments(parser, "dynamic")
    add_request_arguments(parser)
    add_library_arguments(parser)
    parser.set_defaults(strict=None, rest=[])
    parse = parser.parse_known_args

    def parse_own(
        words: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The words that this verb does not know are lm-eval's, wherever they are: `rest`."""
        arguments, rest = parse(words, namespace)
        arguments.rest = rest
        return arguments, []

    parser.parse_known_args = parse_own  # type: ignore[method-assign,assignment]


def run(arguments: argparse.Namespace) -> int:
    """Run lm-eval's command line in this process and return the exit code. Raises this library's errors, and those of
    the evaluation itself; an unknown task or another mistake of the user is printed on one line, and the code is 2."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"lm-eval is not installed: {_INSTALL}")
    import lm_eval
    import lm_eval.utils
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig

    from . import offload_lm  # noqa: F401  (lm-eval knows the model by its name from then on)

    given = {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    given |= {"key": str(given["key"])} if "key" in given else {}  # results are written as JSON
    given = {**dict(arguments.fields), **given}
    evaluate, table, tasks = lm_eval.simple_evaluate, lm_eval.utils.make_table, EvaluatorConfig.process_tasks
    words = ["lm_eval", *arguments.rest]
    try:
        with (
            _replaced(sys, "argv", words),
            _replaced(EvaluatorConfig, "process_tasks", _checked_before(tasks, given)),
            _replaced(lm_eval, "simple_evaluate", _with_cache(evaluate, given)),
            _replaced(lm_eval.utils, "make_table", _with_requests(table)),
        ):
            cli_evaluate()
    except (OSError, ValueError) as error:
        if isinstance(error, OURS) or _while_evaluating(error):
            raise
        complain(error, arguments)
        return 2
    return 0


def _checked_before(tasks: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """lm-eval's `process_tasks`, which finds and loads the tasks, after the arguments of the model are checked."""

    def process_tasks(config: Any, *others: Any, **more: Any) -> Any:
        from ..contexts.library import ContextLibrary
        from .offload_lm import check_arguments

        together = _together(config.model, config.model_args, given)
        check_arguments(together)
        if (folder := together.get("library")) is not None:
            limit = {"max_bytes": together["library_bytes"]} if "library_bytes" in together else {}
            ContextLibrary(folder, key=together.get("key"), **limit)
        return tasks(config, *others, **more)

    return process_tasks


def _together(model: Any, model_args: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `OffloadLM`: `--model_args` and the `given` ones. Raises `ConfigError`."""
    if model not in (*_PLAIN_NAMES, _NAME):
        raise ConfigError(f"--model must be hf or {_NAME}, got {model!r}: run lm_eval itself for other models")
    twice = sorted(given.keys() & (model_args or {}).keys())
    if twice:
        raise ConfigError(f"{twice[0]} is both an option and in --model_args: leave one of them out")
    together = {**(model_args or {}), **given}
    for name in ("library_bytes", "key"):
        if name in together and together.get("library") is None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a library: give --library DIR too")
    check_floor(*(together.get(name) for name in ("floor", "memory", "library")))
    return together


def _with_cache(evaluate: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """lm-eval's `simple_evaluate`, whose model `hf` is `hf-offload` with the `given` arguments."""

    def evaluate_with_cache(*, model: Any, model_args: Any = None, **others: Any) -> Any:
        together = _together(model, model_args, given)
        if others.get("use_cache") is not None:
            others["use_cache"] += _of_cache(together)
        return evaluate(model=_NAME, model_args=together, **others)

    return evaluate_with_cache


def _of_cache(model_args: dict[str, Any]) -> str:
    """End of the name of `--use_cache`'s file. lm-eval looks for an answer by its request only, and would take that of
    `hf` or of another cache for this one's. Empty for `cache=dynamic`, which answers as `hf` does."""
    from .named_cache import DYNAMIC, offloading_class

    name = str(model_args.get("cache", next(iter(CACHES))))
    if name == DYNAMIC:
        return ""
    fields = {field.name for field in dataclasses.fields(offloading_class(name).config_class)}
    own = {"memory", "goal", "floor", *fields}
    given = sorted((argument, str(value)) for argument, value in model_args.items() if argument in own)
    digest = hashlib.blake2b(repr(given).encode(), digest_size=4).hexdigest()
    return f"_{name.replace(':', '-')}-{digest}"


def _with_requests(table: Callable[..., str]) -> Callable[..., str]:
    """lm-eval's `make_table`, with the cache, the requests that did not use it and the tokens that a library had above
    the table."""

    def make_table(results: Any, *others: Any, **more: Any) -> str:
        config = results.get("config", {})
        if "cache" not in config:
            return table(results, *others, **more)
        counts = (
            f"requests: {config['cache_requests']}, left plain: {config['cache_plain_requests']}, "
            f"at floor: {config['cache_floor_requests']}"
        )
        if "cache_reused_tokens" in config:
            counts += f"\ntokens from the library: {config['cache_reused_tokens']:,}"
        return f"cache: {config['cache']}\n{counts}\n{table(results, *others, **more)}"

    return make_table


@contextlib.contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module, and restore it."""
    known, before = name in vars(place), getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        if known:
            setattr(place, name, before)
        else:
            delattr(place, name)  # a module's __getattr__ has it


def _while_evaluating(error: BaseException) -> bool:
    """Whether everything that the user named had been found before the error."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name == "evaluate" and Path(code.co_filename).name == "evaluator.py" for code in frames)
