"""Adapters: a new one changes nothing, it alone is trained, and the engine samples from what the learner trains."""

import json
import shutil

import numpy as np
import pytest
import torch

from agents.adapters import add_adapter, has_adapter, merge_adapter, plain_weights, without_adapter
from agents.engine import Request
from agents.models import ModelError, Policy, load_adapter, load_policy
from agents.scoring import score_sequences
from agents.transformers_engine import TransformersEngine
from tests.agents.policies import generate, random_ids, random_policy

IDS = [random_ids(np.random.default_rng(0), 20)]


def adapted(family: str = "llama", scale: float = 0.3, **options) -> Policy:
    """A policy with an adapter that matters."""
    policy = random_policy(family)
    add_adapter(policy.model, **{"rank": 4, "alpha": 8.0, **options})
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return policy


def scores(policy: Policy) -> np.ndarray:
    return score_sequences(policy.model, IDS)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_a_new_adapter_changes_nothing_and_alone_is_trained(family):
    policy = random_policy(family)
    before = scores(policy)
    add_adapter(policy.model, rank=4, alpha=8.0)
    np.testing.assert_array_equal(scores(policy), before)
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in policy.model.named_parameters() if ".lora_" in name} != set()
    assert not any("lm_head" in name for name in trained)


def test_a_new_adapter_depends_on_its_seed_alone():
    one, same, other = (random_policy(seed=1) for _ in range(3))
    for policy, seed in ((one, 3), (same, 3), (other, 4)):
        torch.rand(1)
        add_adapter(policy.model, rank=4, alpha=8.0, seed=seed)
    state = torch.random.get_rng_state()
    add_adapter(random_policy().model, rank=4, alpha=8.0)
    assert torch.equal(state, torch.random.get_rng_state())
    for (name, a), b, c in zip(one.model.named_parameters(), same.model.parameters(), other.model.parameters()):
        assert torch.equal(a, b) and torch.equal(a, c) == ("lora_A" not in name)


def test_adapters_of_a_model_in_bfloat16_are_in_float32():
    policy = random_policy()
    policy.model.bfloat16()
    add_adapter(policy.model, rank=4, alpha=8.0)
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}
    assert policy.model.dtype == torch.bfloat16 and np.isfinite(scores(policy)).all()


def test_an_adapter_in_float32_of_a_model_in_bfloat16_comes_back_as_it_was(tmp_path):
    policy = random_policy()
    policy.model.bfloat16()
    add_adapter(policy.model, rank=4, alpha=8.0, base="some/model")
    policy.save(tmp_path)
    again = random_policy()
    again.model.bfloat16()
    load_adapter(again.model, tmp_path)
    assert all(torch.equal(a, b) and a.dtype == b.dtype
               for a, b in zip(policy.model.parameters(), again.model.parameters()))
    assert again.model.peft_config["default"].base_model_name_or_path == "some/model"


def test_only_the_layers_named_get_one_and_an_unknown_name_is_refused():
    policy = random_policy()
    add_adapter(policy.model, rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    names = {name.split(".lora_")[0].split(".")[-1] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match="q_porj"):
        add_adapter(random_policy().model, rank=4, alpha=8.0, targets=("q_porj",))


def test_without_its_adapter_a_model_is_what_it_was():
    policy, base = adapted(), random_policy()
    assert np.abs(scores(policy) - scores(base)).max() > 0.5
    changed = scores(policy)
    with without_adapter(policy.model):
        np.testing.assert_array_equal(scores(policy), scores(base))
    np.testing.assert_array_equal(scores(policy), changed)
    with pytest.raises(IndexError), without_adapter(policy.model):
        score_sequences(policy.model, [np.array([10**6])])
    np.testing.assert_array_equal(scores(policy), changed)
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.model.named_parameters())


def test_the_engine_samples_from_the_adapted_model():
    policy = adapted()
    engine = TransformersEngine(policy, slots=2)
    (answer,) = generate(engine, Request(prompt_ids=IDS[0], max_new_tokens=8, seed=1))
    whole = np.concatenate([IDS[0], answer.response_ids])
    np.testing.assert_allclose(answer.logprobs, score_sequences(policy.model, [whole])[0][20:], atol=1e-4)
    with without_adapter(policy.model):
        assert np.abs(answer.logprobs - score_sequences(policy.model, [whole])[0][20:]).max() > 0.1


def test_an_engine_with_a_model_of_its_own_gets_the_adapter_with_the_weights():
    policy, engine = adapted(), TransformersEngine(random_policy(seed=7), slots=2)
    engine.load(plain_weights(policy.model), version=1)
    np.testing.assert_allclose(engine.score(IDS)[0], scores(policy), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_merged_adapter_leaves_a_plain_model_that_says_the_same(family):
    policy = adapted(family)
    before = scores(policy)
    merge_adapter(policy.model)
    np.testing.assert_allclose(scores(policy), before, atol=2e-4)
    assert not has_adapter(policy.model) and all(p.requires_grad for p in policy.model.parameters())
    assert policy.model.state_dict().keys() == random_policy(family).model.state_dict().keys()
    add_adapter(policy.model, rank=2, alpha=4.0)  # and can have another one
    np.testing.assert_allclose(scores(policy), before, atol=2e-4)


@pytest.fixture
def saved(tmp_path):
    """A base model, and beside it an adapter that names it by a relative path."""
    policy = adapted(base="../base")
    random_policy().save(tmp_path / "run" / "base")
    policy.save(tmp_path / "run" / "adapter")
    return tmp_path, policy


def test_a_saved_adapter_is_small_and_is_loaded_as_part_of_its_model(saved, monkeypatch):
    folder, policy = saved
    assert not (folder / "run" / "adapter" / "model.safetensors").exists()
    shutil.move(folder / "run", folder / "moved")
    monkeypatch.chdir(folder / "moved")
    for path in ("adapter", str(folder / "moved" / "adapter")):
        loaded = load_policy(path)
        assert not has_adapter(loaded.model)
        np.testing.assert_allclose(scores(loaded), scores(policy), atol=2e-4)


def test_an_adapter_is_trained_further_from_the_very_same_weights(saved):
    folder, policy = saved
    again = load_policy(str(folder / "run" / "base"))
    load_adapter(again.model, folder / "run" / "adapter")
    ours, theirs = (dict(one.model.named_parameters()) for one in (policy, again))
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]) and parameter.requires_grad == theirs[name].requires_grad
        assert parameter.dtype == theirs[name].dtype
    np.testing.assert_array_equal(scores(again), scores(policy))


def test_what_is_wrong_with_an_adapter_is_said(saved):
    folder = saved[0] / "run" / "adapter"
    shutil.rmtree(saved[0] / "run" / "base")
    with pytest.raises(ModelError, match="no model folder"):
        load_policy(str(folder))
    random_policy(num_hidden_layers=1).save(saved[0] / "run" / "base")
    with pytest.raises(ModelError, match=r"another model's: \d+ weights do not fit"):
        load_policy(str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not say what model"):
        load_policy(str(folder))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        load_policy(str(folder))
