"""Models and caches by name. A cache's name is one of the registry, "module:Class", or "dynamic" (transformers')."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..registry import CACHES, cache_class, name_of
from .arguments import new_console
from .models import KnownModel, known_models

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from ..model.geometry import Geometry


class ModelLoadError(OSError):
    """The named model or its tokenizer cannot be loaded."""


def load(
    name: str | None = None, dtype: str = "auto", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model (Hub name or folder; None: the default model) in evaluation mode, and its tokenizer.

    `device` None: CUDA if available, else the CPU. Raises `DefaultModelMissingError`, `ModelLoadError`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .default_model import load_default_model, usual_dtype

    model: Any  # transformers' own hints know neither `to(device)` nor `generate`
    device = str(_device(device))
    if name is None:
        model, tokenizer = load_default_model(usual_dtype(device) if dtype == "auto" else getattr(torch, dtype))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            wanted = dtype if dtype == "auto" else getattr(torch, dtype)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
        except Exception as error:  # its type depends on the format and on the model's code
            why = f"cannot load {_named(name)} as a causal language model: {_reason(error)}{_hub_name(name)}"
            raise ModelLoadError(why) from error
    try:
        return model.to(device).eval(), tokenizer
    except RuntimeError as error:
        raise ModelLoadError(f"cannot move {name or 'the default model'} to device {device!r}: {error}") from error


def load_for(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` the model that a verb's options name, and say so on stderr."""
    new_console(stderr=True).print(f"loading {arguments.model or 'the default model'} ...", highlight=False)
    return load(arguments.model, arguments.dtype, arguments.device)


def _device(name: str | None) -> torch.device:
    """The device with that name; None: CUDA if available, else the CPU. Raises `ModelLoadError` for a device that is
    missing or cannot store numbers."""
    import torch

    usual = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(usual if name is None else name)
        torch.zeros(1, dtype=torch.float32, device=device).tolist()
    except Exception as error:  # its type depends on the device
        reason = re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".:") or type(error).__name__
        raise ModelLoadError(f"device {name!r} cannot be used here: {reason}; leave it out for {usual!r}") from error
    return device


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that `load` would load, without the model. Raises the errors of `load`."""
    from transformers import AutoTokenizer

    from .default_model import DefaultModelMissingError, load_default_tokenizer

    try:
        return load_default_tokenizer() if name is None else AutoTokenizer.from_pretrained(name)
    except DefaultModelMissingError:
        raise
    except Exception as error:
        place, hint = ("the default model", "") if name is None else (_named(name), _hub_name(name))
        raise ModelLoadError(f"cannot load the tokenizer of {place}: {_reason(error)}{hint}") from error


def positions_of(model: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for; None if it states no limit. A "dynamic" rotary embedding extends it."""
    from ..model.look_ahead import stretch

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else int(positions * stretch(model))


def load_positions(name: str | None = None) -> int | None:
    """Tokens that the model which `load` would load, or one of `known_models`, has positions for, from its
    configuration; None: no limit stated. Raises `DefaultModelMissingError`, `ModelLoadError`."""
    if name is None:
        from .default_model import default_positions

        return default_positions()
    if (known := known_model(name)) is not None:
        return known.positions

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return positions_of(AutoModelForCausalLM.from_config(config))
    except Exception as error:
        raise ModelLoadError(f"cannot read the configuration of {_named(name)}: {_reason(error)}") from error


def load_geometry(
    name: str | None = None, dtype: str = "auto", device: str | None = None, here: bool = True
) -> tuple[Geometry, str | None]:
    """Geometry of the model that `load` would load, from its configuration and at most the sizes of its weight files,
    and a sentence about its weights if they are quantized. `name` may also be one of `known_models`, unless a folder
    has that name: "auto" is bfloat16 then. Unless the machine is `here`, it need not have the `device`. Raises
    `DefaultModelMissingError`, `ModelLoadError`, `UnsupportedModelError`."""
    import torch

    where = _device(device).type if here else torch.device(device or "cuda").type
    if name is None:
        from .default_model import default_geometry

        return default_geometry(None if dtype == "auto" else getattr(torch, dtype), where), None
    if (known := known_model(name)) is not None:
        return known.geometry(torch.bfloat16 if dtype == "auto" else getattr(torch, dtype), where), None

    from transformers import AutoConfig, AutoModelForCausalLM

    from ..model.geometry import Geometry

    try:
        config = AutoConfig.from_pretrained(name)
        text = config.get_text_config()
        stated = getattr(text, "dtype", None) or getattr(config, "dtype", None)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
            model = model.to((stated or torch.float32) if dtype == "auto" else getattr(torch, dtype))
    except Exception as error:
        why = f"cannot read the configuration of {_named(name)}: {_reason(error)}{_known_name(name)}"
        raise ModelLoadError(why) from error
    geometry = dataclasses.replace(Geometry.of(model), device=where)
    files = sum(file.stat().st_size for file in Path(name).glob("model*.safetensors")) if dtype == "auto" else 0
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if settings is not None:
        return _quantized(geometry, model, settings, files)
    return dataclasses.replace(geometry, weight_bytes=files) if files and stated is None else geometry, None


