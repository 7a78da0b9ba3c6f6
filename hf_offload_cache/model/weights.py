"""Every number that a model computes with, wherever it is kept: parameters, buffers, scales, offloaded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

SAMPLE = 64
"""Elements of every weight in the sampled digest: evenly spaced, including the first and the last."""

_CHUNK = 1 << 24
"""Elements that a full digest reads at once."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 32
"""Rows that bitsandbytes interleaves when it repacks a 4-bit weight for the CPU."""


@dataclass(frozen=True)
class Weight:
    """A tensor as it is in memory, as a view: valid while the model keeps that tensor."""

    name: str
    kind: str
    """Shape, type, and packing."""
    tensor: torch.Tensor
    """On "meta" if it is not in memory and no holder was found."""

    @property
    def seen(self) -> bool:
        """Whether its elements are available."""
        return self.tensor.device.type != "meta"

    @property
    def count(self) -> int:
        """Number of available elements."""
        return self.tensor.numel() if self.seen else 0

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Bits of the elements at `positions` (n,) int64, in row-major order: (n,) integers."""
        bits = _as_bits(self.tensor)
        return bits.view(-1)[positions] if bits.is_contiguous() else torch.take(bits, positions)

    def sample(self) -> list[torch.Tensor]:
        """`SAMPLE` elements, or all if there are no more."""
        if not self.count:
            return []
        number = min(SAMPLE, self.count)
        positions = torch.arange(number, device=self.tensor.device) * (self.count - 1) // max(1, number - 1)
        return [self.take(positions)]

    def everything(self) -> Iterator[torch.Tensor]:
        """All elements in order, in pieces."""
        if self.count:
            yield from _as_bits(self.tensor).reshape(-1).split(_CHUNK)


class _Interleaved(Weight):
    """4-bit codes that bitsandbytes interleaved for the CPU at the first forward, read in their original order.

    Otherwise the first token would change the model's identity. Tensor (N, K/2); within 32 rows and one column of
    pairs, the 64 codes are in 32 bytes, the first 32 of them in the low halves.
    """

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        columns = self.tensor.shape[-1]
        row, column = positions // columns, positions % columns
        start = (row // _ROWS * columns + column) * _ROWS
        halves = []
        for half in (0, 1):
            code = row % _ROWS * 2 + half
            packed = self.tensor.reshape(-1)[start + code % _ROWS]
            halves.append(torch.where(code < _ROWS, packed & 15, packed >> 4))
        return (halves[0] << 4) | halves[1]

    def everything(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.count, _CHUNK):
            yield self.take(torch.arange(start, min(start + _CHUNK, self.count), device=self.tensor.device))


def sampled_digest(model: torch.nn.Module) -> str:
    """A digest of a sample of every weight; begins with "unseen:" if only name and shape of some are known."""
    all_weights = list(weights(model))
    return _marked(all_weights, digest((f"{weight.name} {weight.kind}", weight.sample()) for weight in all_weights))


def full_digest(model: torch.nn.Module) -> str:
    """A digest of every byte of every weight; marked like `sampled_digest`. Reads the complete model."""
    all_weights = list(weights(model))
    return _marked(all_weights, digest((f"{weight.name} {weight.kind}", weight.everything()) for weight in all_weights))


def digest(entries: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> str:
    """32 hex digits of xxh3_128 over labels and, after each, the raw bytes of its tensors (any device), in order."""
    hasher = xxhash.xxh3_128()
    for label, tensors in entries:
        hasher.update(label.encode())
        for tensor in tensors:
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def weights(model: torch.nn.Module) -> Iterator[Weight]:
    """Parameters (tied ones under each name), persistent buffers, and the additional tensors of quantised layers, by
    name.

    Weights that accelerate offloaded come from its hooks; those in files are read completely.
    """
    all_weights: list[Weight] = []
    for path, module in model.named_modules():
        prefix = f"{path}.".replace("_orig_mod.", "").removeprefix(".")  # of a part wrapped by torch.compile
        for name, tensor in _own(module):
            state = getattr(tensor, "quant_state", None)
            if tensor.device.type == "meta":
                tensor = _offloaded(module, name, tensor)
            all_weights += _parts(prefix + name, tensor, state)
        # bitsandbytes moves an 8-bit weight's scales from the parameter to the layer at the first forward
        scales = getattr(getattr(module, "weight", None), "SCB", None)
        if scales is None:
            scales = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            all_weights += _parts(prefix + "weight.SCB", scales)
    yield from sorted(all_weights, key=lambda weight: weight.name)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and the buffers saved with it: the others follow from the configuration."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _offloaded(module: torch.nn.Module, name: str, placeholder: torch.Tensor) -> torch.Tensor:
    """The tensor that accelerate's hook would put in place of the one on "meta"; that one if there is no such hook."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        held = getattr(one, "weights_map", None)
        if held is not None and name in held:
            return torch.as_tensor(held[name], device="cpu")
    return placeholder


