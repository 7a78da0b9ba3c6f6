"""Sample texts, the rows that are tuned, and tuning's progress."""

from __future__ import annotations

import pydoc
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from ..errors import ConfigError
from ..model.config_values import config_value
from ..report.progress import Progress as Bar

# Progress

class Progress:
    """Progress of parts whose shares add up to 1, and their clock."""

    def __init__(self, seconds: float, shown: bool = True) -> None:
        self._bar = Bar("tuning", total=1.0, shown=shown)
        self._seconds = seconds
        self._before = self._share = 0.0
        self._name, self._deadline = "tuning", 0.0

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.update(self._before + self._share * (exception[0] is None), name="tuning")
        self._bar.close()

    def begin(self, name: str, share: float) -> None:
        """Begin the next part, which may take `share` of the time; `name` says what is measured."""
        self._before += self._share
        self._name, self._share = name, share
        self._deadline = time.perf_counter() + share * self._seconds
        self.done(0.0, "")

    def done(self, fraction: float, detail: str) -> None:
        """Report this fraction of the part, from 0 to 1, and the `detail` being measured."""
        self._bar.update(self._before + fraction * self._share, name=f"{self._name}{detail}")

    def within(self, index: int, count: int) -> Callable[[float, str], None]:
        """Like `done`, for one of `count` samples."""
        return lambda fraction, detail: self.done((index + fraction) / count, f"{index + 1} of {count}, {detail}")

    @property
    def seconds_left(self) -> float:
        """Seconds left for the part; negative if it took more than its share."""
        return self._deadline - time.perf_counter()


# Sample text: the user's, or Python's help texts, which every Python has

def bundled_prose() -> list[str]:
    """Paragraphs of prose from Python's help topics, in the order of their names, each once: the same for the same
    version of Python.

    Without grammars, code and tables, which a small model continues instead of answering.
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
                "tokenizer must be given if texts are strings or left out, got None: pass the model's tokenizer, or "
                "token ids as texts"
            )
        text = tokenizer(text, verbose=False)["input_ids"]
    return torch.as_tensor(text, dtype=torch.int64, device="cpu")


def windows(documents: list[torch.Tensor], count: int, least: int, most: int) -> list[torch.Tensor]:
    """`count` stretches of ids, `most` tokens long, or as long as the longest document if that is shorter.

    They begin at even distances over all documents that are long enough, overlap if there is little text, and never
    cross from one document to another. Raises `ConfigError` if no document has `least` tokens.
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


LEAST_CONTEXT = 4096
"""S_min: tokens of the shortest context that is profiled and solved for."""
_CONTEXT_STEP = 2048
_MOST_CONTEXTS = 32
"""Rows per batch size; the step between contexts grows in multiples of itself to stay within."""
_MOST_BATCHES = 16


def rows_for(max_batch: int, max_context: int) -> tuple[list[int], list[int]]:
    """Batch sizes and contexts to tune: steps of 1, and of 2K from 4K (appendix A.3), or wider ones if those would be
    too many; the largest are always included."""
    stride = -(-max_batch // _MOST_BATCHES)
    batches = sorted({1, *range(stride, max_batch + 1, stride), max_batch})
    if max_context <= LEAST_CONTEXT:
        return batches, [max_context]
    span = max_context - LEAST_CONTEXT
    step = _CONTEXT_STEP * max(1, -(-span // (_CONTEXT_STEP * (_MOST_CONTEXTS - 1))))
    return batches, sorted({*range(LEAST_CONTEXT, max_context, step), max_context})


def sample_sizes(model: Any, selected: int, max_context: int, steps: int) -> tuple[int, int]:
    """Tokens of a sample's context for a cache that selects `selected`, and `steps` decoded after it."""
    context = min(4096, max(max_context, 4 * selected))
    positions = config_value(model.config.get_text_config(decoder=True), "max_position_embeddings")
    return (min(context, positions - steps) if isinstance(positions, int) else context), steps
