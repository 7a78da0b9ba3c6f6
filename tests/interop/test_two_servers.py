"""Two processes serve from one folder while they are killed, bits flip and the disk is full: each answer is right.

As a script (`python test_two_servers.py FOLDER SEED KILLS FLIPS`): prints what happened. A script, because a process
that forks must have no threads: torch gets one.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload_cache import ContextLibrary, offload
from hf_offload_cache.contexts import sweep
from hf_offload_cache.registry import CACHES

CONVERSATIONS, TURNS, FIRST, NEW, ADDED = 4, 3, 150, 6, 20
"""Tokens of a conversation's first prompt, of an answer, and of each further question."""
MOST = 1_500_000
"""Bytes of the library: less than half of what all conversations take."""
SILENT = 60.0
"""Seconds without an answer after which a server is said to hang."""
CALM = 10
"""Requests of each server at the end, without kills, flips and full disks."""


# ------------------------------------------------------------------------------------------------ a server


class Disk:
    """The disk of this process, as its calls to the module `os` see it. Two things may happen at a call: the process is
    killed at call `dies` (a write puts half of its bytes there), and there is no room from call `fills` to `empties`.
    """

    CALLS = ("mkdir", "rmdir", "open", "unlink", "rename", "link", "fchmod", "fsync", "write", "pwrite", "pwritev")
    TAKE = ("mkdir", "link", "write", "pwrite", "pwritev", "posix_fallocate")

    def __init__(self, dies: int) -> None:
        self.dies, self.calls, self.fills, self.empties, self.refused = dies, 0, 0, 0, 0
        for name in (*self.CALLS, "posix_fallocate"):
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            if self.calls == self.dies:
                if name in ("write", "pwrite"):
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:], **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            takes = name in self.TAKE or (name == "open" and arguments[1] & os.O_CREAT)
            if takes and self.fills <= self.calls < self.empties:
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **keywords)

        return counted


def serve(
    folder: Path, model: Any, texts: list[list[tuple[torch.Tensor, torch.Tensor]]], plan: dict[str, Any],
    say: Callable[..., None],
) -> None:  # fmt: skip
    """In a child: answer requests until the process is killed, or `plan["requests"]` of them."""
    chance = random.Random(plan["seed"])
    library = ContextLibrary(folder, max_bytes=MOST)
    disk = Disk(plan["dies"])
    left = [plan["first"]] if plan["first"] is not None else []
    done = 0
    while done < plan["requests"]:
        name, kept = chance.choice(list(CACHES)), chance.choice([0, MOST])
        memory = chance.choice([None, "1/2"])
        with offload(model, name, exact=True, library=library, library_memory=kept, memory=memory) as record:
            talk = chance.randrange(CONVERSATIONS)
            for place in left or [(talk, turn) for turn in range(TURNS)]:
                full = plan["full"] and chance.random() < 0.15
                disk.fills = disk.calls + chance.randrange(60)
                disk.empties = disk.fills + (chance.randrange(1, 150) if full else 0)
                ids, expected = texts[place[0]][place[1]]
                say(begin=place)
                with torch.no_grad():
                    answer = model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
                    )
                say(end=place, right=torch.equal(answer, expected))
                done += 1
            left = []
        say(
            reused=record.tokens_reused, repeated=record.requests_repeated, plain=record.requests_left_plain,
            trouble=record.reuse.trouble, refused=disk.refused, requests=record.requests,
        )  # fmt: skip
        disk.refused = 0


# ------------------------------------------------------------------------------------------------ who starts, kills


@dataclass
class Server:
    """One of the two, and its successors."""

    number: int
    pid: int = 0
    reports: int = -1
    """Descriptor of a pipe."""
    unread: bytes = b""
    asked: list[int] | None = None
    """The request that it is answering."""
    heard: float = 0.0
    dies_at: float = 0.0
    """When it is killed from outside."""


