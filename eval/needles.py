"""Needles in a haystack: documents with planted facts and questions for them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_offload_cache.tuning import bundled_prose

ADJECTIVES = ("amber", "silent", "northern", "crooked", "golden", "hidden", "frozen", "scarlet", "hollow", "distant")
NOUNS = ("lighthouse", "orchard", "library", "harbour", "windmill", "greenhouse", "tower", "bridge", "museum", "well")
_TEMPLATE_TOKENS = 130
"""About as many tokens as the fact, the question and the chat template have."""


@dataclass(frozen=True)
class Needle:
    """A document with a fact in it, and the question for it. The wording makes `DynamicCache` answer 18 of 20 at 4K
    tokens; a fact said once and asked plainly gave 9."""

    document: str
    fact: str
    question: str
    code: str
    depth: float


def make_needles(
    tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int = 0, facts: int = 1
) -> Iterator[Needle]:
    """Yield `count` samples of about `tokens` tokens, each with its own text, fact and depth, fixed by `seed`. One of
    several `facts` in a document is asked for; the others name other places, and are spread evenly."""
    paragraphs = bundled_prose()
    generator = random.Random(seed)
    paragraphs = paragraphs[(shift := seed * 97 % len(paragraphs)) :] + paragraphs[:shift]
    for index in range(count):
        adjective, noun = generator.choice(ADJECTIVES), generator.choice(NOUNS)
        code = str(generator.randrange(10_000, 100_000))
        depth = (index + 0.5) / count
        adjectives = generator.sample([name for name in ADJECTIVES if name != adjective], facts - 1)
        nouns = generator.sample([name for name in NOUNS if name != noun], facts - 1)
        codes = [str(generator.randrange(10_000, 100_000)) for _ in nouns]
        others = list(map(fact_of, map(" ".join, zip(adjectives, nouns, strict=True)), codes))
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
        fact = fact_of(f"{adjective} {noun}", code)
        places = [(depth + number / facts) % 1 for number in range(facts)]
        for place, planted in sorted(zip(places, [fact, *others], strict=True), reverse=True):
            before = next(i for i in range(len(lengths) + 1) if sum(lengths[:i]) >= place * sum(lengths))
            chosen.insert(before, planted)
        question = f"What is the secret code of the {adjective} {noun}? Answer with the number only."
        yield Needle("\n\n".join(chosen), fact, question, code, depth)


def fact_of(place: str, code: str) -> str:
    """A fact, said twice."""
    sentence = f"he secret code of the {place} is {code}."
    return f"Remember this: t{sentence} T{sentence}"


def parse_setting(text: str) -> tuple[str, dict[str, Any]]:
    """ "name:field=value,field=value" -> name and fields; values are JSON where they can be, else text."""
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    return name, fields
