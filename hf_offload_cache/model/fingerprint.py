"""Named fields that identify a model: may data made with one model be used with another?

`fingerprint` is for calibrated or tuned data: shape, rotary embedding, a sample of the weights. `full_fingerprint` is
for keys and values, which depend on more: all effective configuration, the modules as they were built, quantisation,
adapters. A saved context stores it (`Manifest.identity`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from ..errors import ContextMismatchError, shown
from .attach import inner_model
from .config_values import config_value, flat, plain, text
from .peft_adapters import adapter_fields
from .weights import digest, full_digest, sampled_digest

EVERY_BYTE = "weights (full)"
"""Field with the digest of every byte of the weights."""
ABSENT = "absent"

# Fields of a configuration that change no key and no value of a given token sequence.
_NAMES = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "_commit_hash", "dtype")
"""Names and versions; the type of the weights is read from the modules."""
_OUTPUTS = ("use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits")
_KERNELS = ("_attn_implementation", "attn_implementation", "_experts_implementation")
_HEADS = ("problem_type", "id2label", "label2id", "num_labels")
_TOKENS = ("bos", "eos", "pad", "sep", "cls", "decoder_start", "forced_bos", "forced_eos")
"""Tokens that begin, end or pad a sequence are in its ids and mask, and people set these fields to suit."""
_TRAINING = ("initializer_range", "init_std", "router_aux_loss_coef")
_IGNORED = frozenset((*_NAMES, *_OUTPUTS, *_KERNELS, *_HEADS, *_TRAINING, *(f"{name}_token_id" for name in _TOKENS)))
_OF_ATTENTION = ("scaling", "sliding_window", "attn_logit_softcapping", "head_dim")
_CONFIG = ("config.model_type", "config", "outer config")
_ORDER = (*_CONFIG, "attention", "rope", "dtype", "quantisation", "adapters", "adapters.layers")
"""Fields, and the first part of dotted ones."""
_LAST = ("tokenizer", "weights", EVERY_BYTE)
_SHOWN = 100
"""Characters of a value shown in a message."""


_SAMPLE = 64
"""Elements sampled of every parameter, evenly spaced."""


def fingerprint(model: Any) -> dict[str, str]:
    """Names and values that must be equal in two PreTrainedModels for one to use the other's calibration."""
    config = model.config.get_text_config(decoder=True)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    fields = ("model_type", *shape)
    values = {name: str(config_value(config, name)) for name in fields}
    values["rope"] = str(config_value(config, "rope_parameters"))
    values["weights"] = digest(_samples(model))
    return values


