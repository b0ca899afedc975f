"""The plan's numbers, worked out by hand, without a weight being made."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from agents.tiny import make_tiny_policy, tiny_config
from tests.trainers.runs import Parity, small_config
from trainers.config import LoraSettings
from trainers.plan import describe_model, plan
from trainers.settings import SettingsError

MODEL = LlamaConfig(vocab_size=1000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4,
                    num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
                    tie_word_embeddings=False)
# Embeddings and head 2 x 1000 x 1024; a layer: q and o 2 x 1024^2, k and v 2 x 1024 x 256, MLP 3 x 1024 x 2048, and two
# norms.
PARAMETERS = 2 * 1000 * 1024 + 4 * (2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 2048 + 2 * 1024) + 1024


@pytest.fixture
def folder(tmp_path):
    """A model's folder with its config and no weights."""
    MODEL.save_pretrained(tmp_path)
    return str(tmp_path)


def rows(path, **sections):
    return dict(plan(small_config(**{"model": {"path": path}} | sections)))


def gib(text):
    return float(text.removesuffix(" GiB").replace(",", ""))


def test_the_numbers_are_those_worked_out_by_hand(folder):
    found = rows(folder, rollout={"tasks_per_step": 8, "group_size": 4, "concurrency": 512, "max_response_tokens": 100},
                 optimizer={"epochs": 2, "minibatches": 3, "micro_batch_tokens": 65536}, run={"steps": 10},
                 evaluation={"episodes": 7, "split": "test"})
    assert found["episodes per step"] == "32 (8 tasks x 4)" and found["gradient steps"] == "60"
    assert found["evaluated problems"] == "7 of test"
    assert found["context"] == "2048 tokens, at most 100 in a response"
    assert found["parameters"] == f"{PARAMETERS / 1e6:,.1f} M (float32)"
    assert found["arithmetic per trained token"] == f"{6 * PARAMETERS / 1e9:,.3g} GFLOP"
    assert gib(found["  weights"]) == pytest.approx(PARAMETERS * 4 / 2**30, abs=0.005) == gib(found["  gradients"])
    assert gib(found["  AdamW"]) == pytest.approx(2 * PARAMETERS * 4 / 2**30, abs=0.005)
    # 512 rows x 2048 tokens x 4 layers x keys and values of 4 heads x 64 numbers x 4 bytes
    assert gib(found["  key-value cache, full"]) == 8.0 == 512 * 2048 * 4 * 2 * 4 * 64 * 4 / 2**30
    assert found["memory on top for sampling"] == "8.00 GiB"
    assert gib(found["memory in all, at most"]) == pytest.approx(8 + gib(found["memory in training"]), abs=0.02)
    parts = ("weights", "gradients", "AdamW", "activations of a micro-batch", "logits of a chunk")
    assert gib(found["memory in training"]) == pytest.approx(sum(gib(found[f"  {name}"]) for name in parts), abs=0.03)


def test_ranks_share_weights_gradients_and_moments_and_gather_what_computes(folder):
    one, eight = rows(folder), rows(folder, run={"steps": 1, "ranks": 8})
    assert "memory in training" in one and "memory of each of 8 ranks" in eight
    assert gib(eight["  weights"]) == pytest.approx(gib(one["  weights"]) / 8, abs=0.006)
    assert gib(eight["  AdamW"]) == pytest.approx(gib(one["  AdamW"]) / 8, abs=0.006)
    # Embeddings, head and last norm, and two layers, whole
    outside, layer = 2 * 1000 * 1024 + 1024, 2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 2048 + 2 * 1024
    assert gib(eight["  weights gathered to compute"]) == pytest.approx((outside + 2 * layer) * 4 / 2**30, abs=0.006)
    assert gib(eight["  gradients"]) == pytest.approx(
        gib(one["  gradients"]) / 8 + (outside + layer) * 4 / 2**30, abs=0.006)
    assert gib(eight["  weights that are sampled from"]) == gib(one["  weights"])
    assert eight["  activations of a micro-batch"] == one["  activations of a micro-batch"]


@pytest.mark.parametrize("engine, copies", [({}, 1), ({"name": "vllm"}, 0), ({"name": "vllm", "transfer": "nccl"}, 1)])
def test_rollouts_beside_the_learner_have_a_copy_of_the_weights_unless_servers_read_a_file(engine, copies, folder):
    found = rows(folder, rollout={"max_staleness": 1}, engine=engine)
    assert gib(found.get("  weights that are sampled from", "0 GiB")) == copies * gib(found["  weights"])


