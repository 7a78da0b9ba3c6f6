"""Needles in a haystack with the real model: which planted facts does each cache still find?"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_offload_cache.console import build_prompt, generate_answer, load_default_model
from hf_offload_cache.registry import cache_class
from hf_offload_cache.report import Progress
from hf_offload_cache.tuning import bundled_prose

ADJECTIVES = ("amber", "silent", "northern", "crooked", "golden", "hidden", "frozen", "scarlet", "hollow", "distant")
NOUNS = ("lighthouse", "orchard", "library", "harbour", "windmill", "greenhouse", "tower", "bridge", "museum", "well")
_TEMPLATE_TOKENS = 130
"""About what the fact, the question and the chat template take."""

METHODS: dict[str, dict[str, Any] | None] = {
    "DynamicCache": None,
    "default": {},
    "paper": {"cache": "eval.baselines.swap_variants:PaperSwapCache"},
    "random": {"cache": "eval.baselines.swap_variants:RandomSwapCache"},
}
"""Name -> a cache (`DiskSwapCache` if none is named) and its fields; None: transformers' own, which the others are
compared with."""


@dataclass(frozen=True)
class Needle:
    """One sample: a document with a fact in it, and the question for it.

    Worded so that `DynamicCache` answers 18 of 20 at 4K tokens; said once and asked plainly, it answered 9.
    """

    document: str
    fact: str
    question: str
    code: str
    depth: float


def make_needles(
    tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int = 0, facts: int = 1
) -> Iterator[Needle]:
    """`count` samples of about `tokens` tokens: other text, another fact and another depth each; of one `seed` always
    the same. Of several `facts` in a document, one is asked for; the others, of other places, are spread evenly."""
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
        others = list(map(_fact, adjectives, nouns, codes))
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
        fact = _fact(adjective, noun, code)
        places = [(depth + number / facts) % 1 for number in range(facts)]
        for place, planted in sorted(zip(places, [fact, *others], strict=True), reverse=True):
            before = next(i for i in range(len(lengths) + 1) if sum(lengths[:i]) >= place * sum(lengths))
            chosen.insert(before, planted)
        question = f"What is the secret code of the {adjective} {noun}? Answer with the number only."
        yield Needle("\n\n".join(chosen), fact, question, code, depth)


def _fact(adjective: str, noun: str, code: str) -> str:
    sentence = f"he secret code of the {adjective} {noun} is {code}."
    return f"Remember this: t{sentence} T{sentence}"


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: dict[str, dict[str, Any] | None],
    samples: int = 20,
    tokens: int = 4096,
    max_new_tokens: int = 24,
    chunk: int | None = None,
    path: str | None = None,
) -> dict[str, Any]:
    """Every method on every sample; answered: the code is in the greedy answer."""
    records: list[dict[str, Any]] = []
    with Progress(f"needles in {tokens:,} tokens", samples * len(methods), "answers") as progress:
        for index, needle in enumerate(make_needles(tokenizer, samples, tokens)):
            input_ids = build_prompt(tokenizer, needle.document, needle.question)
            for name, fields in methods.items():
                if fields is None:
                    cache: Any = DynamicCache(config=model.config)
                else:
                    kind = cache_class(fields.get("cache", "disk-swap"))
                    own = {field: value for field, value in fields.items() if field != "cache"}
                    cache = kind(model, path=path, **own)
                try:
                    answer = generate_answer(model, tokenizer, input_ids, cache, max_new_tokens, chunk)
                finally:
                    getattr(cache, "close", lambda: None)()
                record = {"sample": index, "method": name, "depth": needle.depth, "code": needle.code}
                record |= {"answered": needle.code in answer.text, "text": answer.text, "tokens": input_ids.shape[1]}
                record |= {"prefill_seconds": answer.prefill_seconds, "decode_seconds": answer.decode_seconds}
                report = answer.report
                if report is not None:
                    kept = ("hit_rate", "prefetch_hit_rate", "selected_fraction", "peak_memory_bytes", "full_kv_bytes")
                    record |= {field: getattr(report, field) for field in kept}
                records.append(record)
                if not record["answered"]:
                    missed = f"sample {index}, {name}: {needle.code} is not in {answer.text!r}"
                    progress.print(missed)
                progress.update(len(records))
    summary = {"samples": samples, "tokens": tokens, "methods": summarise(records, methods), "records": records}
    return summary


def summarise(records: list[dict[str, Any]], methods: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Per method: how many answered, how many lost of those that `DynamicCache` answered, and mean rates."""
    reference = next(name for name, fields in methods.items() if fields is None)
    known = {r["sample"] for r in records if r["method"] == reference and r["answered"]}
    table = {}
    for name, fields in methods.items():
        own = [record for record in records if record["method"] == name]
        row: dict[str, Any] = {
            "fields": fields,
            "answered": sum(record["answered"] for record in own),
            "lost": sum(record["sample"] in known and not record["answered"] for record in own),
            "of": len(known),
        }
        for field in ("hit_rate", "prefetch_hit_rate", "selected_fraction"):
            values = [record[field] for record in own if record.get(field) is not None]
            row[field] = sum(values) / len(values) if values else None
        table[name] = row
    return table


def parse_setting(text: str) -> tuple[str, dict[str, Any]]:
    """"name:field=value,field=value" -> name and fields; values are JSON where they can be, else text."""
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    return name, fields


def main() -> None:
    """Plant facts in long texts and ask for them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, help="tokens of a prefill call (default: 1024)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--set", action="append", default=[], metavar="NAME:FIELD=VALUE,...", help="one more method")
    parser.add_argument("--path", help="folder on the disk to use")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = load_default_model(torch.bfloat16)
    names = dict.fromkeys(["DynamicCache", *arguments.methods])
    methods = {name: METHODS[name] for name in names} | dict(map(parse_setting, arguments.set))
    result = run(
        model, tokenizer, methods, arguments.samples, arguments.tokens, chunk=arguments.chunk, path=arguments.path
    )
    for name, row in result["methods"].items():
        shares = [f"{key} {row[key]:.2f}" for key in ("hit_rate", "prefetch_hit_rate", "selected_fraction") if row[key]]
        print(f"{name:14} answered {row['answered']:2}, lost {row['lost']} of {row['of']}  {', '.join(shares)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
