"""The greedy answer to one prompt, streamed and timed. What the console runs, for reuse.

model, tokenizer = load()
input_ids = build_prompt(tokenizer, document, question)
with make_cache("disk-swap", model, fields={"num_selected": 400}) as cache:
    answer = generate_answer(model, tokenizer, input_ids, cache, on_text=print)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.filling import piece_size, prefill
from ..errors import ConfigError
from ..model.look_ahead import stretch
from ..report.report import CacheReport
from .arguments import PromptTooLongError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


# How much of a prompt is prefilled before `generate` is called

def prefilled_tokens(prompt_tokens: int) -> int:
    """How many of the prompt `generate_answer` prefills before it calls `generate`, which gets the rest: several at
    once, so that a sparse cache is exact to the prompt's end."""
    return max(0, prompt_tokens - 16)


# The prompt: a document and a question about it, as one, or in two parts of which the first can be saved

_DOCUMENT = "<<< document >>>"
"""Stands for the document while the chat template is asked what it puts around it."""


def build_prompt(tokenizer: Any, document: str, question: str) -> torch.Tensor:
    """Token ids (1, T) of the document and then the question: the user's message where the tokenizer has a chat
    template, else plain text that ends in "Answer:"."""
    document, question = document.strip(), question.strip()
    if not getattr(tokenizer, "chat_template", None):
        plain = f"{document}\n\nQuestion: {question}\nAnswer:"
        return tokenizer(plain, return_tensors="pt", verbose=False)["input_ids"]
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return encoded["input_ids"]


def document_part(tokenizer: Any, document: str) -> torch.Tensor:
    """Token ids (1, T) of a prompt up to the document's end: what is saved, since no question changes it.

    With a `question_part` behind it that is a prompt which differs from `build_prompt`'s at most where they meet: each
    part is tokenised by itself. Raises `ConfigError` for a chat template that changes the document.
    """
    document = document.strip()
    if getattr(tokenizer, "chat_template", None):
        before, _ = _around_document(tokenizer, "")
        ids: list[int] = tokenizer(before + document, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([ids], device="cpu")
    ids = tokenizer(document, verbose=False)["input_ids"]
    plain = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    starts = [start for start in range(len(ids) - len(plain) + 1) if ids[start : start + len(plain)] == plain]
    without_end = ids[: starts[0] + len(plain)] if starts else plain
    return torch.tensor([without_end], device="cpu")


def question_part(tokenizer: Any, question: str) -> torch.Tensor:
    """Token ids (1, T) of all that comes behind a `document_part`. Raises `ConfigError` as that does."""
    question = question.strip()
    if getattr(tokenizer, "chat_template", None):
        after = _around_document(tokenizer, question)[1]
    else:
        after = f"\n\nQuestion: {question}\nAnswer:"
    return torch.tensor([tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]], device="cpu")


def _around_document(tokenizer: Any, question: str) -> tuple[str, str]:
    """What the chat template puts before the document, and what comes after it."""
    messages = [{"role": "user", "content": f"{_DOCUMENT}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, found, after = str(text).partition(_DOCUMENT)
    if not found:
        raise ConfigError(
            "the tokenizer's chat template does not take the document as it is, so that a context cannot end where the "
            "document does: run without --save and --context"
        )
    return before, after


@dataclass(frozen=True)
class Answer:
    """An answer and what it took. Seconds, bytes; rates are of one sequence."""

    cache: str
    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    first_token_seconds: float
    """From the start of the prefill to the first new token."""
    decode_seconds: float
    """From the first new token to the last."""
    full_kv_bytes: int
    memory_bytes: int
    disk_bytes: int
    report: CacheReport | None
    """None for `DynamicCache`, which keeps none."""

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding alone, without prefill and first token; None where fewer than two tokens were made."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        report = self.report.to_dict() if self.report is not None else None
        return {**values, "tokens_per_second": self.tokens_per_second, "report": report}


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises `PromptTooLongError` where prompt and answer do not fit the model's positions (if it says how many), of
    which a "dynamic" rotary embedding makes more."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    positions = None if positions is None else int(positions * stretch(model))
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens:,} tokens and the answer may have {max_new_tokens:,}, together "
            f"{prompt_tokens + max_new_tokens:,}, but the model has {positions:,} positions: shorten the document by "
            f"{prompt_tokens + max_new_tokens - positions:,} tokens, or take another model"
        )


