"""A process of its own that works with caches as it is told, line by line; `Other` is the end that tells it.

As a script it reads `[verb, arguments...]` as JSON from its input, and answers each with a line: `["ok", result]` or
`["error", name of the class, message]`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any


class Other:
    """A process like that. `begin` returns at once, `end` waits for what was begun; `ask` does both."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), str(here.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """The result. Raises `RuntimeError` with the class and the message of an error."""
        assert self._process.stdout is not None
        kind, *found = json.loads(self._process.stdout.readline() or '["error", "it has ended", ""]')
        if kind == "error":
            raise RuntimeError(": ".join(found))
        return found[0]

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.end()

    def close(self) -> int:
        """Its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait()
        self._process.stdout.close()
        return status


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
        from hf_offload_cache.contexts.folder import remove

        return remove(place, wipe=wipe)

    def close(self) -> None:
        self.cache.close()
        self.cache = None


def main() -> None:
    import torch

    torch.set_num_threads(1)  # as its parent: how many there are decides the last bits of a sum
    worker = _Worker()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            reply = ["ok", getattr(worker, verb)(*arguments)]
        except Exception as error:
            reply = ["error", type(error).__name__, str(error)]
        print(json.dumps(reply), flush=True)
    gc.freeze()  # the end of an interpreter looks at all that was imported, for a second


if __name__ == "__main__":
    main()
