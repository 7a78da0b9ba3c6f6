"""lm-eval's command line with one model more, `hf-offload`: its Hugging Face model through a cache of this library.

    python -m eval.lm_eval --model hf-offload --model_args cache=disk-swap,memory=1/13 --tasks needle_single
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lm_eval.tasks
import lm_eval.utils
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import BitsAndBytesConfig, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from hf_offload_cache import offload
from hf_offload_cache.config import parse_size
from hf_offload_cache.console import DYNAMIC, check_fields, load, offloading_class
from hf_offload_cache.core import OffloadCache
from hf_offload_cache.errors import ConfigError
from hf_offload_cache.interop import FLOOR, beyond_share, request_cache
from hf_offload_cache.model import reason_against_pieces

from .continuations import Asked, Continuations, Needed, Scored
from .model_arguments import BITS, sort_arguments

TASKS = Path(__file__).parent / "tasks"
_LOGGER = logging.getLogger(__name__)


@register_model("hf-offload")
class OffloadLM(HFLM):
    """As lm-eval's `hf`, with the KV cache of each request offloaded.

    A context is prefilled into a cache once, and its continuations are scored through forks of that, `batch_size` at a
    time. Where everything is attended to, contexts that begin the same share what they have in common. `exact=bitwise`
    asks as `hf` does, and its scores and texts are `hf`'s to the last bit.

    Args:
        pretrained: as of `hf`; None: the default model from its package.
        cache: "disk-swap" and the other names of the registry, "module:Class", or "dynamic": all as `hf` does it.
        memory: memory budget of each request, or batch of them: "300MiB", bytes, "1/13" of the full cache.
        goal: with `memory`, what fields are chosen for: "fidelity" or "speed", as in `for_budget`.
        path: folder on the disk to use.
        floor: memory of a sequence whose share is less than any such cache needs, as of a short one (`request_cache`):
            "64MiB"; transformers' own cache where that is less. The results say how many had either.
        strict: such a request raises `BudgetError`.
        others: arguments of `hf`, those of `from_pretrained` among them, and fields of the cache ("exact=True"). Of
            `batch_size`, "auto" is 1.
    """

    def __init__(
        self, pretrained: Any = None, cache: str = "disk-swap", memory: int | str | None = None,
        path: str | None = None, strict: bool = False, floor: int | str = FLOOR, goal: str | None = None, **others: Any,
    ) -> None:  # fmt: skip
        theirs, self.fields, loading = sort_arguments(others, cache, pretrained)
        check_fields(cache, self.fields, path, memory, goal)
        parse_size(floor, "floor")
        self.cache_name, self.memory, self.path = cache, memory, path
        self.limits = {"memory": memory, "goal": goal, "floor": floor, "strict": strict, "path": path}
        self.requests = self.plain_requests = self.floor_requests = 0
        """Answered requests; those with transformers' own cache because they were short; those planned with `floor`."""
        self.report: Any = None
        if cache != DYNAMIC and str(theirs.get("batch_size", 1)).startswith("auto"):
            _LOGGER.warning("batch_size=auto is 1 with cache=%s: name a number for batches", cache)
            theirs["batch_size"] = 1
        for name in ("dtype", "softmax_dtype", "mixed_precision_dtype"):
            _check_dtype(name, theirs.get(name))
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
        found: list[Scored] = [(0.0, False)] * len(asked)
        with tqdm(total=len(asked), disable=disable_tqdm or self.rank != 0, desc="scoring continuations") as bar:
            for place, scored in continuations.scored(asked):
                found[place] = scored
                if requests[place][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], scored)
                bar.update()
        return found

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

    def _cache(self, needed: Needed) -> AbstractContextManager[Any]:
        cls = offloading_class(self.cache_name)
        self.requests += needed.requests
        own = request_cache(cls, self.model, needed.tokens, needed.rows, **self.limits, **self.fields)
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
        with offload(self.model, self.cache_name, **self.limits, **self.fields) as done:
            found = super()._model_generate(context, max_length, stop, **options)
        self.plain_requests += len(context) * done.requests_left_plain
        self.floor_requests += len(context) * done.requests_at_floor
        self.report = done.report or self.report
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
        """And which cache it was, and for how many requests its memory was too little."""
        own = {"cache": self.cache_used, "cache_memory": self.memory, "cache_goal": self.limits["goal"]}
        own["cache_fields"] = self.fields
        own |= {"cache_floor_requests": self.floor_requests, "cache_plain_requests": self.plain_requests}
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


class _OurTasks(TaskManager):
    """Knows the tasks next to this file, and those that a user includes, which come first if they have the name of one
    of ours."""

    def __init__(self, *args: Any, include_path: Any = None, **kwargs: Any) -> None:
        given = include_path if isinstance(include_path, list | tuple) else [include_path] if include_path else []
        super().__init__(*args, include_path=[TASKS, *given], **kwargs)


def main() -> None:
    """lm-eval's own, which also finds the tasks next to this file, and names the cache above its table. A user's
    mistake is one line, and exits with 2."""
    theirs, table = lm_eval.tasks.TaskManager, lm_eval.utils.make_table

    def with_cache(results: Any, *others: Any, **more: Any) -> str:
        used = results.get("config", {}).get("cache")
        return (f"cache: {used}\n" if used else "") + table(results, *others, **more)

    # its commands have place for one folder, the user's, and for nothing above the table
    lm_eval.tasks.TaskManager, lm_eval.utils.make_table = _OurTasks, with_cache
    try:
        cli_evaluate()
    except (OSError, ValueError) as error:
        if type(error).__module__ != ConfigError.__module__ and _while_evaluating(error):
            raise
        print(f"eval.lm_eval: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    finally:
        lm_eval.tasks.TaskManager, lm_eval.utils.make_table = theirs, table


def _while_evaluating(error: BaseException) -> bool:
    """Whether it came once all that the user named was found."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name == "evaluate" and Path(code.co_filename).name == "evaluator.py" for code in frames)


if __name__ == "__main__":
    main()
