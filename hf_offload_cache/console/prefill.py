"""How much of a prompt is prefilled before `generate` is called."""

from __future__ import annotations


def prefilled_tokens(prompt_tokens: int) -> int:
    """How many of the prompt `generate_answer` prefills before it calls `generate`, which gets the rest: several at
    once, so that a sparse cache is exact to the prompt's end."""
    return max(0, prompt_tokens - 16)
