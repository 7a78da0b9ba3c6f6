"""Processes that compute beside what is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute beside this one."""
    others = [multiprocessing.get_context("spawn").Process(target=_multiply, daemon=True) for _ in range(count)]
    for one in others:
        one.start()
    try:
        if others:
            time.sleep(5)  # until they have imported what they need
        yield
    finally:
        for one in others:
            one.terminate()
            one.join()


def _multiply() -> None:
    torch.set_num_threads(1)
    one = torch.randn(256, 256)
    while True:
        one @ one
