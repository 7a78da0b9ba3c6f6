"""lm-eval's Hugging Face model with the KV cache of each request offloaded: `OffloadLM`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import AutoConfig, BitsAndBytesConfig, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ..config import parse_size
from ..contexts.library import ContextLibrary
from ..core.cache import OffloadCache
from ..errors import BudgetError, ConfigError, ContextError, StoreError
from ..interop.offload import FLOOR, beyond_share, budgets, offload, request_cache
from ..interop.reuse import LEAST, opened_within
from ..model.look_ahead import reason_against_pieces
from ..registry import CACHES
from .continuations import Asked, Continuations, Needed, Scored
from .default_model import find_gguf
from .named_cache import DYNAMIC, check_fields, check_library_key, load, offloading_class

_LOGGER = logging.getLogger(__name__)


@register_model("hf-offload")
class OffloadLM(HFLM):
    """As lm-eval's `hf`, with the KV cache of each request offloaded.

    A context is prefilled into a cache once, and its continuations are scored through forks of that, `batch_size` at a
    time. Where everything is attended to, contexts that begin the same share what they have in common. `exact=bitwise`
    asks as `hf` does, and its scores and texts are `hf`'s to the last bit.

    Args:
        pretrained: as in `hf`; None: the default model from its package.
        cache: "disk-swap" or another name of the registry, "module:Class", or "dynamic", which is `hf` itself.
        memory: memory budget of each request, or batch of them: "300MiB", bytes, "1/13" of the full cache.
        goal: with `memory`, what fields are chosen for: "fidelity" or "speed", as in `for_budget`.
        path: folder on the disk to use.
        floor: memory per sequence of a request whose share is too small for any such cache (`request_cache`): "64MiB".
            If transformers' own cache takes less, the request has that. The results count both.
        strict: such a request raises `BudgetError`.
        library: folder of a `ContextLibrary`. A request starts from the longest beginning that an earlier one has left
            there, also in another run, and leaves its own text. Not with `exact=bitwise`.
        library_bytes: maximum disk space of the library: "200GB".
        key: file with the library's encryption key; it then encrypts the requests' own files, too.
        others: arguments of `hf`, including those of `from_pretrained`, and fields of the cache ("exact=True"). A
            `batch_size` of "auto" is 1.
    """

    def __init__(
        self, pretrained: Any = None, cache: str = "disk-swap", memory: int | str | None = None,
        path: str | None = None, strict: bool = False, floor: int | str = FLOOR, goal: str | None = None,
        library: str | None = None, library_bytes: int | str = "200GB", key: str | Path | None = None, **others: Any,
    ) -> None:  # fmt: skip
        own = {"pretrained": pretrained, "cache": cache, "memory": memory, "path": path, "floor": floor, "goal": goal}
        theirs, self.fields, loading = check_arguments({**own, "library": library, "key": key, **others})
        self.cache_name, self.memory, self.path = cache, memory, path
        self.library = None if library is None else ContextLibrary(library, library_bytes, key=key)
        self._key_fields = {} if self.library is None else self.library.key_fields
        path = library if path is None else path  # where records can be linked into it
        self.reused = 0
        """Tokens that came from the library."""
        self.limits: dict[str, Any] = {"memory": memory, "goal": goal, "floor": floor, "strict": strict, "path": path}
        self.requests = self.plain_requests = self.floor_requests = 0
        """Answered requests; those left with transformers' own cache; those planned with `floor`."""
        self.report: Any = None
        if cache != DYNAMIC and str(theirs.get("batch_size", 1)).startswith("auto"):
            _LOGGER.warning("batch_size=auto is 1 with cache=%s: name a number for batches", cache)
            theirs["batch_size"] = 1
        theirs["device"] = _there(theirs.get("device"))
        if pretrained is None:
            dtype = str(theirs.pop("dtype", "auto")).removeprefix("torch.")
            pretrained, theirs["tokenizer"] = load(None, dtype, theirs["device"])
        super().__init__(pretrained, **theirs, **loading)
        layers = DynamicCache(config=self.model.config).layers
        self._has_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self._plain = cache == DYNAMIC or not any(isinstance(layer, CacheLayerMixin) for layer in layers)
        if self._plain and cache != DYNAMIC:
            _LOGGER.warning("%s keeps a state alone: there is nothing to offload", type(self.model).__name__)
        adapters = getattr(self.model, "peft_config", None) or {}
        if cache != DYNAMIC and any(getattr(one, "is_prompt_learning", False) for one in adapters.values()):
            raise ConfigError("peft: an adapter that is a prompt is put in anew by each forward: use cache=dynamic")

    def _create_model(self, *args: Any, quantization_config: Any = None, **kwargs: Any) -> None:
        """transformers has no `load_in_4bit` any more, but a configuration of it."""
        bits = {name: kwargs.pop(name) for name in BITS & kwargs.keys()}
        if bits:
            quantization_config = BitsAndBytesConfig(**bits)
        super()._create_model(*args, quantization_config=quantization_config, **kwargs)

    # --- log likelihoods ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Scored]:
        if self._plain or self.fields.get("exact") == "bitwise":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        selects = offloading_class(self.cache_name).selects and not self.fields.get("exact")
        share = not selects and not self._has_state

        def whole(cache: Any) -> bool:
            return share or not (self._has_state or isinstance(cache, OffloadCache))

        def apart(tokens: int) -> bool:
            return reason_against_pieces(self.model, 1, tokens) is not None

        continuations = Continuations(
            self._cache, self._logits, share=share, whole=whole, batch=int(self.batch_size), apart=apart
        )
        asked = [self._fitting(context, continuation) for _, context, continuation in requests]
        found: dict[int, Scored] = {}
        with tqdm(total=len(asked), disable=disable_tqdm or self.rank != 0, desc="scoring continuations") as bar:

            def score() -> None:
                left = [place for place in range(len(asked)) if place not in found]
                for index, scored in continuations.scored([asked[place] for place in left]):
                    place = left[index]
                    found[place] = scored
                    if requests[place][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[place][0], scored)
                    bar.update()

            library = self.library
            try:
                score()
            except (BudgetError, StoreError) as error:
                if library is None:
                    raise
                _LOGGER.warning("the library is not used for the rest of these requests: %s", error)
                self.library = None
                score()
            finally:
                self.library = library
        return [found[place] for place in range(len(asked))]

    def _fitting(self, context: list[int], continuation: list[int]) -> Asked:
        """The last tokens of a request that fit the model, as `hf` cuts them."""
        for name, ids in (("context", context), ("continuation", continuation)):
            if not ids:
                raise ConfigError(f"a request's {name} must have a token at least, got none: fix the task's texts")
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"a request's continuation must have at most max_length={self.max_length} tokens, got "
                f"{len(continuation)}: give a larger max_length, or shorter texts"
            )
        both = (*context, *continuation)[-(self.max_length + 1) :]
        return both[: -len(continuation)], both[-len(continuation) :]

    @contextmanager
    def _cache(self, needed: Needed, begin: Sequence[int] = ()) -> Iterator[Any]:
        """A cache for such requests. It may hold a beginning of the tokens `begin`, with which all of them begin."""
        if self.library is None or len(begin) < LEAST:
            with self._new_cache(needed) as cache:
                yield cache
            return
        with self._opened(needed, begin) or self._new_cache(needed) as cache:
            yield cache
            if isinstance(cache, OffloadCache):
                self._leave(cache, len(begin))

    def _opened(self, needed: Needed, begin: Sequence[int]) -> AbstractContextManager[Any] | None:
        """A cache with what the library has of `begin`; None: nothing that can be used."""
        assert self.library is not None
        floor, strict = self.limits["floor"], self.limits["strict"]
        limits = budgets(self.model, needed.tokens, needed.rows, self.memory, floor, strict)
        ids = torch.tensor([[*begin, begin[-1]]], device="cpu")  # a library leaves the last token to the model
        try:
            found = opened_within(
                limits, self.library, ids, self.model, offloading_class(self.cache_name), path=self.limits["path"],
                max_context=needed.tokens, max_batch=needed.rows, **self.fields,
            )  # fmt: skip
        except (BudgetError, ContextError, StoreError) as error:
            _LOGGER.warning("a stored context is not used: %s", error)
            return None
        if found is None:
            return None
        self.requests += needed.requests
        self.reused += found[1]
        return found[0]

    def _leave(self, cache: OffloadCache, tokens: int) -> None:
        """Save what `cache` holds; of several rows, their first `tokens` tokens, which are the same."""
        assert self.library is not None
        try:
            if cache.sequences > 1:
                cache.crop(min(0, tokens - cache.get_seq_length()))
                cache.batch_select_indices(torch.zeros(1, dtype=torch.long, device="cpu"))
            self.library.save(cache, instead=True)
        except (OSError, ValueError) as error:  # limits, a full disk, rows that cannot be cropped
            _LOGGER.warning("a context was not kept: %s", error)

    def _new_cache(self, needed: Needed) -> AbstractContextManager[Any]:
        cls = offloading_class(self.cache_name)
        self.requests += needed.requests
        always = self.library is not None
        fields = {**self.limits, **self.fields, **self._key_fields}
        own = request_cache(cls, self.model, needed.tokens, needed.rows, always=always, **fields)
        if own is not None:
            self.floor_requests += needed.requests * beyond_share(own, self.model, self.memory)
            return own
        self.plain_requests += needed.requests
        return nullcontext(DynamicCache(config=self.model.config))

    def _logits(self, ids: torch.Tensor, cache: Any, wanted: int) -> torch.Tensor:
        logits = self._forward(ids.to(self.device), cache, logits_to_keep=wanted)
        return logits[:, -wanted:].log_softmax(-1, dtype=self.softmax_dtype)  # some models give all

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Logits for `hf`'s own way, which gives whole texts in one forward each."""
        if self._plain:
            return super()._model_call(inps, attn_mask, labels)
        rows, tokens = inps.shape
        with self._cache(Needed(tokens, rows, rows)) as cache:
            return self._forward(inps, cache)

    def _forward(self, ids: torch.Tensor, cache: Any, **keep: int) -> torch.Tensor:
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, mixed, enabled=mixed is not None):
            logits: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **keep).logits
        return logits

    # --- texts -------------------------------------------------------------------------------------------------

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        if self._plain:
            return super()._model_generate(context, max_length, stop, **options)
        self.requests += len(context)
        with offload(self.model, self.cache_name, library=self.library, **self.limits, **self.fields) as done:
            found = super()._model_generate(context, max_length, stop, **options)
        self.plain_requests += len(context) * done.requests_left_plain
        self.floor_requests += len(context) * done.requests_at_floor
        self.report = done.report or self.report
        self.reused += done.tokens_reused
        return found

    # --- what is said ------------------------------------------------------------------------------------------

    def loglikelihood(self, *args: Any, **kwargs: Any) -> Any:
        return self._told(super().loglikelihood(*args, **kwargs))

    def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> Any:
        return self._told(super().loglikelihood_rolling(*args, **kwargs))

    def generate_until(self, *args: Any, **kwargs: Any) -> Any:
        return self._told(super().generate_until(*args, **kwargs))

    def _told(self, found: Any) -> Any:
        if self.plain_requests or self.floor_requests:
            _LOGGER.warning(
                "memory=%s was too little for some of %d requests so far: %d had floor=%s a sequence, and %d "
                "transformers' own cache, which is no more; strict=True refuses them", self.memory, self.requests,
                self.floor_requests, self.limits["floor"], self.plain_requests,
            )  # fmt: skip
        return found

    @property
    def cache_used(self) -> str:
        """Name of the cache that the requests used, including transformers' own if some or all of them used it."""
        if self.cache_name == DYNAMIC or not (self._plain or self.plain_requests):
            return self.cache_name
        if self._plain or self.plain_requests == self.requests:
            return f"{DYNAMIC}, though {self.cache_name} was asked for"
        return f"{self.cache_name}, but {DYNAMIC} for {self.plain_requests} of {self.requests} requests"

    def get_model_info(self) -> dict[str, Any]:
        """`hf`'s, and the cache, its requests, and how many of them its memory was too small for."""
        own: dict[str, Any] = {"cache": self.cache_used, "cache_memory": self.memory, "cache_goal": self.limits["goal"]}
        own |= {"cache_fields": self.fields, "cache_requests": self.requests}
        own |= {"cache_floor_requests": self.floor_requests, "cache_plain_requests": self.plain_requests}
        own |= {} if self.library is None else {"cache_reused_tokens": self.reused}
        return {**super().get_model_info(), **own}


