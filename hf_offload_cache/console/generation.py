"""One question about one document, timed: load, prompt, prefill, streamed answer. What the console runs, for reuse.

    model, tokenizer = load()
    input_ids = build_prompt(tokenizer, document, question)
    with make_cache("disk-swap", model, fields={"num_selected": 400}) as cache:
        answer = generate_answer(model, tokenizer, input_ids, cache, on_text=print)
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..caches.disk_swap_config import DiskSwapConfig
from ..config import parse_memory
from ..errors import ConfigError
from ..report.cache_report import CacheReport

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from ..model.geometry import Geometry

CACHES = ("disk-swap", "dynamic")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class ModelLoadError(OSError):
    """The named model or its tokenizer cannot be loaded; nothing was kept."""


class PromptTooLongError(ValueError):
    """Prompt and answer need more positions than the model has; nothing was run."""


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


def load(
    name: str | None = None, dtype: str = "auto", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (hub name or folder; None: the embedded default) and its tokenizer, in evaluation mode.

    `device` None: CUDA where there is one, else the CPU. Raises `DefaultModelMissingError`, `ModelLoadError`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .default_model import load_default_model

    model: Any  # transformers' own hints know neither `to(device)` nor `generate`
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name is None:
        model, tokenizer = load_default_model(None if dtype == "auto" else getattr(torch, dtype))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            wanted = dtype if dtype == "auto" else getattr(torch, dtype)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
        except (OSError, ValueError) as error:
            kind = "folder" if Path(name).exists() else "hub name (and no folder of that name exists)"
            raise ModelLoadError(f"cannot load the {kind} {name!r} as a causal language model: {error}") from error
    try:
        return model.to(device).eval(), tokenizer
    except RuntimeError as error:
        raise ModelLoadError(f"cannot move {name or 'the default model'} to device {device!r}: {error}") from error


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that `load` would load, which is not read. Raises as `load`."""
    from transformers import AutoTokenizer

    from .default_model import find_gguf

    try:
        if name is not None:
            return AutoTokenizer.from_pretrained(name)
        file = find_gguf()
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of {name or 'the default model'!r}: {error}") from error


