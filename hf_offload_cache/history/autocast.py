"""A model under `torch.autocast`: its own attention runs under it, what is stored and chosen is computed without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What `torch.autocast` casts to in this thread on `device`; None: it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """In it, operations of this thread have the type of their arguments: on `device`, and on the processor, where some
    of what a device attends to is chosen."""
    on = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    return _off(on) if on else nullcontext()  # in every layer of a step, in which it seldom is on


@contextmanager
def _off(kinds: list[str]) -> Iterator[None]:
    with ExitStack() as off:
        for kind in kinds:
            off.enter_context(torch.autocast(kind, enabled=False))
        yield