def _parts(name: str, tensor: Any, state: Any = None) -> Iterator[Weight]:
    """A plain tensor, or the plain ones that a quantised or wrapped tensor consists of."""
    if state is not None:
        yield from _four_bit(name, tensor, state)
    elif hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{inner}", getattr(tensor, inner))
    else:
        yield Weight(name, f"{tuple(tensor.shape)} {tensor.dtype}", tensor)


def _four_bit(name: str, tensor: torch.Tensor, state: Any) -> Iterator[Weight]:
    """Codes, scales and code book of a bitsandbytes weight, the same before and after it is repacked for the CPU.

    Packing rounds the scales to bfloat16, so they are rounded here too.
    """
    packed = getattr(state, "packing_format_for_cpu", False)
    kind = f"{tuple(state.shape)} {state.quant_type} in blocks of {state.blocksize}"
    yield _Interleaved(name, kind, tensor.data) if packed else Weight(name, kind, tensor.data.view(torch.uint8))
    scales = state.absmax
    if packed:
        scales = scales.T
    elif state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = (dequantize_blockwise(scales, state.state2) + state.offset).float()
    scales = scales.reshape(-1).to(torch.bfloat16)
    yield Weight(f"{name}.absmax", f"{tuple(scales.shape)}", scales)
    yield Weight(f"{name}.code", f"{tuple(state.code.shape)} {state.code.dtype}", state.code)


def _as_bits(tensor: Any) -> torch.Tensor:
    """Elements as integers of their size: the stored bits are compared, including -0.0 and NaN."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.element_size() not in _BITS:
        plain = torch.view_as_real(plain)  # complex128
    return plain.view(_BITS[plain.element_size()])


def _marked(found: list[Weight], hexdigits: str) -> str:
    unseen = sum(not weight.seen for weight in found)
    return f"unseen: {unseen} of {len(found)} weights; {hexdigits}" if unseen else hexdigits


# --- bytes of quantised weights, from a configuration alone

DENSE, UNKNOWN = "dense", "unknown"
"""How weights are counted: with the numbers of the model's type, because transformers dequantises them as it loads or
first uses them; or so because their bytes are unknown."""


def quantized_bytes(model: Any, settings: Mapping[str, Any], device: str) -> int | str:
    """Bytes that the weights and buffers of `model`, which is on the meta device and may be changed, take on a `device`
    ("cpu", "cuda") once transformers has loaded them in the form of `settings`, a configuration's
    `quantization_config`. `DENSE` or `UNKNOWN`: as many as the model's without it.
    """
    method = quantization_method(settings)
    if method == "compressed-tensors" or (method in ("fp8", "mxfp4") and device == "cpu"):
        return DENSE
    if method == "fp8":
        return _as_replaced(model, settings)
    count = {"bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq}.get(method)
    if count is None or _has_others(model):
        return UNKNOWN
    return count(model, settings)


def quantization_method(settings: Mapping[str, Any]) -> str:
    """The name of the method of a `quantization_config`, as transformers finds it."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = settings.get("quant_method", "unknown method")
    return str(getattr(method, "value", method))


