"""Pictures, videos and sounds of a prompt: the tokens that stand for each one, and a digest of its content.

Equal token ids stand for different pictures. A library therefore compares the digests as well as the ids.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Medium(NamedTuple):
    """One picture, video or sound in a prompt (B, T)."""

    row: int
    start: int
    """Column of its first placeholder."""
    stop: int
    """Column behind its last placeholder."""
    digest: str
    """32 hex digits: BLAKE2b of the model's inputs for it, with their names, dtypes and shapes."""


class _Kind(NamedTuple):
    """The inputs for one kind of media. The first one has the content; the others describe or mask it."""

    ids: tuple[str, ...]
    """Fields of the configuration that may have the placeholder's id."""
    inputs: tuple[str, ...]
    layout: str
    """How the inputs are divided: "grid" (patches one after the other, their numbers in the second input), "equal"
    (the first dimension counts media of equally many tokens), "nested" (the second dimension does, for one row) or
    "frames" (the first dimension counts sounds, the mask in the second input their frames)."""


_PICTURE, _VIDEO, _SOUND = (
    tuple(f"{kind}_token_{end}" for end in ("id", "index")) for kind in ("image", "video", "audio")
)
_EQUAL = (_Kind(_PICTURE, ("pixel_values",), "equal"),)
_NESTED = (_Kind(_PICTURE, ("pixel_values", "pixel_attention_mask"), "nested"),)
_GRID = (_Kind(_PICTURE, ("pixel_values", "image_grid_thw"), "grid"),)
_FRAMES = (_Kind(_SOUND, ("input_features", "feature_attention_mask"), "frames"),)
_VIDEO_GRID = _Kind(_VIDEO, ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"), "grid")

_KNOWN: dict[str, tuple[_Kind, ...]] = {
    "llava": _EQUAL,
    "gemma3": _EQUAL,
    "smolvlm": _NESTED,
    "qwen2_audio": _FRAMES,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), (*_GRID, _VIDEO_GRID)),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"), _GRID),
}
"""The media of each model type whose forward may continue a prompt behind any of them, with every version of
transformers. (Ernie 4.5 VL may not with 5.17, which passes its token types on unsliced.)"""
_BY_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Inputs (B, T) that are 0 at text."""
_OPTIONS = ("tokenizer", "assistant_tokenizer")
"""Arguments of `generate` that are named neither in its signature nor in its configuration."""


def placeholder_ids(model: Any) -> list[int] | None:
    """The ids that media replace; None: the model's type is not known."""
    kinds = _KNOWN.get(model.config.model_type)
    return None if kinds is None else [id_ for kind in kinds if (id_ := _id_of(model, kind)) is not None]


def _id_of(model: Any, kind: _Kind) -> int | None:
    return next((value for name in kind.ids if type(value := getattr(model.config, name, None)) is int), None)


@dataclass(frozen=True)
class Media:
    """The media of one prompt, and how its inputs are divided among them."""

    marks: tuple[Medium, ...] = ()
    """In the order of rows and columns."""
    parts: tuple[tuple[int, dict[str, tuple[int, int, int]]], ...] = ()
    """For each medium: its first column, and for each input the dimension and the range that belong to it."""

    def keep_behind(self, held: int, inputs: dict[str, Any]) -> None:
        """Reduce a model's `inputs`, by name, to the media behind the first `held` tokens per sequence. Inputs without
        any are removed; the others are copies on the same device."""
        for name in {name: None for _, parts in self.parts for name in parts}:
            given: torch.Tensor = inputs.pop(name)
            kept = [parts[name] for start, parts in self.parts if start >= held and name in parts]
            if kept:
                pieces = [given.narrow(dim, start, stop - start) for dim, start, stop in kept]
                inputs[name] = torch.cat(pieces, kept[0][0])


def whole(marks: Sequence[Medium], columns: int) -> int:
    """The largest number of columns, at most `columns`, that ends within none of the media."""
    while (inside := [mark.start for mark in marks if mark.start < columns < mark.stop]) != []:
        columns = min(inside)
    return columns


def of_row(marks: Sequence[Medium], row: int, first: int = 0) -> tuple[Medium, ...]:
    """The media of one row, as those of a prompt of this row alone that begins with column `first`."""
    return tuple(
        mark._replace(row=0, start=mark.start - first, stop=mark.stop - first) for mark in marks if mark.row == row
    )


