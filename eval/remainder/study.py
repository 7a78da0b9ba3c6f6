"""How close to full attention, and to all needles, do steps come that estimate what they do not attend to?"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from hf_offload_cache.console import build_prompt, load_default_model
from hf_offload_cache.tuning import distance, perplexity_over

from ..needles import make_needles
from ..studies.common import Rows, Study, main
from ..studies.contexts import Context, prefill, reference_texts
from .attention import Plan, follow

PLANS: dict[str, Plan] = {
    "dropped": Plan(400), "dropped, 800": Plan(800), "dropped, 1600": Plan(1600),
    "direction": Plan(400, "direction"), "codes": Plan(400, "codes"), "codes among 100": Plan(400, "codes", 100),
    "both": Plan(400, "both"), "both among 100": Plan(400, "both", 100),
    "codes, 800 among 200": Plan(800, "codes", 200), "both, 800 among 200": Plan(800, "both", 200),
    "means": Plan(400, "means"), "true values": Plan(400, "true"),
    "dropped, per head": Plan(400, per_head=True), "both, per head": Plan(400, "both", per_head=True),
    "both, per head by mass": Plan(400, "both", by_mass=True, per_head=True),
}  # fmt: skip


def scaled(plan: Plan, scale: float) -> Plan:
    """With that share of its selected tokens and groups."""
    return dataclasses.replace(
        plan,
        tokens=None if plan.tokens is None else max(16, int(plan.tokens * scale)),
        among=None if plan.among is None else max(2, int(plan.among * scale)),
    )


def run(arguments: argparse.Namespace, rows: Rows, loaded: Any = None) -> dict[str, Any]:
    model, tokenizer = loaded or load_default_model(torch.float32)
    texts = reference_texts(tokenizer, arguments.samples, arguments.tokens + arguments.steps)
    for sample, ids in enumerate(texts):
        context, new = prefill(model, ids[:, : arguments.tokens]), ids[:, arguments.tokens :]
        reference, _ = follow(model, context, new, Plan())
        for name in arguments.plans:
            if rows.has(kind="text", sample=sample, plan=name):
                continue
            found, lost = follow(model, context, new, scaled(PLANS[name], arguments.scale), arguments.bytes)
            near = distance(reference, found) | {"perplexity": perplexity_over(reference, found, new)}
            rows.add(kind="text", sample=sample, plan=name, lost=lost, **near)
    needles = make_needles(tokenizer, arguments.needles, arguments.tokens, planted=4)
    for sample, needle in enumerate(needles):
        ids = build_prompt(tokenizer, needle.document, needle.question)
        asked = len(tokenizer(needle.question, add_special_tokens=False)["input_ids"]) + 16
        context = prefill(model, ids[:, :-asked])
        said = needle.text.partition(". ")[2].removesuffix(".")  # the model answers with the needle's second sentence
        answer = tokenizer(said, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if not (right := log_loss(model, context, ids, answer, Plan(), arguments.bytes))[0]:
            continue  # full attention does not answer
        for name in arguments.plans:
            if not rows.has(kind="needle", sample=sample, plan=name):
                plan = scaled(PLANS[name], arguments.scale)
                answered, loss = log_loss(model, context, ids, answer, plan, arguments.bytes)
                rows.add(kind="needle", sample=sample, plan=name, found=answered, extra_loss=loss - right[1])
    return {"plans": {name: _summary(rows, name) for name in arguments.plans}}


def log_loss(
    model: Any, context: Context, ids: torch.Tensor, answer: torch.Tensor, plan: Plan, nbytes: int
) -> tuple[bool, float]:
    """Whether each token of `answer` (1, a) is the likeliest, and its negative log probability. The question, the part
    of ids (1, T) that `context` has not, attends to everything but for its last token."""
    question = ids[:, context.tokens :]
    new = torch.cat([question, answer[:, :-1]], 1)
    logits, _ = follow(model, context, new, plan, nbytes, dense=question.shape[1] - 1)
    said = logits[question.shape[1] - 1 :].log_softmax(-1)
    return bool((said.argmax(-1) == answer[0]).all()), -float(said.gather(1, answer.t()).sum())


def _summary(rows: Rows, name: str) -> dict[str, Any]:
    texts, needles = rows.where(kind="text", plan=name), rows.where(kind="needle", plan=name)
    mean = {field: sum(row[field] for row in texts) / len(texts) for field in ("kl", "top1", "lost")} if texts else {}
    return mean | {"found": sum(row["found"] for row in needles), "asked": len(needles)}


STUDY = Study(
    "remainder", __doc__, run,
    {
        "tokens": (7616, "tokens of a context"),
        "steps": (512, "tokens after it, teacher-forced"),
        "samples": (2, "texts"),
        "needles": (8, "questions for one of four needles"),
        "bytes": (24, "bytes of a key's code"),
        "plans": (list(PLANS), "plans to compare", list(PLANS)),
        "scale": (1.0, "share of the selected tokens, for small contexts"),
    },
    {"tokens": 900, "steps": 64, "samples": 1, "needles": 1, "plans": ["dropped", "codes", "both"], "scale": 0.25},
    module="eval.remainder.study", of_a_run=("plans",),
)  # fmt: skip

if __name__ == "__main__":
    main(STUDY)
