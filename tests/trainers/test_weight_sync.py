"""Training on servers: they have the learner's weights at each step, or the run says at once that they have not."""

import copy
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
import torch

from agents.adapters import add_adapter
from agents.engine import EngineError, Request
from agents.models import load_policy
from agents.rollout import RolloutError
from agents.transformers_engine import TransformersEngine
from agents.vllm_engine import VLLMEngine
from agents.vllm_replica import ServerReplica
from agents.weight_transfer import AdapterTransfer, SharedMemoryTransfer
from tests.agents.chat_server import Reply, failed
from tests.agents.fake_vllm import GENERATE, FakeVLLM, interpreter, serving_vllm
from tests.agents.policies import generate, logprobs_alone, random_ids, random_policy
from tests.trainers.runs import Recorder, go_on, rows, small_config, start, task_keys, weights
from trainers import engines
from trainers.loop import train
from trainers.run import Run
from trainers.transcripts import read_trajectories
from trainers.weight_sync import WeightSync, WeightSyncError


def served(folder, **sections):
    """Settings of a run on two servers that are started for it."""
    return {"engine": {"name": "vllm", "replicas": 2, "python": interpreter(folder)}, "model": {"head_size": 32},
            **sections}


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_training_on_servers_is_training_on_the_learners_own_weights(tmp_path):
    before = children()
    start(tmp_path / "own", run={"steps": 3}, model={"head_size": 32})
    start(tmp_path / "served", run={"steps": 3}, **served(tmp_path))
    assert children() == before
    # Servers sum in another order, so that last bits differ; the sampled tokens were the same.
    assert torch.allclose(weights(tmp_path / "own"), weights(tmp_path / "served"), rtol=0, atol=1e-4)
    for step, row in enumerate(rows(tmp_path / "served"), 1):
        assert row["step"] == step and row["sync_gap"] < 1e-5 and row["logprob_gap"] < 1e-5
    versions = {(row["step"], turn["weight_version"]) for row in rows(tmp_path / "served", "trajectories")
                for turn in row["turns"]}
    assert versions == {(1, 0), (2, 1), (3, 2)}


@pytest.mark.parametrize("keep_cache", [True, False])
def test_servers_go_on_beside_the_learner_and_each_token_is_of_the_weights_that_it_names(keep_cache, tmp_path):
    start(tmp_path / "run", run={"steps": 6, "save_every": 1, "keep_checkpoints": 6}, environment={"tasks": 50},
          rollout={"max_staleness": 2, "keep_cache": keep_cache}, **served(tmp_path))
    found = rows(tmp_path / "run")
    assert len(found) == 6 and all(row["groups_kept"] == 2 and row["staleness_max"] <= 2 for row in found)
    assert all(row["sync_gap"] < 1e-5 for row in found) and found[0]["logprob_gap"] < 1e-5
    assert len(set(task_keys(tmp_path / "run"))) == 12
    folders = [tmp_path / "run" / "initial", *sorted(tmp_path.glob("run/checkpoints/*"))]
    policies = [load_policy(str(folder)) for folder in folders]
    versions = set()
    for trajectory in read_trajectories(tmp_path / "run" / "trajectories.jsonl"):
        for turn in trajectory.turns:
            begin = 0
            for version, end in turn.weight_versions or [(turn.weight_version, len(turn.response_ids))]:
                expected = logprobs_alone(policies[version], turn.prompt_ids, turn.response_ids)
                assert np.abs(turn.logprobs - expected)[begin:end].max() < 1e-4
                versions.add(version)
                begin = end
    assert len(versions) > 3


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_goes_on_when_a_server_dies_in_the_middle_of_a_step(max_staleness, tmp_path, monkeypatch):
    died = tmp_path / "died"
    died.touch()
    monkeypatch.setenv("FAKE_VLLM_DIES_AT", "12")  # of 8 episodes of 2 turns a step, on two servers: in the second
    monkeypatch.setenv("FAKE_VLLM_DIED", str(died))
    start(tmp_path / "run", run={"steps": 3}, rollout={"max_staleness": max_staleness}, **served(tmp_path))
    assert died.read_text() == "yes"
    assert [(row["step"], row["dropped_groups"]) for row in rows(tmp_path / "run")] == [(1, 0), (2, 0), (3, 0)]
    assert all(row["logprob_gap"] < 1e-5 for row in rows(tmp_path / "run") if not row["staleness_max"])


@pytest.fixture
def tiny(tmp_path):
    """A policy's folder, and the settings of runs that start from it."""
    start(tmp_path / "first", run={"steps": 1})
    return tmp_path / "first" / "initial"


def on_server(folder, tiny, url, **sections):
    """A run on a server that is there already."""
    engine = {"name": "vllm", "servers": [url], **sections.pop("engine", {})}
    return Run.create(folder, small_config(model={"path": str(tiny)}, engine=engine, **sections))


class Breaking(Recorder):
    """After the first step, `broken` is set."""

    def __init__(self):
        super().__init__()
        self.broken = threading.Event()

    def advance(self, metrics):
        super().advance(metrics)
        self.broken.set()


@pytest.mark.parametrize("bad", [failed(500), Reply(body=b"garbage"), Reply(hang_up=True),
                                 Reply(body=b'{"choices": [', missing=50)])
