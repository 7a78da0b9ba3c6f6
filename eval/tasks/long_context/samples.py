"""What long texts are asked, for lm-eval: each function gives its task's samples, the same ones for the same arguments.

Texts are Python's own help topics, which are there wherever Python is, with facts planted in them. Arguments come of
lm-eval's `--metadata` (JSON) and of the model's: `max_seq_lengths`, tokens of a prompt, [4096]; `samples`, of each
length, 20; `seed`.
"""

from __future__ import annotations

import functools
import itertools
import random
import string
from collections.abc import Callable
from typing import Any

import datasets
from transformers import AutoTokenizer

from eval.needles import ADJECTIVES, NOUNS, haystack
from hf_offload_cache.console.default_model import load_default_tokenizer

_TEMPLATE = 64
"""Tokens that a chat template may take."""
Sample = dict[str, Any]
Make = Callable[["Text", random.Random], Sample]


class Text:
    """Paragraphs to fill a prompt of so many tokens with."""

    def __init__(self, tokenizer: Any, tokens: int, shift: int) -> None:
        self._tokenizer, self.tokens = tokenizer, tokens
        paragraphs = haystack()
        self._paragraphs = paragraphs[(at := shift % len(paragraphs)) :] + paragraphs[:at]

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def around(self, planted: list[str], question: str, generator: random.Random) -> str:
        """The prompt: text with each of these sentences somewhere in it, in their order, and the question."""
        room = self.tokens - _TEMPLATE - self.count(question) - sum(self.count(one) + 2 for one in planted)
        chosen: list[str] = []
        for paragraph in itertools.cycle(self._paragraphs):
            room -= self.count(paragraph) + 2
            if room < 0:
                break
            chosen.append(paragraph)
        places = sorted(generator.randint(0, len(chosen)) for _ in planted)
        for place, sentence in sorted(zip(places, planted, strict=True), key=lambda one: one[0], reverse=True):
            chosen.insert(place, sentence)
        ordered = iter(planted)  # those at one place came in turned round
        own = set(planted)
        return "\n\n".join(next(ordered) if one in own else one for one in chosen) + f"\n\n{question}"


def _task(make: Make) -> Callable[..., dict[str, datasets.Dataset]]:
    @functools.wraps(make)
    def samples(**arguments: Any) -> dict[str, datasets.Dataset]:
        name = arguments.get("tokenizer") or arguments.get("pretrained")
        tokenizer = AutoTokenizer.from_pretrained(name) if isinstance(name, str) else load_default_tokenizer()
        count, seed = int(arguments.get("samples", 20)), int(arguments.get("seed", 0))
        found = []
        for tokens in arguments.get("max_seq_lengths", [4096]):
            for index in range(count):
                generator = random.Random(f"{make.__name__} {seed} {tokens} {index}")
                found.append({**make(Text(tokenizer, tokens, 41 * index + 97 * seed), generator), "length": tokens})
        return {"test": datasets.Dataset.from_list(found)}

    return samples


def _places(generator: random.Random, count: int) -> list[str]:
    every = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return generator.sample(every, count)


def _code(generator: random.Random) -> str:
    return str(generator.randrange(10_000, 100_000))


def _fact(place: str, code: str) -> str:
    return f"Remember this: the secret code of the {place} is {code}. The secret code of the {place} is {code}."


@_task
def needle_single(text: Text, generator: random.Random) -> Sample:
    """One fact, and a question for it."""
    (place,), code = _places(generator, 1), _code(generator)
    question = f"What is the secret code of the {place}? Answer with the number only."
    return {"input": text.around([_fact(place, code)], question, generator), "outputs": [code]}


@_task
def needle_multikey(text: Text, generator: random.Random) -> Sample:
    """Eight facts, and a question for one of them."""
    facts = {place: _code(generator) for place in _places(generator, 8)}
    place = generator.choice(list(facts))
    question = f"What is the secret code of the {place}? Answer with the number only."
    planted = [_fact(*one) for one in facts.items()]
    return {"input": text.around(planted, question, generator), "outputs": [facts[place]]}


