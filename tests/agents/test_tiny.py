"""Tiny policies: their tokenizer takes any text, and everything about them follows from their arguments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from agents.agent import ModelAgent
from agents.models import load_policy
from agents.rollout import Rollout
from agents.tiny import ROLES, make_tiny_policy, train_tokenizer
from agents.transformers_engine import TransformersEngine
from tests.agents.policies import TEXTS, tokenizer
from trainers.supervised import gold_texts

WORDS = tokenizer()


@pytest.fixture(scope="module")
def countdown():
    return envs.make("turngym/Countdown-v0")


def tiny(env, **options):
    texts = gold_texts(env, env.tasks("train")[:32], seed=0)
    return make_tiny_policy(env, texts, **{"hidden_size": 32, "layers": 2, **options})


def encode(text, words=WORDS):
    return words(text, add_special_tokens=False).input_ids


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(st.sampled_from("0123456789+-*/() <>\nabé終😀\u0301\x00")),
                 st.lists(st.sampled_from([*TEXTS, *ROLES, "<|end|>", " ", "</answer", "12"])).map("".join)))
def test_any_text_is_decoded_as_it_was_encoded(text):
    assert WORDS.decode(encode(text)) == text


def test_tags_and_roles_are_single_tokens_wherever_they_stand():
    for word in ("<tool>", "</tool>", "<answer>", "</answer>", "<obs>", "</obs>", *ROLES, "<|end|>"):
        for text in (word, "1" + word + "2", " " + word + " "):
            assert encode(word)[0] in encode(text) and len(encode(word)) == 1


def test_words_behind_a_tag_and_separators_are_tokens():
    words = train_tokenizer(["<action>open drawer 1</action> Next [SEP] Buy [x]"] * 50, 320)
    assert [words.decode([i]) for i in encode("<action>open drawer", words)] == ["<action>", "open", " drawer"]
    for separator in ("[SEP]", " [SEP] "):
        assert len(encode(separator, words)) == 1
    assert len(encode("[x]", words)) == 3


def test_numbers_look_the_same_wherever_they_stand():
    # Two digits at most to a token, and a space never joins a number.
    words = train_tokenizer(["Numbers: 12 34 56. 12+34 (12*34)"] * 50, 300)
    pair = encode("12", words)
    for text in ("12+1", "(12)", " 12 ", "a 12", "<tool>12</tool>", "3 12"):
        assert any(encode(text, words)[i:i + len(pair)] == pair for i in range(len(text)))
    assert encode("1234", words) == encode("12", words) + encode("34", words)


def test_the_sentences_of_the_rules_are_single_tokens(countdown):
    policy = tiny(countdown)
    rules = encode(countdown.system_prompt, policy.tokenizer)
    assert len(rules) < 10 and policy.tokenizer.decode(rules) == countdown.system_prompt


@pytest.mark.parametrize("rules", ["Réponds. Toujours en français.", "終。", "a\nb\nÀ.", "", "É"])
def test_rules_in_any_language_survive(countdown, rules):
    class Other(type(countdown)):
        pass

    env = Other()
    env.system_prompt = rules
    words = make_tiny_policy(env, TEXTS, hidden_size=32, layers=1).tokenizer
    assert words.decode(encode(rules, words)) == rules


def test_the_same_arguments_make_the_same_policy_and_leave_the_global_generator_alone(countdown):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = tiny(countdown), tiny(countdown), tiny(countdown, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert one.tokenizer.get_vocab() == two.tokenizer.get_vocab()
    assert one.tokenizer.chat_template == two.tokenizer.chat_template
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, two.model.state_dict()[name])
    assert any(not torch.equal(w, other.model.state_dict()[n]) for n, w in one.model.state_dict().items())


def test_a_saved_policy_is_loaded_as_it_was(countdown, tmp_path):
    policy = tiny(countdown)
    policy.save(tmp_path)
    loaded = load_policy(str(tmp_path), device="cpu")
    assert loaded.end_ids == policy.end_ids and loaded.max_context == policy.max_context
    assert loaded.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template
    for text in (*TEXTS, countdown.system_prompt, "<|user|>né 12\n"):
        assert encode(text, loaded.tokenizer) == encode(text, policy.tokenizer)
        assert loaded.tokenizer.decode(encode(text)) == policy.tokenizer.decode(encode(text))
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])

    def play(one):
        agent = ModelAgent(TransformersEngine(one), one, max_response_tokens=12)
        groups, _ = Rollout(lambda: countdown, concurrency=1).run(agent, countdown.tasks("train")[:2], 2, seed=0)
        return [turn.response_ids.tolist() for group in groups for t in group.trajectories for turn in t.turns]
    assert play(loaded) == play(policy)


def test_an_untrained_policy_takes_every_token_for_about_equally_likely(countdown):
    policy = tiny(countdown)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.from_numpy(np.arange(5, 25))[None]).logits[0]
    assert float((-logits.log_softmax(-1)).max()) < 2 * np.log(len(policy.tokenizer))