@dataclass
class Trial:
    folder: Path
    chance: random.Random
    model: Any
    texts: list[list[tuple[torch.Tensor, torch.Tensor]]]
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Names of contexts."""

    def start(self, server: Server, *, calm: bool) -> None:
        """A new process, which begins with the request at which the last one was killed."""
        inside = not calm and self.chance.random() < 0.6
        plan = {
            "seed": self.chance.randrange(2**32), "first": server.asked, "full": not calm,
            "dies": self.chance.randrange(1, 1200) if inside else 0, "requests": CALM if calm else 10**9,
        }  # fmt: skip
        reading, writing = os.pipe()
        server.pid = os.fork()
        if server.pid == 0:
            write = os.write

            def say(**what: Any) -> None:
                write(writing, json.dumps(what).encode() + b"\n")

            try:
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                warnings.simplefilter("ignore")
                serve(self.folder, self.model, self.texts, plan, say)
                os._exit(0)
            except BaseException:
                say(raised=traceback.format_exc()[-3000:])
            finally:
                os._exit(1)
        os.close(writing)
        server.reports, server.unread, server.heard = reading, b"", time.monotonic()
        wait = 10**9 if calm or inside else self.chance.uniform(0.02, 1.0)
        server.dies_at = server.heard + wait

    def listen(self, server: Server) -> bool:
        """Read what a server says; False: its process has ended."""
        data = os.read(server.reports, 65536)
        if not data:
            return False
        server.heard = time.monotonic()
        *lines, server.unread = (server.unread + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "begin" in said:
                server.asked = said["begin"]
            elif "end" in said:
                assert server.asked == said["end"]
                server.asked = None
                self.counts["answers"] += 1
                if not said["right"]:
                    self.wrong.append(f"another answer to {said['end']}")
            elif "raised" in said:
                self.wrong.append(said["raised"])
            else:
                for name in ("reused", "repeated", "plain", "refused"):
                    self.counts[name] += said[name]
                self.counts["notes"] += len(said["trouble"])
        return True

    def ended(self, server: Server) -> int:
        os.close(server.reports)
        return os.waitstatus_to_exitcode(os.waitpid(server.pid, 0)[1])

    def flip(self) -> None:
        """A bit of a file of a context."""
        files = sorted(path for path in self.folder.glob("[0-9a-f]*/*") if not path.name.endswith(".damaged"))
        if not files:
            return
        with contextlib.suppress(FileNotFoundError), open(self.chance.choice(files), "r+b") as file:
            at = self.chance.randrange(max(1, os.fstat(file.fileno()).st_size))
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << self.chance.randrange(8)]))
                self.counts["flips"] += 1

    def run(self, servers: list[Server], kills: int, flips: int) -> None:
        """Until so many kills and flips have happened; with none of either, until the servers have ended."""
        calm = not kills
        running = list(servers)
        for server in servers:
            self.start(server, calm=calm)
        next_flip = time.monotonic() + 0.3
        while running:
            ready, _, _ = select.select([server.reports for server in running], [], [], 0.02)
            now = time.monotonic()
            if flips and now >= next_flip and self.counts["flips"] < flips:
                self.flip()
                next_flip = now + self.chance.uniform(0.05, 0.5)
            self.seen |= {path.name for path in self.folder.glob("[0-9a-f]*") if len(path.name) == 32}
            for server in list(running):
                if now > server.dies_at:
                    os.kill(server.pid, signal.SIGKILL)
                elif now - server.heard > SILENT:
                    os.kill(server.pid, signal.SIGUSR1)  # prints where it is
                    time.sleep(1)
                    os.kill(server.pid, signal.SIGKILL)
                    self.wrong.append(f"server {server.number} has said nothing for {SILENT} s")
                    server.heard = now
                if server.reports not in ready or self.listen(server):
                    continue
                status = self.ended(server)
                running.remove(server)
                self.counts["kills"] += status == -signal.SIGKILL
                if status not in (0, -signal.SIGKILL):
                    self.wrong.append(f"server {server.number} has ended with {status}")
                enough = self.counts["kills"] >= kills and self.counts["flips"] >= flips
                if not calm and not enough and not self.wrong:
                    self.start(server, calm=False)
                    running.append(server)

    def after(self) -> None:
        """What is in the folder at the end."""
        sweep(self.folder)
        names = sorted(path.name for path in self.folder.iterdir())
        strange = [
            name for name in names
            if not re.fullmatch(r"[0-9a-f]{32}|\.hf_offload_cache-written-\d{4}-\d\d-\d\d", name)
        ]  # fmt: skip
        if strange:
            self.wrong.append(f"left behind: {strange}")
        library = ContextLibrary(self.folder, max_bytes=MOST)
        library.evict()
        self.counts["removed"] = len(self.seen) - len(library.entries())
        self.counts["written"] = library.bytes_written_today()


def conversations(model: Any) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each conversation, the prompt of each turn and what follows from it, with `DynamicCache`."""
    texts = []
    for number in range(CONVERSATIONS):
        ids, turns = prompt(model, 1, FIRST, seed=number % 2), []  # two begin alike
        if number > 1:
            ids[:, FIRST // 2 :] = prompt(model, 1, FIRST - FIRST // 2, seed=10 + number)
        for turn in range(TURNS):
            with torch.no_grad():
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
                )
            turns.append((ids, answer))
            ids = torch.cat([answer, prompt(model, 1, ADDED, seed=100 * number + turn)], 1)
        texts.append(turns)
    return texts


def main(folder: str, seed: str, kills: str, flips: str) -> None:
    torch.set_num_threads(1)
    model = build(LlamaForCausalLM, LlamaConfig(**COMMON))
    trial = Trial(Path(folder) / "storm", random.Random(int(seed)), model, conversations(model))
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that was imported
    servers = [Server(0), Server(1)]
    trial.run(servers, int(kills), int(flips))
    if not trial.wrong:
        trial.run(servers, 0, 0)  # the requests at which the last ones were killed
    trial.after()
    calm = Trial(Path(folder) / "calm", trial.chance, model, trial.texts)
    calm.run([Server(0), Server(1)], 0, 0)
    calm.after()
    lost = [server.asked for server in servers if server.asked is not None]
    print(json.dumps({"storm": trial.counts, "calm": calm.counts, "wrong": trial.wrong + calm.wrong, "lost": lost}))


# ------------------------------------------------------------------------------------------------ tests


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.parametrize("faults", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_no_answer_is_wrong_and_no_request_is_lost(faults: int, tmp_path: Path) -> None:
    """As many kills as flipped bits, the disk full in one request of seven, and evictions all the time."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), "1", str(faults), str(faults)], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    storm, calm = found["storm"], found["calm"]
    assert not found["wrong"] and not found["lost"], (found["wrong"], done.stderr)
    assert storm["kills"] >= faults and storm["flips"] >= faults
    assert storm["answers"] > 10 and calm["answers"] >= 2 * CALM
    assert calm["reused"] > 0 and calm["removed"] > 0
    assert not calm["repeated"] and not calm["plain"] and not calm["notes"], "an eviction has hurt a reader"


if __name__ == "__main__":
    main(*sys.argv[1:])
