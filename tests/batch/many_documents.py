"""Documents and questions of words that are numbers, and what is answered without any of ours."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from harness import prompt
from transformers import DynamicCache

from hf_offload_cache.console import document_part, load, question_part

NEW = 8
DIES_AT = "w4"
"""The last word of the document at which a worker dies, which is in no other."""


def text(model: Any, length: int, seed: int) -> str:
    return " ".join(f"w{word}" for word in prompt(model, 1, length, seed)[0].tolist())


def expected(model: Any, tokenizer: Any, document: str, questions: list[str], new: int = NEW) -> list[str]:
    """Greedy answers with `DynamicCache`, each prefilled anew."""
    found = []
    for question in questions:
        ids = torch.cat([document_part(tokenizer, document), question_part(tokenizer, question)], 1)
        cache = DynamicCache(config=model.config)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return found


def dies_once(folder: str, mark: str) -> tuple[Any, Any]:
    """The model in `folder`, whose process is killed within the document that ends in `DIES_AT`, unless there is
    a file `mark`, which then has its id."""
    model, tokenizer = load(folder)
    last = tokenizer(DIES_AT, add_special_tokens=False)["input_ids"][0]

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if bool((kwargs["input_ids"] == last).any()):
            try:
                with open(mark, "x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model, tokenizer


def is_gone(mark: Path) -> bool:
    """The process whose id is in `mark` runs no more."""
    try:
        os.kill(int(mark.read_text()), 0)
    except ProcessLookupError:
        return True
    return False
