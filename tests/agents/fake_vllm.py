"""A small server that speaks vLLM's token API over a policy of transformers: for what real ones do too seldom, fail.

As a process it takes vLLM's arguments:

    python -m tests.agents.fake_vllm --model FOLDER --port N
"""

import argparse
import copy
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from agents.models import Policy, load_adapter, load_policy
from agents.scoring import score_sequences
from agents.transformers_engine import sample
from agents.vllm_replica import ADAPTER_NAME
from tests.agents.chat_server import ChatServer, Reply
from tests.http_servers import running

GENERATE = "/inference/v1/generate"


def json_reply(value, status=200):
    return Reply(status=status, body=json.dumps(value).encode())


class FakeVLLM(ChatServer):
    """`fault(number, path, body)` may answer a request in place of the server; None leaves it to the server."""

    def __init__(self, policy: Policy, fault=lambda number, path, body: None, port: int = 0):
        super().__init__(None, port)
        self.policy, self.fault = policy, fault
        self.version, self.mode = "default", "processed_logprobs"
        self.adapted: Policy | None = None
        self.model_lock, self.go_on = threading.Lock(), threading.Event()
        self.go_on.set()

    @property
    def url(self):
        return super().url.removesuffix("/v1")

    @property
    def generated(self):
        return self.paths.count(GENERATE)

    def reply(self, number, path, body):
        found = self.fault(number, path, body)
        if found is not None:
            return found
        name = path.partition("?")[0]
        if name == GENERATE:
            policy = self.adapted if body["model"] == ADAPTER_NAME else self.policy
            return json_reply(self.generate(policy, body)) if policy else json_reply({"detail": "no such model"}, 404)
        if name == "/v1/models":
            return json_reply({"data": [{"id": "policy", "max_model_len": self.policy.max_context}]})
        if name == "/server_info":
            return json_reply({"vllm_config": {"model_config": {"logprobs_mode": self.mode}}})
        if name == "/pause":
            self.go_on.clear()
        elif name == "/resume":
            self.go_on.set()
        elif name == "/update_weights":
            self.update(**body["update_info"])
        elif name == "/v1/load_lora_adapter":
            self.load_adapter(body["lora_path"])
        elif name == "/update_weight_version":
            self.version = body["new_version"]
        elif name == "/weight_info":
            return json_reply({"weight_version": self.version})
        elif name not in ("/health", "/start_weight_update", "/finish_weight_update", "/sleep", "/wake_up"):
            return json_reply({"detail": "Not Found"}, 404)
        return json_reply({})

    def update(self, path, version):
        own = self.policy.model.state_dict()
        with self.model_lock, safe_open(path, framework="pt") as file, torch.no_grad():
            assert file.metadata()["version"] == version
            for name in file.keys():  # noqa: SIM118
                own[name].copy_(file.get_tensor(name))

    def load_adapter(self, folder):
        self.adapted = replace(self.policy, model=copy.deepcopy(self.policy.model))
        load_adapter(self.adapted.model, folder)

    @torch.no_grad()
    def generate(self, policy, body):
        """Samples as `TransformersEngine` does."""
        prompt, wanted = body["token_ids"], body["sampling_params"]
        ids, logprobs, versions, reason = [], [], [], "length"
        while len(ids) < wanted["max_tokens"] and reason == "length" and self.go_on.wait(30):
            with self.model_lock:
                if not self.go_on.is_set():
                    continue
                versions.append(self.version)
                logits = policy.model(input_ids=torch.tensor([prompt + ids])).logits[:, -1]
            (token,), (logprob,) = sample(logits, [wanted["temperature"]], [wanted.get("seed", 0)], [len(ids)])
            ids.append(token)
            logprobs.append(logprob)
            text = policy.tokenizer.decode(ids)
            if token in wanted.get("stop_token_ids", ()) or any(stop in text for stop in wanted.get("stop", ())):
                reason = "stop"
        scored = None
        if "prompt_logprobs" in wanted:
            found = score_sequences(policy.model, [np.array(prompt)])[0].tolist()
            scored = [None, *({str(i): {"logprob": one}} for i, one in zip(prompt[1:], found[1:]))]
        content = [{"token_id": i, "logprob": one, "rank": 1} for i, one in zip(ids, logprobs)]
        return {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason,
                             "weight_versions": spans(versions)}],
                "prompt_logprobs": scored}


def spans(versions):
    """Of the tokens that were sampled with these."""
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    return [{"version": versions[start], "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], len(versions)])]


def serving_vllm(policy, fault=lambda number, path, body: None):
    return running(FakeVLLM(policy, fault))


def interpreter(folder: Path) -> str:
    """A program that stands in for the interpreter that has vLLM: it starts this server instead of vLLM's."""
    script, root = folder / "python", Path(__file__).parents[2]
    command = f'exec env PYTHONPATH={root} {sys.executable} -m tests.agents.fake_vllm "$@"'
    script.write_text(f"#!/bin/sh\nshift 3\n{command}\n")
    script.chmod(0o755)
    return str(script)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    die_at, died = int(os.environ.get("FAKE_VLLM_DIES_AT", 0)), Path(os.environ.get("FAKE_VLLM_DIED", "/dev/null"))

    def fault(number, path, body):
        if die_at and server.generated == die_at and died.read_text() == "":
            died.write_text("yes")
            os.kill(os.getpid(), signal.SIGKILL)

    server = FakeVLLM(load_policy(arguments.model), fault, arguments.port)
    server.serve_forever()


if __name__ == "__main__":
    main()