def _check_dtype(name: str, value: Any) -> None:
    """Raises `ConfigError` for text that names none of torch's types."""
    if not isinstance(value, str) or value == "auto":
        return
    if not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        raise ConfigError(f"{name} must be a type of torch such as 'float32', got {value!r}")


def _there(device: str | None) -> str:
    """The device, or the default one if this CUDA device does not exist. lm-eval's command passes `cuda:0` by
    default, and `hf` ignores it then."""
    here = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if device is not None and (not device.startswith("cuda") or device in (*here, "cuda" if here else "")):
        return device
    return "cuda" if here else "cpu"


# --- `--model_args`: arguments of lm-eval's own model, of the cache, and of `from_pretrained`


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs", "model_args"}


_OF_HF = _parameters(HFLM.__init__)
BITS = _parameters(BitsAndBytesConfig.__init__)
"""Arguments that make a quantization configuration."""
_LOADING = _parameters(PreTrainedModel.from_pretrained) | BITS | {
    "adapter_kwargs", "allow_all_kernels", "attn_implementation", "code_revision", "device_map",
    "experts_implementation", "key_mapping", "max_memory", "offload_buffers", "torch_dtype", "use_kernels", "variant",
}  # fmt: skip
"""Arguments of `from_pretrained`, the last ones among its `kwargs`."""
_READING = ("revision", "subfolder", "trust_remote_code", "gguf_file")
_OF_A_NAME = {
    "autogptq", "delta", "gguf_file", "gptqmodel", "parallelize", "peft", "revision", "subfolder", "tp_plan",
    "trust_remote_code",
}  # fmt: skip
"""Arguments of lm-eval's own that decide how a model is loaded."""


