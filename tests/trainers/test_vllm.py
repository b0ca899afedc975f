"""A real vLLM server: exact on the CPU in float32, no further from the learner than a fresh server in bfloat16.

`make test-vllm` makes an environment that has vLLM for the CPU, names its interpreter in TURNGYM_VLLM_PYTHON, and runs
these. TURNGYM_SMALL_MODEL names the folder or GGUF file of a small pretrained model (docs/engines.md says of which).
"""

import asyncio
import os
import sys
from contextlib import closing

import httpx
import numpy as np
import psutil
import pytest
import torch

from agents.adapters import add_adapter
from agents.engine import Request
from agents.models import Policy, load_policy
from agents.scoring import score_sequences
from agents.vllm_engine import VLLMEngine
from agents.vllm_in_process import InProcessReplica
from agents.vllm_replica import ADAPTER_NAME, ServerReplica
from agents.vllm_server import VLLMServer, engine_arguments
from agents.weight_transfer import AdapterTransfer, SharedMemoryTransfer
from tests.agents.policies import generate, logprobs_alone, random_ids, random_policy
from tests.trainers.runs import Recorder, rows
from trainers.config import build_config
from trainers.engines import connected
from trainers.loop import train
from trainers.run import Run
from trainers.weight_sync import WeightSync, WeightSyncError

PYTHON, SMALL_MODEL = os.environ.get("TURNGYM_VLLM_PYTHON"), os.environ.get("TURNGYM_SMALL_MODEL")
FURTHER = ["--enforce-eager", "--max-num-seqs", "32"]
pytestmark = [pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-vllm"), pytest.mark.timeout(1800)]
IN_PROCESS = pytest.mark.skipif(sys.executable != PYTHON, reason="needs vLLM in this interpreter: make test-vllm")


@pytest.fixture(autouse=True, scope="module")
def small_cache():
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    yield
    del os.environ["VLLM_CPU_KVCACHE_SPACE"]


def engine_for(policy: Policy, folder, dtype="float32"):
    policy.save(folder / "model")
    arguments = engine_arguments(str(folder / "model"), dtype=dtype, max_context=128, backend="shared_memory",
                                 further=FURTHER)
    server = VLLMServer(arguments, folder / "log", python=PYTHON)
    return connected(VLLMEngine([ServerReplica(server)], policy.end_ids, max_context=128,
                                transfer=SharedMemoryTransfer(getattr(torch, dtype))))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, tmp_path_factory):
    """An engine over a real server, and a policy like the one that it began with."""
    policy = random_policy(tie_word_embeddings=request.param, head_dim=32, num_attention_heads=4, hidden_size=128)
    engine = engine_for(policy, tmp_path_factory.mktemp("vllm"))
    yield engine, policy
    engine.close()
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE]
    assert not any("vllm.entrypoints" in line or line.startswith("VLLM::") for line in left)


