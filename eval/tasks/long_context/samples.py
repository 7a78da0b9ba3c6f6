"""Samples of long texts for lm-eval: each function gives its task's, the same ones for the same arguments.

Texts are Python's own help topics, with needles planted in them. Arguments come of lm-eval's `--metadata` (JSON) and of
the model's: `max_seq_lengths`, tokens of a prompt with its answer, [4096]; `samples`, of each length, 20; `seed`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import string
from collections.abc import Callable
from typing import Any

import datasets

from eval.needles import ADJECTIVES, NOUNS, needle_of
from eval.tokens import Tokens, tokens_of

_TEMPLATE = 64
"""Tokens that a chat template may take."""
Sample = dict[str, Any]
Make = Callable[["Text", random.Random], Sample]


class Text:
    """Paragraphs to fill a prompt with: it, a chat template and an answer have so many tokens."""

    def __init__(self, count: Tokens, tokens: int, answer: int, shift: int) -> None:
        self.count, self.tokens, self.room = count, tokens, tokens - _TEMPLATE - answer
        paragraphs = count.paragraphs
        self._paragraphs = paragraphs[(at := shift % len(paragraphs)) :] + paragraphs[:at]

    def around(self, planted: list[str], question: str, generator: random.Random) -> str:
        """The prompt: text with each of these sentences somewhere in it, in their order, and the question. What is left
        of its tokens is less than any paragraph takes."""
        room = self.room - sum(map(self.count.behind, (*planted, question)))
        chosen: list[str] = []
        shortest = min(size for _, size in self._paragraphs)
        for paragraph, size in itertools.cycle(self._paragraphs):
            if room < shortest:
                break
            if size <= room:
                chosen.append(paragraph)
                room -= size
        while True:
            made = _planted(chosen, planted, random.Random(generator.random()))
            prompt = "\n\n".join((*made, question))
            if self.count.of(prompt) <= self.room:
                return prompt
            if not chosen:
                raise ValueError(f"max_seq_lengths: {self.tokens} tokens have no room for what is asked: ask for more")
            chosen.pop()  # of a tokenizer for which a text has more tokens than its paragraphs

    def listed(self, make: Callable[[int], str], question: str, guess: int) -> str:
        """The prompt: a line of words and the question. `make` gives the line by some number of words, the same for the
        same number and the longer the larger it is; it has as many as there is room for, less a hundredth."""
        room = self.room
        number, most = guess, None
        for _ in range(12):
            prompt = f"{make(number)}\n\n{question}"
            count = self.count.of(prompt)
            if 0.99 * room <= count <= room:
                return prompt
            most = prompt if count <= room else most
            number = max(1, int(number * 0.997 * room / count))
        if most is None:
            raise ValueError(f"max_seq_lengths: {self.tokens} tokens have no room for the words: ask for more")
        return most


def _planted(paragraphs: list[str], planted: list[str], generator: random.Random) -> list[str]:
    """Paragraphs with each of these sentences somewhere among them, in their order."""
    places = sorted(generator.randint(0, len(paragraphs)) for _ in planted)
    found, start = [], 0
    for place, sentence in zip(places, planted, strict=True):
        found += [*paragraphs[start:place], sentence]
        start = place
    return found + paragraphs[start:]


def _task(answer: int) -> Callable[[Make], Callable[..., dict[str, datasets.Dataset]]]:
    """Make a task with so many tokens for its answer (`max_gen_toks`): lm-eval cuts the beginning of a prompt that
    leaves less of a model's length."""

    def task(make: Make) -> Callable[..., dict[str, datasets.Dataset]]:
        @functools.wraps(make)
        def samples(**arguments: Any) -> dict[str, datasets.Dataset]:
            counted = tokens_of(arguments)
            count, seed = int(arguments.get("samples", 20)), int(arguments.get("seed", 0))
            found = []
            for tokens in arguments.get("max_seq_lengths", [4096]):
                for index in range(count):
                    generator = random.Random(f"{make.__name__} {seed} {tokens} {index}")
                    text = Text(counted, tokens, answer, 41 * index + 97 * seed)
                    found.append({**make(text, generator), "length": tokens})
            return {"test": datasets.Dataset.from_list(found)}

        return samples

    return task


def _places(generator: random.Random, count: int) -> list[str]:
    every = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return generator.sample(every, count)


def _codes(generator: random.Random, count: int) -> list[str]:
    return [str(code) for code in generator.sample(range(10_000, 100_000), count)]


@_task(48)
def needle_single(text: Text, generator: random.Random) -> Sample:
    """One needle, and a question for it."""
    (place,), (code,) = _places(generator, 1), _codes(generator, 1)
    question = f"What is the secret code of the {place}? Answer with the number only."
    return {"input": text.around([needle_of(place, code)], question, generator), "outputs": [code]}


@_task(48)
def needle_multikey(text: Text, generator: random.Random) -> Sample:
    """Eight needles, and a question for one of them."""
    codes = dict(zip(_places(generator, 8), _codes(generator, 8), strict=True))
    place = generator.choice(list(codes))
    question = f"What is the secret code of the {place}? Answer with the number only."
    planted = [needle_of(*one) for one in codes.items()]
    return {"input": text.around(planted, question, generator), "outputs": [codes[place]]}


@_task(128)
def needle_multivalue(text: Text, generator: random.Random) -> Sample:
    """Four needles of one place, all asked for."""
    (place,), codes = _places(generator, 1), _codes(generator, 4)
    planted = [f"Remember this: one of the secret codes of the {place} is {code}." for code in codes]
    question = f"What are the four secret codes of the {place}? Answer with the numbers only."
    return {"input": text.around(planted, question, generator), "outputs": codes}


