"""Pass-keys behind 30,000 tokens, with Gemma 3 270M and a sixth of the KV cache's memory: `make demo-long`.

The text is prose from Python's help topics with three sentences planted in it. It is read once; each question, and the
continuation of the text's end, goes to a fork of that cache. Gemma is a base model: it completes text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import document_part, load, question_part
from hf_offload_cache.errors import BudgetError, ConfigError
from hf_offload_cache.report import Progress
from hf_offload_cache.report.report import kv_share_text, size_text
from hf_offload_cache.tuning import bundled_prose

from .gemma import GemmaMissingError, GemmaTermsError, accept_terms, load_gemma
from .needles import needle_of

PLACES = {"amber lighthouse": "73914", "silent orchard": "20586", "crooked windmill": "48127"}
"""The planted pass-keys, at even depths of the text."""
_PIECE = 2048
"""Tokens of a forward. Transformers' attention of a layer with a window computes scores of all pairs of them."""


def make_text(tokenizer: Any, tokens: int) -> str:
    """Prose of at most `tokens` tokens, with the pass-keys of `PLACES` in it."""
    needles, chosen = [needle_of(place, code) for place, code in PLACES.items()], []
    room = tokens - sum(_count(tokenizer, needle) for needle in needles)
    for paragraph in bundled_prose():
        if (room := room - _count(tokenizer, paragraph)) < 0:
            break
        chosen.append(paragraph)
    for number, needle in reversed(list(enumerate(needles))):
        chosen.insert((2 * number + 1) * len(chosen) // (2 * len(needles)), needle)
    return "\n\n".join(chosen)


def _count(tokenizer: Any, text: str) -> int:
    """Tokens of a paragraph and of the two line ends after it, which count apart."""
    return len(tokenizer(text, verbose=False)["input_ids"]) + 2


@dataclass(frozen=True)
class Found:
    """Results of one run."""

    tokens: int
    answers: dict[str, str]
    """What the model wrote, by place."""
    continuation: str
    seconds: float
    """Of reading the text."""
    report: Any
    """Of the cache that has read the text."""

    @property
    def right(self) -> int:
        """Answers with their pass-key."""
        return sum(PLACES[place] in answer for place, answer in self.answers.items())


def run(model: Any, tokenizer: Any, tokens: int, memory: str, max_new_tokens: int = 40) -> Found:
    """Read a text of at most `tokens` tokens in a cache with this `memory`, and ask for each pass-key."""
    document = document_part(tokenizer, make_text(tokenizer, tokens))
    count = document.shape[1]
    started = time.perf_counter()
    with DiskSwapCache.for_budget(model, memory, max_context=count + 128, goal="fidelity") as cache, torch.no_grad():
        with Progress("reading", count, "tokens") as bar:
            for piece in document[:, :-1].split(_PIECE, 1):
                model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
                bar.update(cache.tokens)
        seconds, report = time.perf_counter() - started, cache.report()
        asked = {
            place: question_part(tokenizer, f"What is the secret code of the {place}? Answer with the number only.")
            for place in PLACES
        }
        answers = {
            place: _complete(model, tokenizer, cache, torch.cat([document, question], 1), 8)
            for place, question in asked.items()
        }
        return Found(count, answers, _complete(model, tokenizer, cache, document, max_new_tokens), seconds, report)


def _complete(model: Any, tokenizer: Any, cache: DiskSwapCache, ids: torch.Tensor, new_tokens: int) -> str:
    """Greedy continuation of `ids` (1, T), on a fork of a cache that has read all but the end of them."""
    with cache.fork() as fork:
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=fork, max_new_tokens=new_tokens,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def main(argv: Sequence[str] | None = None) -> int:
    """0: every pass-key was found; 1: not all of them."""
    parser = argparse.ArgumentParser(prog="python -m eval.long_demo", description=__doc__)
    parser.add_argument("--accept-gemma-terms", action="store_true", help="accept the terms without asking")
    parser.add_argument("--model", help="another model: a folder, instead of Gemma 3 270M")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the text (default: %(default)s)")
    parser.add_argument("--memory", default="1/6", help="memory of the cache (default: %(default)s of the full KV)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.model is None:
            accept_terms(arguments.accept_gemma_terms)
        model, tokenizer = load_gemma() if arguments.model is None else load(arguments.model, device="cpu")
        found = run(model, tokenizer, arguments.tokens, arguments.memory)
    except (GemmaMissingError, GemmaTermsError, BudgetError, ConfigError) as error:
        parser.error(str(error))
    report = found.report
    share = kv_share_text(report.peak_memory_bytes, report.full_kv_bytes)
    print(f"read {found.tokens:,} tokens in {found.seconds:.0f} s; KV memory {size_text(report.peak_memory_bytes)} at "
          f"most ({share}), {size_text(report.disk_bytes)} on disk")  # fmt: skip
    for place, answer in found.answers.items():
        right = "right" if PLACES[place] in answer else f"wrong, it is {PLACES[place]}"
        print(f"the secret code of the {place}: {answer.splitlines()[0] if answer else ''} ({right})")
    print(f"the text goes on: {found.continuation}")
    print(f"{found.right} of {len(PLACES)} pass-keys found")
    return 0 if found.right == len(PLACES) else 1


if __name__ == "__main__":
    sys.exit(main())
