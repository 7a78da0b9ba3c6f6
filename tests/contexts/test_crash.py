"""A process that saves a real cache is killed at a system call, by default at every eighteenth or thirty-sixth, else
at every one: the old context is there, or the new, in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_driver
import pytest

LEAST = 100
"""Points at which a real cache is killed, if at every second call; those of test_publish.py come on top."""


def kill(folder: Path, step: int, method: str) -> dict[str, Any]:
    """What `crash_driver.py` found."""
    here = Path(crash_driver.__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, crash_driver.__file__, str(folder), str(step), method],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict[str, Any], least: int) -> None:
    assert found["points"] >= least
    outcomes = found["found"]
    for name, counts in outcomes.items():
        assert set(counts) == ({"nothing", "new"} if name.startswith("new") else {"old", "new"}), (name, counts)
    assert len(outcomes) == len(crash_driver.SCENARIOS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_killed_at_every_eighteenth_call(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = kill(tmp_path, 18, "disk-swap")
    record_property("kill points", found["points"])
    print(found)
    check(found, LEAST // 9)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.parametrize("method", ["abstract-tree", pytest.param("cluster", marks=pytest.mark.slow)])
def test_killed_with_abstracts_and_replicas_and_in_clusters(tmp_path: Path, method: str) -> None:
    check(kill(tmp_path, 36, method), LEAST // 18)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.parametrize("method", crash_driver.BEGIN)
def test_killed_at_every_call(tmp_path: Path, method: str) -> None:
    check(kill(tmp_path, 1, method), 2 * LEAST)