def test_layers_computed_again_keep_their_inputs_alone_and_autocast_halves_what_is_kept(folder):
    plans = [rows(folder, optimizer={"micro_batch_tokens": 65536, "gradient_checkpointing": again},
                  model={"path": folder, "autocast": autocast})
             for again, autocast in ((False, False), (True, False), (False, True))]
    whole, again, halved = (gib(found["  activations of a micro-batch"]) for found in plans)
    # Of one layer 12 x 1024 + 4 x 2048 numbers a token, and of each of 4 its input
    one = 65536 * (12 * 1024 + 4 * 2048) * 4 / 2**30
    assert whole == pytest.approx(4 * one, abs=0.01) == 2 * halved
    assert again == pytest.approx(one + 4 * 65536 * 1024 * 4 / 2**30, abs=0.01)
    assert plans[1]["arithmetic per trained token"] == f"{8 * PARAMETERS / 1e9:,.3g} GFLOP"


def test_half_the_bytes_take_half_the_memory_and_a_reference_takes_more(folder):
    whole, half = rows(folder), rows(folder, model={"path": folder, "dtype": "bfloat16"})
    for name in ("  AdamW", "  activations of a micro-batch"):
        assert gib(half[name]) == pytest.approx(gib(whole[name]) / 2, abs=0.006)
    assert half["parameters"].endswith("(bfloat16)")
    both = rows(folder, algorithm={"kl_coefficient": 0.1})
    assert both["models beside the policy"] == "reference"
    assert gib(both["  weights"]) == pytest.approx(2 * gib(whole["  weights"]), abs=0.01)


def test_the_context_is_the_shorter_of_the_asked_and_the_possible(folder):
    for asked, context in ((None, 2048), (512, 512), (4096, 2048)):
        sections = {"rollout": {"max_context_tokens": asked}} if asked else {}
        assert rows(folder, **sections)["context"].startswith(f"{context} tokens")


def test_refills_are_announced(folder):
    assert rows(folder, algorithm={"name": "DAPO", "max_generation_batches": 5})["sampled at most per step"] == \
        "40 episodes"


def test_a_model_that_is_not_here_has_unknown_memory():
    found = rows("nobody/no-such-model")
    assert found["memory"] == "unknown: the config of nobody/no-such-model is not on this machine"
    assert found["gradient steps"] == "2"


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    AutoConfig.for_model("t5", d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="a t5 model is no causal language model"):
        rows(str(tmp_path))


def test_no_weights_are_made(folder, monkeypatch):
    devices = []
    whole = torch.nn.Parameter.__new__
    monkeypatch.setattr(torch.nn.Parameter, "__new__", lambda cls, data=None, requires_grad=True: (
        devices.append(data.device.type), whole(cls, data, requires_grad))[1])
    rows(folder)
    rows("tiny")
    assert set(devices) == {"meta"}


def test_a_tiny_policy_has_the_parameters_that_are_counted():
    policy = make_tiny_policy(Parity(), ["a b c"], vocabulary=300, hidden_size=32, layers=2)
    counted = describe_model(tiny_config(len(policy.tokenizer), 32, 2), LoraSettings())
    assert counted.parameters == counted.trainable == sum(p.numel() for p in policy.model.parameters())


def test_adapters_alone_have_gradients_and_the_reference_is_the_model_without_them():
    # One layer of 32, its feed-forward of 80: q, k, v, o 4 * 2 * (32 + 32); gate, up, down 3 * 2 * (32 + 80) at rank 2.
    model = tiny_config(300, 32, 1)
    assert describe_model(model, LoraSettings(rank=2)).trainable == 512 + 672
    assert describe_model(model, LoraSettings(rank=2, targets=("q_proj",))).trainable == 128
    with pytest.raises(SettingsError, match=r"model.lora.targets \['q_porj'\]"):
        describe_model(model, LoraSettings(rank=2, targets=("q_porj",)))
    whole, adapters = (rows("tiny", model={"lora": {"rank": rank}}, algorithm={"kl_coefficient": 0.1})
                       for rank in (0, 2))
    assert whole["models beside the policy"] == "reference" and "models beside the policy" not in adapters
    assert adapters["parameters of the adapters"] == "0.0 M" and "parameters of the adapters" not in whole
