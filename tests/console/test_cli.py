"""The console on a tiny random model: what it prints where, its exit codes, and errors of one line."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import transformers
from pairwise import combinations
from tokenizers.pre_tokenizers import Whitespace
from word_model import NEW, POSITIONS, WORDS, answered, save_word_model

from hf_offload_cache import DiskSwapCache, registry
from hf_offload_cache.console import answer, build_prompt, load_default_model, load_default_tokenizer, parser
from hf_offload_cache.console import arguments as common
from hf_offload_cache.console import main as cli
from hf_offload_cache.console import named_cache as load_model
from hf_offload_cache.memory import MemoryPlan, machine
from hf_offload_cache.methods.cluster import cache as cluster
from hf_offload_cache.model import Geometry, quantized_bytes
from hf_offload_cache.report.report import size_text

DOCUMENT_WORDS = 200


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_word_model(tmp_path_factory.mktemp("tiny"), Whitespace())


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(" ".join(WORDS[i * 7 % len(WORDS)] for i in range(DOCUMENT_WORDS)))
    return file


@pytest.fixture
def run(tiny, document, console):
    """Runs `generate` on the tiny model: (exit code, stdout, stderr)."""

    def run(*arguments, model=tiny, prompt=document):
        fixed = ["generate", "--model", model, "--prompt-file", prompt, "--question", "w5", "--device", "cpu"]
        return console(*fixed, "--max-new-tokens", NEW, *arguments)

    return run


def expected_text(tiny, document):
    """The answer by transformers alone: one prefill, `DynamicCache`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    return answered(tiny, build_prompt(tokenizer, document.read_text(), "w5"))


def last_line(text):
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("chunk", ["1", "64", "4096"])
def test_answer_goes_to_stdout_whatever_the_chunk(run, tiny, document, chunk):
    code, out, err = run("--cache", "dynamic", "--prefill-chunk", chunk)
    assert code == 0
    assert out.strip() == expected_text(tiny, document)
    assert "Traceback" not in err


def test_exact_disk_swap_gives_the_same_answer(run, tiny, document, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    code, out, err = run("--set", "exact=true", "--set", "block_tokens=32", "--prefill-chunk", "50", "--path", folder)
    assert code == 0 and list(folder.iterdir()) == []
    assert out.strip() == expected_text(tiny, document)
    assert "DiskSwapCache" in err and "memory now" in err
    assert re.search(r"^prefill: ([\d,]+) of \1 tokens in [\d.]+ s$", err, re.M)  # no terminal: one line


def test_compare_prints_both_and_writes_json(run, tmp_path):
    file = tmp_path / "answers.json"
    code, out, err = run("--compare", "--set", "num_selected=64", "--set", "engine=mapped", "--json", str(file))
    assert code == 0
    assert len(out.splitlines()) == 2  # an answer each, and nothing else
    words = ("DynamicCache", "DiskSwapCache", "KV memory", "on disk", "time to first token", "hit rate", "I/O wait")
    assert [word for word in words if word not in err] == []
    dynamic, swapped = json.loads(file.read_text())
    assert (dynamic["cache"], swapped["cache"]) == ("DynamicCache", "DiskSwapCache")
    assert dynamic["prompt_tokens"] == swapped["prompt_tokens"] == DOCUMENT_WORDS + 5  # Question : w5 Answer :
    # 2 layers, keys and values, 2 heads of 16 floats; the last new token is never fed
    assert dynamic["full_kv_bytes"] == (dynamic["prompt_tokens"] + dynamic["new_tokens"] - 1) * 2 * 2 * 2 * 16 * 4
    assert dynamic["report"] is None
    assert swapped["report"]["decode_steps"] == swapped["new_tokens"] - 1  # the first comes of the prompt's last tokens
    assert swapped["disk_bytes"] == swapped["report"]["disk_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "num_selected"], "FIELD=VALUE"),
        (["--set", "=3"], "FIELD=VALUE"),
        (["--max-new-tokens", "0"], "at least 1, got '0'"),
        (["--prefill-chunk", "-5"], "at least 1, got '-5'"),
        (["--cache", "disk-swop"], "dynamic, or module:Class, got 'disk-swop': did you mean 'disk-swap'"),
        (["--dtype", "int3"], "invalid choice"),
        (["--cache", "dynamic", "--compare"], "--compare sets another cache next to DynamicCache"),
        (["--set", "num_selectd=3"], "did you mean 'num_selected'?"),
        (["--set", "num_selected=-3"], "num_selected must be at least 1, got -3"),
        (["--set", "host_memory=1GiB"], "--set host_memory=1GiB is a limit for a model on a GPU, and this one is on a"),
        (["--set", "num_selected=lots"], "num_selected must be a whole number, got 'lots'"),
        (["--cache", "dynamic", "--set", "num_selected=3"], "cache 'dynamic' keeps all in memory"),
        (["--max-new-tokens", "400"], f"together 605, but the model has {POSITIONS} positions"),
        (["--cache", "dynamic", "--json", "no/folder.json"], "--json"),
        (["--memory", "1/500"], "--memory is 216 bytes"),
        (["--memory", "lots"], "--memory must be bytes, a size such as '300MiB'"),
        (["--cache", "dynamic", "--memory", "1/2"], "cache 'dynamic' keeps all in memory"),
        (["--goal", "fidelity"], "--goal needs --memory and --prompt-file"),
        (["--goal", "best", "--memory", "1/2"], "invalid choice: 'best'"),
        (["--set", "max_context=10"], "max_context is 10 and this step would make it"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in last_line(err) and "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"w1 \xff w2", "is not UTF-8 text: byte 3 is 0xff"),
        (b" \n", "has no text (2 characters)"),
        ("a folder", "Is a directory"),
    ],
)
def test_a_bad_prompt_file(run, tmp_path, content, words):
    file = tmp_path / "bad.txt"
    if content == "a folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    code, out, err = run(prompt=file)
    assert (code, out) == (2, "")
    assert words in err and str(file) in err and len(err.strip().splitlines()) == 1


def test_unknown_model_and_a_folder_without_one(run, tmp_path):
    code, _, err = run(model=tmp_path)
    assert code == 2 and f"cannot load the folder {str(tmp_path)!r}" in last_line(err)
    code, _, err = run(model=tmp_path / "nowhere")
    assert code == 2 and "no folder of that name" in last_line(err)


def test_interrupt_closes_the_cache_and_exits_130(run, monkeypatch):
    closed = []

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    close = DiskSwapCache.close
    monkeypatch.setattr(DiskSwapCache, "close", lambda cache: (closed.append(cache), close(cache))[1])
    monkeypatch.setattr(answer, "prefill", interrupted)
    code, out, err = run()
    assert (code, out) == (130, "")
    assert closed
    assert last_line(err) == "hf-offload-cache: interrupted"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n=400", 400),
        ("exact=true", True),
        ("exact=True", True),
        ("rank=null", None),
        ("rank=None", None),
        ("engine=mapped", "mapped"),
        ('engine="mapped"', "mapped"),
        ("adapter=a=b", "a=b"),
    ],
)
def test_values_of_set(text, value):
    assert common.assignment(text)[1] == value and type(common.assignment(text)[1]) is type(value)