def media_of(model: Any, ids: torch.Tensor, call: Mapping[str, Any]) -> Media | str:
    """The media of a prompt with ids (B, T), from the keyword arguments of a `generate` call besides the ids and their
    mask; or the reason why they cannot be told apart."""
    from transformers import GenerationConfig, GenerationMixin

    kinds = _KNOWN.get(model.config.model_type, ())
    known = {*(_BY_TOKEN if kinds else ()), *(name for kind in kinds for name in kind.inputs)}
    given = {name: value for name, value in call.items() if value is not None}
    options = {*_OPTIONS, *inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig())}
    if unknown := sorted(name for name in given.keys() - known if name not in options or has_tensor(given[name])):
        return f"it is not known how {', '.join(unknown)} of a {model.config.model_type} belong to its tokens"
    host, text = ids.to("cpu"), torch.ones_like(ids, dtype=torch.bool, device="cpu")
    by_token = {name: torch.as_tensor(given[name], device="cpu") for name in _BY_TOKEN if name in given}
    found = list[tuple[Medium, dict[str, tuple[int, int, int]]]]()
    for kind in kinds:
        inputs = {name: given[name] for name in kind.inputs if name in given}
        placeholder = _id_of(model, kind)
        stands = host == (-1 if placeholder is None else placeholder)
        places, text = stands.nonzero(), text & ~stands
        if not inputs:
            if len(places):
                return f"it has placeholders (id {placeholder}) and no {kind.inputs[0]}"
            continue
        divided = _divided(model, kind, inputs, len(places), len(ids))
        if isinstance(divided, str):
            return divided
        at = 0
        for tokens, parts in divided:
            mine = places[at : at + tokens]
            at += tokens
            row, start, stop = int(mine[0, 0]), int(mine[0, 1]), int(mine[-1, 1]) + 1
            if int(mine[-1, 0]) != row:
                return f"one of {kind.inputs[0]} has its placeholders in two sequences"
            contents = {name: inputs[name].narrow(dim, begin, end - begin) for name, (dim, begin, end) in parts.items()}
            types = {name: all_[mine[:, 0], mine[:, 1]] for name, all_ in by_token.items() if all_.shape == ids.shape}
            found.append((Medium(row, start, stop, _digest({**contents, **types})), parts))
    if any(value.shape != ids.shape or bool((value[text] != 0).any()) for value in by_token.values()):
        return f"{', '.join(by_token)} are not 0 at the tokens of its text"
    found.sort(key=lambda one: one[0][:2])
    return Media(tuple(mark for mark, _ in found), tuple((mark.start, parts) for mark, parts in found))


def _divided(
    model: Any, kind: _Kind, inputs: dict[str, torch.Tensor], places: int, rows: int
) -> list[tuple[int, dict[str, tuple[int, int, int]]]] | str:
    """For each medium of a kind, in the inputs' order: the number of its placeholders, of `places` in all, and the
    dimension and range of each input; or the reason why that is not known."""
    main = inputs.get(kind.inputs[0])
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in inputs.values()) or main is None:
        return f"{', '.join(inputs)} are not the tensors that its {kind.inputs[0]} need"
    if kind.layout == "equal" and main.ndim != 4:
        return f"its {kind.inputs[0]} are not one picture after the other"
    dim = 1 if kind.layout == "nested" else 0
    if dim and (rows > 1 or main.ndim != 5 or len(main) > 1 or not bool(main.flatten(2).any(2).all())):
        return f"some of its {kind.inputs[0]} may stand for no tokens"
    described = inputs.get(kind.inputs[1]) if len(kind.inputs) > 1 else None
    if kind.layout == "grid":
        if described is None or described.ndim != 2 or described.shape[1] != 3:
            return f"{kind.inputs[1]} is missing, or not a row of three for each of {kind.inputs[0]}"
        sizes = described.to("cpu").prod(1).tolist()
        tokens = [size // model.config.vision_config.spatial_merge_size**2 for size in sizes]
    elif kind.layout == "frames":
        if described is None or described.ndim != 2:
            return f"{kind.inputs[1]} is missing, which says how long each sound is"
        frames = described.to("cpu").sum(1)
        tokens, sizes = ((((frames - 1) // 2 + 1) - 2) // 2 + 1).tolist(), [1] * len(main)
    else:
        count = main.shape[dim]
        tokens, sizes = [places // max(1, count)] * count, [1] * count
    least = 2 if kind.layout == "frames" else 1  # Qwen2-Audio takes single placeholders for unexpanded ones
    fits = sum(tokens) == places and min(tokens, default=0) >= least and sum(sizes) == main.shape[dim]
    if not fits or any(value.shape[dim : dim + 1] != (len(sizes),) for value in inputs.values() if value is not main):
        return f"its placeholders are more, or fewer, than its {', '.join(inputs)} stand for"
    divided, at = list[tuple[int, dict[str, tuple[int, int, int]]]](), 0
    for number, (count, size) in enumerate(zip(tokens, sizes, strict=True)):
        parts = {name: (dim, number, number + 1) for name in inputs}
        divided.append((count, {**parts, kind.inputs[0]: (dim, at, at + size)}))
        at += size
    return divided


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a collection with one in it."""
    if isinstance(value, dict | list | tuple):
        return any(map(has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _digest(parts: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits for tensors by name, on any device. Waits for the device."""
    digest = hashlib.blake2b(digest_size=16, person=b"media of prompt")
    for name, part in sorted(parts.items()):
        content = part.detach().to("cpu").contiguous()
        digest.update(f"{name} {content.dtype} {tuple(content.shape)}\0".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