@_task(128)
def needle_multiquery(text: Text, generator: random.Random) -> Sample:
    """Four needles of four places, all asked for."""
    codes = dict(zip(_places(generator, 4), _codes(generator, 4), strict=True))
    asked = ", ".join(f"the {place}" for place in codes)
    question = f"What are the secret codes of {asked}? Answer with the numbers only."
    planted = [needle_of(*one) for one in codes.items()]
    return {"input": text.around(planted, question, generator), "outputs": list(codes.values())}


@_task(96)
def variable_tracking(text: Text, generator: random.Random) -> Sample:
    """A value is handed on from variable to variable, next to another chain (RULER)."""
    names = ["".join(generator.sample(string.ascii_uppercase, 5)) for _ in range(10)]
    chains, values = (names[:5], names[5:]), _codes(generator, 2)
    first, second = (
        [f"VAR {chain[0]} = {own}.", *(f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain))]
        for chain, own in zip(chains, values, strict=True)
    )
    planted = [sentence for pair in zip(first, second, strict=True) for sentence in pair]
    question = f"Which five variables are assigned the value {values[0]} in the text? Answer with their names only."
    return {"input": text.around(planted, question, generator), "outputs": chains[0]}


def _words(generator: random.Random, count: int) -> list[str]:
    """That nobody has read: of syllables."""
    syllables = [one + other for one in "bdfgklmnprstvz" for other in "aeiou"]
    return list(dict.fromkeys("".join(generator.sample(syllables, 3)) for _ in range(2 * count)))[:count]


@_task(128)
def common_words(text: Text, generator: random.Random) -> Sample:
    """Ten words are in a list thirty times each, the others, of which there are the more the longer it is, three times
    (RULER, section 3); below 4,096 tokens, where this has no room, six times and once, as in its code."""
    frequent, seldom = (30, 3) if text.tokens >= 4096 else (6, 1)
    words, seed = _words(generator, 10 + text.tokens // 2), generator.random()
    often = words[:10]

    def listed(others: int) -> str:
        found = often * frequent + words[10 : 10 + others] * seldom
        random.Random(seed).shuffle(found)
        numbered = " ".join(f"{number}. {word}" for number, word in enumerate(found, 1))
        return f"Below is a numbered list of words.\n{numbered}"

    question = "What are the ten words that appear most often in the list? Answer with the words only."
    return {"input": text.listed(listed, question, max(1, (text.tokens // 8 - 10 * frequent) // seldom)),
            "outputs": often}  # fmt: skip


@_task(64)
def frequent_words(text: Text, generator: random.Random) -> Sample:
    """The word of rank k of a zeta distribution of exponent 2 is there as often as this has it, to the whole number
    (RULER, section 3): no two of the first four ranks are there equally often."""
    words, seed = _words(generator, max(20, text.tokens // 50)), generator.random()

    def listed(count: int) -> str:
        ranks = zip(words, (int(count / rank**2 / (math.pi**2 / 6)) for rank in itertools.count(1)), strict=False)
        found = [word for word, times in ranks for _ in range(times)]
        random.Random(seed).shuffle(found)
        return f"Below is a list of words.\n{' '.join(found)}"

    question = "What are the three words that appear most often in the list? Answer with the words only."
    return {"input": text.listed(listed, question, text.tokens // 4), "outputs": words[:3]}


@_task(16)
def document_qa(text: Text, generator: random.Random) -> Sample:
    """Two of sixteen planted sentences have to be put together; one of four answers is right."""
    rooms, keepers = _places(generator, 8), generator.sample(_NAMES, 8)
    kept = generator.sample(_THINGS, 8)
    planted = [f"{keeper} is the keeper of the {room}." for keeper, room in zip(keepers, rooms, strict=True)]
    planted += [f"In the {room} they keep the {thing}." for room, thing in zip(rooms, kept, strict=True)]
    generator.shuffle(planted)
    right = generator.randrange(8)
    question = f"Question: what is kept where {keepers[right]} is the keeper?\nAnswer: the"
    choices = [kept[right], *generator.sample([one for one in kept if one != kept[right]], 3)]
    generator.shuffle(choices)
    made = text.around(planted, question, generator)
    return {"input": made, "choices": choices, "answer": choices.index(kept[right])}


@_task(640)
def long_generation(text: Text, generator: random.Random) -> Sample:
    """All needles of a text, one a line: a long answer over a long text. Below 2,048 tokens there is room for eight."""
    count = 24 if text.tokens >= 2048 else 8
    codes = dict(zip(_places(generator, count), _codes(generator, count), strict=True))
    planted = [f"The secret code of the {place} is {code}." for place, code in codes.items()]
    question = "List all the secret codes in the text above, one a line, each with its place."
    return {"input": text.around(planted, question, generator), "outputs": list(codes.values())}


_NAMES = (
    "Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luca", "Mira",
    "Nils",
)  # fmt: skip
_THINGS = (
    "telescope", "violin", "compass", "loom", "anvil", "globe", "kettle", "ladder", "mirror", "barometer", "saddle",
    "lantern", "typewriter", "anchor",
)  # fmt: skip


def recall(doc: Sample, results: list[str]) -> dict[str, float]:
    """The share of what was asked for that is in the answer."""
    answer = results[0].casefold()
    return {"recall": sum(one.casefold() in answer for one in doc["outputs"]) / len(doc["outputs"])}

