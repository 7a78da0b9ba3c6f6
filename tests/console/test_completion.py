"""The script that completes commands in a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hf_offload_cache.console import main as cli

COMPLETED = """\
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_hf_offload_cache hf-offload-cache "${{COMP_WORDS[$COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pu", ["publish"]),
        ("generate --pr", ["--prefill-chunk", "--prompt-file"]),
        ("generate --dtype b", ["bfloat16"]),
        ("completion z", ["zsh"]),
        ("generate --prompt-file te", ["text.txt", "texts"]),
        ("verify te", ["texts"]),
        ("generate --model te", ["texts"]),
    ],
)
def test_bash_completes(words: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verbs, options, their values, files and folders."""
    (tmp_path / "script.bash").write_text(script("bash", capsys))
    (tmp_path / "texts").mkdir()
    (tmp_path / "text.txt").touch()
    program = COMPLETED.format(script=tmp_path / "script.bash", words=f"hf-offload-cache {words}")
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_each_shell_has_a_script_with_every_verb(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script"
    path.write_text(script(shell, capsys))
    text = path.read_text()
    verbs = ("generate", "run", "plan", "models", "tune", "inspect", "ls", "rm", "verify", "stream")
    assert all(verb in text for verb in verbs)
    assert "prompt-file" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(path)], check=True)


def test_another_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["completion", "cmd"])
    assert end.value.code == 2 and "bash" in capsys.readouterr().err