def _samples(model: torch.nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """A sample of every parameter; only name and shape for weights that are not in memory."""
    for name, parameter in model.named_parameters():
        tensors = []
        if parameter.device.type != "meta" and parameter.numel():
            elements = parameter.detach().reshape(-1)
            tensors.append(elements[:: max(1, elements.numel() // _SAMPLE)][:_SAMPLE])
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype}", tensors


def full_fingerprint(model: Any, tokenizer: Any = None, *, every_byte: bool = False) -> dict[str, str]:
    """Names and text values of everything that makes stored keys and values valid for `model`, in the order of
    comparison.

    `model`: a PreTrainedModel, also within torch.compile's or PEFT's wrapper, with its currently active adapters.
    "weights" is a digest of a sample of every weight; `every_byte` adds "weights (full)", one of every byte, which
    reads the complete model. For weights that are neither in memory nor in accelerate's hooks, the digest says
    "unseen". Without `tokenizer`, its field is absent. Changes nothing; any thread, outside of a forward. Raises
    `TypeError` for something else than a model.
    """
    inner = inner_model(model)
    fields: dict[str, str] = {
        **_config_fields(inner.config),
        **_attention_fields(inner),
        **_quantisation_fields(inner.config),
        **adapter_fields(model, inner),
    }
    if tokenizer is not None:
        fields["tokenizer"] = tokenizer_digest(tokenizer)
    fields["weights"] = sampled_digest(inner)
    if every_byte:
        fields[EVERY_BYTE] = full_digest(inner)
    return dict(sorted(fields.items(), key=lambda item: _rank(item[0])))


def check_fingerprint(stored: dict[str, str], model: Any, tokenizer: Any = None) -> None:
    """Raise `ContextMismatchError` with the first field in which `model` differs from the `stored` fingerprint.

    Configuration comes first, weights last; a field that one side lacks differs too. The tokenizer is compared if both
    sides have one. The full digest is computed only if it is stored, and only if everything else is equal.
    """
    known = dict(stored)
    full = known.pop(EVERY_BYTE, None)
    if tokenizer is None:
        known.pop("tokenizer", None)
    _compare(known, full_fingerprint(model, tokenizer if "tokenizer" in stored else None))
    if full is not None:
        _compare({EVERY_BYTE: full}, {EVERY_BYTE: full_digest(inner_model(model))})


def _compare(stored: dict[str, str], current: dict[str, str]) -> None:
    for name in sorted(stored.keys() | current.keys(), key=_rank):
        before, now = stored.get(name, ABSENT), current.get(name, ABSENT)
        if before != now:
            before, now = (shown(one, _SHOWN + 6) for one in _shortened(before, now))
            what = "tokenizer" if name == "tokenizer" else "model"
            way = f"load it in {before} (`--dtype`)" if name == "dtype" else f"open it with the {what} that made it"
            raise ContextMismatchError(
                f"the context was made with another {what}: {shown(name)} was {before}, here it is {now}; "
                f"{way}, or prefill again"
            )


def _rank(name: str) -> tuple[int, str]:
    """Sort key of a field: by `_ORDER`, then unknown ones, then `_LAST`."""
    if name in _LAST:
        return len(_ORDER) + 1 + _LAST.index(name), name
    group = name if name in _ORDER else name.partition(".")[0]
    return _ORDER.index(group) if group in _ORDER else len(_ORDER), name


def _shortened(*values: str) -> list[str]:
    """The values, long ones cut to the part where they differ."""
    if max(map(len, values)) <= _SHOWN:
        return list(values)
    common = next((i for i, pair in enumerate(zip(*values, strict=False)) if len(set(pair)) > 1), min(map(len, values)))
    start = max(0, common - _SHOWN // 3)
    end = start + _SHOWN
    return [("..." if start else "") + value[start:end] + ("..." if len(value) > end else "") for value in values]


# ---------------------------------------------------------------------------------------------- configuration


def _config_fields(config: Any) -> dict[str, str]:
    """The text model's configuration, and the additions of a composite model around it (encoders of images and
    sound)."""
    decoder = config.get_text_config(decoder=True)
    fields = flat("config", _without(decoder.to_dict(), "quantization_config"), _IGNORED)
    if decoder is not config:
        parts = [name for name, value in vars(config).items() if value is decoder]
        fields |= flat("outer config", _without(config.to_dict(), "quantization_config", *parts), _IGNORED)
    return fields


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _attention_fields(model: torch.nn.Module) -> dict[str, str]:
    """The modules as they were built, whatever the configuration says now, and the types they compute in."""
    values: dict[str, list[Any]] = {}
    kinds: set[str] = set()
    for module in model.modules():
        attributes = vars(module)
        if "layer_idx" in attributes:
            for name in _OF_ATTENTION:
                if name in attributes and isinstance(attributes[name], int | float | None):
                    values.setdefault(f"attention.{name}", []).append(attributes[name])
        for name, value in attributes.items():
            if name.endswith("attention_scaling") and isinstance(value, int | float):
                values.setdefault(f"rope.{name}", []).append(value)
        for name, buffer in module.named_buffers(recurse=False):
            # Their values follow from the configuration, except the last bit, which differs between devices. Their type
            # does not: a model that was cast has rounded angles.
            if name.endswith("inv_freq") and "original" not in name:
                values.setdefault(f"rope.{name}", []).append(buffer.dtype)
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
                kinds.add(plain(parameter.dtype))
    texts = {name: text(each[0] if len(set(each)) == 1 else each) for name, each in values.items()}
    return {**texts, "dtype": ", ".join(sorted(kinds))}


def _quantisation_fields(config: Any) -> dict[str, str]:
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return {"quantisation": "none"}
    fields = quantised if isinstance(quantised, Mapping) else quantised.to_dict()
    return {"quantisation": text(fields.get("quant_method", "?")), **flat("quantisation", fields)}


# ---------------------------------------------------------------------------------------------- tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of everything that turns text into ids: vocabulary, merges, normaliser, added tokens; not templates or
    padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # The JSON begins with version, truncation and padding; calls change the last two.
        # Cut, not parsed: vocabularies have megabytes. A quote in the first part is escaped.
        head, mark, rest = backend.to_str().partition(',"added_tokens":')
        return xxhash.xxh3_128((rest if mark else head).encode()).hexdigest()
    flags = {name: value for name, value in getattr(tokenizer, "init_kwargs", {}).items() if type(value) is bool}
    merges = {" ".join(pair): rank for pair, rank in getattr(tokenizer, "bpe_ranks", {}).items()}
    added = {str(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    parts = [type(tokenizer).__name__, tokenizer.get_vocab(), merges, added, flags]
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True).encode()).hexdigest()