def generate_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    cache: Cache,
    max_new_tokens: int = 64,
    prefill_chunk: int | None = None,
    on_progress: Callable[[int], object] | None = None,
    on_text: Callable[[str], object] | None = None,
    pause: tuple[int, Callable[[], object]] | None = None,
    started: float | None = None,
) -> Answer:
    """The greedy answer to the prompt (1, T). The cache may hold the prompt's first tokens; afterwards it holds the
    prompt and the answer.

    All of the prompt but its last tokens is prefilled in pieces of `prefill_chunk` tokens (None: 1,024), and `generate`
    continues from there. If the model's keys depend on a forward's length and `prefill_chunk` is None, `generate`
    prefills the complete prompt. Then `prefill_seconds` is nearly 0 and `first_token_seconds` includes the prefill.
    `on_text` gets the answer in this thread, in pieces, as complete words are ready. `pause`: a number of tokens, and a
    function to call when the cache holds exactly that many; its time does not count. `started`: the `time.perf_counter`
    value when the work for this prompt began (None: now). Raises `PromptTooLongError` and `ConfigError` before anything
    runs.
    """
    import torch

    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}: use 64")
    check_length(model, input_ids.shape[1], max_new_tokens)
    input_ids = input_ids.to(model.device)
    streamer = _streamer(tokenizer, on_text or (lambda text: None))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    start = time.perf_counter() if started is None else started
    first = held = getattr(cache, "tokens", 0)
    turn = held if pause is None else pause[0]  # what is held at the pause is a turn of its own
    last = prefilled_tokens(input_ids.shape[1])
    size = piece_size(model, turn, input_ids.shape[1], prefill_chunk, until=last)

    def prefill_to(stop: int) -> None:
        nonlocal held
        done, report = held, on_progress or (lambda tokens: None)
        if stop > done:
            part = input_ids[:, done:stop]
            prefill(model, part, cache, prefill_chunk, lambda tokens: report(done - first + tokens))
            held = stop
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)

    if pause is not None:
        prefill_to(pause[0])
        paused = time.perf_counter()
        pause[1]()
        start += time.perf_counter() - paused
    if size is not None:
        prefill_to(last)
    prefilled = time.perf_counter()
    generator: Any = model
    output = generator.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=padding,
        **_GREEDY,
    )
    new_ids = output[0, input_ids.shape[1] :]
    report = cache.report() if hasattr(cache, "report") else None
    full = report.full_kv_bytes if report is not None else _held_bytes(cache)
    return Answer(
        cache=type(cache).__name__,
        text=str(tokenizer.decode(new_ids, skip_special_tokens=True)).strip(),
        prompt_tokens=input_ids.shape[1],
        new_tokens=len(new_ids),
        prefill_seconds=prefilled - start,
        first_token_seconds=streamer.times[0] - start,
        decode_seconds=streamer.times[-1] - streamer.times[0],
        full_kv_bytes=full,
        memory_bytes=report.memory_bytes if report is not None else full,
        disk_bytes=report.disk_bytes if report is not None else 0,
        report=report,
    )


# A model's own generation settings may ask for sampling; said like this, transformers does not warn about the rest.
_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}


def _held_bytes(cache: Cache) -> int:
    """Bytes that the layers of a cache of transformers' own keep in memory."""
    from ..memory.account import storage_bytes

    return storage_bytes([vars(layer) for layer in cache.layers])


def _streamer(tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], object]) -> Any:
    """transformers' `TextStreamer` handing its text to `on_text`; `times` has the moment of each new token."""
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):
        times: list[float]

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                self.times.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    streamer = CallbackStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.times = []
    return streamer
