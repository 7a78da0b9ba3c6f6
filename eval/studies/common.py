"""What a study is, and the command around it: arguments, rows that survive an interruption, JSON, plot."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..bench import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Plot = Callable[[dict[str, Any], list[dict[str, Any]], Figure], None]


class Rows:
    """What was measured so far, one flat dictionary of JSON values a row; each is printed as it comes.

    `target`: the JSON file that is written anew, in one piece, after each row; None: none.
    """

    def __init__(self, head: dict[str, Any] | None = None, target: Path | None = None, say: Callable = print) -> None:
        self.head = head or {}
        self.target = target
        self.rows: list[dict[str, Any]] = []
        self.say = say

    def resume(self) -> None:
        """Take over the rows of an earlier, interrupted run. Raises `ValueError` where its arguments were others."""
        if self.target is None or not self.target.exists():
            return
        earlier = json.loads(self.target.read_text())
        for name in ("study", "arguments"):
            if earlier.get(name) != json.loads(json.dumps(self.head[name])):
                raise ValueError(
                    f"--resume: {str(self.target)!r} has other {name} ({earlier.get(name)}) than this run "
                    f"({self.head[name]}): give the same ones, or another --json"
                )
        self.rows = earlier["rows"]
        self.say(f"resumed with {len(self.rows)} rows of {self.target}")

    def has(self, **key: Any) -> bool:
        """Some row has these values: what would give it need not be measured again."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """One more row. Numbers that are shown are those that are not in lists."""
        self.rows.append(row)
        shown = ((name, value) for name, value in row.items() if not isinstance(value, list | dict))
        self.say("  ".join(f"{name} {_shown(value)}" for name, value in shown))
        self.write()

    def where(self, **key: Any) -> list[dict[str, Any]]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def drop(self, **key: Any) -> None:
        """Forget the rows with these values; on the disk, once the next one is added."""
        self.rows = [row for row in self.rows if any(row.get(name) != value for name, value in key.items())]

    def write(self, **more: Any) -> None:
        """The head, the rows and `more` to the JSON file; a reader sees the old one or the new one."""
        if self.target is not None:
            write_json(self.target, {**self.head, **more, "rows": self.rows})


@dataclass(frozen=True)
class Study:
    """A question, how it is measured and how the answer looks.

    `run(arguments, rows)` adds to `rows` what it measures, leaves out what `rows.has`, and returns the summary: JSON
    values, among them "must_reach" with rows of `judged` where the project promises a figure. `plot(summary, rows,
    figure)` draws. `quick` are the arguments' values under --quick.
    """

    name: str
    question: str
    run: Callable[[argparse.Namespace, Rows], dict[str, Any]]
    plot: Plot
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    quick: dict[str, Any] = field(default_factory=dict)
    size: tuple[float, float] = (8.0, 4.5)
    """Of the plot, in inches."""
    module: str | None = None
    """Where its command is; None: a module of `eval.studies` of its name."""
    of_a_run: tuple[str, ...] = ()
    """Arguments that decide which rows there are, and not what one says: a run may go on with others."""
    more_plots: dict[str, tuple[str, Plot]] = field(default_factory=dict)
    """By the end of `--plot-NAME`, what else can be drawn, and how."""

    @property
    def command(self) -> str:
        """How it is started."""
        return f"python -m {self.module or f'eval.studies.{self.name}'}"


def judged(figure: str, measured: float | None, least: float | None = None, most: float | None = None) -> dict:
    """A promised figure and whether it was kept; "met" is None where nothing was measured."""
    met = None
    if measured is not None:
        met = (least is None or measured >= least) and (most is None or measured <= most)
    return {"figure": figure, "measured": measured, "at_least": least, "at_most": most, "met": met}


def main(study: Study, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run `study` as a command; returns what the JSON file has. Prints each row and the summary."""
    parser = argparse.ArgumentParser(prog=study.command, description=study.question)
    parser.add_argument("--json", type=Path, help="file for what was measured, written after each row")
    formats = "files for the plot; an ending says the format: .png, .svg, .pdf"
    parser.add_argument("--plot", type=Path, nargs="+", default=[], help=formats)
    for name, (what, _) in study.more_plots.items():
        parser.add_argument(f"--plot-{name}", type=Path, nargs="+", default=[], help=f"files for a plot of {what}")
    parser.add_argument("--path", help="folder on the disk to use")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, no more")
    parser.add_argument("--resume", action="store_true", help="go on from the rows that --json has")
    parser.add_argument("--threads", type=int, help="of torch")
    study.arguments(parser)
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(**study.quick)
    arguments = parser.parse_args(argv)
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes on from the rows of a file: name it with --json")
    more = {f"plot_{name}": plot for name, (_, plot) in study.more_plots.items()}
    pictures = [(target, study.plot) for target in arguments.plot]
    pictures += [(target, plot) for name, plot in more.items() for target in getattr(arguments, name)]
    if pictures and importlib.util.find_spec("matplotlib") is None:
        parser.error("a plot needs matplotlib: pip install matplotlib, or leave it out")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    apart = ("json", "plot", *more, "path", "resume", *study.of_a_run)
    asked = {name: value for name, value in vars(arguments).items() if name not in apart}
    head = {"study": study.name, "arguments": asked, "machine": machine(arguments.path)}
    rows = Rows(head, arguments.json, say=lambda line: print(line, flush=True))
    if arguments.resume:
        try:
            rows.resume()
        except ValueError as error:
            parser.error(str(error))
    start = time.perf_counter()
    summary = study.run(arguments, rows)
    last = {"seconds": time.perf_counter() - start, "summary": summary}
    rows.write(**last)
    for target, plot in pictures:
        draw(study, summary, rows.rows, target, plot)
    for line in summary_lines(summary):
        print(line, flush=True)
    return {**head, **last, "rows": rows.rows}


def draw(
    study: Study, summary: dict[str, Any], rows: list[dict[str, Any]], target: Path, plot: Plot | None = None
) -> None:
    """The study's plot, or another one of it, as a picture at `target`, the same bytes for the same values. Needs
    matplotlib; no display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=study.size, layout="constrained")
    (plot or study.plot)(summary, rows, figure)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": study.name}):
        figure.savefig(target, dpi=120, metadata=undated.get(target.suffix))


def summary_lines(summary: dict[str, Any]) -> Iterable[str]:
    """What of a summary a terminal shows: everything but lists; promises last."""
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
    """`value` as JSON at `target`, in one piece; nothing is left behind after an error."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w") as file:
            json.dump(value, file, indent=1)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _shown(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return repr(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