def test_wait_policy_is_set_before_torch(tmp_path):
    """The real console: torch must see the policy, and the arguments must survive a restart."""
    program = (
        "import os, sys\n"
        "sys.argv = ['hf-offload-cache', 'generate', '--prompt-file', 'nowhere.txt', '--question', 'a b']\n"
        "from hf_offload_cache.console import main as cli\n"
        "code = cli.main()\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "sys.exit(code)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--prompt-file 'nowhere.txt' cannot be read" in last_line(done.stderr)
    # either this process set it before any torch, or it was started anew and that one printed nothing to stdout
    assert done.stdout in ("PASSIVE False\n", "")


def test_trace_is_written_beside_an_answer_that_stays_the_same(run, tiny, document, tmp_path):
    file = tmp_path / "trace.json"
    code, out, err = run("--set", "exact=true", "--trace", str(file), "--compare")
    assert code == 0
    assert out.splitlines() == [expected_text(tiny, document)] * 2
    assert "timeline" in err, "what it holds is in the report"
    steps = [event["name"] for event in json.loads(file.read_text()) if "step" in event.get("args", {})]
    assert steps == ["prefill"] * 2 + ["decode"] * 5


def test_a_trace_that_cannot_be_is_refused_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(load_model, "load", lambda *arguments: pytest.fail("a model was loaded"))
    code, _, err = run("--trace", str(tmp_path / "missing" / "trace.json"))
    assert code == 2
    assert "--trace" in last_line(err) and "there is no folder" in last_line(err)
    code, _, err = run("--trace", str(tmp_path / "trace.json"), "--cache", "dynamic")
    assert code == 2
    assert "--trace" in last_line(err)
    assert list(tmp_path.glob("trace*")) == []


# ---------------------------------------------------------------------------------------------- memory


def test_generate_within_a_memory(run, tmp_path):
    """The report says the budget beside the peak, which is below it."""
    file = tmp_path / "answer.json"
    code, _, err = run("--memory", "3/1", "--set", "num_selected=64", "--json", str(file))
    assert code == 0, err
    (answer,) = json.loads(file.read_text())
    full = (answer["prompt_tokens"] + 6) * 2 * 2 * 2 * 16 * 4  # what is planned for: the prompt and six tokens
    assert answer["report"]["memory_budget"] == full * 3
    assert answer["report"]["peak_memory_bytes"] <= answer["report"]["memory_budget"]
    assert "memory budget" in err


@pytest.fixture
def plan(tiny, tmp_path, console):
    """Runs `plan` on the tiny model's folder: (exit code, stdout, stderr, what was written as JSON)."""

    def run(*arguments, model=tiny, context="4000"):
        file = tmp_path / "plan.json"
        found = console("plan", "--model", model, "--context", context, "--device", "cpu", "--json", file, *arguments)
        return *found, json.loads(file.read_text()) if file.exists() else None

    return run


def test_plan_of_a_folder(plan, tiny, tmp_path):
    """Two layers, two key heads of 16 floats: 512 bytes a token. No weights are read."""
    (tmp_path / "disk").mkdir()
    path = ["--path", str(tmp_path / "disk")]
    code, out, err, written = plan("--batch", "3", "--memory", "1/4", "--set", "num_sinks=2", *path)
    assert (code, err) == (0, "")
    files = sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    weights = written["plan"]["weight_bytes"]
    assert 0 < files - weights < 8192  # what a file has besides is its header
    assert written["plan"]["full_kv_bytes"] == 3 * 4000 * 512
    assert written["config"]["memory"] == 3 * 4000 * 512 // 4 >= written["plan"]["peak_bytes"]
    assert written["config"]["num_sinks"] == 2 and written["config"]["max_batch"] == 3
    assert written["machine"]["needs"] == {
        "memory": weights + written["plan"]["peak_bytes"], "disk": written["plan"]["disk_bytes"]
    }  # fmt: skip
    assert written["machine"]["fits"] == {"memory": True, "disk": True}
    rows = ("weights", "full KV", "compact keys", "adapters", "staging", "write queue", "on disk", "num_sinks=2")
    assert [words for words in rows if words not in out] == []
    assert list((tmp_path / "disk").iterdir()) == []


def test_plan_loads_no_weights(plan, tiny, tmp_path):
    """The configuration alone is enough; weights are then counted."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tiny / "config.json").read_text())
    code, _, err, bare = plan("--memory", "1/2", model=tmp_path / "bare")
    assert code == 0, err
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 <= bare["plan"]["weight_bytes"] - parameters < 1024  # and the rotary frequencies
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    code, _, err, _ = plan("--memory", "1/2", model=tmp_path / "bare")
    assert code == 2 and "the model stores no keys and values: there is nothing to offload" in last_line(err)
    code, _, _, written = plan("--set", "num_selected=64")
    assert (written["config"]["num_selected"], written["config"]["memory"]) == (64, None)
    _, _, _, whole = plan("--memory", "1/2")
    assert {**bare["plan"], "weight_bytes": 0} == {**whole["plan"], "weight_bytes": 0}
    _, _, _, half = plan("--memory", "1/2", "--dtype", "bfloat16")
    assert half["plan"]["full_kv_bytes"] * 2 == whole["plan"]["full_kv_bytes"]


def test_bytes_of_quantized_weights(tiny):
    """They equal the sizes of the tensors that each method's package makes for a layer."""
    config = transformers.AutoConfig.from_pretrained(tiny)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: one.weight.shape for name, one in model.model.named_modules() if type(one) is torch.nn.Linear}
    whole, ints, floats = Geometry.of(model).weight_bytes, torch.int32, torch.float32

    def packed(outs, ins, bits=4):
        groups = ins // 32
        return [(ins * bits // 32, outs, ints), (groups, outs * bits // 32, ints), (groups, outs, torch.float16)]

    def indexed(outs, ins):
        return [*packed(outs, ins), (ins, ints)]

    def in_eight_bits(outs, ins):
        return [*packed(outs, ins, 8), (ins, ints)]

    def with_scales(outs, ins):
        return [(outs, ins, torch.int8), (outs, floats)]

    def in_blocks_of_64(outs, ins):
        return [(outs, ins // 2, torch.uint8), (outs * ins // 64, floats), (16, floats)]

    def in_squares(outs, ins):
        return [(outs, ins, torch.int8), (-(-outs // 128), -(-ins // 128), floats)]

    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    four, eight = ({"quant_method": "bitsandbytes", f"load_in_{bits}bit": True} for bits in (4, 8))
    two = [["self_attn.v_proj"], ["mlp.up_proj"]]
    for settings, device, ends, stored in (
        (gptq, "cuda", "", indexed),
        ({**gptq, "bits": 8, "modules_in_block_to_quantize": two}, "cpu", ("v_proj", "up_proj"), in_eight_bits),
        (awq, "cuda", "", packed),
        ({**awq, "modules_to_not_convert": [*mlp]}, "cuda", attention, packed),
        ({**eight, "llm_int8_skip_modules": [*attention, "lm_head"]}, "cpu", mlp, with_scales),
        (four, "cpu", "", in_blocks_of_64),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "cuda", "", in_squares),
    ):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        layers = [shape for name, shape in shapes.items() if name.endswith(ends)]
        tensors = [torch.empty(size, dtype=kind, device="meta") for one in layers for *size, kind in stored(*one)]
        change = sum(one.nbytes for one in tensors) - 4 * sum(one.numel() for one in layers)
        assert quantized_bytes(model, settings, device) == whole + change, settings
    for settings, device, expected in (
        ({"quant_method": "fp8"}, "cpu", "dense"), ({"quant_method": "mxfp4"}, "cpu", "dense"),
        ({"quant_method": "mxfp4"}, "cuda", "unknown"), ({"quant_method": "compressed-tensors"}, "cuda", "dense"),
        ({**gptq, "dynamic": {"-:.*": {}}}, "cuda", "unknown"), ({**gptq, "lm_head": True}, "cuda", "unknown"),
    ):  # fmt: skip
        assert quantized_bytes(model, settings, device) == expected, settings
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    with torch.device("meta"):
        experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        transposed = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2))
    for other in (experts, transposed):
        assert [quantized_bytes(other, settings, "cuda") for settings in (four, gptq, awq)] == ["unknown"] * 3


def test_plan_counts_quantized_weights(plan, tiny, tmp_path):
    """As they are in memory, whatever the files have; by the files if a method is not known; else as if they were not
    quantized. A note says how."""
    config, folder = json.loads((tiny / "config.json").read_text()), tmp_path / "bare"
    folder.mkdir()
    _, _, _, plain = plan("--memory", "1/2")
    whole = plain["plan"]["weight_bytes"]

    def planned(method, *machine):
        settings = {"quant_method": method, "bits": 4}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        code, out, err, written = plan("--memory", "1/2", *machine, model=folder)
        assert code == 0, err
        assert f"note: {written['notes'][-1]}" in out
        return written["plan"]["weight_bytes"] - whole, written["notes"][-1]

    counted = "the weights are quantized, and were counted"
    dense = "weights of fp8 are dequantized when they are used on cpu: they were counted as float32"
    unknown = "the weights were counted as if they were not quantized (quanto): they may take less"
    assert planned("quanto") == (0, unknown)
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(bytes(1234))
    assert planned("quanto") == (2 * 1234 - whole, f"{counted} by their files")
    assert planned("fp8") == (0, dense)
    saved, note = planned("gptq", "--device", "cuda:0", "--device-memory", "24GiB")
    assert saved < -whole // 4 and note == f"{counted} as gptq keeps them"


def test_plan_for_a_goal(plan):
    """As `for_budget` chooses; what cannot be had is a note, or an error."""
    for goal, expected in ((), [560, True, 8]), (("fidelity",), [560, True, 8]), (("speed",), [400, False, None]):
        code, out, _, written = plan("--memory", "1/1", *(("--goal", *goal) if goal else ()))
        chosen = [written["config"][name] for name in ("num_selected", "remainder", "entry_bits")]
        assert (code, chosen) == (0, expected) and ("remainder=False" in out) == (goal == ("speed",))
    code, out, _, written = plan("--memory", "1/6", "--goal", "fidelity")
    assert code == 0 and not written["config"]["remainder"]
    assert written["notes"][0].startswith("--goal fidelity has no room") and f"note: {written['notes'][0]}" in out
    for wrong, words in (
        ((), "--goal fidelity needs --memory"),
        (("--memory", "1/2", "--compare"), "--goal fidelity needs --memory"),
        (("--memory", "1/2", "--cache", "spec"), "SpecCache has no fields for"),
    ):
        code, _, err, _ = plan("--goal", "fidelity", *wrong)
        assert code == 2 and words in last_line(err)


def test_plan_compares_all_caches(plan, monkeypatch):
    """Each as its own plan has it; what does not fit is told, and is no error while another does."""
    longer, room = "40000", ("--memory", "40MiB", "--set", "group_size=4")
    code, out, _, written = plan("--compare", *room, context=longer)
    assert code == 0 and [one["name"] for one in written["plans"]] == list(registry.CACHES)
    assert all(name in out for name in registry.CACHES) and written["machine"]["fits"] == list(registry.CACHES)
    assert written["chosen"]["fidelity"] in written["plans"]
    for one in written["plans"]:
        _, _, _, alone = plan("--cache", one["name"], *room, context=longer)
        assert (one["plan"], one["config"]) == (alone["plan"], alone["config"])
        assert one["plan"]["peak_bytes"] <= 40 * 2**20 and 0 < one["attended"] <= 40000
        assert 0 < one["read_bytes"] <= one["plan"]["full_kv_bytes"]
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)  # what is not installed is planned, and that is said
    code, out, _, written = plan("--compare", *room, "--set", "exact=true", context=longer)
    assert all(one["plan"] for one in written["plans"]) and "cluster: ClusterCache needs faiss" in out
    assert "for speed: disk-swap: the first that fits: exact caches all give the same output" in out
    code, out, _, written = plan("--compare", "--memory", "2000")
    assert code == 1 and written["machine"]["fits"] == [] and "none of them" in out
    assert all(one["plan"] is None and "need at least" in one["refused"] for one in written["plans"])


@pytest.mark.parametrize(("what", "line"), [("free_memory", "memory: "), ("free_disk", "disk: ")])
def test_a_plan_that_this_machine_does_not_hold(plan, monkeypatch, what, line):
    with monkeypatch.context() as patch:
        patch.setattr(machine, what, lambda where="cpu": 1000)
        code, out, _, written = plan("--memory", "1/4")
    assert code == 1
    (said,) = [text for text in out.splitlines() if text.startswith(line)]
    assert said.endswith("free 1000 B: does not fit")
    assert written["machine"]["fits"][line.rstrip(": ")] is False
    monkeypatch.setattr(machine, "free_memory", lambda device: None)
    code, out, _, _ = plan("--memory", "1/4")
    assert code == 0 and "free unknown: it is unknown whether that fits" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "1/400"], "BudgetError: --memory is"),
        (["--memory", "1/4", "--set", "rnk=3"], "did you mean 'rank'?"),
        (["--memory", "a lot"], "memory must be bytes, a size"),
        (["--batch", "0"], "at least 1, got '0'"),
        (["--path", "nowhere/at/all"], "--path must be a folder that exists, got 'nowhere/at/all'"),
        (["--memory", "1/4", "--measured", "m.json"], "ConfigError: --measured m.json needs --compare and --memory"),
        (["--compare", "--measured", "m.json"], "ConfigError: --measured m.json needs --compare and --memory"),
        (["--compare", "--cache", "spec"], "ConfigError"),
        (["--compare", "--set", "num_selected=4"], "ConfigError"),
        (["--cache", "dynamic"], "cache 'dynamic' keeps all in memory"),
        (["--cache", "disk-swop"], "did you mean 'disk-swap'?"),
        (["--cache", "no_such_module:Class"], "there is no module 'no_such_module'"),
        (["--model", "nowhere/at-all"], "cannot read the configuration of the Hub name"),
    ],
)
def test_a_wrong_plan(plan, arguments, words):
    code, out, err, written = plan(*arguments)
    assert (code, out, written) == (2, "", None)
    assert words in last_line(err) and "Traceback" not in err


