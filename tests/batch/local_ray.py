"""A Ray of this machine alone: loopback, two workers, no dashboard, nothing told to anybody, nothing left."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as there, it listens on loopback alone
    "RAY_AUTH_MODE": "token",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_register_timeout_seconds": "120",
}


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - before


@contextlib.contextmanager
def local_ray(cpus: int = 2) -> Iterator[Any]:
    """The module, initialised. What it reads of the environment it reads when it is imported, here for the first time.

    Its folder is not below pytest's: the names of its sockets may have 107 characters."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it leaves one in the home folder
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        import ray
        import ray.data

        try:
            for attempt in range(3):  # half a minute each, which Ray leaves its processes to start
                try:
                    ray.init(
                        num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=folder,
                        object_store_memory=80 * 2**20, log_to_driver=False, logging_level="ERROR",
                    )  # fmt: skip
                    break
                except Exception as error:
                    if attempt == 2 or "timed out during startup" not in str(error):
                        raise
                    for one in started_since(before):
                        one.kill()
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield ray
        finally:
            started = started_since(before)
            ray.shutdown()
            _, alive = psutil.wait_procs(started, timeout=60)
            shutil.rmtree(folder, ignore_errors=True)
    assert not alive, alive


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which it, or one that it started, waits for connections."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            waits = [own.laddr.ip for own in one.net_connections("tcp") if own.status == psutil.CONN_LISTEN]
            found |= {address.removeprefix("::ffff:") for address in waits}
    return found