def _as_replaced(model: Any, settings: Mapping[str, Any]) -> int | str:
    """The model's bytes after transformers has replaced the layers that it quantises."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        AutoHfQuantizer.from_config(dict(settings), pre_quantized=True).preprocess_model(model=model)
    except Exception:  # its type depends on the settings
        return UNKNOWN
    return total_bytes(model)


def _has_others(model: torch.nn.Module) -> bool:
    """Whether weights are in modules that versions of the packages quantise or not: those of several experts in one
    parameter, and GPT-2's, which are transposed."""
    from transformers.pytorch_utils import Conv1D

    others = [module for module in model.modules() if not isinstance(module, torch.nn.Conv1d)]
    experts = (tensor.ndim == 3 for module in others for tensor in module.parameters(recurse=False))
    return any(isinstance(module, Conv1D) for module in others) or any(experts)


def total_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones count once."""
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def _with_layers(model: Any, layers: Iterable[torch.nn.Linear], nbytes: Callable[[int, int], int]) -> int:
    """The model's bytes, with `nbytes` of inputs and outputs for the weight of each of these layers."""
    own = {id(layer.weight): layer for layer in layers}
    changed = sum(nbytes(one.in_features, one.out_features) - one.weight.nbytes for one in own.values())
    return total_bytes(model) + changed


def _linear_layers(model: Any, skipped: list[str] | None, default_too: bool = False) -> list[torch.nn.Linear]:
    """Linear layers that transformers replaces: not the `skipped` ones; None: not the output layer and tied ones."""
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    patterns = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules, default_too)
    named = ((name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear)
    return [module for name, module in named if should_convert_module(name, patterns)]


def _bitsandbytes(model: Any, settings: Mapping[str, Any]) -> int | str:
    layers = _linear_layers(model, settings.get("llm_int8_skip_modules"))
    if settings.get("load_in_8bit"):
        return _with_layers(model, layers, lambda ins, outs: ins * outs + 4 * outs)
    if not settings.get("load_in_4bit"):
        return UNKNOWN

    def four_bits(ins: int, outs: int) -> int:
        """Codes, a scale for each 64 of them, which may be in 8 bits with a scale for each 256, and code books."""
        scales = of_scales = math.ceil(ins * outs / 64)
        if settings.get("bnb_4bit_use_double_quant"):
            of_scales += 4 * (math.ceil(scales / 256) + 256 + 1)
        else:
            of_scales *= 4
        return math.ceil(ins * outs / 2) + of_scales + 4 * 16

    return _with_layers(model, layers, four_bits)


def _gptq(model: Any, settings: Mapping[str, Any]) -> int | str:
    bits, group = settings.get("bits"), settings.get("group_size", 128)
    if not isinstance(bits, int) or settings.get("dynamic") or settings.get("lm_head"):
        return UNKNOWN
    chosen = settings.get("modules_in_block_to_quantize") or [""]
    ends = tuple(name for names in chosen for name in ([names] if isinstance(names, str) else names))
    layers = [
        module for name, module in model.get_decoder().named_modules()
        if type(module) is torch.nn.Linear and name.endswith(ends)
    ]  # fmt: skip
    return _with_layers(model, layers, lambda ins, outs: _in_groups(ins, outs, bits, group) + 4 * ins)


def _awq(model: Any, settings: Mapping[str, Any]) -> int | str:
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    layers = _linear_layers(model, settings.get("modules_to_not_convert"), default_too=True)
    return _with_layers(model, layers, lambda ins, outs: _in_groups(ins, outs, bits, group))


def _in_groups(ins: int, outs: int, bits: int, group: int) -> int:
    """Codes, and for each group of inputs and each output a zero point of as many bits and a scale of 16."""
    groups = 1 if group <= 0 else math.ceil(ins / group)
    return math.ceil(ins * outs * bits / 8) + groups * outs * 2 + math.ceil(groups * outs * bits / 8)
