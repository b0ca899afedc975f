"""Tiny policies: a few million parameters and a tokenizer trained on an environment's own text, for a laptop's CPU."""

import re
from collections.abc import Iterable, Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agents.models import Policy, prepare
from envs.core import TextEnv

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TAG = re.compile(r"</?[A-Za-z_]+>| ?\[[A-Z]{2,}\] ?")
"""`<action>`, and separators such as `[SEP]` with the spaces around them."""
SENTENCE = re.compile(r"\S[^.\n]*[.\n]?\s?")


def make_tiny_policy(env: TextEnv, texts: Iterable[str], *, vocabulary: int = 512, hidden_size: int = 192,
                     head_size: int = 16, layers: int = 4, max_context: int = 1024, seed: int = 0) -> Policy:
    """An untrained Qwen3 whose tokenizer was trained on `texts` (what is said in `env`). The same arguments give the
    same policy."""
    tokenizer = train_tokenizer(texts, vocabulary, fixed=SENTENCE.findall(env.system_prompt))
    config = tiny_config(len(tokenizer), hidden_size, layers, max_context, head_size)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:  # each layer passes its input on until it has learned something to add
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return Policy(prepare(model.float()), tokenizer)


def tiny_config(vocabulary: int, hidden_size: int, layers: int, max_context: int = 1024,
                head_size: int = 16) -> Qwen3Config:
    """The architecture of a tiny policy.

    Small heads, weights of unit gain and fast rotary frequencies are meant to help copying, the first thing that it
    must learn: what to copy is found by what stands beside it. Queries and keys are normalised, which bears a large
    learning rate.
    """
    heads = max(1, hidden_size // head_size)
    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden_size, intermediate_size=hidden_size * 8 // 3 // 16 * 16,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden_size // heads,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=hidden_size**-0.5, tie_word_embeddings=True, bos_token_id=None, attention_dropout=0.0)


def train_tokenizer(texts: Iterable[str], vocabulary: int, fixed: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template of one token per role.

    Numbers are cut into chunks of two digits and punctuation into single characters, so that numbers and expressions
    always look the same; an environment's tags, and each `fixed` text (the sentences of its rules), are one token each.
    """
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[0-9]{1,2}|\s(?=[0-9])|[^\w\s]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # A byte-level decoder takes a whole token in other letters for bytes, so those texts are left to BPE.
    tags = {form for text in texts for tag in TAG.findall(text) for form in (tag, tag.strip())}
    known = sorted(tags) + [text for text in fixed if text.isascii()]
    tokenizer.train_from_iterator(
        (part for text in texts for part in TAG.split(text)),
        trainers.BpeTrainer(vocab_size=vocabulary - len(known), special_tokens=[PAD, END, *ROLES], show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in known])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD,
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast
