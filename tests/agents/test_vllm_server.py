"""A server that we start is watched, and nothing of it is left, however it or we end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from agents.engine import EngineError
from agents.vllm_server import VLLMServer
from tests.agents.fake_vllm import interpreter
from tests.agents.policies import random_policy
from tests.processes import alive, wait_until_gone

ROOT = Path(__file__).parents[2]
BEGETTING = """#!/bin/sh
sleep 1000 &
echo $$ $! > {pids}
wait
"""
"""Stands in for an interpreter: a process with a child, which never serves."""


def begetting(folder):
    script, pids = folder / "begetting", folder / "pids"
    script.write_text(BEGETTING.format(pids=pids))
    script.chmod(0o755)
    return script, pids


def started(pids, seconds=60.0):
    """The processes, once they run."""
    end = time.monotonic() + seconds
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < end, "it never started"
        time.sleep(0.02)
    return [int(pid) for pid in pids.read_text().split()]


def test_it_serves_after_start_and_nothing_is_left_after_close(tmp_path):
    random_policy().save(tmp_path / "model")
    server = VLLMServer(["--model", str(tmp_path / "model")], tmp_path / "log", python=interpreter(tmp_path))
    server.start()
    assert server.alive and httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "default"}
    first = server.url
    server.start()  # again, from the beginning
    assert server.alive and httpx.get(f"{server.url}/health").status_code == 200
    server.close()
    server.close()
    for url in {first, server.url}:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert not server.alive


def test_a_server_that_does_not_serve_in_time_is_ended_with_its_children(tmp_path):
    script, pids = begetting(tmp_path)
    server = VLLMServer([], tmp_path / "log", python=str(script), startup_seconds=3.0)
    with pytest.raises(EngineError, match="did not serve within 3 s"):
        server.start()
    assert wait_until_gone(started(pids)) == []


def test_a_server_that_ends_while_it_starts_is_an_error_with_its_last_words(tmp_path):
    server = VLLMServer(["--model", "no/such"], tmp_path / "log", python=interpreter(tmp_path))
    with pytest.raises(EngineError, match=r"(?s)ended while it started; the end of .*log:.*no/such"):
        server.start()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_we_are_killed(ending, tmp_path):
    script, pids = begetting(tmp_path)
    code = f"from pathlib import Path; from agents.vllm_server import VLLMServer; " \
           f"VLLMServer([], Path({str(tmp_path / 'log')!r}), python={str(script)!r}).start()"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    children = started(pids)
    parent.send_signal(ending)
    parent.wait(30)
    assert wait_until_gone(children) == []


def test_no_child_of_a_server_that_is_killed_outlives_it(tmp_path):
    script, pids = begetting(tmp_path)
    code = f"from pathlib import Path; from agents.vllm_server import VLLMServer; " \
           f"VLLMServer([], Path({str(tmp_path / 'log')!r}), python={str(script)!r}).start()"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    server, child = started(pids)
    os.kill(server, signal.SIGKILL)
    _, said = parent.communicate(timeout=60)
    assert "the vLLM server ended while it started" in said
    assert wait_until_gone([child]) == [] and not alive(server)
