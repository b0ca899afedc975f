"""vLLM's server as a process of ours: started, watched, and ended with all that it started, even by our own death."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from agents.engine import EngineError

PLUGIN = Path(__file__).with_name("vllm_plugin")
SUPERVISOR = Path(__file__).with_name("supervise.py")
SERVED_NAME = "policy"
LOG_LINES = 15
CLOSE_SECONDS = 30.0


class VLLMServer:
    """A vLLM server of one model on this machine."""

    def __init__(self, arguments: Sequence[str], log: Path, *, python: str | None = None,
                 environment: Mapping[str, str] | None = None, startup_seconds: float = 900.0):
        """`arguments`: see `engine_arguments`. `log`: what the server writes. `python`: the interpreter that has vLLM;
        None: this one. `environment`: variables on top of ours."""
        self.log, self.startup_seconds = log, startup_seconds
        self.url = ""
        """Where it listens on the loopback; another one after each start."""
        self._command = [python or sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server",
                         "--enable-scale-out", "--disable-uvicorn-access-log", *arguments]
        self._environment = {**os.environ, "PYTHONPATH": str(PLUGIN), "VLLM_SERVER_DEV_MODE": "1",
                             "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", **(environment or {})}
        self._process: subprocess.Popen | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, after what was left of it has ended, and wait until it serves.

        Raises EngineError where it ends instead, or takes longer than `startup_seconds`.
        """
        self.close()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-P", str(SUPERVISOR), *self._command, "--host", "127.0.0.1", "--port", str(port)]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                             env=self._environment, start_new_session=True)
        end = time.monotonic() + self.startup_seconds
        while not self._healthy():
            if not self.alive or time.monotonic() > end:
                reason = "ended while it started" if not self.alive else \
                    f"did not serve within {self.startup_seconds:g} s"
                self.close()
                raise EngineError(f"the vLLM server {reason}; the end of {self.log}:\n{self.last_words()}")
            time.sleep(0.2)

    def close(self) -> None:
        """End it with all its processes."""
        if self._process is None:
            return
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        with suppress(ProcessLookupError):  # none is left unless the supervisor hung or was killed
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(nothing)"

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False


def engine_arguments(model: str, *, dtype: str, max_context: int, backend: str, further: Sequence[str]) -> list[str]:
    """Arguments of `vllm serve` for an engine that trains: `model` is a folder or a hub name, `backend` how new weights
    come (`shared_memory`, `nccl`)."""
    return ["--model", model, "--served-model-name", SERVED_NAME, "--dtype", dtype, "--max-model-len", str(max_context),
            "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
            "--weight-transfer-config", json.dumps({"backend": backend}), *further]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on there now."""
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]
