"""Processes that compute beside what is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch

_IMPORTS = 120.0
"""Seconds."""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute beside this one."""
    context = multiprocessing.get_context("spawn")
    begun = [context.Event() for _ in range(count)]
    others = [context.Process(target=_multiply, args=(one,), daemon=True) for one in begun]
    for one in others:
        one.start()
    try:
        if not all(one.wait(_IMPORTS) for one in begun):  # until they have imported what they need
            raise RuntimeError(f"processes that were to compute did not begin within {_IMPORTS:.0f} s")
        yield
    finally:
        for one in others:
            one.terminate()
            one.join()


def _multiply(begun: Any) -> None:
    torch.set_num_threads(1)
    one = torch.randn(256, 256)
    begun.set()
    while True:
        one @ one
