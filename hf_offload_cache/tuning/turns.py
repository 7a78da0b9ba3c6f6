"""Several caches decode one text, open at once and in turns: a machine that gets slower gets slower for all of them."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.prefill import prefill

TURN = 8
"""Steps of one cache before it is the next one's turn."""

Followed = tuple[torch.Tensor, list[float]]
"""Logits (steps, V) and seconds of the steps."""


@dataclass(frozen=True)
class Contender:
    """A cache that decodes with others."""

    model: Any
    """That it runs on."""
    open: Callable[[], contextlib.AbstractContextManager[Any]]
    """Makes it, empty; the end of the `with` closes it."""


def without_seams(model: Any) -> Any:
    """A twin of `model`, of the same weights, for caches that are not ours: the seams that ours put on a model take
    time of every cache. The model itself where its weights are spread over devices, which its own modules know."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return model
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def together(needs: Mapping[str, int], room: int | None) -> list[list[str]]:
    """Names in their order, as many beside each other as fit `room` bytes (None: all); what does not is alone."""
    found: list[list[str]] = []
    taken = 0
    for name, needed in needs.items():
        if found and (room is None or taken + needed <= room):
            found[-1].append(name)
            taken += needed
        else:
            found.append([name])
            taken = needed
    return found


def follow_in_turns(
    contenders: Mapping[str, Contender], ids: torch.Tensor, steps: int,
    on_step: Callable[[float, str], object] = lambda done, name: None,
) -> dict[str, Followed]:  # fmt: skip
    """Run ids (1, T) through each cache. They are prefilled in pieces if the model allows it, and the last `steps`
    tokens are decoded one by one, whatever the model would predict. Each turn takes `TURN` tokens, going forth and back
    over the caches. All caches are open, and use memory, at the same time.

    Returns by name the logits (steps, V), float32 on the host, after each token, and the seconds of each step, at whose
    end the model's device has finished. `on_step` gets the finished share, from 0 to 1, and a name, in this thread.
    """
    said: dict[str, list[torch.Tensor]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = {}
        for number, (name, one) in enumerate(contenders.items()):
            on_step(number / (2 * len(contenders)), name)
            opened[name] = stack.enter_context(one.open())
            prefill(one.model, ids[:, :-steps], opened[name])
        for number, turn in enumerate(ids[:, -steps:].split(TURN, 1)):
            for name in opened if number % 2 == 0 else reversed(opened):
                on_step((1 + number * TURN / steps) / 2, name)
                model = contenders[name].model
                for token in turn.split(1, 1):
                    start = time.perf_counter()
                    logits = model(input_ids=token, past_key_values=opened[name], use_cache=True).logits[0, -1]
                    said[name].append(logits.float().cpu())
                    seconds[name].append(time.perf_counter() - start)
    return {name: (torch.stack(said[name]), seconds[name]) for name in contenders}