def test_a_server_that_fails_for_good_ends_the_run_with_a_checkpoint_and_no_false_reward(bad, tiny, tmp_path,
                                                                                         monkeypatch):
    monkeypatch.setattr(engines, "ServerReplica", partial(ServerReplica, patience=0.0))
    display = Breaking()

    def fault(_, path, body):
        sampling = path == GENERATE and "prompt_logprobs" not in body["sampling_params"]
        return bad if sampling and display.broken.is_set() else None
    with serving_vllm(load_policy(str(tiny)), fault) as server:
        run = on_server(tmp_path / "run", tiny, server.url, run={"steps": 3}, rollout={"retries": 0})
        with pytest.raises(RolloutError, match=r"(?s)all 2 groups failed.*error_engine"):
            train(run, display)
        assert [path.name for path in run.checkpoints] == ["step-000001"]
        assert [row["step"] for row in rows(tmp_path / "run")] == [1]
        display.broken.clear()
        go_on(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight",
                                  "model.norm.weight"])
def test_a_sync_that_spoils_a_tensor_is_seen_at_once(name, tiny, tmp_path, monkeypatch):
    display, prepare = Breaking(), SharedMemoryTransfer.prepare

    def spoiling(self, weights, version):
        weights = dict(weights)
        if version == 1:
            weights[name] = weights[name] + 0.05 * torch.randn_like(weights[name])
        prepare(self, weights, version)
    monkeypatch.setattr(SharedMemoryTransfer, "prepare", spoiling)
    with serving_vllm(load_policy(str(tiny))) as server:
        run = on_server(tmp_path / "run", tiny, server.url, run={"steps": 3})
        with pytest.raises(WeightSyncError, match=r"after weights 1 were sent.*more than engine.gap_limit = 0.0001"):
            train(run, display)
    assert [path.name for path in run.checkpoints] == ["step-000001"]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]


def test_training_an_adapter_on_servers_is_training_it_on_the_learners_own_weights(tmp_path):
    model = {"head_size": 32, "lora": {"rank": 2}}
    start(tmp_path / "own", run={"steps": 3}, model=model)
    start(tmp_path / "served", run={"steps": 3}, **served(tmp_path, model=model))
    assert torch.allclose(weights(tmp_path / "own"), weights(tmp_path / "served"), rtol=0, atol=1e-4)
    assert all(row["sync_gap"] < 1e-5 and row["logprob_gap"] < 1e-5 for row in rows(tmp_path / "served"))


def test_a_lost_adapter_is_loaded_again_and_one_that_does_not_arrive_is_seen(monkeypatch):
    base, prompt = random_policy(), random_ids(np.random.default_rng(0), 8)
    policy = replace(base, model=copy.deepcopy(base.model))
    add_adapter(policy.model, rank=2, alpha=16.0)

    def learn():
        with torch.no_grad():
            for parameter in filter(lambda one: one.requires_grad, policy.model.parameters()):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    learn()
    with serving_vllm(base) as server, closing(
            VLLMEngine([ServerReplica(url=server.url)], base.end_ids, max_context=128,
                       transfer=AdapterTransfer(policy))) as engine:
        engine.connect()
        sync = WeightSync(engine, policy, gap_limit=1e-4)
        assert sync.gap() > 1e-2, "the base model is another"
        assert sync(1)["sync_gap"] < 1e-5
        server.adapted = None
        (found,) = generate(engine, Request(prompt_ids=prompt, max_new_tokens=8))
        assert np.abs(found.logprobs - logprobs_alone(policy, prompt, found.response_ids)).max() < 1e-4
        learn()
        monkeypatch.setattr(server, "load_adapter", lambda folder: None)
        with pytest.raises(WeightSyncError):
            sync(2)
        assert "/update_weights" not in server.paths


def test_weights_that_do_not_arrive_are_seen_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeVLLM, "update", lambda *_, **__: None)
    policy = load_policy(str(tiny))
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.01)
    with serving_vllm(policy) as server, pytest.raises(WeightSyncError, match="differ by"):
        train(on_server(tmp_path / "run", tiny, server.url), Recorder())


def test_a_growing_gap_is_an_alarm_before_it_ends_the_run(tiny, monkeypatch):
    policy = load_policy(str(tiny))
    engine = TransformersEngine(policy)
    sync = WeightSync(engine, policy, gap_limit=1e-4)
    assert sync(0)["sync_gap"] == 0.0
    monkeypatch.setattr(sync, "gap", lambda: 6e-5)
    with pytest.warns(UserWarning, match="differ by 6e-05 nats a token"):
        assert sync(1)["sync_gap"] == 6e-5
    for gap in (2e-4, float("nan"), float("inf")):
        monkeypatch.setattr(sync, "gap", lambda: gap)  # noqa: B023 (called at once)
        with pytest.raises(WeightSyncError):
            sync(2)


def test_a_failing_sync_ends_the_run_with_a_checkpoint(tiny, tmp_path):
    display = Breaking()
    with serving_vllm(load_policy(str(tiny)), lambda _, path, body: failed(500, "no memory") if display.broken.is_set()
                      and path == "/update_weights" else None) as server:
        run = on_server(tmp_path / "run", tiny, server.url, run={"steps": 3})
        with pytest.raises(EngineError, match=r"version 1 did not reach every replica.*answers 500: 'no memory'"):
            train(run, display)
    assert [path.name for path in run.checkpoints] == ["step-000001"]


def test_no_server_no_run(tmp_path):
    with pytest.raises(EngineError, match="ended while it started"):
        start(tmp_path / "run", engine={"name": "vllm", "python": "/bin/false"}, model={"head_size": 32})


def test_an_engine_of_the_learners_own_weights_needs_no_check(tmp_path):
    start(tmp_path / "run")
    assert all("sync_gap" not in row for row in rows(tmp_path / "run"))
