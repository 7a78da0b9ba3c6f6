"""The prompt: a document and a question about it, as one, or in two parts of which the first can be saved."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError

_DOCUMENT = "<<< document >>>"
"""Stands for the document while the chat template is asked what it puts around it."""


def build_prompt(tokenizer: Any, document: str, question: str) -> torch.Tensor:
    """Token ids (1, T) of the document and then the question: the user's message where the tokenizer has a chat
    template, else plain text that ends in "Answer:"."""
    document, question = document.strip(), question.strip()
    if not getattr(tokenizer, "chat_template", None):
        plain = f"{document}\n\nQuestion: {question}\nAnswer:"
        return tokenizer(plain, return_tensors="pt", verbose=False)["input_ids"]
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return encoded["input_ids"]


def document_part(tokenizer: Any, document: str) -> torch.Tensor:
    """Token ids (1, T) of a prompt up to the document's end: what is saved, since no question changes it.

    With a `question_part` behind it that is a prompt which differs from `build_prompt`'s at most where they meet: each
    part is tokenised by itself. Raises `ConfigError` for a chat template that changes the document.
    """
    document = document.strip()
    if getattr(tokenizer, "chat_template", None):
        before, _ = _around_document(tokenizer, "")
        ids: list[int] = tokenizer(before + document, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([ids], device="cpu")
    ids = tokenizer(document, verbose=False)["input_ids"]
    plain = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    starts = [start for start in range(len(ids) - len(plain) + 1) if ids[start : start + len(plain)] == plain]
    without_end = ids[: starts[0] + len(plain)] if starts else plain
    return torch.tensor([without_end], device="cpu")


def question_part(tokenizer: Any, question: str) -> torch.Tensor:
    """Token ids (1, T) of all that comes behind a `document_part`. Raises `ConfigError` as that does."""
    question = question.strip()
    if getattr(tokenizer, "chat_template", None):
        after = _around_document(tokenizer, question)[1]
    else:
        after = f"\n\nQuestion: {question}\nAnswer:"
    return torch.tensor([tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]], device="cpu")


def _around_document(tokenizer: Any, question: str) -> tuple[str, str]:
    """What the chat template puts before the document, and what comes after it."""
    messages = [{"role": "user", "content": f"{_DOCUMENT}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, found, after = str(text).partition(_DOCUMENT)
    if not found:
        raise ConfigError(
            "the tokenizer's chat template does not take the document as it is, so that a context cannot end where the "
            "document does: run without --save and --context"
        )
    return before, after
