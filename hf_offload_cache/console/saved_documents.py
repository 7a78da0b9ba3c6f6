"""Where `generate` has its document from, and where it keeps it: a file of text, a saved context."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import OutputFileError, read_text

if TYPE_CHECKING:
    import torch


class PromptFileError(OSError):
    """The prompt file is missing, unreadable, empty or not UTF-8 text."""


def check_target(arguments: argparse.Namespace) -> None:
    """Before minutes of work; nothing is created or changed."""
    target = arguments.save
    if not target.parent.is_dir():
        raise OutputFileError(f"--save {str(target)!r} cannot be made: there is no folder {str(target.parent)!r}")
    if os.path.lexists(target) and not arguments.overwrite:
        raise OutputFileError(f"--save {str(target)!r} exists already: --overwrite replaces a context")


def save_document(arguments: argparse.Namespace, cache: Any, tokenizer: Any) -> None:
    try:
        cache.save(arguments.save, overwrite=arguments.overwrite, tokenizer=tokenizer)
    except FileExistsError as error:
        raise OutputFileError(f"--save: {error}") from error
    print(f"saved {cache.tokens:,} tokens in {arguments.save}", file=sys.stderr)


def saved_ids(arguments: argparse.Namespace) -> torch.Tensor:
    """The tokens of the context, (1, T). Raises `ContextError`, `EncryptionKeyError`."""
    import torch

    from ..contexts.prefixes import read_ids
    from ..contexts.reader import read_manifest
    from ..errors import ConfigError
    from ..stores.encryption import load_key

    manifest = read_manifest(arguments.context)
    key = None if arguments.key is None else load_key(arguments.key)
    ids = torch.from_numpy(read_ids(arguments.context, manifest, key))
    if ids.shape[0] != 1 or bool((ids < 0).any()):
        raise ConfigError(
            f"--context {str(arguments.context)!r} has several sequences, padding or embeddings, and must hold the "
            "tokens of one document: open it in Python"
        )
    return ids


def read_document(path: Path) -> str:
    """The text of a prompt file. Raises `PromptFileError`."""
    text = read_text(path, "--prompt-file", PromptFileError)
    if not text.strip():
        raise PromptFileError(f"--prompt-file {str(path)!r} has no text ({len(text):,} characters)")
    return text
