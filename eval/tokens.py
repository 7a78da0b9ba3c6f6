"""Token counts of the texts that the tasks in `tasks/` make prompts of. lm-eval imports a task's functions anew for
each task, and this module is what they share."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoTokenizer

from hf_offload_cache.console import load_default_tokenizer
from hf_offload_cache.tuning import bundled_prose


class Tokens:
    """Counts a model's tokens; those of the paragraphs to fill prompts with, once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.paragraphs = [(one, self.behind(one)) for one in bundled_prose()]

    def of(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def behind(self, paragraph: str) -> int:
        """Tokens of a paragraph that is not the first of its text."""
        return self.of(f"\n\n{paragraph}")


def tokens_of(arguments: dict[str, Any]) -> Tokens:
    """Tokenizer of the model that lm-eval's arguments name, or else of the default one. It is loaded once in a process,
    even if its folder changes meanwhile."""
    name = arguments.get("tokenizer") or arguments.get("pretrained")
    if not isinstance(name, str):
        return _tokens_of(None)
    options = {one: arguments[one] for one in ("revision", "subfolder", "trust_remote_code") if one in arguments}
    return _tokens_of(name, **options)


@functools.lru_cache(maxsize=4)
def _tokens_of(name: str | None, **options: Any) -> Tokens:
    return Tokens(load_default_tokenizer() if name is None else AutoTokenizer.from_pretrained(name, **options))
