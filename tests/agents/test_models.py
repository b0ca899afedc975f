"""Loading policies: whole models load as they were saved, and everything else is refused with a reason."""

import json
import re
import time

import gguf
import pytest
import torch

from agents.models import ModelError, Policy, find_model, load_policy
from tests.agents.policies import TEXTS, random_policy


@pytest.fixture
def folder(tmp_path):
    random_policy().save(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_loaded_with_dropout_off(folder):
    policy = load_policy(str(folder), device="cpu")
    assert not policy.model.training
    assert all(module.attention_dropout == 0 for module in policy.model.modules()
               if hasattr(module, "attention_dropout"))
    assert all(module.p == 0 for module in policy.model.modules() if isinstance(module, torch.nn.Dropout))
    assert policy.max_context == 128


def test_training_mode_does_not_bring_dropout_back(folder):
    policy, ids = load_policy(str(folder), device="cpu"), torch.arange(5, 15)[None]
    expected = policy.model(input_ids=ids).logits
    policy.model.train()
    torch.testing.assert_close(policy.model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_have_the_type_that_was_asked_for(folder, dtype):
    assert load_policy(str(folder), dtype=dtype, device="cpu").model.dtype == getattr(torch, dtype)


def test_every_end_token_of_tokenizer_and_generation_config_counts(folder):
    policy = load_policy(str(folder), device="cpu")
    assert policy.end_ids == {policy.tokenizer.eos_token_id}
    policy.model.generation_config.eos_token_id = [7, 9]
    assert policy.end_ids == {7, 9, policy.tokenizer.eos_token_id}
    policy.model.generation_config.eos_token_id = 7
    assert policy.end_ids == {7, policy.tokenizer.eos_token_id}


def test_a_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_policy("~/model", device="cpu").max_context == 128


@pytest.mark.parametrize("path", ["./nothing", "/nowhere/model", "~/nothing", "/nowhere/model.gguf", "../up.gguf"])
def test_a_missing_model_is_named(path):
    with pytest.raises(ModelError, match=f"no (model folder|GGUF file) {path}"):
        load_policy(path)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    with pytest.raises(ModelError, match="no model folder"):
        load_policy(str(file))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF of no kind")
    with pytest.raises(ModelError, match="cannot load the model"):
        load_policy(str(file))


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("path", ["nobody/nothing", "gpt3", "a/b/c", "my model", "modls/countdown"])
def test_a_name_that_nobody_can_reach_is_refused_at_once(path, offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}")
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"no such folder here, and http://127\.0\.0\.1:9 gives none") as refused:
        load_policy(path)
    assert f"cannot load the model {path!r}" in str(refused.value) and "Give a folder" in str(refused.value)
    assert time.monotonic() - started < 10  # transformers alone would try for a minute


def test_a_model_in_the_cache_needs_no_hub(folder, tmp_path, monkeypatch):
    kept = tmp_path / "cache" / "models--some--body"
    folder.rename((kept / "snapshots").mkdir(parents=True) or kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert find_model("some/body") == ("some/body", {})
    with pytest.raises(ModelError):
        find_model("some/boby")


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def without(name):
    return lambda folder: (folder / name).unlink()


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def wrong_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))


def of_unknown_kind(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))


@pytest.mark.parametrize("damage", [
    empty, without("config.json"), without("model.safetensors"), without("tokenizer.json"), cut("config.json"),
    cut("model.safetensors"), cut("tokenizer.json"), wrong_size, of_unknown_kind])
def test_a_broken_folder_is_refused(folder, damage, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    damage(folder)
    with pytest.raises(ModelError, match="cannot load the model"):
        load_policy(str(folder))


def test_a_model_that_would_be_completed_by_random_weights_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks 9 weights of a LlamaForCausalLM \(model\.layers\.2"):
        load_policy(str(folder))


def test_an_unknown_type_of_weights_is_refused(folder):
    with pytest.raises(ModelError, match="unknown dtype 'bfloat17'; one of float32"):
        load_policy(str(folder), dtype="bfloat17")


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def write_gguf(policy: Policy, path: str, quantisation: gguf.GGMLQuantizationType) -> None:
    """Write a Qwen2 policy as a GGUF file and give it the weights that the file holds after rounding."""
    config, words = policy.model.config, policy.tokenizer
    model = json.loads(words.backend_tokenizer.to_str())
    added = {token["id"] for token in model["added_tokens"]}
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words.convert_ids_to_tokens(range(len(words))))
    writer.add_token_types([gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL
                            for i in range(len(words))])
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_pad_token_id(words.pad_token_id)
    writer.add_chat_template(words.chat_template)
    for name, weight in policy.model.state_dict().items():
        layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name).groups()
        kept = quantisation if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.numpy(), kept)
        prefix = "" if layer is None else f"blk.{layer}."
        writer.add_tensor(f"{prefix}{GGUF_NAMES[module]}.{kind}", data, raw_dtype=kept)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kept)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantisation", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_a_gguf_file_is_loaded_de_quantised_and_can_be_saved(tmp_path, quantisation):
    policy = random_policy("qwen2", intermediate_size=64)
    write_gguf(policy, str(tmp_path / "tiny.gguf"), quantisation)
    loaded = load_policy(str(tmp_path / "tiny.gguf"), device="cpu")
    loaded.save(tmp_path / "saved")
    ids = torch.arange(5, 25)[None]
    for one in (loaded, load_policy(str(tmp_path / "saved"), device="cpu")):
        torch.testing.assert_close(one.model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
        assert one.end_ids == policy.end_ids and one.max_context == 128
        assert one.tokenizer.chat_template == policy.tokenizer.chat_template
        for text in TEXTS:
            assert one.tokenizer(text).input_ids == policy.tokenizer(text).input_ids
            assert one.tokenizer.decode(one.tokenizer(text).input_ids) == text
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
