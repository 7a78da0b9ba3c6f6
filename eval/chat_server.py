"""Chats with `transformers serve` over HTTP, with and without a library: what each turn computes, waits and writes.

Two conversations about a long text each alternate, by the openai client, streamed and not streamed. Both servers are
stopped and started again after the third turn. A third server, which offloads without a library, shows what a library
adds to the first answer about a text.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers import AutoTokenizer

from hf_offload_cache.console import load_default_model
from hf_offload_cache.tuning import bundled_text

from .bench import machine
from .studies.common import Options, one_run, say, write_json

_UP = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_TICK = os.sysconf("SC_CLK_TCK")
PLAIN, OFFLOADED, LIBRARY = "transformers' own cache", "offloaded", "with a library"


def serve(log: Path, arguments: list[str]) -> None:
    """Run `transformers serve` with these arguments in this process. Each forward of an embedding appends a line to
    `log`: its ids, the process's CPU seconds until then, and `time.monotonic()`."""
    import torch

    file = log.open("a", buffering=1)

    def note(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and given[0].ndim == 2 and not given[0].is_floating_point():
            row = {"ids": given[0].reshape(-1).tolist(), "cpu": time.process_time(), "at": time.monotonic()}
            file.write(json.dumps(row) + "\n")

    torch.nn.modules.module.register_module_forward_pre_hook(note)
    sys.argv = ["transformers", "serve", *arguments]
    runpy.run_module("transformers.cli.transformers", run_name="__main__", alter_sys=True)


class Server:
    """A server in its own process from `with` to its end, where it is interrupted, as by Ctrl-C.

    Args:
        folder: for its log and its stderr, which a server that is started again continues.
        options: of `hf-offload-cache run`; None: `transformers serve` alone.
        arguments: of `transformers serve`. With --continuous-batching, one that has answered does not end by itself:
            a thread of transformers 5.23 stays. It is killed.
    """

    def __init__(self, folder: Path, options: Sequence[object] | None, arguments: Sequence[object] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self._ends = "--continuous-batching" not in arguments
        self.log, self.stderr = folder / "forwards.jsonl", folder / "stderr"
        run = Path(sys.executable).with_name("hf-offload-cache"), "run"
        start = [sys.executable] if options is None else [*run, *options]
        local = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
        command = [*start, "-m", "eval.chat_server", "--serve", self.log, *local, *arguments]
        self._command = [str(word) for word in command]
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    def __enter__(self) -> Server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
        with self.stderr.open("w") as stderr:
            self._process = subprocess.Popen(self._command, env=environment, stderr=stderr, stdout=stderr)
        try:
            self.client: Any = OpenAI(base_url=f"{self._address()}/v1", api_key="none", max_retries=0, timeout=3600)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def _address(self) -> str:
        assert self._process is not None
        end = time.monotonic() + 180
        while time.monotonic() < end and self._process.poll() is None:
            if (found := _UP.search(self.stderr.read_text())) is not None:
                return found[1]
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.stderr.read_text()}")

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self.client.close()
        try:
            if self._ends:
                self._process.send_signal(signal.SIGINT)
                self._process.wait(120)
        finally:
            self._process.kill()  # one that has ended is left alone
            self._process.wait()

    def forwards(self) -> list[dict[str, Any]]:
        """The log's lines since the last call."""
        if not self.log.exists():
            return []
        with self.log.open() as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind("\n") + 1]
        self._read += len(text)
        return [json.loads(line) for line in text.splitlines()]

    def cpu_seconds(self) -> float:
        """CPU time of the process, all threads."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def bytes_written(self) -> int:
        """Bytes that the process has written to disks, once that stays the same for a while."""
        assert self._process is not None
        latest = -1
        while True:
            (line,) = re.findall(r"^write_bytes: (\d+)", Path(f"/proc/{self._process.pid}/io").read_text(), re.M)
            if int(line) == latest:
                return latest
            latest = int(line)
            time.sleep(0.4)


def ask(server: Server, model: str, messages: Any, streamed: bool, **options: Any) -> dict[str, Any]:
    """The answer to a chat, as a row of measurements.

    "computed": ids of the prompt that ran through the model. "fed": ids that it ran through one by one after them.
    "first_token_seconds": until the first text arrived, or, if not streamed, until the second step began.
    "first_token_cpu": the server's CPU seconds until the second step began.
    """
    server.forwards()
    before, cpu, start = server.bytes_written(), server.cpu_seconds(), time.monotonic()
    answer, first = "", None
    if streamed:
        for chunk in server.client.chat.completions.create(model=model, messages=messages, stream=True, **options):
            text = chunk.choices[0].delta.content if chunk.choices else None
            first = time.monotonic() if first is None and text else first
            answer += text or ""
    else:
        whole = server.client.chat.completions.create(model=model, messages=messages, **options)
        answer = whole.choices[0].message.content or ""
    end, cpu_end = time.monotonic(), server.cpu_seconds()
    prompt, *steps = server.forwards()
    second = steps[0] if steps else {"at": end, "cpu": cpu_end}
    return {
        "streamed": streamed, "answer": answer, "computed": prompt["ids"],
        "fed": [one for step in steps for one in step["ids"]], "first_token_seconds": (first or second["at"]) - start,
        "first_token_cpu": second["cpu"] - cpu, "answer_seconds": end - start, "answer_cpu": cpu_end - cpu,
        "bytes_written": server.bytes_written() - before,
    }  # fmt: skip


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)))  # fmt: skip


@dataclass
class Conversation:
    """What was said, and the ids that the latest turn left in a cache."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    turn: int = 0

    def next_turn(self, server: Server, model: str, tokenizer: Any, question: str, **options: Any) -> dict[str, Any]:
        """Ask `question`; the row says which of the prompt's tokens were its own: not stored by the turn before."""
        self.turn += 1
        self.messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        row = ask(server, model, self.messages, (self.turn + self.number) % 2 == 0, **options)
        own = len(prompt) - min(shared(prompt, self.stored), len(prompt) - 1)
        self.stored = [*prompt, *row["fed"]]
        self.messages.append({"role": "assistant", "content": row["answer"]})
        computed = len(row.pop("computed"))
        del row["fed"]
        return {
            "conversation": self.number, "turn": self.turn, "prompt": len(prompt), "own": own, "computed": computed,
            "beyond": computed - own, **row,
        }  # fmt: skip


