"""How close to full attention do steps come that estimate what they do not attend to, instead of dropping it?

Perplexity and KL are to full attention in float32 over the same keys and values in 16 bits, so that rounding in the
model hides nothing.
"""

from __future__ import annotations

import argparse
import copy
import math
import pathlib
import pydoc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_offload_cache.core import selective_layer
from hf_offload_cache.core.plan import layer_kinds
from hf_offload_cache.model import Geometry
from hf_offload_cache.tuning import distance, divergence, perplexity_over

from .common import Rows, Study, main
from .contexts import MODEL, Context, default_model, open_cache, peak_share, prefill, reference_texts, replay
from .teacher_forced import Fields, contenders_of
from .watch import Look, Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUARTERS = 4


def code(tokenizer: Any, count: int, tokens: int) -> list[torch.Tensor]:
    """`count` stretches (1, tokens) of the source code of Python's own modules."""
    folder = pathlib.Path(pydoc.__file__).parent
    modules = "argparse", "ast", "dataclasses", "datetime", "enum", "inspect", "typing", "zipfile"
    text = "\n\n".join((folder / f"{name}.py").read_text() for name in modules if (folder / f"{name}.py").exists())
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    starts = [index * (ids.shape[1] - tokens) // max(1, count - 1) for index in range(count)]
    return [ids[:, start : start + tokens] for start in starts]


TURNS, _MESSAGE = 5, 256
"""Turns of a chat, and tokens of the message before each one but the first."""

Turns = list[tuple[torch.Tensor, torch.Tensor]]
"""For each turn of a text, a message (1, m) that is read at once, and an answer (1, s) that is decoded."""


def texts_of(kind: str, tokenizer: Any, count: int, tokens: int, steps: int) -> list[tuple[torch.Tensor, Turns]]:
    """`count` contexts (1, tokens), each with the turns after it, which decode `steps` tokens together.

    "changed": help texts, but code in the second half of the steps. "chat": help texts; before each turn but the first
    comes a message of code. Other kinds have one turn without a message."""
    if kind in TEXTS:
        texts = TEXTS[kind](tokenizer, count, tokens + steps)
        return [(ids[:, :tokens], [(ids[:, :0], ids[:, tokens:])]) for ids in texts]
    found, both = [], [make(tokenizer, count, tokens + steps) for make in (reference_texts, code)]
    for ids, other in zip(*both, strict=True):
        context, answers = ids[:, :tokens], ids[:, tokens:]
        if kind == "chat":
            messages = [ids[:, :0], *other[:, : (TURNS - 1) * _MESSAGE].split(_MESSAGE, 1)]
            turns = list(zip(messages, answers.tensor_split(TURNS, 1), strict=True))
        else:
            stays = steps - steps // 2
            turns = [(ids[:, :0], torch.cat([answers[:, :stays], other[:, tokens + stays :]], 1))]
        found.append((context, turns))
    return found


def length_of(turns: Turns) -> int:
    """Tokens of all messages and answers."""
    return sum(part.shape[1] for turn in turns for part in turn)


TEXTS: dict[str, Callable[[Any, int, int], list[torch.Tensor]]] = {"help": reference_texts, "code": code}
USUAL: dict[str, Fields] = {
    f"{count}, {name}": {"num_selected": count, "remainder": remainder, "entry_bits": None}
    for count in (400, 800)
    for name, remainder in (("dropped", False), ("estimated", True))
} | {"1600, dropped": {"num_selected": 1600, "goal": "speed"}}


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    """Add a row for each text and contender, with the KL of each quarter of its steps."""
    model, tokenizer = default_model(loaded, arguments.model)
    wide = copy.deepcopy(model).float()
    contenders = contenders_of(arguments, USUAL, memory=arguments.memory)
    for kind in arguments.texts:
        texts = texts_of(kind, tokenizer, arguments.samples, arguments.tokens, arguments.steps)
        for sample, (ids, turns) in enumerate(texts):
            left = {name: one for name, one in contenders.items() if not rows.has(text=kind, sample=sample, name=name)}
            if not left:
                continue
            context, last = prefill(model, ids), arguments.tokens + length_of(turns)
            full = replay(DynamicCache(config=model.config), wide, widened(context))
            with torch.no_grad():
                reference = torch.stack(list(answered(wide, full, turns)))
            for name, fields in left.items():
                with open_cache(model, fields, last, arguments.path) as planned:
                    cls, planned_fields = type(planned), of_plan(planned, model)
                with cls(wide, path=arguments.path, **planned_fields) as cache:  # type: ignore[call-arg]
                    found = steps(cache, wide, context, turns, reference)
                rows.add(text=kind, sample=sample, name=name, **found)
    return {"contenders": {name: summary(rows.where(name=name)) for name in contenders}}


def widened(context: Context) -> Context:
    """With the same keys and values in float32."""
    keys, values = ([part.float() for part in parts] for parts in (context.keys, context.values))
    return replace(context, keys=keys, values=values)


def of_plan(planned: Any, model: PreTrainedModel) -> Fields:
    """The fields of a planned cache of `model`, without its limits: a float32 model has wider temporary tensors. Its
    records would hold fewer tokens too."""
    limits = {"memory", "max_context", "max_batch"}
    kinds = layer_kinds(Geometry.of(model), planned.config, 1)
    fields = {name: value for name, value in asdict(planned.config).items() if name not in limits}
    return fields | {"group_size": max(kind.form.group_size for kind, _ in kinds)}


def answered(model: PreTrainedModel, cache: Cache, turns: Turns) -> Iterator[torch.Tensor]:
    """Logits (V,) float32 after each token of the answers, as they are decoded (teacher forcing)."""
    for message, answer in turns:
        if message.numel():
            model(input_ids=message, past_key_values=cache, use_cache=True)
        for token in answer.split(1, 1):
            yield model(input_ids=token, past_key_values=cache, use_cache=True).logits[0, -1].float()


def steps(cache: Any, model: PreTrainedModel, context: Context, turns: Turns, reference: torch.Tensor) -> Fields:
    """A row's figures. "dropped": the attention mass that steps neither attended to nor estimated, by their own
    estimate, and "estimated": of the other mass, what they estimated. "lost": the true mass of both. The others compare
    these and the KL over steps, by Spearman's rank correlation."""
    lost: list[float] = []
    estimated, dropped, true, looked_at = [], [], [], selective_layer.LOOKED_AT
    counters = cache.storage.counters

    def told(look: Look) -> None:
        lost.append(1 - look.mass)

    replay(cache, model, context)
    selective_layer.LOOKED_AT = 1  # every layer's in every step
    try:
        with torch.no_grad(), Watch(cache, widened(context).keys, told):
            logits = []
            for scores in answered(model, cache, turns):
                logits.append(scores)
                estimated.append(counters.estimated_millionths / 1e6 / max(1, counters.times_estimated))
                true.append(float(np.mean(lost[-len(cache.offloaded) :])))
                dropped.append(counters.lost_millionths / 1e6 / max(1, counters.times_lost))
                counters.estimated_millionths = counters.times_estimated = 0
                counters.lost_millionths = counters.times_lost = 0
                lost.clear()
    finally:
        selective_layer.LOOKED_AT = looked_at
    found = torch.stack(logits)
    each = divergence(reference, found)
    row: Fields = {**distance(reference, found), "most": float(each.max())}
    row |= {f"kl_{place + 1}": float(part.mean()) for place, part in enumerate(each.tensor_split(QUARTERS))}
    row |= {"perplexity": perplexity_of(reference, found, turns), "lost": float(np.mean(true))}
    row |= {"estimated": float(np.mean(estimated)), "dropped": float(np.mean(dropped))}
    row |= {"lost_to_kl": spearman(true, each.tolist()), "hit_rate": cache.report().hit_rate, **peak_share(cache)}
    own = (1 - (1 - np.array(estimated)) * (1 - np.array(dropped))).tolist()  # estimated of what was not dropped
    return row | ({"estimated_to_lost": spearman(own, true)} if any(own) else {})


def perplexity_of(reference: torch.Tensor, found: torch.Tensor, turns: Turns) -> float | None:
    """As `perplexity_over`, of all answers together, whose logits are `found`; None if each is a single token."""
    lengths = [answer.shape[1] for _, answer in turns]
    parts = zip(reference.split(lengths), found.split(lengths), turns, strict=True)
    ratios = [(perplexity_over(one, other, answer), answer.shape[1] - 1) for one, other, (_, answer) in parts]
    known = [(math.log(ratio), count) for ratio, count in ratios if ratio is not None]
    counted = sum(count for _, count in known)
    return math.exp(sum(ratio * count for ratio, count in known) / counted) if counted else None


def spearman(one: list[float], other: list[float]) -> float:
    """Spearman's rank correlation of two lists without equal values."""
    ranks = [np.argsort(np.argsort(part)) for part in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over texts; the largest "most"; the perplexity's geometric mean."""
    found = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows if isinstance(row.get(name), float)]
        if values:
            found[name] = float(np.exp(np.mean(np.log(values))) if name == "perplexity" else np.mean(values))
    return found | ({"most": max(row["most"] for row in rows)} if rows else {})


def plot(summary: dict[str, Any], rows: list[dict[str, Any]], figure: Figure) -> None:
    """KL by quarter of the steps, a line a contender; a panel a kind of text."""
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for panel, kind in zip(np.atleast_1d(figure.subplots(1, len(kinds), sharey=True)), kinds, strict=True):
        for name in summary["contenders"]:
            own = [row for row in rows if row["name"] == name and row["text"] == kind]
            quarters = [np.mean([row[f"kl_{place + 1}"] for row in own]) for place in range(QUARTERS)]
            panel.plot(range(1, QUARTERS + 1), quarters, "o--" if "dropped" in name else "o-", label=name)
        panel.set(title=kind, xlabel="quarter of the steps", yscale="log", xticks=range(1, QUARTERS + 1))
    figure.axes[0].set_ylabel("KL to full attention, nats a token")
    figure.axes[0].legend()


STUDY = Study(
    "remainder", __doc__, run,
    {
        "tokens": (7424, "prefilled tokens"),
        "steps": (512, "tokens decoded after them, teacher-forced"),
        "samples": (2, "texts of a kind"),
        "texts": (["help", "code"], "kinds of text; changed: from one to the other after half of the steps; "
                  "chat: five turns, with messages of code", [*TEXTS, "changed", "chat"]),
        "memory": ("1/13", "memory budget: a share of the full KV, a size, or none"),
        **MODEL,
    },
    {"tokens": 1280, "steps": 16, "samples": 1, "texts": ["help"]}, settings=True, plots={"plot": plot},
    of_a_run=("texts",),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
