"""Needles in a haystack: documents with planted sentences and questions for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_offload_cache.console.arguments import field_value
from hf_offload_cache.tuning import bundled_prose

ADJECTIVES = ("amber", "silent", "northern", "crooked", "golden", "hidden", "frozen", "scarlet", "hollow", "distant")
NOUNS = ("lighthouse", "orchard", "library", "harbour", "windmill", "greenhouse", "tower", "bridge", "museum", "well")
_TEMPLATE_TOKENS = 130
"""About as many tokens as the needle, the question and the chat template have."""


@dataclass(frozen=True)
class Needle:
    """A document with a needle in it, and the question for it. The wording makes `DynamicCache` answer 18 of 20 at 4K
    tokens; a needle said once and asked plainly gave 9."""

    document: str
    text: str
    question: str
    code: str
    depth: float


def make_needles(
    tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int = 0, planted: int = 1
) -> Iterator[Needle]:
    """Yield `count` samples of about `tokens` tokens, each with its own text, needle and depth, fixed by `seed`. One
    of several `planted` in a document is asked for; the others name other places, and are spread evenly."""
    paragraphs = bundled_prose()
    generator = random.Random(seed)
    paragraphs = paragraphs[(shift := seed * 97 % len(paragraphs)) :] + paragraphs[:shift]
    for index in range(count):
        adjective, noun = generator.choice(ADJECTIVES), generator.choice(NOUNS)
        code = str(generator.randrange(10_000, 100_000))
        depth = (index + 0.5) / count
        adjectives = generator.sample([name for name in ADJECTIVES if name != adjective], planted - 1)
        nouns = generator.sample([name for name in NOUNS if name != noun], planted - 1)
        codes = [str(generator.randrange(10_000, 100_000)) for _ in nouns]
        others = list(map(needle_of, map(" ".join, zip(adjectives, nouns, strict=True)), codes))
        chosen: list[str] = []
        lengths: list[int] = []
        room = tokens - _TEMPLATE_TOKENS - sum(len(tokenizer(other)["input_ids"]) + 1 for other in others)
        position = index * len(paragraphs) // count
        while True:
            paragraph = paragraphs[position % len(paragraphs)]
            position += 1
            length = len(tokenizer(paragraph, verbose=False)["input_ids"]) + 1
            if sum(lengths) + length > room:
                if room - sum(lengths) < 40 or length < 200:  # nearly full, or only a little too long
                    break
                continue
            chosen.append(paragraph)
            lengths.append(length)
        needle = needle_of(f"{adjective} {noun}", code)
        places = [(depth + number / planted) % 1 for number in range(planted)]
        for place, sentences in sorted(zip(places, [needle, *others], strict=True), reverse=True):
            before = next(i for i in range(len(lengths) + 1) if sum(lengths[:i]) >= place * sum(lengths))
            chosen.insert(before, sentences)
        question = f"What is the secret code of the {adjective} {noun}? Answer with the number only."
        yield Needle("\n\n".join(chosen), needle, question, code, depth)


def needle_of(place: str, code: str) -> str:
    """A needle: its sentence, said twice."""
    sentence = f"he secret code of the {place} is {code}."
    return f"Remember this: t{sentence} T{sentence}"


def parse_setting(text: str) -> tuple[str, dict[str, Any]]:
    """ "name:field=value,field=value" -> name and fields; values as of the console's `--set`."""
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        fields[key] = field_value(value)
    return name, fields