def talk(
    start: Callable[[], Server], way: str, model: str, texts: Sequence[str], questions: Sequence[str],
    restart_after: int, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each turn of the conversations about `texts`, which alternate. Another server answers the turns after
    `restart_after`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations, rows = [Conversation(number + 1) for number in range(len(texts))], []
    options = {"max_tokens": 16, "temperature": 0, **options}
    for part in (questions[:restart_after], questions[restart_after:]):
        if not part:
            continue
        with start() as server:
            for question in part:
                for conversation, text in zip(conversations, texts, strict=True):
                    beginning = "" if conversation.turn else f"{text}\n\n"
                    row = conversation.next_turn(server, model, tokenizer, beginning + question, **options)
                    rows.append({"way": way, **row})
                    say("  ".join(f"{name} {value}" for name, value in rows[-1].items() if name != "answer"))
    return rows


def first_answers(
    servers: dict[str, Callable[[], Server]], model: str, texts: Sequence[str], **options: Any
) -> dict[str, list[dict[str, Any]]]:
    """Answers about texts that no server has read, in turns, forth and back; those about the first text, in which
    servers load the model, do not count."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    with servers[OFFLOADED]() as off, servers[LIBRARY]() as on:
        both = [(OFFLOADED, off), (LIBRARY, on)]
        for number, text in enumerate(texts):
            for name, server in both if number % 2 else both[::-1]:
                row = ask(server, model, [{"role": "user", "content": text}], True, temperature=0, **options)
                if number:
                    found[name].append(row)
    return found


def summary(rows: list[dict[str, Any]], firsts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures that the library promises, from rows of `talk` and of `first_answers`."""
    on, off = ([row for row in rows if row["way"] == way] for way in (LIBRARY, PLAIN))
    last = [(one, other) for one, other in zip(on, off, strict=True) if one["turn"] == max(row["turn"] for row in on)]
    ratios = {
        name: statistics.median(other[name] / max(one[name], 1e-3) for one, other in last)
        for name in ("first_token_seconds", "first_token_cpu")
    }
    found: dict[str, Any] = {
        "most_tokens_beyond_own": max(row["beyond"] for row in on),
        "answers_equal": [row["answer"] for row in on] == [row["answer"] for row in off],
        "last_turn_sooner": ratios["first_token_seconds"], "last_turn_less_cpu": ratios["first_token_cpu"],
    }  # fmt: skip
    if firsts:
        pairs = list(zip(firsts[LIBRARY], firsts[OFFLOADED], strict=True))
        for name in ("answer_seconds", "answer_cpu"):
            found[f"first_{name}_on_over_off"] = statistics.median(one[name] / other[name] for one, other in pairs)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each turn, with and without the library."""
    lines = [
        "| conversation, turn | prompt | its own tokens | computed with, without | first token with, without, s "
        "| CPU s | written with, without, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    on, off = ([row for row in rows if row["way"] == way] for way in (LIBRARY, PLAIN))
    for one, other in zip(on, off, strict=True):
        pairs = [f"{one['computed']:,}, {other['computed']:,}"]
        pairs += [f"{one[name]:.2f}, {other[name]:.2f}" for name in ("first_token_seconds", "first_token_cpu")]
        pairs += [f"{one['bytes_written'] / 1e6:.1f}, {other['bytes_written'] / 1e6:.1f}"]
        lines.append(" | ".join(
            [f"| {one['conversation']}, {one['turn']}", f"{one['prompt']:,}", f"{one['own']:,}", *pairs]
        ) + " |")  # fmt: skip
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Computed tokens and the time to the first token, by turn. Needs matplotlib but no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    panels = (("computed", "tokens computed"), ("first_token_seconds", "first token, s"))
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for way, style in ((PLAIN, "--"), (LIBRARY, "-")):
            for number in sorted({row["conversation"] for row in rows}):
                own = [row for row in rows if (row["way"], row["conversation"]) == (way, number)]
                axes.plot([row["turn"] for row in own], [row[name] for row in own], style, marker="o",
                          color=f"C{number}", label=f"conversation {number}, {way}")  # fmt: skip
        axes.set(xlabel="turn", ylabel=label, yscale="log", xticks=sorted({row["turn"] for row in rows}))
    axes.legend(fontsize="x-small")
    figure.savefig(target, dpi=120)


OPTIONS: Options = {
    "model": (str, "folder of a model with a chat template (default: the packaged one)"),
    "tokens": (1500, "tokens of each text: 1,500, or 7,000 for a long one"),
    "turns": (5, "turns of each conversation; the servers start again after the third"),
    "firsts": (3, "texts for the first answer's time with a library over without; 0: not measured"),
    "set": (["exact=true"], "fields of the cache"),
    "memory": (str, "memory budget of each request, as for hf-offload-cache run"),
    "plot": (Path, "picture of tokens and times by turn: .png, .svg, .pdf"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Chats with `transformers serve` over HTTP, with and without a library."""
    arguments = one_run(main.__doc__, OPTIONS, argv)
    if arguments.quick:
        arguments.tokens, arguments.turns, arguments.firsts = min(arguments.tokens, 200), 2, 0
    with tempfile.TemporaryDirectory(dir=arguments.path) as name:
        folder = Path(name)
        if arguments.model is None:
            model, tokenizer = load_default_model()
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
        place = arguments.model or str(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(place)
        ids = tokenizer(bundled_text()).input_ids

        def text(number: int) -> str:
            start = number * (len(ids) - arguments.tokens) // (2 + arguments.firsts)
            return str(tokenizer.decode(ids[start : start + arguments.tokens]))

        fields = [word for one in arguments.set for word in ("--set", one)]
        fields += [] if arguments.memory is None else ["--memory", arguments.memory]

        def starts(way: str, at: str) -> Callable[[], Server]:
            own = None if way == PLAIN else [*fields, "--path", folder]
            own = own if way != LIBRARY else [*fields, "--library", folder / f"library {at}"]
            return lambda: Server(folder / f"{way} {at}", own, [place])  # the model is loaded before it answers

        quoted = [bundled_text()[400 * turn : 400 * turn + 80] for turn in range(arguments.turns)]
        asked = [f"Question {turn + 1}: {part}?" for turn, part in enumerate(quoted)]
        rows = []
        for way in (LIBRARY, PLAIN):
            rows += talk(starts(way, "chats"), way, place, [text(0), text(1)], asked, min(3, arguments.turns - 1))
        firsts = {}
        if arguments.firsts:
            ways = {way: starts(way, "firsts") for way in (OFFLOADED, LIBRARY)}
            texts = [text(number) for number in range(1, arguments.firsts + 2)]
            firsts = first_answers(ways, place, texts, max_tokens=16)
        found = summary(rows, firsts)
        print(table(rows), json.dumps(found, indent=1), sep="\n\n", flush=True)
        if arguments.json:
            made = {"arguments": {name: getattr(arguments, name) for name in ("tokens", "turns", "set", "memory")}}
            write_json(arguments.json, {**made, "machine": machine(arguments.path), "summary": found, "rows": rows})
        if arguments.plot:
            plot(rows, arguments.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
