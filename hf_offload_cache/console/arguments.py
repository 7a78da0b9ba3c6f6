"""What the verbs of the console share: arguments, files to write, and the errors that are theirs."""

from __future__ import annotations

import argparse
import ast
import json
import os
from pathlib import Path
from typing import Any

from ..registry import CACHES


class OutputFileError(OSError):
    """The file for the figures cannot be written."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--dtype`, `--device` and `--path`, which every verb that concerns a model has."""
    add = parser.add_argument
    add("--model", metavar="ID_OR_PATH", help="hub name or folder (default: SmolLM2-135M-Instruct from a package)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: %(default)s")
    add("--device", help="e.g. cpu or cuda:0 (default: cuda where there is one)")
    add("--path", metavar="DIR", help="folder on the disk to use (default: the temporary folder)")


def add_cache_argument(parser: argparse.ArgumentParser, *others: str) -> None:
    """`--cache NAME`, None where it is left out: of the registry, of `others`, or "module:Class". Checked when it is
    used."""
    names = ", ".join((*CACHES, *others))
    parser.add_argument(
        "--cache", metavar="NAME", help=f"{names}, or module:Class of your own (default: {next(iter(CACHES))})"
    )


def add_field_argument(parser: argparse.ArgumentParser) -> None:
    """`--set FIELD=VALUE`, repeatable: pairs in `arguments.fields`."""
    parser.add_argument(
        "--set", metavar="FIELD=VALUE", action="append", default=[], type=assignment, dest="fields",
        help="a field of the cache's configuration, e.g. num_selected=400; repeatable",
    )  # fmt: skip


def assignment(text: str) -> tuple[str, Any]:
    """FIELD=VALUE; the value is JSON, a Python literal, or else the text itself (engine=mapped needs no quotes)."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as num_selected=400, got {text!r}")
    for parse in (json.loads, ast.literal_eval):
        try:
            return name, parse(value)
        except (ValueError, SyntaxError):
            continue
    return name, value


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def check_writable(path: Path, option: str = "--json") -> None:
    """Before minutes of work; nothing is created or changed."""
    if not path.parent.is_dir():
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: it is a folder, or not permitted")


def write_json(path: Path, values: Any, option: str = "--json") -> None:
    """Write `values`. Raises `OutputFileError`."""
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise OutputFileError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def read_text(path: Path, option: str, error_class: type[OSError]) -> str:
    """The UTF-8 text of the file that `option` names. Raises `error_class`."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise error_class(f"{option} {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.start:,} is 0x{error.object[error.start]:02x}"
        raise error_class(f"{option} {str(path)!r} is not UTF-8 text: {where}") from error