def renewed(policy: Policy, seed: int) -> Policy:
    """The policy with other weights."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in filter(lambda one: one.requires_grad, policy.model.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def test_log_probabilities_are_those_of_the_model_at_the_sampling_temperature(served):
    engine, policy = served
    WeightSync(engine, policy, gap_limit=1e-4)(engine.weight_version + 1)
    rng = np.random.default_rng(0)
    requests = [Request(prompt_ids=random_ids(rng, 5 + seed), max_new_tokens=12, temperature=temperature, seed=seed,
                        stop=("a",)) for seed in range(4) for temperature in (0.0, 0.5, 1.0)]
    for request, found in zip(requests, generate(engine, *requests)):
        expected = logprobs_alone(policy, request.prompt_ids, found.response_ids, request.temperature or 1.0)
        assert len(found.response_ids) and np.abs(found.logprobs - expected).max() < 1e-4
        text = policy.tokenizer.decode(found.response_ids)
        ended = int(found.response_ids[-1]) in policy.end_ids or "a" in text
        reasons = {"stop"} if ended else {"length"}
        if len(found.response_ids) == request.max_new_tokens:  # vLLM looks at the length first
            reasons.add("length")
        assert found.finish_reason in reasons and "a" not in policy.tokenizer.decode(found.response_ids[:-1])


def test_equal_seeds_give_equal_responses_and_others_do_not(served):
    engine = served[0]
    prompt = random_ids(np.random.default_rng(1), 8)
    found = generate(engine, *(Request(prompt_ids=prompt, max_new_tokens=12, seed=seed) for seed in (1, 1, 2, 3)))
    texts = [tuple(one.response_ids) for one in found]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_new_weights_reach_every_tensor_and_no_cache_outlives_them(served):
    engine, policy = served
    sync = WeightSync(engine, policy, gap_limit=1e-4)
    prompt = random_ids(np.random.default_rng(2), 100)  # several blocks of the prefix cache
    for seed in range(3):
        version = engine.weight_version + 1
        assert sync.gap() < 1e-4 or seed == 0
        renewed(policy, seed)
        assert sync.gap() > 1e-2, "other weights are seen"
        assert sync(version)["sync_gap"] < 1e-4
        (found,) = generate(engine, Request(prompt_ids=prompt, max_new_tokens=8, seed=seed))
        assert found.weight_version == version
        assert np.abs(found.logprobs - logprobs_alone(policy, prompt, found.response_ids)).max() < 1e-4


@pytest.mark.parametrize("kind", ["spoilt", "part missing", "missing", "other version"])
def test_a_sync_that_went_wrong_is_seen_and_a_whole_one_heals_it(kind, served, monkeypatch):
    engine, policy = served
    sync, prepare = WeightSync(engine, policy, gap_limit=1e-4), SharedMemoryTransfer.prepare

    def spoil(self, weights, version):
        weights, layer = dict(weights), "model.layers.1.self_attn"
        if kind == "spoilt":
            weights[f"{layer}.v_proj.weight"] = weights[f"{layer}.v_proj.weight"] * 1.1
        elif kind == "part missing":  # vLLM holds queries', keys' and values' in one, and counts it as sent
            del weights[f"{layer}.v_proj.weight"]
        elif kind == "missing":
            del weights[f"{layer}.o_proj.weight"]
        prepare(self, weights, version + (kind == "other version"))
        self._version = str(version)
    sync(engine.weight_version + 1)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryTransfer, "prepare", spoil)
        if kind in ("spoilt", "part missing"):
            with pytest.raises(WeightSyncError):
                sync(engine.weight_version + 1)
        else:
            with pytest.raises(Exception, match="did not reach every replica"):
                sync(engine.weight_version + 1)
    assert sync(engine.weight_version + 1)["sync_gap"] < 1e-4


@pytest.mark.parametrize("keep_cache", [True, False])
def test_a_response_under_way_goes_on_with_the_new_weights(keep_cache, served, monkeypatch):
    engine, policy = served
    monkeypatch.setattr(engine, "_keep_cache", keep_cache)
    WeightSync(engine, policy, gap_limit=1e-4)(engine.weight_version + 1)
    prompt = random_ids(np.random.default_rng(3), 4)

    async def ask_and_load(seconds):
        asked = [asyncio.create_task(engine.generate(Request(prompt_ids=prompt, max_new_tokens=120, seed=seed)))
                 for seed in range(32)]
        await asyncio.sleep(seconds)
        engine.load(renewed(policy, 9).model.state_dict(), engine.weight_version + 1)
        return await asyncio.gather(*asked)
    for seconds in (0.3, 0.1, 0.6, 0.05, 1.2):  # until some responses are in their middle
        found = asyncio.run(ask_and_load(seconds))
        assert all(len(one.logprobs) == len(one.response_ids) for one in found)
        new = engine.weight_version
        if changed := [one for one in found if [version for version, _ in one.weight_versions] == [new - 1, new]]:
            break
    gaps = [np.abs(one.logprobs - logprobs_alone(policy, prompt, one.response_ids))[one.weight_versions[0][1] + 1:]
            for one in changed]
    assert changed and (np.concatenate(gaps).mean() < 1e-4) == (not keep_cache)


@IN_PROCESS
def test_in_this_process_it_is_the_same_engine(tmp_path):
    policy = random_policy(head_dim=32, num_attention_heads=4, hidden_size=128)
    policy.save(tmp_path / "model")
    arguments = engine_arguments(str(tmp_path / "model"), dtype="float32", max_context=128, backend="shared_memory",
                                 further=FURTHER)
    engine = VLLMEngine([InProcessReplica(arguments)], policy.end_ids, max_context=128, shares_gpu=True,
                        transfer=SharedMemoryTransfer(torch.float32))
    with closing(engine):
        engine.connect()
        sync, prompt = WeightSync(engine, policy, gap_limit=1e-4), random_ids(np.random.default_rng(2), 20)
        for version in (1, 2):
            assert sync(version)["sync_gap"] < 1e-4
            (found,) = generate(engine, Request(prompt_ids=prompt, max_new_tokens=8, temperature=0.5))
            expected = logprobs_alone(policy, prompt, found.response_ids, 0.5)
            assert found.weight_version == version and np.abs(found.logprobs - expected).max() < 1e-4
            engine.sleep()
            renewed(policy, version)


ROLLOUT = {"tasks_per_step": 2, "group_size": 4, "max_response_tokens": 24, "max_context_tokens": 512, "concurrency": 8}


def countdown(folder, **sections):
    return Run.create(folder, build_config({
        "environment": {"id": "turngym/Countdown-v0"}, "evaluation": {"episodes": 0}, "model": {"head_size": 32},
        "engine": {"name": "vllm", "python": PYTHON, "arguments": FURTHER},
        "rollout": ROLLOUT, "run": {"steps": 3, "log_trajectories": 100}, **sections}))


@pytest.fixture
def say(capsys):
    """Prints in spite of pytest."""
    def out(*parts):
        with capsys.disabled():
            print(*parts)
    return out


@pytest.mark.parametrize("lora", [0, 8], ids=["all weights", "adapter"])
def test_three_steps_on_countdown_with_a_tiny_policy(lora, tmp_path, say):
    train(countdown(tmp_path, warm_start={"steps": 20}, algorithm={"name": "RLOO"},
                    model={"head_size": 32, "lora": {"rank": lora}}), Recorder())
    found = rows(tmp_path)
    say(f"\ntiny, float32, adapters of rank {lora}: gap after each sync", [row["sync_gap"] for row in found],
        "of the tokens that train", [row["logprob_gap"] for row in found])
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(row["sync_gap"] < 1e-4 and row["logprob_gap"] < 1e-4 and not row["failed_episodes"] for row in found)
    assert {turn["weight_version"] for row in rows(tmp_path, "trajectories") for turn in row["turns"]
            if row["step"] == 3} == {2}


def test_three_steps_beside_the_rollouts(tmp_path, say):
    train(countdown(tmp_path, warm_start={"steps": 20}, algorithm={"name": "RLOO"},
                    rollout=ROLLOUT | {"max_staleness": 1}), Recorder())
    found = rows(tmp_path)
    say("\nbeside the learner: gap after each sync", [row["sync_gap"] for row in found], "oldest tokens",
        [row["staleness_max"] for row in found])
    assert [row["groups_kept"] for row in found] == [2, 2, 2]
    assert all(row["sync_gap"] < 1e-4 and row["staleness_max"] <= 1 and not row["failed_episodes"] for row in found)
    assert found[0]["logprob_gap"] < 1e-4


@pytest.fixture(params=["server", pytest.param("in process", marks=IN_PROCESS)])
def adapted(request, tmp_path):
    """An engine over a real replica, and a policy with an adapter on its weights."""
    policy = random_policy(head_dim=32, num_attention_heads=4, hidden_size=128)
    policy.save(tmp_path / "model")
    add_adapter(policy.model, rank=8, alpha=16.0, base=str(tmp_path / "model"))
    arguments = engine_arguments(str(tmp_path / "model"), dtype="float32", max_context=128, backend="shared_memory",
                                 further=[*FURTHER, "--enable-lora", "--max-lora-rank", "8"])
    replica = ServerReplica(VLLMServer(arguments, tmp_path / "log", python=PYTHON)) if request.param == "server" else \
        InProcessReplica(arguments)
    engine = connected(VLLMEngine([replica], policy.end_ids, max_context=128, transfer=AdapterTransfer(policy),
                                  shares_gpu=request.param == "in process"))
    with closing(engine):
        yield engine, policy


def test_an_adapter_is_renewed_in_place_and_a_stale_or_lost_one_is_found(adapted, monkeypatch):
    engine, policy = adapted
    sync, prompt = WeightSync(engine, policy, gap_limit=1e-4), random_ids(np.random.default_rng(2), 100)
    for version in (1, 2):
        renewed(policy, version)
        assert sync.gap() > 1e-2, "other weights are seen"
        assert sync(version)["sync_gap"] < 1e-4
        (found,) = generate(engine, Request(prompt_ids=prompt, max_new_tokens=8))
        assert found.weight_version == version
        assert np.abs(found.logprobs - logprobs_alone(policy, prompt, found.response_ids)).mean() < 1e-4
        engine.sleep()
        sync(version)
    if not engine.shares_gpu:
        answer = httpx.post(f"{engine.replicas[0].name}/v1/unload_lora_adapter", json={"lora_name": ADAPTER_NAME})
        assert answer.status_code == 200
        (found,) = generate(engine, Request(prompt_ids=prompt, max_new_tokens=8))
        assert np.abs(found.logprobs - logprobs_alone(policy, prompt, found.response_ids)).mean() < 1e-4
    monkeypatch.setattr(AdapterTransfer, "prepare", lambda *_: None)
    renewed(policy, 3)
    with pytest.raises(WeightSyncError):
        sync(3)


@pytest.mark.skipif(not SMALL_MODEL, reason="TURNGYM_SMALL_MODEL names no model")
def test_three_steps_with_a_pretrained_model_stay_as_close_as_a_fresh_server(tmp_path, say):
    run = countdown(tmp_path / "run", model={"path": SMALL_MODEL, "dtype": "bfloat16"}, algorithm={"name": "RLOO"},
                    optimizer={"learning_rate": 1e-5}, run={"steps": 3, "save_every": 1, "keep_checkpoints": 3})
    train(run, Recorder())
    gaps = [row["sync_gap"] for row in rows(tmp_path / "run")]
    policy = load_policy(str(run.checkpoints[1]), dtype="bfloat16")  # what the last step was sampled with
    engine = engine_for(policy, tmp_path, dtype="bfloat16")
    with closing(engine):
        fresh = WeightSync(engine, policy, gap_limit=1.0).gap()
    say("\npretrained, bfloat16: gap after each sync", gaps, "of a server freshly started on the last of these", fresh)
    assert gaps[-1] < fresh + 1e-3  # the same sums: equal where it was written
    assert np.abs(score_sequences(policy.model, [random_ids(np.random.default_rng(0), 9)])[0]).max() > 0
