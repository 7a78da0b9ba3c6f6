"""kvpress next to our caches: its own process, in an environment that it can be installed in."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import torch

PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "KnormPress")


class KVPress:
    """A process of the interpreter `python`, which has kvpress, with `model`; one job at a time. It ends with the
    `with`. Raises `RuntimeError` where it ends by itself; what it said is on stderr."""

    def __init__(self, python: str, model: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        command = [python, str(Path(__file__).with_name("kvpress_process.py")), self._folder.name]
        self._process = subprocess.Popen(
            [*command, str(torch.get_num_threads())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *nothing: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def follow(self, press: str, share: Any, ids: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Logits (S, V) of new (1, S) after ids (1, T), of which `share` is kept; and bytes that are."""
        target = Path(self._folder.name) / "logits.pt"
        found = self._ask(press, share, ids, next=new[0].tolist(), logits=str(target))
        return torch.load(target), found["held"]

    def answer(self, press: str, share: Any, ids: torch.Tensor, first: int, most: int, end: list[int]) -> list[int]:
        """Ids of the greedy answer to ids (1, T), of which the first are prefilled at once."""
        return list(self._ask(press, share, ids, first=first, answer=most, end=end)["answer"])

    def _ask(self, press: str, share: Any, ids: torch.Tensor, **more: Any) -> dict[str, Any]:
        job = {"press": press, "ratio": float(1 - Fraction(share)), "ids": ids[0].tolist(), **more}
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):  # it has ended: what follows says how
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(
                f"kvpress ended with {code} at {press}, {share} of {ids.shape[1]} tokens: what it said is above; its "
                "environment needs kvpress and a transformers that this takes"
            )
        return json.loads(line)
