"""The command line: one verb a file, the answer to one question, and the default model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answer import Chat as Chat
    from .answer import build_prompt as build_prompt
    from .answer import check_length as check_length
    from .answer import document_part as document_part
    from .answer import follow_up_part as follow_up_part
    from .answer import generate_answer as generate_answer
    from .answer import prefilled_tokens as prefilled_tokens
    from .answer import question_part as question_part
    from .arguments import PromptTooLongError as PromptTooLongError
    from .arguments import printable as printable
    from .chat import html_text as html_text
    from .chat import read_document_file as read_document_file
    from .default_model import DamagedError as DamagedError
    from .default_model import check as check
    from .default_model import keep as keep
    from .default_model import load_default_model as load_default_model
    from .default_model import load_default_tokenizer as load_default_tokenizer
    from .default_model import models_folder as models_folder
    from .default_model import read_header as read_header
    from .main import parser as parser
    from .models import KnownModel as KnownModel
    from .models import known_models as known_models
    from .models import longest as longest
    from .models import model_cells as model_cells
    from .models import model_header as model_header
    from .models import room_of as room_of
    from .named_cache import DYNAMIC as DYNAMIC
    from .named_cache import check_fields as check_fields
    from .named_cache import load as load
    from .named_cache import offloading_class as offloading_class
    from .offload_lm import OffloadLM as OffloadLM

_HOME = {
    "Chat": "answer",
    "DYNAMIC": "named_cache",
    "DamagedError": "default_model",
    "KnownModel": "models",
    "OffloadLM": "offload_lm",
    "PromptTooLongError": "arguments",
    "build_prompt": "answer",
    "check": "default_model",
    "check_fields": "named_cache",
    "check_length": "answer",
    "document_part": "answer",
    "follow_up_part": "answer",
    "generate_answer": "answer",
    "html_text": "chat",
    "keep": "default_model",
    "known_models": "models",
    "load": "named_cache",
    "load_default_model": "default_model",
    "load_default_tokenizer": "default_model",
    "longest": "models",
    "model_cells": "models",
    "model_header": "models",
    "models_folder": "default_model",
    "offloading_class": "named_cache",
    "parser": "main",
    "prefilled_tokens": "answer",
    "printable": "arguments",
    "question_part": "answer",
    "read_document_file": "chat",
    "read_header": "default_model",
    "room_of": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
