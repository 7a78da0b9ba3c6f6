"""Greedy answers, streamed and timed: to one prompt, and to the questions of a conversation; used by the console.

model, tokenizer = load()
input_ids = build_prompt(tokenizer, document, question)
with make_cache("disk-swap", model, fields={"num_selected": 400}) as cache:
    answer = generate_answer(model, tokenizer, input_ids, cache, on_text=print)
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from ..core.filling import piece_size, prefill
from ..errors import ConfigError, StoreError, is_full
from ..report.progress import Progress
from ..report.report import CacheReport
from .arguments import PromptTooLongError, say
from .named_cache import make_cache, offloading_class, positions_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from ..core.cache import OffloadCache
    from ..interop.reuse import Reuse

_DOCUMENT, _ANSWER = "<<< document >>>", "<<< answer >>>"
"""Placeholders, to find out what the chat template puts around a document and after an answer."""


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


def follow_up_part(tokenizer: Any, question: str) -> torch.Tensor:
    """Token ids (1, T) of the next question of a conversation, from the end of the answer before it, without that
    answer's end token. Raises `ConfigError` for a chat template that changes answers."""
    question = question.strip()
    if not getattr(tokenizer, "chat_template", None):
        return question_part(tokenizer, question)
    texts = (("user", _DOCUMENT), ("assistant", _ANSWER), ("user", question))
    messages = [{"role": role, "content": text} for role, text in texts]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    _, separator, after = str(text).partition(_ANSWER)
    if not separator:
        raise ConfigError("the tokenizer's chat template changes answers, so that no conversation can continue them")
    return torch.tensor([tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"]], device="cpu")


def _around_document(tokenizer: Any, question: str) -> tuple[str, str]:
    """The chat template's text before the document, and the text after it."""
    messages = [{"role": "user", "content": f"{_DOCUMENT}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, separator, after = str(text).partition(_DOCUMENT)
    if not separator:
        raise ConfigError(
            "the tokenizer's chat template changes the document, so that a context cannot end with it: use `generate` "
            "without --save and --context"
        )
    return before, after


@dataclass(frozen=True)
class Answer:
    """An answer, and the time and memory that it took, in seconds and bytes."""

    cache: str
    text: str
    new_ids: tuple[int, ...]
    """The answer's tokens. The cache has all of them but the last one."""
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
        """The fields as plain values that JSON can store, without the tokens."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["new_ids"]
        report = self.report.to_dict() if self.report is not None else None
        return {**values, "tokens_per_second": self.tokens_per_second, "report": report}


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise `PromptTooLongError` unless prompt and answer fit the model's positions, if it states a limit."""
    positions = positions_of(model)
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
    stop: Callable[[tuple[int, ...]], bool] | None = None,
) -> Answer:
    """The greedy answer to the prompt (1, T). The cache may already have the prompt's first tokens; afterwards it has
    the prompt and the answer.

    All of the prompt but its last tokens is prefilled in pieces of `prefill_chunk` tokens (None: 1,024), and `generate`
    continues from there. If the model's keys depend on a forward's length and `prefill_chunk` is None, `generate`
    prefills the complete prompt. Then `prefill_seconds` is nearly 0 and `first_token_seconds` includes the prefill.
    `on_text` gets the answer in this thread, in pieces, as complete words are ready. `pause`: a number of tokens, and a
    function to call when the cache has exactly that many; its time does not count. `started`: the `time.perf_counter`
    value when the work for this prompt began (None: now). `stop` gets the answer's tokens so far, after each of them;
    the answer ends when it returns True. Raises `PromptTooLongError` and `ConfigError` before anything runs.
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
    stopping: dict[str, Any] = {}
    if stop is not None:

        def stops(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            return torch.full((len(ids),), stop(tuple(ids[0, input_ids.shape[1] :].tolist())), device=ids.device)

        stopping["stopping_criteria"] = [stops]
    output = generator.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=padding,
        **stopping,
        **_GREEDY,
    )
    new_ids = output[0, input_ids.shape[1] :]
    report = cache.report() if hasattr(cache, "report") else None
    full = report.full_kv_bytes if report is not None else _held_bytes(cache)
    return Answer(
        cache=type(cache).__name__,
        text=str(tokenizer.decode(new_ids, skip_special_tokens=True)).strip(),
        new_ids=tuple(new_ids.tolist()),
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


# ------------------------------------------------------------------------------------------------- a conversation

_EVERY = 5.0
"""Seconds between two lines of progress without a terminal."""


class _Interrupt:
    """Within it, the first Ctrl-C sets `asked`, and the next one raises `KeyboardInterrupt`. For the main thread; in
    others it does nothing."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _StoppedReading(KeyboardInterrupt):
    """Ctrl-C between two pieces of a document: the cache has what was read."""


class Chat:
    """A conversation about `document` (1, T) in one cache. It holds exactly the tokens of `ids`, except the last one of
    an answer without an end. For one thread; the caller closes it.

    Args:
        reuse: the library that the document is looked up in and kept in; None: none. Its owner closes it.
        limit: most tokens of documents and conversation.
        path, fields, memory: as for `make_cache`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, document: torch.Tensor, cache: str, reuse: Reuse | None, limit: int,
        chunk: int | None = None, *, path: Any, fields: dict[str, Any], memory: Any,
    ) -> None:  # fmt: skip
        from ..model.place import inner_model
        from ..model.plain_caches import may_crop

        self.model, self.tokenizer, self.document, self.reuse, self.limit = model, tokenizer, document, reuse, limit
        self.ids = document
        """Tokens (1, T) on the CPU of documents, questions and answers, without the answers' end tokens."""
        self.answers = 0
        self.from_library, self.read_seconds = 0, 0.0
        """Of the last reading: tokens of the document that the library had, and its time."""
        self.stopped = ""
        """Why the last answer ended: "end", "length" or "interrupted"."""
        self._torn = False
        """The cache cannot be used any more: it is read again before the next question."""
        self._name, self._chunk, self._memory = cache, chunk, memory
        self._fields = {**fields, **({} if reuse is None else reuse.library.key_fields)}
        self._path = path if path is not None or reuse is None else reuse.library.folder
        self._may_crop = may_crop(inner_model(model))
        self._open = contextlib.ExitStack()
        self.cache: Any = None
        ends = getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id
        self._ends = {one for each in ends for one in (each if isinstance(each, list) else [each]) if one is not None}

    def close(self) -> None:
        self._open.close()

    @property
    def left(self) -> int:
        """Tokens that questions and answers may still take."""
        return self.limit - self.ids.shape[1]

    @property
    def said(self) -> str:
        """A sentence about the last reading."""
        tokens = self.document.shape[1]
        source = f", {self.from_library:,} of them from the library," if self.from_library else ""
        return f"read {tokens:,} tokens{source} in {self.read_seconds:.1f} s; {self.left:,} are left for questions"

    def begin(self) -> None:
        """Begin the conversation anew: the cache then holds the document, from the library as far as it has it. Raises
        `KeyboardInterrupt` after a Ctrl-C; the library then has what was read."""
        if self.answers and self._may_crop and not self._torn:
            self.cache.crop(self.document.shape[1] - self.cache.tokens)
        else:
            self._read(self.document)
        self.ids, self.answers = self.document, 0

    def _read(self, ids: torch.Tensor) -> None:
        """Make the cache hold these tokens."""
        started, self._torn = time.perf_counter(), True
        self._open.close()
        self.cache, self.from_library = self._stored(ids)
        self._torn = False
        if (missing := ids[:, self.from_library :]).shape[1]:
            bar = Progress("read", missing.shape[1], "tokens", every=_EVERY)
            try:
                with _Interrupt() as interrupt, bar:

                    def update(tokens: int) -> None:
                        bar.update(tokens)
                        if interrupt.asked and tokens < missing.shape[1]:
                            raise _StoppedReading

                    prefill(self.model, missing.to(self.model.device), self.cache, self._chunk, update)
            except _StoppedReading:
                if self._keep():
                    say(f"the next start continues after {self.cache.tokens:,} tokens")
                raise
            if ids is self.document:
                self._keep()
        self.read_seconds = time.perf_counter() - started

    def _stored(self, ids: torch.Tensor) -> tuple[OffloadCache, int]:
        """A cache, and the number of the first tokens of `ids` that it holds."""
        from ..model.own_generate import Request

        if self.reuse is not None:
            one_more = torch.cat([ids, ids[:, -1:]], 1)  # a match ends before the last token
            found = self.reuse.take(
                Request(1, self.limit, ids=one_more), self.model, offloading_class(self._name),
                [self._memory], path=self._path, **self._fields,
            )  # fmt: skip
            if found is not None:
                self._open.enter_context(found[0])
                return found
        made = make_cache(self._name, self.model, self._path, self._fields, self._memory, self.limit)
        return self._open.enter_context(made), 0  # type: ignore[return-value]

    def _keep(self) -> bool:
        """Save the cache's content in the library; whether it is there. A failure costs the next start a reading."""
        if self.reuse is None:
            return False
        try:
            self.reuse.library.save(self.cache, instead=True)
            return True
        except (OSError, ValueError, RuntimeError) as error:
            say(f"not kept in the library: {' '.join(str(error).split())}")
            return False

    def ask(self, question: str, max_new_tokens: int, on_text: Callable[[str], object]) -> Answer:
        """The answer, streamed to `on_text`; a Ctrl-C ends it. A context that turns out to be damaged is read again.

        Raises `PromptTooLongError` if nothing is left for an answer. After an error the conversation is as before the
        question, or ends with a part of it if the cache cannot be cropped."""
        part = (follow_up_part if self.answers else question_part)(self.tokenizer, question)
        input_ids = torch.cat([self.ids, part], 1)
        if (room := self.limit - input_ids.shape[1]) < 1:
            raise PromptTooLongError(
                f"documents, conversation and this question have {input_ids.shape[1]:,} tokens, and there is room for "
                f"{self.limit:,}, the answer included: ask a shorter question, or begin anew with /new"
            )
        new = min(max_new_tokens, room)
        if self._torn:
            say("the conversation is read again, because the last question was interrupted")
            self._read(self.ids)
        try:
            answer = self._answer(input_ids, new, on_text)
        except StoreError as error:
            if is_full(error):
                raise
            say(f"\nthe conversation is read again, because its context could not be read: {error}")
            self._read(self.ids)
            answer = self._answer(input_ids, new, on_text)
        self.ids = torch.cat([input_ids, torch.tensor([answer.new_ids], device="cpu")], 1)
        if self._is_end(answer.new_ids[-1]):  # the cache does not have it, and the next question begins with it
            self.ids = self.ids[:, :-1]
        self.answers += 1
        return answer

    def _answer(self, input_ids: torch.Tensor, max_new_tokens: int, on_text: Callable[[str], object]) -> Answer:
        before = self.cache.tokens
        try:
            with _Interrupt() as interrupt:
                answer = generate_answer(
                    self.model, self.tokenizer, input_ids, self.cache, max_new_tokens, self._chunk, on_text=on_text,
                    stop=lambda ids: interrupt.asked or self._is_end(ids[-1]),
                )  # fmt: skip
        except BaseException as error:
            if not isinstance(error, StoreError) or is_full(error):  # others: it is read again
                self._undo(before)
            raise
        ended = self._is_end(answer.new_ids[-1])
        self.stopped = "end" if ended else "interrupted" if interrupt.asked else "length"
        return answer

    def _undo(self, before: int) -> None:
        """After an error in a question: go back to the first `before` tokens, or take over what was added if the cache
        cannot be cropped. If it cannot be used any more, the next question reads the conversation again."""
        try:
            if self._may_crop:
                self.cache.crop(before)  # after the tokens of an interrupted forward were removed
            else:
                self.cache.freeze()
                self.ids = self.cache.input_ids.to("cpu") if self.cache.tokens > before else self.ids
        except (StoreError, RuntimeError):
            self._torn = True

    def _is_end(self, token: int) -> bool:
        """Whether a token ends an answer. Without a chat template, the end of a line does: a base model continues a
        text, and would ask the next question itself."""
        plain = not getattr(self.tokenizer, "chat_template", None)
        return token in self._ends or (plain and "\n" in self.tokenizer.decode([token]))
