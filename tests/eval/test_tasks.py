"""Tasks for lm-eval: their texts are as long as asked, the same each time, and have what they ask for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import lm_eval.tasks
import pytest
import torch
from harness import build
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from long_llama import long_model
from site_pages import FRONT, PAGES, commands
from transformers import LlamaConfig, LlamaForCausalLM
from words import words

from eval import lm_eval as ours
from eval import tokens
from eval.lm_eval import TASKS
from eval.tasks.long_context import samples

RECALL = (
    "needle_single", "needle_multikey", "needle_multivalue", "needle_multiquery", "variable_tracking", "common_words",
    "frequent_words", "long_generation",
)  # fmt: skip
FOUND = dict(zip(RECALL, (1, 1, 4, 4, 5, 10, 3, 24), strict=True))
"""Answers of each."""
ANSWERS = dict(zip((*RECALL, "document_qa"), (48, 48, 128, 128, 96, 128, 64, 640, 16), strict=True))
"""Tokens for them."""


def default_tokenizer() -> Any:
    """Loaded once, for the tasks too."""
    return tokens.tokens_of({}).tokenizer


def made(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(getattr(samples, name)(**arguments)["test"])


def has_what_is_asked_for(name: str, samples: list[dict[str, Any]]) -> None:
    """As many tokens as asked, less those of a chat template and of an answer, and less than a paragraph or a
    hundredth."""
    tokenizer, not_text = default_tokenizer(), 64 + ANSWERS[name]
    for one in samples:
        length = len(tokenizer(one["input"], verbose=False)["input_ids"])
        assert one["length"] - not_text - max(30, one["length"] // 100) < length <= one["length"] - not_text
        wanted = one["choices"] if name == "document_qa" else one["outputs"]
        assert all(answer in one["input"] for answer in wanted)
        short = name == "long_generation" and one["length"] < 2048
        assert len(set(wanted)) == (4 if name == "document_qa" else 8 if short else FOUND[name])


@pytest.mark.parametrize("name", [*RECALL, "document_qa"])
def test_texts_have_what_is_asked_for_and_are_as_long_as_asked(name: str) -> None:
    arguments = {"max_seq_lengths": [1024, 2048], "samples": 2, "seed": 3}
    found = made(name, **arguments)
    assert found == made(name, **arguments) and found != made(name, **{**arguments, "seed": 4})
    assert [one["length"] for one in found] == [1024, 1024, 2048, 2048] and found[0]["input"] != found[1]["input"]
    has_what_is_asked_for(name, found)


@pytest.mark.slow
def test_they_are_as_long_as_128k_tokens() -> None:
    """Made once more, in a process with other hashes, they are the same."""
    every, code = [*RECALL, "document_qa"], """
import hashlib, sys
from eval.tasks.long_context import samples
for name in sys.argv[1:]:
    (one,) = getattr(samples, name)(max_seq_lengths=[131_072], samples=1)["test"]
    print(hashlib.sha256(one["input"].encode()).hexdigest())
"""
    run = subprocess.run(
        [sys.executable, "-c", code, *every], capture_output=True, check=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "5"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    for name, digest in zip(every, run.stdout.split()[-9:], strict=True):
        found = made(name, max_seq_lengths=[131_072], samples=1)
        has_what_is_asked_for(name, found)
        assert hashlib.sha256(found[0]["input"].encode()).hexdigest() == digest


def test_tasks_load_one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though lm-eval imports the functions of each anew."""
    loaded = []
    monkeypatch.setattr(tokens, "load_default_tokenizer", lambda: loaded.append(1) or words())
    tokens._tokens_of.cache_clear()
    try:
        metadata = {"max_seq_lengths": [1024], "samples": 1}
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        assert set(manager.load(["needle_single", "needle_multikey"])["tasks"]) == {"needle_single", "needle_multikey"}
    finally:
        tokens._tokens_of.cache_clear()
    assert loaded == [1]


def test_a_prompt_as_long_as_the_model_takes_is_not_cut() -> None:
    """With its template: lm-eval keeps of it what an answer leaves of the model's length."""
    tokenizer, asked = default_tokenizer(), [{"role": "user", "content": "<text>"}]
    empty = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={"max_seq_lengths": [1024, 8192], "samples": 1}
    )
    for name in (*RECALL, "document_qa"):
        (task,) = manager.load([name])["tasks"].values()
        for doc in task.test_docs():
            ids = tokenizer(empty.replace(asked[0]["content"], doc["input"]), verbose=False)["input_ids"]
            most = task.config.generation_kwargs["max_gen_toks"] if name in RECALL else 8
            assert len(ids) <= doc["length"] - most
    with pytest.raises(ValueError, match="max_seq_lengths: 300 tokens have no room"):
        made("common_words", max_seq_lengths=[300], samples=1)


