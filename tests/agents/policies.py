"""Small policies with random weights, large enough that every token of the context matters to the logits."""

import asyncio

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from agents.engine import Completion, Request
from agents.models import Policy, prepare
from agents.tiny import train_tokenizer
from agents.transformers_engine import TransformersEngine

TEXTS = ["<tool>1+2</tool>", "<obs>3</obs>", "<answer>1+2</answer>", "Numbers: 1 2 3. Target: 6."]

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4, "head_dim": 8,
         "attention_dropout": 0.1, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2 with a window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
    "gpt2": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 8},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.5},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 300)


def random_policy(family: str = "llama", *, seed: int = 0, attention: str | None = None, **options) -> Policy:
    words = tokenizer()
    options = {**SMALL, **FAMILIES[family], "vocab_size": len(words), **options}
    attention = attention or options.pop("attn_implementation", "sdpa")
    options.pop("attn_implementation", None)
    name = family.split()[0]
    if name == "gpt2":
        options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": len(words),
                   "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": 1}
    config: PreTrainedConfig = AutoConfig.for_model(name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return Policy(prepare(model.float()), words)


@torch.no_grad()
def logprobs_alone(policy: Policy, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The response's log-probabilities by the model's own forward pass on this one sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1:-1].float()
    chosen = (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt):, None])
    return chosen[:, 0].numpy()


def generate(engine: TransformersEngine, *requests: Request) -> list[Completion]:
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(request) for request in requests))
    return asyncio.run(all_of_them())


def random_ids(rng: np.random.Generator, length: int) -> np.ndarray:
    """Ids of ordinary tokens."""
    return rng.integers(5, 261, length)