# ---------------------------------------------------------------------------------------------- caches by name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cluster" else pytest.mark.slow) for name in registry.CACHES]
)
def test_every_cache_by_its_name(run, plan, tiny, document, tmp_path, name):
    """Exact it answers as `DynamicCache` does; it is planned for a budget, and opened from what it saved."""
    file, kind = tmp_path / "answers.json", registry.cache_class(name)
    code, out, err = run("--cache", name, "--set", "exact=true", "--compare", "--json", str(file))
    assert code == 0, err
    assert out.splitlines() == [expected_text(tiny, document)] * 2
    assert [answer["cache"] for answer in json.loads(file.read_text())] == ["DynamicCache", kind.__name__]
    code, out, err, written = plan("--cache", name, "--memory", "3/5")
    assert code == 0, err
    assert set(written["config"]) == {field.name for field in dataclasses.fields(kind.config_class)}
    assert written["plan"]["peak_bytes"] <= written["plan"]["full_kv_bytes"] * 3 // 5


@pytest.fixture
def outsider(tmp_path, monkeypatch):
    """`module:Class` of a cache with a field of its own, in a module that this library does not know."""
    (tmp_path / "outside_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from hf_offload_cache import DiskSwapCache, DiskSwapConfig\n\n\n"
        "@dataclass(frozen=True)\n"
        "class MyConfig(DiskSwapConfig):\n"
        "    own_field: int = 7\n\n\n"
        "class MyCache(DiskSwapCache):\n"
        "    config_class = MyConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "outside_method:MyCache"
    sys.modules.pop("outside_method", None)


@pytest.fixture
def asked(tiny, document, tmp_path, console, monkeypatch):
    """Runs a verb from a folder of its own: (exit code, stdout, the lines of stderr). MODEL, FILE and FOLDER stand for
    those that are there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    there = {"MODEL": tiny, "FILE": document, "FOLDER": tmp_path / "folder"}

    def run(*arguments):
        code, out, err = console(*(there.get(word, word) for word in arguments))
        return code, out, err.strip().splitlines()

    return run


CONSOLE = [sys.executable, "-W", "ignore", "-m", "hf_offload_cache.console.main"]
"""As the process that a shell starts: for what only a process does. Its verb is `ls`, which imports no torch."""


def test_generate_with_a_cache_from_outside(run, tiny, document, tmp_path, outsider):
    file = tmp_path / "answers.json"
    own = ["--cache", outsider, "--set", "own_field=9"]
    code, out, err = run(*own, "--set", "exact=true", "--compare", "--json", str(file))
    assert code == 0, err
    assert out.splitlines() == [expected_text(tiny, document)] * 2
    assert [answer["cache"] for answer in json.loads(file.read_text())] == ["DynamicCache", "MyCache"]
    code, _, err = run("--cache", outsider, "--set", "own_feld=9")
    assert code == 2 and "MyConfig has no field 'own_feld'; did you mean 'own_field'?" in last_line(err)
    code, _, err = run("--set", "own_field=9")
    assert code == 2 and "DiskSwapConfig has no field 'own_field'" in last_line(err)


def test_a_context_is_opened_with_the_cache_that_saved_it(run, tmp_path, tiny, capsys, outsider, monkeypatch):
    saved = tmp_path / "saved"
    assert run("--cache", outsider, "--save", str(saved))[0] == 0

    def ask(*arguments):
        fixed = ["generate", "--model", str(tiny), "--context", str(saved), "--question", "w5", "--device", "cpu"]
        return cli.main([*fixed, "--max-new-tokens", "2", *arguments]), last_line(capsys.readouterr().err)

    code, line = ask()
    assert code == 2 and "was saved by 'MyCache', which is not among disk-swap" in line
    assert ask("--cache", outsider)[0] == 0
    code, line = ask("--cache", "disk-swap")
    assert code == 2 and "cache is MyCache, not DiskSwapCache" in line
    monkeypatch.setitem(registry.CACHES, "mine", outsider)
    assert ask()[0] == 0


def test_plan_of_a_cache_from_outside(plan, outsider):
    _, _, _, known = plan("--memory", "1/2")
    code, out, err, written = plan("--memory", "1/2", "--cache", outsider, "--set", "own_field=9")
    assert code == 0, err
    assert written["config"].pop("own_field") == 9 and "own_field=9" in out
    assert written["config"] == known["config"] and written["plan"] == known["plan"]


# ---------------------------------------------------------------------------------------- a user's mistakes

VERBS = {
    "generate": ("--model", "MODEL", "--prompt-file", "FILE", "--question", "w5"),
    "plan": ("--model", "MODEL", "--context", "4000"),
    "tune": ("--model", "MODEL", "--memory", "1/2", "--context", "400", "--out", "tuned.json"),
    "publish": ("FOLDER", "published", "--model", "MODEL"),
    "stream": ("published", "--model", "MODEL", "--prompt-file", "FILE", "--question", "w5"),
}


@pytest.mark.parametrize(("verb", "device"), combinations(list(VERBS), ["cuda:0", "meta", "nonsense", ""]))
def test_a_device_that_cannot_be_used(asked, verb, device):
    if device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("it can be used here")
    code, out, lines = asked(verb, *VERBS[verb], "--device", device)
    assert (code, out) == (2, "")
    told = [line for line in lines if not line.startswith("loading ")]
    assert len(told) == 1, told
    assert told[0].startswith(f"hf-offload-cache: ModelLoadError: --device {device!r} cannot be used here: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--memory", "4KiB"], "--memory is 4,096 bytes"),
        (["plan", "--memory", "4KiB"], "lower --context or --batch"),
        (["plan", "--memory", "4KiB", "--set", "num_selected=30"], "num_selected=30"),
        (["plan", "--compare", "--memory", "1/4", "--measured", "random"], "--measured must be a file that"),
        (["plan", "--path", "nowhere"], "--path must be a folder that exists, got 'nowhere'"),
        (["generate", "--path", "nowhere"], "--path must be a folder that exists, got 'nowhere'"),
        (["tune", "--path", "nowhere"], "--path must be a folder that exists, got 'nowhere'"),
        (["generate", "--memory", "4KiB"], "or --max-new-tokens"),
        (["generate", "--set", "rank=100000"], "use --set rank="),
        (["generate", "--key", "random"], "--key: 'random' must hold 32 bytes or 64 hex digits"),
        (["generate", "--cache", "nowhere:Cache"], "--cache 'nowhere:Cache': there is no module 'nowhere'"),
        (["stream", "--path", "nowhere"], "--path must be a folder that exists, got 'nowhere'"),
    ],
)
def test_errors_name_the_options_of_the_console(asked, tmp_path, arguments, words):
    (tmp_path / "random").write_bytes(bytes([0xCE, 0xFF]) * 150)
    code, out, lines = asked(arguments[0], *VERBS[arguments[0]], *arguments[1:])
    assert (code, out) == (2, "")
    assert words in lines[-1] and not [name for name in ("max_context", "max_batch", "for_budget") if name in lines[-1]]
    assert [line for line in lines if line.startswith("hf-offload-cache")] == lines[-1:]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("memory=4KiB is too small. Raise memory, or lower max_context or max_batch.",
         "--memory 4KiB is too small. Raise --memory, or lower --context or --batch."),
        ('engine="uring": no; use engine="auto" or another `path`',
         "--set engine=uring: no; use --set engine=auto or another --path"),
        ("keep it in memory, as memory, at '/memory/max_context': rank is 3", None),
        ("X has no field 'x'; known: memory, max_context", None),
    ],
)  # fmt: skip
def test_arguments_are_options_where_they_are_arguments(said, words):
    """None: nothing of it is one."""
    assert common.in_options(said, parser().parse_args(["plan", "--context", "5"])) == (words or said)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]])
def test_without_a_verb_it_says_what_there_is(asked, arguments):
    code, out, lines = asked(*arguments)
    assert (code, lines) == (0, [])
    words = ("hf-offload-cache 0", "torch 2", "transformers 5") if arguments == ["--version"] else ("generate", "serve")
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "from 0 to 65535, got '70000'"),
        (["--port", "-1"], "from 0 to 65535, got '-1'"),
        (["--port", "TAKEN"], "already in use"),
        (["--host", "a" * 70 + ".b", "--port", "0"], "name others, or --port 0"),
        (["--host", "192.0.2.1", "--port", "0"], "name others, or --port 0"),
    ],
)
def test_a_place_that_cannot_be_served_on(asked, arguments, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in arguments]
        code, out, lines = asked("serve", "FOLDER", *given)
    assert (code, out) == (2, "")
    assert words in lines[-1] and lines[-1].startswith("hf-offload-cache serve: error: ")


@pytest.mark.parametrize(("stream", "buffered"), combinations(("stdout", "stderr"), (True, False)))
def test_output_that_nobody_reads_ends_quietly(tmp_path, stream, buffered):
    """As behind `head`, whether it is written at once or when the process ends; also an error's line."""
    place = tmp_path / "nowhere" if stream == "stderr" else tmp_path
    out, into = os.pipe()
    os.close(out)
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: into}
    done = subprocess.run([*CONSOLE, "ls", place], env=environment, text=True, check=False, timeout=100, **pipes)
    os.close(into)
    assert done.returncode == (141 if stream == "stdout" else 2)
    assert not (done.stderr if stream == "stdout" else done.stdout)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("buffered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_output_on_a_full_disk_is_one_line(tmp_path, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [*CONSOLE, "ls", tmp_path]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment, text=True, check=False, timeout=100, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.startswith("hf-offload-cache: O") and done.stderr.endswith("No space left on device\n")
    assert len(done.stderr.splitlines()) == 1


OWN = """
from hf_offload_cache import DiskSwapCache
class Mine(DiskSwapCache):
    pass
"""


def test_a_cache_of_the_current_folder(asked, tmp_path):
    """As `python -m` finds modules; the path is as it was afterwards."""
    (tmp_path / "module_of_this_folder.py").write_text(OWN)
    before = sys.path[:]
    code, out, lines = asked("plan", *VERBS["plan"], "--cache", "module_of_this_folder:Mine")
    assert code == 0, lines
    assert "this cache" in out and sys.path == before
    del sys.modules["module_of_this_folder"]


def test_without_a_home(monkeypatch, capsys):
    """The default model is unpacked into memory, and said to be; its tokenizer loads."""
    import pwd

    from hf_offload_cache.console import default_model

    def nobody(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(default_model, "_load", lambda source, dtype: (source.suffix, dtype))
    assert load_default_model(torch.float32) == (".gguf", torch.float32)
    assert "set XDG_CACHE_HOME or HOME to a folder" in capsys.readouterr().err
    assert load_default_tokenizer()("a text")["input_ids"]


# ------------------------------------------------------------------------------- a machine elsewhere, with a GPU

ELSEWHERE = ("--device", "cuda:0", "--device-memory", "24GiB")


@pytest.fixture
def elsewhere(tiny, tmp_path, console, monkeypatch):
    """As `plan`, for a machine with a GPU of 24 GiB; what this machine has is not asked for."""
    for name in ("free_memory", "free_disk"):
        monkeypatch.setattr(machine, name, lambda *_: pytest.fail("this machine was asked"))

    def run(*arguments, context="40000"):
        file = tmp_path / "plan.json"
        found = console("plan", "--model", tiny, "--context", context, *ELSEWHERE, "--json", file, *arguments)
        return *found, json.loads(file.read_text()) if file.exists() else None

    return run


def test_a_plan_for_a_machine_elsewhere(elsewhere, tiny):
    """Records in its host memory where they fit, otherwise on its disk, of which nothing is known."""
    code, out, err, written = elsewhere("--memory", "2MiB", "--host-memory", "64GiB")
    plan, machine_there = written["plan"], written["machine"]
    assert (code, err) == (0, "") and written["config"]["engine"] == "memory"
    assert plan["device"] == "cuda" and plan["peak_bytes"] <= 2 * 2**20 and plan["disk_bytes"] == 0
    records = plan["host_decode"]["records in memory"]
    assert 40000 * 512 // 2 < records < plan["host_bytes"] and "records in memory" not in plan["decode"]
    assert machine_there["needs"] == {
        "device memory": plan["weight_bytes"] + plan["peak_bytes"], "host memory": plan["host_bytes"], "disk": 0
    }  # fmt: skip
    assert machine_there["free"] == {"device memory": 24 * 2**30, "host memory": 64 * 2**30, "disk": None}
    assert machine_there["fits"] == {"device memory": True, "host memory": True, "disk": True}
    assert machine_there["here"] is False
    for words in ("device memory of this cache", "device memory budget", "host memory of this cache", "staging, host"):
        assert words in out
    host = f"{size_text(plan['host_bytes'])} of host memory"
    assert f"of device memory ({MemoryPlan(**fields_of(plan)).share}), {host}" in out
    assert written["notes"] == [] or "need the host" not in written["notes"][-1]
    code, out, _, tree = elsewhere("--memory", "2MiB", "--host-memory", "64GiB", "--cache", "abstract-tree")
    (note,) = (note for note in tree["notes"] if note.startswith("steps of "))
    assert f"note: {note}" in out
    _, _, _, just = elsewhere("--memory", "2MiB", "--host-memory", str(plan["host_bytes"]))
    assert just["plan"] == plan and just["machine"]["fits"]["host memory"] is True
    code, _, _, less = elsewhere("--memory", "2MiB", "--host-memory", str(records))
    assert code == 0 and less["config"]["engine"] == "auto" and less["machine"]["fits"]["disk"] is None
    assert less["plan"]["disk_bytes"] >= 40000 * 512 // 2 and less["plan"]["host_bytes"] <= records


def fields_of(plan):
    return {name: plan[name] for name in (field.name for field in dataclasses.fields(MemoryPlan))}


def test_what_a_machine_elsewhere_lacks(elsewhere):
    code, out, _, written = elsewhere("--memory", "2MiB")  # its host memory is unknown
    assert code == 0 and written["config"]["engine"] == "auto" and written["plan"]["disk_bytes"] > 0
    assert "host memory: " in out and "free unknown" in out
    code, out, _, written = elsewhere("--device-memory", "1MiB", "--memory", "2MiB", "--host-memory", "1GiB")
    assert code == 1 and written["machine"]["fits"]["device memory"] is False
    assert "device memory: weights and cache need" in out and "free 1.0 MiB: does not fit" in out
    code, _, err, _ = elsewhere("--memory", "2MiB", "--host-memory", "1MiB", "--set", "engine=memory")
    assert code == 2 and "BudgetError: --host-memory is 1,048,576 bytes (1.0 MiB), which is too small" in last_line(err)
    advice = "raise --host-memory, or lower --context or --batch, or pass --set engine=auto"
    assert f"of host memory with --set engine=memory: {advice}" in last_line(err)
    code, _, err, _ = elsewhere("--memory", "20KiB", "--host-memory", "1GiB")
    assert code == 2 and "--memory is 20,480 bytes" in last_line(err) and "of device memory" in last_line(err)


def test_all_caches_on_a_machine_elsewhere(elsewhere):
    code, out, _, written = elsewhere("--memory", "1/2", "--host-memory", "1GiB", "--compare")
    assert code == 0 and written["machine"]["fits"] == list(registry.CACHES) and "these fit that machine: " in out
    assert all(one["config"]["engine"] == "memory" and one["plan"]["host_bytes"] for one in written["plans"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "24GiB"], "--device-memory 24GiB is the memory of a GPU on a machine elsewhere: give "),
        (["--device", "cpu", "--device-memory", "24GiB"], "give --device cuda:0 too, or leave it out"),
        (["--device", "cuda:0", "--device-memory", "much"], "--device-memory must be a number of bytes or a size"),
        ([*ELSEWHERE, "--host-memory", "much"], "--host-memory must be a number of bytes or a size"),
        (["--device", "cpu", "--host-memory", "64GiB"], "this one is on a CPU, where memory limits everything"),
        (["--device", "cpu", "--set", "host_memory=64GiB"], "--set host_memory=64GiB is a limit for a model on a GPU"),
    ],
)
def test_a_machine_elsewhere_that_is_wrong(tiny, console, arguments, words):
    code, out, err = console("plan", "--model", tiny, "--context", "4000", "--memory", "2MiB", *arguments)
    assert (code, out) == (2, "") and words in last_line(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device can be used here")
def test_a_device_that_is_not_here_can_be_elsewhere(tiny, console):
    code, _, err = console("plan", "--model", tiny, "--context", "4000", "--device", "cuda:0")
    assert code == 2 and "or give --device-memory, such as 24GiB, to plan for a machine that has it" in last_line(err)
