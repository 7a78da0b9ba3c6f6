"""A study and its command: options, rows that survive an interruption, a JSON file, and sometimes a plot."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..bench import judged as judged
from ..bench import machine
from ..gemma import GemmaMissingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Plot = Callable[[dict[str, Any], list[dict[str, Any]], Figure], None]


class Rows:
    """Rows measured so far, each a flat dictionary of JSON values, printed as it arrives. `target`: the JSON file,
    replaced after each row; None: no file."""

    def __init__(self, head: dict[str, Any] | None = None, target: Path | None = None, say: Callable = print) -> None:
        self.head = head or {}
        self.target = target
        self.rows: list[dict[str, Any]] = []
        self.say = say

    def resume(self) -> None:
        """Take over the rows of an interrupted run. Raises `ValueError` if its arguments differ."""
        if self.target is None or not self.target.exists():
            return
        earlier = json.loads(self.target.read_text())
        for name in ("study", "arguments"):
            if _given(earlier.get(name)) != _given(json.loads(json.dumps(self.head[name]))):
                raise ValueError(
                    f"--resume: {str(self.target)!r} has other {name} ({earlier.get(name)}) than this run "
                    f"({self.head[name]}): give the same ones, or another --json"
                )
        self.rows = earlier["rows"]
        self.say(f"resumed with {len(self.rows)} rows of {self.target}")

    def has(self, **key: Any) -> bool:
        """Whether some row has these values, so that it need not be measured again."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Add a row, and print its values that are not lists."""
        self.rows.append(row)
        shown = ((name, value) for name, value in row.items() if not isinstance(value, list | dict))
        self.say("  ".join(f"{name} {_shown(value)}" for name, value in shown))
        self.write()

    def where(self, **key: Any) -> list[dict[str, Any]]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def drop(self, **key: Any) -> None:
        """Forget the rows with these values; the file follows with the next row."""
        self.rows = [row for row in self.rows if any(row.get(name) != value for name, value in key.items())]

    def write(self, **more: Any) -> None:
        """Replace the JSON file by the head, `more` and the rows, atomically."""
        if self.target is not None:
            write_json(self.target, {**self.head, **more, "rows": self.rows})


Options = dict[str, tuple[Any, ...]]
"""Name -> default, help and, if limited, the allowed values. A type instead of a default: None, or a value of it."""


COMMON: Options = {
    "json": (Path, "file for the results"),
    "path": (str, "folder on the disk to use"),
    "quick": (False, "small sizes: only shows that it runs"),
}
"""Options of every command."""


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add an option for each; a list as default takes several values, and False makes a flag."""
    for name, (default, about, *choices) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=about)
            continue
        several = isinstance(default, list)
        one = default[0] if several else default
        kind, default = (one, None) if isinstance(one, type) else (type(one), default)
        allowed, nargs = choices[0] if choices else None, "+" if several else None
        parser.add_argument(flag, type=kind, nargs=nargs, default=default, choices=allowed, help=about)


@dataclass(frozen=True)
class Study:
    """A question and how it is measured.

    `run(arguments, rows, loaded)` adds to `rows` what it measures, skips what `rows.has`, and returns the summary as
    JSON values; rows of `judged` are its "must_reach". `loaded`: a model and its tokenizer instead of the default.
    """

    name: str
    question: str
    run: Callable[..., dict[str, Any]]
    options: Options
    quick: dict[str, Any] = field(default_factory=dict)
    """Values of options under --quick."""
    settings: bool = False
    """Whether --set names other contenders."""
    plots: dict[str, Plot] = field(default_factory=dict)
    """Option -> what it draws."""
    size: tuple[float, float] = (8.0, 4.5)
    """Size of a plot in inches."""
    module: str | None = None
    """Module of the command; None: the one of its name in `eval.studies`."""
    of_a_run: tuple[str, ...] = ()
    """Options that decide which rows are measured but not their values: a resumed run may have others."""

    def parser(self) -> argparse.ArgumentParser:
        """Its options, and those of every study."""
        command = f"python -m {self.module or f'eval.studies.{self.name}'}"
        parser = argparse.ArgumentParser(prog=command, description=self.question)
        add_options(parser, COMMON)
        parser.add_argument("--resume", action="store_true", help="continue the rows in the --json file")
        parser.add_argument("--threads", type=int, help="torch threads")
        for name in self.plots:
            parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], help="picture files: .png, .svg, .pdf")
        if self.settings:
            _add_settings(parser)
        add_options(parser, self.options)
        return parser

    def parsed(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Arguments of the command; --quick changes the defaults."""
        parser = self.parser()
        if parser.parse_known_args(argv)[0].quick:
            parser.set_defaults(**self.quick)
        arguments = parser.parse_args(argv)
        if arguments.resume and arguments.json is None:
            parser.error("--resume continues the rows of a file: name it with --json")
        if any(getattr(arguments, name.replace("-", "_")) for name in self.plots) and not find_spec("matplotlib"):
            parser.error("a plot needs matplotlib: pip install matplotlib, or leave it out")
        return arguments