def _quantized(geometry: Geometry, model: Any, settings: Any, files: int) -> tuple[Geometry, str | None]:
    """`geometry` with the bytes of the weights in the form of these settings, and how they were counted. `files`: the
    bytes of their files, which count if nothing else is known; 0: there are none."""
    from ..model.weights import DENSE, UNKNOWN, quantization_method, quantized_bytes

    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    method, counted = quantization_method(settings), quantized_bytes(model, settings, geometry.device)
    if counted == DENSE:
        kind = str(geometry.dtype).removeprefix("torch.")
        where = "" if method == "compressed-tensors" else f" on {geometry.device}"
        return geometry, f"weights of {method} are dequantized when they are used{where}: they were counted as {kind}"
    if counted == UNKNOWN and not files:
        return geometry, f"the weights were counted as if they were not quantized ({method}): they may take less"
    found = dataclasses.replace(geometry, weight_bytes=files if isinstance(counted, str) else counted)
    how = "by their files" if isinstance(counted, str) else f"as {method} keeps them"
    return found, f"the weights are quantized, and were counted {how}"


def known_model(name: str | None) -> KnownModel | None:
    """The model of the shipped table with that name, unless a folder has it."""
    return None if name is None or Path(name).is_dir() else known_models().get(name)


def _named(name: str) -> str:
    """How a message names a model."""
    path = Path(name)
    kind = "folder" if path.is_dir() else "file" if path.exists() else "Hub name (and no folder of that name exists)"
    return f"the {kind} {name!r}"


def _reason(error: Exception) -> str:
    """The error's text, with its type unless the text suffices."""
    said = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    return said.rstrip(".")


def _hub_name(name: str) -> str:
    """End of the error for a name of `known_models`, which only `plan` takes."""
    known = known_model(name)
    return "" if known is None else f"; the Hub name of {name} is {known.repository!r}"


def _known_name(name: str) -> str:
    """End of the error for a name that is no folder: the closest name that needs no Hub, or where to find one."""
    if Path(name).exists():
        return ""
    names = {known.repository.lower(): known.name for known in known_models().values()}
    names |= {known.lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.lower(), names, 1)
    return f"; did you mean {names[near[0]]!r}, which needs no Hub?" if near else "; `models` lists names without a Hub"


DYNAMIC = "dynamic"
"""transformers' own `DynamicCache`, which keeps everything in memory and has no fields."""


def default_for(context: Path | None) -> str:
    """The default cache's name: that of the cache that saved `context`, else the first of the registry.

    Raises `ContextError` if there is no context or its manifest cannot be read; `ConfigError` if the cache that saved
    it is not registered.
    """
    if context is None:
        return next(iter(CACHES))
    from ..contexts.manifest import read_manifest

    saved_by = read_manifest(context).cache
    name = name_of(saved_by)
    if name is None:
        raise ConfigError(
            f"context {str(context)!r} was saved by {saved_by!r}, which is not among {', '.join(CACHES)}: name it as "
            f"--cache module:{saved_by}"
        )
    return name


def offloading_class(name: str) -> type[Any]:
    """A class of this library's caches. Raises `ConfigError`, also for "dynamic"."""
    if name == DYNAMIC:
        raise ConfigError(f"cache {DYNAMIC!r} keeps all in memory and has no fields: name one of {', '.join(CACHES)}")
    return cache_class(name, others=(DYNAMIC,))


def check_fields(
    name: str, fields: Mapping[str, Any], path: str | Path | None = None, memory: int | str | None = None,
    goal: str | None = None,
) -> None:  # fmt: skip
    """Raise `ConfigError` for arguments that `make_cache` refuses with any model, before one is loaded."""
    check_folder(path)
    if name != DYNAMIC:
        from ..core.budget import check_limits

        offloading_class(name).config_class.load(None, dict(fields))
        check_limits(offloading_class(name), memory, goal, fields)
    elif fields or path or memory or goal:
        raise ConfigError(
            f"cache {DYNAMIC!r} keeps all in memory and has no fields, path, memory or goal: leave them out"
        )


def check_library_key(library: object, fields: Mapping[str, Any], otherwise: str = "") -> None:
    """Raise `ConfigError` for a key among the fields of a cache with a library. `otherwise` ends the advice."""
    if library is not None and fields.get("encryption_key") is not None:
        raise ConfigError(
            f"the library's key encrypts the cache's own files too: give key=FILE, and no other key{otherwise}"
        )


def check_folder(path: str | Path | None) -> None:
    """Raise `ConfigError` unless `path` is None or a folder."""
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"path must be a folder that exists, got {str(path)!r}")


@contextlib.contextmanager
def make_cache(
    name: str,
    model: PreTrainedModel,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
    goal: str | None = None,
) -> Iterator[Cache]:
    """A context manager of a cache of that name, which it closes.

    `memory` (bytes, "300MiB", or "1/13" of the full KV cache) is a limit for one sequence of `max_context` tokens, and
    `goal` what its fields are chosen for: see `OffloadCache.for_budget`. Raises `ConfigError` for an unknown name or
    field, and `BudgetError` if no configuration fits `memory`.
    """
    check_fields(name, fields or {}, path, memory, goal)
    if name == DYNAMIC:
        from transformers import DynamicCache

        yield DynamicCache(config=model.config)
        return
    cls = offloading_class(name)
    if memory is None:
        cache = cls(model, path=path, **(fields or {}))
    elif max_context is None:
        raise ConfigError(f"memory={memory!r} needs max_context, the tokens it is for: give both")
    else:
        cache = cls.for_budget(model, memory, max_context, path=path, goal=goal, **(fields or {}))
    with cache:
        yield cache


@contextlib.contextmanager
def open_cache(
    name: str,
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    max_context: int | None = None,
) -> Iterator[Cache]:
    """As `make_cache`, with the context saved in `directory`, which counts as used now. Raises `ConfigError` for an
    unknown name, and the errors of `OffloadCache.open`."""
    from ..contexts.listing import touch

    own = {} if memory is None else {"max_context": max_context}
    with offloading_class(name).open(
        directory, model, memory=memory, path=path, tokenizer=tokenizer, **{**own, **(fields or {})}
    ) as cache:
        touch(directory)
        yield cache