def load_geometry(name: str | None = None, dtype: str = "auto", device: str | None = None) -> Geometry:
    """What of the model `load` would load decides memory. Reads the configuration, and of weights at most their files'
    sizes; only the embedded default is loaded. Raises `DefaultModelMissingError`, `ModelLoadError`,
    `UnsupportedModelError`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..model.geometry import Geometry

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if name is None:
        return dataclasses.replace(Geometry.of(load(None, dtype, "cpu")[0]), device=where)
    try:
        config = AutoConfig.from_pretrained(name)
        stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
            model = model.to(stored if dtype == "auto" else getattr(torch, dtype))
    except (OSError, ValueError) as error:
        kind = "folder" if Path(name).exists() else "hub name (and no folder of that name exists)"
        raise ModelLoadError(f"cannot read the configuration of the {kind} {name!r}: {error}") from error
    geometry = dataclasses.replace(Geometry.of(model), device=where)
    files = sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else 0
    return dataclasses.replace(geometry, weight_bytes=files) if files and dtype == "auto" else geometry


def build_prompt(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> torch.Tensor:
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


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises `PromptTooLongError` where prompt and answer do not fit the model's positions (if it says how many)."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens:,} tokens and the answer may have {max_new_tokens:,}, together "
            f"{prompt_tokens + max_new_tokens:,}, but the model has {positions:,} positions: shorten the document by "
            f"{prompt_tokens + max_new_tokens - positions:,} tokens, or take another model"
        )


def check_fields(
    name: str, fields: Mapping[str, Any], path: str | Path | None = None, memory: int | str | None = None
) -> None:
    """Raises `ConfigError` for what `make_cache` would refuse whatever the model, so before a model is loaded."""
    if name not in CACHES:
        raise ConfigError(f"cache must be one of {', '.join(CACHES)}, got {name!r}")
    if name == "disk-swap":
        DiskSwapConfig.load(None, dict(fields))
        if memory is not None:
            parse_memory(memory, sys.maxsize)
    elif fields or path or memory:
        raise ConfigError("cache 'dynamic' keeps all in memory and has no fields, path or memory: leave them out")


@contextlib.contextmanager
def make_cache(
    name: str,
    model: PreTrainedModel,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
) -> Iterator[Cache]:
    """A cache of that name (one of `CACHES`), closed on leaving, also after an exception.

    With `memory` (bytes, "300MiB", or "1/13" of the full KV), which is for one sequence of `max_context` tokens, the
    best that it allows (see `OffloadCache.for_budget`). Raises `ConfigError` for a name or a field that there is not,
    `BudgetError` for a memory that does not do.
    """
    check_fields(name, fields or {}, path, memory)
    if name == "disk-swap":
        from ..caches.disk_swap import DiskSwapCache

        if memory is None:
            cache = DiskSwapCache(model, path=path, **(fields or {}))
        elif max_context is None:
            raise ConfigError(f"memory={memory!r} needs max_context, the tokens it is for: give both")
        else:
            cache = DiskSwapCache.for_budget(model, memory, max_context, path=path, **(fields or {}))
        with cache:
            yield cache
    else:
        from transformers import DynamicCache

        yield DynamicCache(config=model.config)


@contextlib.contextmanager
def open_cache(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
) -> Iterator[Cache]:
    """As `make_cache("disk-swap", ...)`, but what was saved in `directory` is held; that counts as used now.

    Raises as `DiskSwapCache.open`.
    """
    from ..caches.disk_swap import DiskSwapCache
    from ..contexts.listing import touch

    own = {} if memory is None else {"max_context": max_context}
    with DiskSwapCache.open(
        directory, model, memory=memory, path=path, tokenizer=tokenizer, **{**own, **(fields or {})}
    ) as cache:
        touch(directory)
        yield cache


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int = 1024,
    on_progress: Callable[[int], object] | None = None,
) -> None:
    """Runs `input_ids` (1, T) through the model in chunks; the cache holds T tokens more.

    `on_progress` gets the number of tokens done after each chunk, in this thread.
    """
    import torch

    if chunk < 1:
        raise ConfigError(f"prefill chunk must be at least 1 token, got {chunk}: use 1024")
    with torch.no_grad():  # as `generate` does; tensors of inference mode could not be written to afterwards
        for start in range(0, input_ids.shape[1], chunk):
            part = input_ids[:, start : start + chunk]
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            if on_progress is not None:
                on_progress(start + part.shape[1])


def prefilled_tokens(prompt_tokens: int) -> int:
    """How many of the prompt `generate_answer` prefills before it calls `generate`, which gets the rest: several at
    once, so that a sparse cache is exact to the prompt's end."""
    return max(0, prompt_tokens - 16)


def generate_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    cache: Cache,
    max_new_tokens: int = 64,
    prefill_chunk: int = 1024,
    on_progress: Callable[[int], object] | None = None,
    on_text: Callable[[str], object] | None = None,
    pause: tuple[int, Callable[[], object]] | None = None,
    started: float | None = None,
) -> Answer:
    """The greedy answer to the prompt (1, T), of which the cache may hold the first tokens; afterwards it holds the
    prompt and the answer.

    All of the prompt but its last tokens is prefilled in chunks; `generate` goes on from there. `on_text` gets the
    answer in pieces, in this thread, as whole words are there. `pause`: a number of tokens and what to call when the
    cache holds just these; the time that takes does not count. `started`: of `time.perf_counter`, when the work for
    this prompt began (None: now). Raises `PromptTooLongError` before anything runs.
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
    prefill_to(prefilled_tokens(input_ids.shape[1]))
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
    """Bytes of keys and values in a cache of transformers' own."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