def one_run(
    about: str | None, options: Options, argv: Sequence[str] | None = None, settings: bool = False
) -> argparse.Namespace:
    """Arguments of a command that is no study: it has no rows to continue. Sets torch's threads."""
    parser = argparse.ArgumentParser(description=about)
    add_options(parser, COMMON | {"threads": (2, "torch threads")} | options)
    if settings:
        _add_settings(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    return arguments


def _given(asked: Any) -> Any:
    """Arguments without those of None: an option that there was not yet counts as not given."""
    if not isinstance(asked, dict):
        return asked
    return {name: value for name, value in asked.items() if value is not None}


def _add_settings(parser: argparse.ArgumentParser) -> None:
    about = "a contender, instead of the usual ones; repeatable. memory=1/13 plans its budget"
    parser.add_argument("--set", action="append", default=[], metavar="NAME:FIELD=VALUE,...", help=about)


def main(study: Study, argv: Sequence[str] | None = None, loaded: Any = None) -> dict[str, Any]:
    """Run a study's command. Prints each row and the summary, and returns the contents of the JSON file."""
    arguments = study.parsed(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    pictures = {name: vars(arguments).pop(name.replace("-", "_")) for name in study.plots}
    apart = ("json", "path", "resume", *study.of_a_run)
    asked = {name: value for name, value in vars(arguments).items() if name not in apart}
    head = {"study": study.name, "arguments": asked, "machine": machine(arguments.path)}
    rows = Rows(head, arguments.json, say=lambda line: print(line, flush=True))
    if arguments.resume:
        try:
            rows.resume()
        except ValueError as error:
            study.parser().error(str(error))
    start = time.perf_counter()
    try:
        summary = study.run(arguments, rows, loaded)
    except GemmaMissingError as error:
        study.parser().error(str(error))
    last = {"seconds": time.perf_counter() - start, "summary": summary}
    rows.write(**last)
    for name, targets in pictures.items():
        for target in targets:
            draw(study, study.plots[name], summary, rows.rows, target)
    for line in summary_lines(summary):
        print(line, flush=True)
    return {**head, **last, "rows": rows.rows}


def draw(study: Study, plot: Plot, summary: dict[str, Any], rows: list[dict[str, Any]], target: Path) -> None:
    """Draw a plot to a file, the same bytes for the same values. Needs matplotlib but no display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=study.size, layout="constrained")
    plot(summary, rows, figure)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": study.name}):
        figure.savefig(target, dpi=120, metadata=undated.get(target.suffix))


def summary_lines(summary: dict[str, Any]) -> Iterable[str]:
    """Lines of a summary for a terminal, without lists; promises last."""
    for name, value in summary.items():
        if name == "must_reach":
            continue
        if isinstance(value, dict):
            lines = []
            for key, part in value.items():
                flat = part.items() if isinstance(part, dict) else [("", part)]
                shown = [f"{own} {_shown(v)}".strip() for own, v in flat if not isinstance(v, list | dict)]
                lines += [f"  {key}: {', '.join(shown)}"] if shown else []
            yield from [f"{name}:", *lines] if lines else []
        elif not isinstance(value, list):
            yield f"{name}: {_shown(value)}"
    for row in summary.get("must_reach", ()):
        verdict = {True: "met", False: "missed", None: "not measured"}[row["met"]]
        bounds = [f"at {end} {row[f'at_{end}']:.3g}" for end in ("least", "most") if row[f"at_{end}"] is not None]
        yield f"must reach: {row['figure']}: {_shown(row['measured'])} ({', '.join(bounds)}): {verdict}"


def write_json(target: Path, value: Any) -> None:
    """Write `value` as JSON to `target`, atomically; an error leaves nothing behind."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w") as file:
            json.dump(value, file, indent=1)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return repr(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
