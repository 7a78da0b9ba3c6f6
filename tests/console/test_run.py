"""`run`: a program that knows nothing of this library, in this process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import ContextLibrary
from hf_offload_cache.console import main as cli

MAIN = [sys.executable, "-m", "hf_offload_cache.console.main", "run", "--set", "exact=true", "--path"]
"""As a process: for what happens at its end."""


PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
found = model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)
print("answer", found[0, 40:].tolist())
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a model."""
    build(LlamaForCausalLM, LlamaConfig(**COMMON)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def answer_of(tiny: Path) -> list[int]:
    """By the program's own question, without this library."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    return model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)[0, 40:].tolist()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "serve.py"
    file.write_text(PROGRAM)
    return file


def test_requests_of_a_program_use_a_library(
    program: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    folder = str(tmp_path / "library")
    own = ["run", "--set", "exact=true", "--library", folder, "--key", str(key), "--library-bytes"]
    for reused in (0, 39):
        assert cli.main([*own, "1GB", str(program), str(tiny), "0"]) == 0
        out, err = capsys.readouterr()
        assert out == f"answer {answer_of(tiny)}\n"
        assert f"1 requests were offloaded, {reused} tokens of their prompts came from the library\n" in err
    assert cli.main(["run", "--library-bytes", "1GB", str(program), str(tiny), "0"]) == 2
    assert "--library-bytes is for a library: give --library DIR too" in capsys.readouterr().err
    twice = ["run", "--set", f"encryption_key={key}", "--library", folder]
    assert cli.main([*twice, str(program), str(tiny), "0"]) == 2
    assert "the library's key encrypts the cache's own files too: give --key FILE, and no other key" in (
        capsys.readouterr().err
    )
    with pytest.warns(UserWarning, match="a context was not kept: max_bytes is 1 and"):
        assert cli.main([*own, "1", str(program), str(tiny), "0"]) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_a_file_runs_with_its_arguments_and_its_models_are_offloaded(
    code: int, program: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, before = GenerationMixin.generate, (list(sys.argv), list(sys.path))
    own = ["run", "--cache", "disk-swap", "--set", "exact=true", "--path", str(tmp_path)]
    assert cli.main([*own, str(program), str(tiny), str(code)]) == code
    out, err = capsys.readouterr()
    assert f"answer {answer_of(tiny)}" in out and "1 requests were offloaded" in err and "full KV" in err
    assert GenerationMixin.generate is plain and (sys.argv, sys.path) == before


def test_a_module_runs(program: Path, tiny: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(program.parent)
    assert cli.main(["run", "-m", "serve", str(tiny), "0"]) == 0
    assert "answer" in capsys.readouterr().out


LEFT_BEHIND = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
def serve():
    threading.main_thread().join()
    import neighbour
    found = model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)
    print("answer", found[0, 40:].tolist(), neighbour.NAME)
threading.Thread(target=serve).start()
idle = ThreadPoolExecutor(1)
idle.submit(int).result()
sys.exit("the main thread ends")
"""


def test_threads_that_outlive_the_main_one_are_offloaded(program: Path, tiny: Path, tmp_path: Path) -> None:
    """Until they end, also by contexts of a library; an idle worker of a pool keeps nobody waiting. A text to exit with
    is said, and is code 1."""
    program.write_text(LEFT_BEHIND)
    (program.parent / "neighbour.py").write_text("NAME = 'neighbour'")
    library = tmp_path / "library"
    command = [*MAIN, str(tmp_path), "--library", str(library), str(program), str(tiny)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1, ended.stderr
    assert len(ContextLibrary(library).entries()) == 1
    assert f"answer {answer_of(tiny)} neighbour" in ended.stdout
    assert "the main thread ends\n" in ended.stderr and "Traceback" not in ended.stderr
    assert "1 requests were offloaded, 0 tokens of" in ended.stderr and "full KV" in ended.stderr


AT_EXIT = """
import atexit
import sys
import threading
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
def last():
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = refuse  # as from Python 3.12 on
    found = model.generate(torch.arange(5, 45)[None], max_new_tokens=6, do_sample=False)
    print("answer", found[0, 40:].tolist())
atexit.register(last)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "mapped"])
def test_requests_in_exit_handlers_are_offloaded(engine: str, program: Path, tiny: Path, tmp_path: Path) -> None:
    program.write_text(AT_EXIT)
    command = [*MAIN, str(tmp_path), "--set", f"engine={engine}", str(program), str(tiny)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"answer {answer_of(tiny)}" in ended.stdout
    assert "1 requests were offloaded\n" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("code", "exits", "said"), [("'a text'", 1, "a text\n"), ("None", 0, ""), ("True", 1, "")])
def test_what_a_program_exits_with(
    code: str, exits: int, said: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text(f"import sys\nsys.exit({code})")
    assert cli.main(["run", str(program)]) == exits
    lines = capsys.readouterr().err.removeprefix(said).splitlines()
    assert lines[0] == "0 requests were offloaded" and lines[1].startswith("no call of generate has ended yet; ")
    assert len(lines) == 2


def test_requests_that_were_left_plain_are_told(
    program: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["run", "--memory", "1/13"]
    assert cli.main([*own, str(program), str(tiny), "0"]) == 0
    out, err = capsys.readouterr()
    why = "all keys and values of such a request fit --floor, 64MiB a sequence"
    assert "answer" in out and f"0 requests were offloaded, 1 were left plain\nleft plain: 1, {why}\n" in err
    for strict in (["--strict"], ["--floor", "1KiB"]):
        assert cli.main([*own, *strict, str(program), str(tiny), "0"]) == 2
        out, err = capsys.readouterr()
        assert not out and "BudgetError" in err and "raise --memory, or lower the length of requests" in err


SHELL = "#!/bin/sh\n"
WRAPPERS: dict[str, str] = {
    "pip": SHELL + """'''exec' "/a path/that is/long/bin/python3" "$0" "$@"\n' '''\n""",
    "uv": SHELL + """'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"\n' '''\n""",
    "buildout": SHELL + """"exec" "/a/path/python3" "$0" "$@"\n""",
    "env": "#!/usr/bin/env python3\n",
}


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_command_runs_as_installers_write_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "serve-it"
    command.write_text(WRAPPERS[kind] + "import sys\nprint('served', __name__, sys.argv)\nsys.exit(3)\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["run", "serve-it", "--port", "1"]) == 3
    assert f"served __main__ {[str(command), '--port', '1']}" in capsys.readouterr().out


def test_a_name_is_a_command_before_it_is_a_file_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a shell: what lies in a folder of somebody else's is run only where it is meant."""
    commands, here = tmp_path / "bin", tmp_path / "here"
    for folder, name in ((commands, "serve-it"), (here, "serve-it"), (here, "serve.py"), (here, "alone")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/usr/bin/env python3\nprint('served', {str(folder / name)!r})\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.chdir(here)
    named = {
        "serve-it": commands / "serve-it", "./serve-it": here / "serve-it", str(here / "alone"): here / "alone",
        "serve.py": here / "serve.py",
    }  # fmt: skip
    for name, place in named.items():
        assert cli.main(["run", name]) == 0
        assert capsys.readouterr().out == f"served {place}\n"
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))  # as of somebody who typed .venv/bin/hf-offload-cache
    assert cli.main(["run", "serve-it"]) == 0
    assert capsys.readouterr().out == f"served {commands / 'serve-it'}\n"
    assert cli.main(["run", "alone"]) == 2
    assert "name a command, ./alone for the file of that name here, or -m" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module", ["no_such_module", "package.no_such", "no_such.module", "package", "alone.py", ".alone"]
)
def test_a_module_that_is_not_there_is_one_line(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As none of a package that is no program; what one imports itself is its own trouble."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "alone.py").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import no_such_module_within")
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv), list(sys.path)
    importlib.invalidate_caches()
    try:
        assert cli.main(["run", "-m", module]) == 2
        err = capsys.readouterr().err
        missing = "package.__main__" if module == "package" else module
        assert f"there is no module {missing!r}" in err and err.count("\n") == 1
        with pytest.raises(ModuleNotFoundError, match="no_such_module_within"):
            cli.main(["run", "-m", "broken.part"])
    finally:
        for name in ("package", "alone", "broken"):
            sys.modules.pop(name, None)
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["/bin/sh"], "is not a Python script"),
        (["--cache", "disk-swp", "x.py"], "did you mean 'disk-swap'"),
        (["--set", "num_selekted=3", "x.py"], "num_selekted"),
        (["--goal", "speed", "-m", "this"], "give memory too"),
        (["--floor", "1MiB", "-m", "this"], "--floor 1MiB is for a memory that is a fraction"),
        (["--floor", "1MiB", "--memory", "9MiB", "-m", "this"], "give --memory 1/13, or leave it out"),
    ],
)
def test_a_wrong_request_is_one_line(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *wrong]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
