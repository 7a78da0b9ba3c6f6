"""Text to measure on: the user's, or Python's own help texts, which are there wherever Python is."""

from __future__ import annotations

import pydoc
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError


def bundled_prose() -> list[str]:
    """Paragraphs of prose from Python's help topics, in the order of their names, each once: the same for the same
    version of Python.

    Grammars, code and tables are left out: a small model goes on with them instead of answering.
    """
    from pydoc_data import topics

    parts = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).split("\n\n")
    paragraphs = (" ".join(pydoc.plain(part).split()) for part in parts)
    return list(dict.fromkeys(part for part in paragraphs if _is_prose(part)))


def bundled_text() -> str:
    """`bundled_prose`, as one text."""
    return "\n\n".join(bundled_prose())


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph.split()) >= 20 and letters > 0.9 * len(paragraph) and paragraph.endswith(".")


def sample_ids(texts: Iterable[Any] | str | None, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids (T,), int64, of each text: strings, or ids as tensors or lists; None: the bundled text, as one."""
    texts = [bundled_text()] if texts is None else [texts] if isinstance(texts, str) else list(texts)
    return [text_ids(text, tokenizer).reshape(-1) for text in texts]


def text_ids(text: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids, int64, of a string; or `text` itself, ids as a tensor or lists. Raises `ConfigError`."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError(
                "tokenizer must be given where texts are strings or left out, got None: pass the model's tokenizer, or "
                "token ids as texts"
            )
        text = tokenizer(text, verbose=False)["input_ids"]
    return torch.as_tensor(text, dtype=torch.int64, device="cpu")


def windows(documents: list[torch.Tensor], count: int, least: int, most: int) -> list[torch.Tensor]:
    """`count` stretches of ids, `most` tokens long, or as long as the longest document where that is shorter.

    They begin at even distances over all documents that are long enough, and overlap where there is little text; none
    crosses from one document to another. Raises `ConfigError` where no document has `least` tokens.
    """
    longest = max((len(document) for document in documents), default=0)
    if longest < least:
        raise ConfigError(
            f"texts: one must have at least {least:,} tokens, the longest has {longest:,}: give longer ones"
        )
    length = min(most, longest)
    places = [(d, start) for d, ids in enumerate(documents) for start in range(len(ids) - length + 1)]
    chosen = [places[index * len(places) // count] for index in range(count)]
    return [documents[d][start : start + length] for d, start in chosen]