@_task
def needle_multivalue(text: Text, generator: random.Random) -> Sample:
    """Four facts of one place, all asked for."""
    (place,), codes = _places(generator, 1), [_code(generator) for _ in range(4)]
    planted = [f"Remember this: one of the secret codes of the {place} is {code}." for code in codes]
    question = f"What are the four secret codes of the {place}? Answer with the numbers only."
    return {"input": text.around(planted, question, generator), "outputs": codes}


@_task
def needle_multiquery(text: Text, generator: random.Random) -> Sample:
    """Four facts of four places, all asked for."""
    facts = {place: _code(generator) for place in _places(generator, 4)}
    asked = ", ".join(f"the {place}" for place in facts)
    question = f"What are the secret codes of {asked}? Answer with the numbers only."
    planted = [_fact(*one) for one in facts.items()]
    return {"input": text.around(planted, question, generator), "outputs": list(facts.values())}


@_task
def variable_tracking(text: Text, generator: random.Random) -> Sample:
    """A value is handed on from variable to variable, and another one beside it (RULER)."""
    names = ["".join(generator.sample(string.ascii_uppercase, 5)) for _ in range(10)]
    chains, value, other = (names[:5], names[5:]), _code(generator), _code(generator)
    first, second = (
        [f"VAR {chain[0]} = {own}.", *(f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(chain))]
        for chain, own in zip(chains, (value, other), strict=True)
    )
    planted = [sentence for pair in zip(first, second, strict=True) for sentence in pair]
    question = f"Which five variables are assigned the value {value} in the text above? Answer with their names only."
    return {"input": text.around(planted, question, generator), "outputs": chains[0]}


def _words(generator: random.Random, count: int) -> list[str]:
    """That nobody has read: of syllables."""
    syllables = [one + other for one in "bdfgklmnprstvz" for other in "aeiou"]
    return list(dict.fromkeys("".join(generator.sample(syllables, 3)) for _ in range(2 * count)))[:count]


def _room_for(text: Text) -> int:
    """Words that a list has room for, or a few more: those beyond are left out."""
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(_words(random.Random(0), 100), 101))
    return int(1.3 * text.tokens / text.count(listed) * 100)


def _list_of(words: list[str], text: Text, question: str) -> str:
    room, kept = text.tokens - _TEMPLATE - text.count(question), []
    for number, word in enumerate(words, 1):
        kept.append(f"{number}. {word}")
    every = " ".join(kept)
    while text.count(every) > room:
        kept = kept[: len(kept) * 19 // 20]
        every = " ".join(kept)
    return f"Below is a numbered list of words.\n{every}\n\n{question}"


@_task
def common_words(text: Text, generator: random.Random) -> Sample:
    """Ten words of a list are there several times as often as the others, the longer it is the more often (RULER)."""
    every = _room_for(text)
    words = _words(generator, 10 + every // 8)
    often, seldom = words[:10], words[10:]
    found = often * (every // 18) + [word for word in seldom for _ in range(3)]
    generator.shuffle(found)
    question = "What are the ten words that appear most often in the list? Answer with the words only."
    return {"input": _list_of(found, text, question), "outputs": often}


@_task
def frequent_words(text: Text, generator: random.Random) -> Sample:
    """A list whose words are there as often as a zeta distribution has it (RULER)."""
    every, words = _room_for(text), _words(generator, 100)
    weights = [1 / rank**2 for rank in range(1, len(words) + 1)]
    found = generator.choices(words, weights, k=every)
    question = "What are the three words that appear most often in the list? Answer with the words only."
    made = _list_of(found, text, question)
    listed = made.split("\n")[1].split()
    order = sorted(words, key=lambda word: -listed.count(word))
    return {"input": made, "outputs": order[:3]}


@_task
def document_qa(text: Text, generator: random.Random) -> Sample:
    """Two of sixteen facts have to be put together; one of four answers is right."""
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


@_task
def long_generation(text: Text, generator: random.Random) -> Sample:
    """All facts of a text, one a line: a long answer over a long text."""
    facts = {place: _code(generator) for place in _places(generator, 24)}
    planted = [f"The secret code of the {place} is {code}." for place, code in facts.items()]
    question = "List all the secret codes in the text above, one a line, each with its place."
    return {"input": text.around(planted, question, generator), "outputs": list(facts.values())}


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

