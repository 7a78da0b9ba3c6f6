"""Processes that work with caches as they are told, line by line; `Other` is the end that tells one.

As a script it takes the numbers of pipes' ends, two for each process, which reads `[verb, arguments...]` as JSON from
the first of them, and answers each with a line in the second: `["ok", result]` or
`["error", name of the class, message]`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class Other:
    """A process like that, at the other ends of two pipes. `begin` returns at once, `end` waits for what was begun;
    `ask` does both."""

    def __init__(self, replies: int, commands: int) -> None:
        self._replies, self._commands = os.fdopen(replies), os.fdopen(commands, "w")

    def begin(self, *command: Any) -> None:
        self._commands.write(json.dumps(command) + "\n")
        self._commands.flush()

    def end(self) -> Any:
        """The result. Raises `RuntimeError` with the class and the message of an error."""
        kind, *found = json.loads(self._replies.readline() or '["error", "it has ended", ""]')
        if kind == "error":
            raise RuntimeError(": ".join(found))
        return found[0]

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.end()

    def hang_up(self) -> None:
        """It ends, once it has answered."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._commands.close()

    def close(self) -> None:
        self._replies.close()


@contextlib.contextmanager
def others(count: int) -> Iterator[list[Other]]:
    """So many, forked from one that has imported what they need: that takes most of their time. All end well."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    commands, replies = [os.pipe() for _ in range(count)], [os.pipe() for _ in range(count)]
    theirs = [end for (read, _), (_, write) in zip(commands, replies, strict=True) for end in (read, write)]
    process = subprocess.Popen([sys.executable, __file__, *map(str, theirs)], env=environment, pass_fds=theirs)
    for end in theirs:
        os.close(end)
    found = [Other(read, write) for (read, _), (_, write) in zip(replies, commands, strict=True)]
    try:
        yield found
    finally:
        for other in found:
            other.hang_up()
        status = process.wait()
        for other in found:
            other.close()
    assert status == 0


def digest(cache: Any, seed: int, steps: int) -> str:
    """Of the tokens and logits of `steps` steps after eleven tokens of `seed`."""
    from saved_contexts import answer, feed, ids

    feed(cache, ids(11, seed))
    found = answer(cache, steps)
    return hashlib.sha256(found.tokens.numpy().tobytes() + found.logits.numpy().tobytes()).hexdigest()


class _Worker:
    def __init__(self) -> None:
        self.cache: Any = None

    def open(self, place: str, fields: dict[str, Any]) -> int:
        from saved_contexts import opened

        self.cache = opened(Path(place), **fields)
        return self.cache.input_ids.shape[1]

    def decode(self, seed: int, steps: int) -> str:
        return digest(self.cache, seed, steps)

    def save(self, place: str, times: int) -> str:
        """Again and again; and what it holds."""
        for _ in range(times):
            self.cache.save(place, overwrite=True)
        return hashlib.sha256(self.cache.input_ids.numpy().tobytes()).hexdigest()

    def keep(self, library: str, max_bytes: int, own: int) -> list[str]:
        """Ten turns of saving into a library and opening from it, every other one as all others; what was warned of."""
        import torch
        from harness import SMALL, prompt, tiny

        from hf_offload_cache import ContextLibrary, DiskSwapCache

        model, contexts = tiny("llama"), ContextLibrary(library, max_bytes=max_bytes)
        with warnings.catch_warnings(record=True) as told, torch.no_grad():
            warnings.simplefilter("always")
            for turn in range(10):
                ids = prompt(model, 1, 10 + turn % 5, seed=turn if turn % 2 else 100 * own + turn)
                with DiskSwapCache(model, engine="mapped", **SMALL) as cache:
                    model(ids, past_key_values=cache)
                    contexts.save(cache)
                opened = contexts.open(torch.cat([ids, ids], 1), model, engine="mapped")
                if opened is not None:
                    with opened[0] as cache:
                        model(ids[:, :1], past_key_values=cache)
        return [str(warning.message) for warning in told]

    def remove(self, place: str, wipe: bool) -> int:
        from hf_offload_cache.contexts import remove

        return remove(place, wipe=wipe)

    def close(self) -> None:
        self.cache.close()
        self.cache = None


def work(commands: IO[str], replies: IO[str]) -> None:
    worker = _Worker()
    for line in commands:
        verb, *arguments = json.loads(line)
        try:
            reply = ["ok", getattr(worker, verb)(*arguments)]
        except Exception as error:
            reply = ["error", type(error).__name__, str(error)]
        print(json.dumps(reply), file=replies, flush=True)


def main(ends: list[int]) -> None:
    """Forks one for each two of `ends`, and waits for them."""
    import saved_contexts  # noqa: F401  # with all that it needs
    import torch

    torch.set_num_threads(1)  # as its parent: how many there are decides the last bits of a sum
    gc.freeze()  # the end of an interpreter looks at all that was imported, for a second
    children = []
    for own in range(0, len(ends), 2):
        child = os.fork()
        if child == 0:
            for end in {*ends} - {*ends[own : own + 2]}:
                os.close(end)
            with os.fdopen(ends[own]) as commands, os.fdopen(ends[own + 1], "w") as replies:
                work(commands, replies)
            return
        children.append(child)
    for end in ends:
        os.close(end)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


if __name__ == "__main__":
    main([int(end) for end in sys.argv[1:]])
