"""The greedy answer to one prompt, streamed and timed; used by the console.

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

_DOCUMENT = "<<< document >>>"
"""Placeholder for the document, to find out what the chat template puts around it."""


def prefilled_tokens(prompt_tokens: int) -> int:
    """Tokens of the prompt that `generate_answer` prefills itself. `generate` gets several tokens at once, so that a
    sparse cache is exact to the prompt's end."""
    return max(0, prompt_tokens - 16)


def build_prompt(tokenizer: Any, document: str, question: str) -> torch.Tensor:
    """Token ids (1, T) of the document and the question: as a user's message if the tokenizer has a chat template, else
    as plain text that ends in "Answer:"."""
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
    """Token ids (1, T) of a prompt up to the document's end, which can be saved because no question changes it.

    With a `question_part` appended, the prompt differs from `build_prompt`'s at most where the parts meet, because each
    is tokenised separately. Raises `ConfigError` for a chat template that changes the document.
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
    """Token ids (1, T) of the prompt after a `document_part`. Raises `ConfigError` like that."""
    question = question.strip()
    if getattr(tokenizer, "chat_template", None):
        after = _around_document(tokenizer, question)[1]
    else:
        after = f"\n\nQuestion: {question}\nAnswer:"
    return torch.tensor([tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]], device="cpu")


def _around_document(tokenizer: Any, question: str) -> tuple[str, str]:
    """The chat template's text before the document, and the text after it."""
    messages = [{"role": "user", "content": f"{_DOCUMENT}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, separator, after = str(text).partition(_DOCUMENT)
    if not separator:
        raise ConfigError(
            "the tokenizer's chat template changes the document, so that a context cannot end with it: run without "
            "--save and --context"
        )
    return before, after


@dataclass(frozen=True)
class Answer:
    """An answer, and the time and memory that it took, in seconds and bytes."""

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
    """None for `DynamicCache`, which has no report."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding, without prefill and first token; None for fewer than two tokens."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values that JSON can store."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        report = self.report.to_dict() if self.report is not None else None
        return {**values, "tokens_per_second": self.tokens_per_second, "report": report}


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise `PromptTooLongError` unless prompt and answer fit the model's positions, if it states a limit. A "dynamic"
    rotary embedding extends it."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    positions = None if positions is None else int(positions * stretch(model))
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens:,} tokens and the answer may have {max_new_tokens:,}, together "
            f"{prompt_tokens + max_new_tokens:,}, but the model has {positions:,} positions: shorten the document by "
            f"{prompt_tokens + max_new_tokens - positions:,} tokens, or use another model"
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
    """The greedy answer to the prompt (1, T). The cache may already have the prompt's first tokens; afterwards it has
    the prompt and the answer.

    All of the prompt but its last tokens is prefilled in pieces of `prefill_chunk` tokens (None: 1,024), and `generate`
    continues from there. If the model's keys depend on a forward's length and `prefill_chunk` is None, `generate`
    prefills the complete prompt. Then `prefill_seconds` is nearly 0 and `first_token_seconds` includes the prefill.
    `on_text` gets the answer in this thread, in pieces, as complete words are ready. `pause`: a number of tokens, and a
    function to call when the cache has exactly that many; its time does not count. `started`: the `time.perf_counter`
    value when the work for this prompt began (None: now). Raises `PromptTooLongError` and `ConfigError` before anything
    runs.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}: use 64")
    check_length(model, input_ids.shape[1], max_new_tokens)
    input_ids = input_ids.to(model.device)
    streamer = _streamer(tokenizer, on_text or (lambda text: None))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    start = time.perf_counter() if started is None else started
    first = stored = getattr(cache, "tokens", 0)
    turn = stored if pause is None else pause[0]  # the tokens up to the pause are a separate turn
    last = prefilled_tokens(input_ids.shape[1])
    size = piece_size(model, turn, input_ids.shape[1], prefill_chunk, until=last)

    def prefill_to(stop: int) -> None:
        nonlocal stored
        done, report = stored, on_progress or (lambda tokens: None)
        if stop > done:
            part = input_ids[:, done:stop]
            prefill(model, part, cache, prefill_chunk, lambda tokens: report(done - first + tokens))
            stored = stop
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


# A model's generation settings may ask for sampling; with these values transformers does not warn about the others.
_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}


def _held_bytes(cache: Cache) -> int:
    """Bytes in the layers of a transformers cache."""
    from ..memory.account import storage_bytes

    return storage_bytes([vars(layer) for layer in cache.layers])


def _streamer(tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], object]) -> Any:
    """A `TextStreamer` that passes its text to `on_text`; `times` has the time of each new token."""
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