def results(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    """Of lm-eval's command line with these. Of its own tasks it knows RULER's: it reads 14,000 files at each start."""
    everything = TaskIndex._iter_yaml_files

    def files(root: Path) -> Iterator[Path]:
        return everything(root / "ruler" if root == Path(lm_eval.tasks.__file__).parent else root)

    with mock.patch.object(TaskIndex, "_iter_yaml_files", files):
        assert ours.main([*arguments, "--output_path", str(tmp_path / "out.json")]) == 0
    (file,) = tmp_path.glob("out*.json")
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model lies that has the default one's tokenizer, length and heads, and random weights: three layers of
    thirty."""
    folder, tokenizer = tmp_path_factory.mktemp("small"), default_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    build(LlamaForCausalLM, config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


STARTS = (["python", "-m", "eval.lm_eval"], ["hf-offload-cache", "lm-eval"])
OF_PAGES = sorted(
    {tuple(words[len(start) :]) for path in (*PAGES, *FRONT) for words in commands(path) for start in STARTS
     if words[: len(start)] == start}
)  # fmt: skip


@pytest.mark.parametrize("words", OF_PAGES, ids=" ".join)
def test_commands_of_the_pages_run(words: Sequence[str], small: Path, tmp_path: Path) -> None:
    """With a small model, and of each task a short prompt, in a share that is not too little for that."""
    filled = {"pretrained=MODEL": f"pretrained={small}", "TASKS": "needle_single,needle_multikey", "1/13": "2/3"}
    command = list(words)
    for name, value in filled.items():
        command = [word.replace(name, value) for word in command]
    if "--metadata" in command:
        command = command[: command.index("--metadata")]
    command += ["--path", str(tmp_path)]
    if not any("pretrained=" in word for word in command):
        command += ["--model_args", f"pretrained={small}"]
    few = ["--metadata", '{"max_seq_lengths": [1024], "samples": 1}', "--gen_kwargs", "max_gen_toks=4"]
    found = results([*command, *few], tmp_path)
    asked = RECALL if "long_context" in words else RECALL[:2]
    assert set(found["results"]) >= {*asked} and ("document_qa" in found["results"]) is ("long_context" in words)
    assert found["config"]["cache"] == "disk-swap" and found["config"]["cache_memory"] == "2/3"
    assert (found["config"]["cache_plain_requests"], found["config"]["cache_floor_requests"]) == (0, 0)
    assert all(0 <= found["results"][name]["recall,none"] <= 1 for name in asked)


OWN_TASK = """
task: passages
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/passages.jsonl}, cache_dir: FOLDER/cache}
test_split: test
output_type: generate_until
doc_to_text: "Answer the question.\\n\\n{{context}}\\n\\nQuestion: {{question}}\\nAnswer:"
doc_to_target: "{{answers}}"
process_results: !function metrics.begins
generation_kwargs: {max_gen_toks: 6, temperature: 1, do_sample: false, until: ["w4"]}
filter_list:
  - name: first
    filter: [{function: regex, regex_pattern: "(w[0-9]+)"}, {function: take_first}]
metric_list:
  - {metric: begins, aggregation: mean, higher_is_better: true}
metadata: {version: 5.0}
"""
"""As lm-eval's LongBench has its tasks, and a filter: texts, a metric of its own, and nothing from a network."""
METRIC = """
def begins(doc, results):
    return {"begins": float(results[0] in doc["answers"])}
"""


def test_the_command_line_has_ours_and_those_that_are_included(tmp_path: Path) -> None:
    """A folder of one's own beside ours; what the filter leaves is what the model goes on with."""
    rows = [" ".join(f"w{5 + step * place % 180}" for place in range(300)) for step in (3, 7)]
    model = tmp_path / "model"
    long_model().save_pretrained(model)
    words().save_pretrained(model)
    ids = torch.tensor([words()(f"Answer the question. {row} Question: w5 Answer:")["input_ids"] for row in rows])
    with torch.no_grad():
        following = long_model()(ids).logits[:, -1].argmax(-1).tolist()
    answers = [[f"w{following[0]}"], ["w1000"]]
    lines = [{"context": row, "question": "w5", "answers": own} for row, own in zip(rows, answers, strict=True)]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "passages.yaml").write_text(OWN_TASK.replace("FOLDER", str(tmp_path)))
    (tmp_path / "metrics.py").write_text(METRIC)
    arguments = [
        "--model", "hf-offload", "--model_args", f"pretrained={model},exact=True,path={tmp_path}",
        "--tasks", "passages,needle_single", "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "2",
        "--metadata", '{"max_seq_lengths": [300], "samples": 1}',
    ]  # fmt: skip
    found = results(arguments, tmp_path)
    assert found["results"]["passages"]["begins,first"] == 0.5
    assert found["results"]["needle_single"]["recall,none"] == 0 and found["config"]["cache_fields"] == {"exact": True}
    assert lm_eval.tasks.TaskManager is TaskManager