class ModelArguments(NamedTuple):
    """Arguments by name."""

    of_hf: dict[str, Any]
    of_cache: dict[str, Any]
    loading: dict[str, Any]
    """Arguments of `from_pretrained`."""


_DEFAULTS = {"cache": next(iter(CACHES)), "floor": FLOOR}
_OWN = {"pretrained", "cache", "memory", "path", "strict", "floor", "goal", "library", "library_bytes", "key"}
"""`OffloadLM`'s own arguments."""


def check_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Sort the arguments of an `OffloadLM` that are not its own. Raises the errors that it raises for arguments before
    it loads a model, except those of the library; `DefaultModelMissingError` if no model is named and there is none."""
    own = {**dict.fromkeys(_OWN), **_DEFAULTS, **{name: given[name] for name in _OWN & given.keys()}}
    cache, library, others = own["cache"], own["library"], {name: given[name] for name in given if name not in _OWN}
    found = sort_arguments(others, cache, own["pretrained"])
    check_fields(cache, found.of_cache, own["path"], own["memory"], own["goal"])
    parse_size(own["floor"], "floor")
    if library is not None and (cache == DYNAMIC or found.of_cache.get("exact") == "bitwise"):
        raise ConfigError(
            "library: with exact=bitwise each text is computed in one piece, and cache=dynamic stores none: leave "
            "one of the two out"
        )
    check_library_key(library, found.of_cache)
    if own["key"] is not None and library is None:
        raise ConfigError("key is for a library: give library too")
    for name in ("dtype", "softmax_dtype", "mixed_precision_dtype"):
        _check_dtype(name, found.of_hf.get(name))
    if own["pretrained"] is None:
        find_gguf()
    return found


def sort_arguments(given: Mapping[str, Any], cache: str, pretrained: Any) -> ModelArguments:
    """Give each argument to `hf`, the cache or `from_pretrained`: to the first of these that knows its name.

    `pretrained`: a name or folder, whose configuration's attributes `from_pretrained` takes, too; or a model, or None
    for the default one. Raises `ConfigError` for what nobody takes, before a model is loaded.
    """
    cls = None if cache == DYNAMIC else offloading_class(cache)
    fields = set() if cls is None else {field.name for field in dataclasses.fields(cls.config_class)}
    found = ModelArguments({}, {}, {})
    unknown: dict[str, Any] = {}
    for name, value in given.items():
        kinds = ((_OF_HF, found.of_hf), (fields, found.of_cache), (_LOADING, found.loading))
        own = next((kept for names, kept in kinds if name in names), unknown)
        own[name] = value
    if unknown and isinstance(pretrained, str):
        of_model = _attributes(pretrained, {name: given[name] for name in _READING if name in given})
        found.loading.update({name: unknown.pop(name) for name in [*unknown] if name in of_model})
    for name in unknown:
        near = difflib.get_close_matches(name, sorted(fields | _OF_HF | _LOADING), 1)
        hint = f"did you mean {near[0]!r}?" if near else "see the fields of the cache, and those of --model hf"
        raise ConfigError(f"model_args: {name!r} is neither a field of cache={cache} nor taken by a model; {hint}")
    lost = sorted({*found.loading, *(name for name in _OF_A_NAME & found.of_hf.keys() if found.of_hf[name])})
    if lost and not isinstance(pretrained, str):
        raise ConfigError(f"model_args: {', '.join(lost)} is for a model that is loaded by name: give pretrained=NAME")
    return found


def _attributes(pretrained: str, options: dict[str, Any]) -> set[str]:
    """Attributes of a model's configuration; none if it cannot be read, because loading tells why."""
    try:
        return set(AutoConfig.from_pretrained(pretrained, **options).to_dict())
    except (OSError, ValueError):
        return set()
