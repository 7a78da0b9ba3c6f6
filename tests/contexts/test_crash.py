"""A process that saves a real cache is killed at a system call: the old context is there, or the new, in full.

The default run kills small contexts at every call (`test_publish_faults.py`), which needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import crash_driver
import pytest

pytestmark = pytest.mark.slow

LEAST = 200
"""Points at which a real cache is killed."""


def kill(folder: Path, method: str) -> dict[str, Any]:
    """What `crash_driver.py` found."""
    here = Path(crash_driver.__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, crash_driver.__file__, str(folder), "1", method],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict[str, Any]) -> None:
    assert found["points"] >= LEAST
    outcomes = found["found"]
    for name, counts in outcomes.items():
        assert set(counts) == ({"nothing", "new"} if name.startswith("new") else {"old", "new"}), (name, counts)
    assert len(outcomes) == len(crash_driver.SCENARIOS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.parametrize("method", crash_driver.BEGIN)
def test_killed_at_every_call(tmp_path: Path, method: str) -> None:
    check(kill(tmp_path, method))
