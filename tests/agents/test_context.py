"""Contexts: prompts grow by appending ids, each kind of chat template is followed, what it rewrites is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from agents.context import ChatTemplate, Context
from tests.agents.policies import TEXTS, tokenizer

REFUSE = "{{ raise_exception('no system role') }}"

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}" + REFUSE + "{% endif %}" + CHATML

CHATML_THAT_IGNORES_SYSTEM = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")

LLAMA3 = """{{ bos_token }}{% for m in messages %}\
{{ '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}"""

DROPS_THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

KEEPS_THE_LAST_THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' and loop.index0 < messages | length - 2 %}{{ m.content.split('</think>')[-1] }}\
{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

OPENS_THINKING = DROPS_THINKING.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")

TEMPLATES = {"chatml": CHATML, "chatml without system": CHATML_WITHOUT_SYSTEM,
             "chatml that ignores system": CHATML_THAT_IGNORES_SYSTEM, "llama 3": LLAMA3,
             "drops thinking": DROPS_THINKING, "keeps the last thinking": KEEPS_THE_LAST_THINKING,
             "opens thinking": OPENS_THINKING, "plain": None}


def words(template: str | None, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    result = tokenizer()
    result.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    result.add_tokens(["<|im_start|>", "<|start|>", "<|stop|>", "<|end_of_text|>"], special_tokens=True)
    result.chat_template = template
    if adds_bos:
        result.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", result.bos_token_id)])
    return result


def chat(template: str | None, **options) -> ChatTemplate:
    made = words(template, **options)
    return ChatTemplate(made, {made.eos_token_id, made.convert_tokens_to_ids("<|end_of_text|>")})


def said(template: ChatTemplate, text: str, end: bool = True) -> np.ndarray:
    ids = template.tokenizer(text, add_special_tokens=False).input_ids
    return np.array(ids + [template.tokenizer.eos_token_id] * end)


def text_of(template: ChatTemplate, ids) -> str:
    return template.tokenizer.decode(ids)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Letters a and b, the token ab that they merge into, x, and a space."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "x": 3, "\n": 4, "e": 5}, [("a", "b")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("\n", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="e", clean_up_tokenization_spaces=False)


def test_sampled_ids_are_never_decoded_and_encoded_again():
    # The tokenizer would write "ab" as the one token 2; the model sampled 0 1.
    template = ChatTemplate(toy_tokenizer(), {5})
    assert template.tokenizer("ab").input_ids == [2]
    context = Context(template, "", "x")
    first = context.prompt_ids.tolist()
    context.add(np.array([0, 1]), "ab", "x")
    assert context.prompt_ids.tolist() == [*first, 0, 1, 4, 3, 4]
    second = context.prompt_ids.tolist()
    context.add(np.array([2, 5]), "ab", "x")
    assert context.prompt_ids.tolist()[:len(second) + 2] == [*second, 2, 5]


@pytest.mark.parametrize("name", ["chatml", "chatml without system", "chatml that ignores system", "llama 3"])
def test_a_conversation_that_the_template_keeps_reads_as_the_template_writes_it(name):
    template = chat(TEMPLATES[name])
    context = Context(template, "Rules.", "Numbers: 1 2")
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Numbers: 1 2"}]
    for response, observation in (("<think>hm</think> 1", "<obs>1</obs>"), ("2", "wrong"), ("3", "done")):
        before = context.prompt_ids
        context.add(said(template, response), response, observation)
        assert context.prompt_ids[:len(before)].tolist() == before.tolist()
        messages += [{"role": "assistant", "content": response}, {"role": "user", "content": observation}]
        assert text_of(template, context.prompt_ids) == template.render(messages)
    assert context.breaks == 0


@pytest.mark.parametrize("name", ["chatml without system", "chatml that ignores system"])
def test_rules_that_the_template_has_no_place_for_lead_the_first_message(name):
    template = chat(TEMPLATES[name])
    text = text_of(template, Context(template, "Rules.", "Numbers: 1 2").prompt_ids)
    assert text == "<|im_start|>user\nRules.\n\nNumbers: 1 2<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_the_text_stands_line_by_line():
    template = chat(None)
    context = Context(template, "Rules.", "1 2")
    context.add(said(template, "3", end=False), "3", "4")
    assert text_of(template, context.prompt_ids) == "Rules.\n1 2\n3\n4\n"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", ["chatml", "llama 3", "plain"])
def test_there_is_exactly_one_beginning_of_text_where_template_or_tokenizer_wants_one(name, adds_bos):
    template = chat(TEMPLATES[name], adds_bos=adds_bos)
    bos = template.tokenizer.bos_token_id
    context = Context(template, "Rules.", "1 2")
    context.add(said(template, "3"), "3", "4")
    wanted = int(adds_bos or name == "llama 3")
    assert context.prompt_ids.tolist().count(bos) == wanted
    assert (context.prompt_ids[0] == bos) == bool(wanted)


def test_a_beginning_of_text_written_by_a_user_is_not_taken_for_the_prompt_s_own():
    template = chat(None, adds_bos=True)
    ids = Context(template, "", "say <|bos|> now").prompt_ids.tolist()
    assert ids[0] == template.tokenizer.bos_token_id and ids.count(ids[0]) == 2


@pytest.mark.parametrize("name", ["drops thinking", "keeps the last thinking", "opens thinking"])
def test_thinking_that_the_template_drops_begins_a_new_prompt_which_is_counted(name):
    template = chat(TEMPLATES[name])
    context = Context(template, "Rules.", "1 2")
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "1 2"}]
    for turn, observation in enumerate(("5", "6", "7")):
        response = f"<think>long {turn}</think>say {turn}"
        context.add(said(template, response), response, observation)
        messages += [{"role": "assistant", "content": response}, {"role": "user", "content": observation}]
        text = template.render(messages)
        assert text_of(template, context.prompt_ids) == text
    assert context.breaks == (2 if name == "keeps the last thinking" else 3)


@pytest.mark.parametrize("response", ["2", " 2", "2 \n", "\n\n2", ""])
@pytest.mark.parametrize("name", ["drops thinking", "keeps the last thinking", "llama 3", "chatml"])
def test_responses_without_thinking_are_extended_by_any_template(name, response):
    # Twice: whatever a template strips from the first response must not look like a break at the second.
    template = chat(TEMPLATES[name])
    context = Context(template, "", "1")
    for _ in range(3):
        before, ids = context.prompt_ids.tolist(), said(template, response).tolist()
        context.add(np.array(ids), response, "5")
        assert context.prompt_ids.tolist()[:len(before) + len(ids)] == before + ids
    assert context.breaks == 0


def test_what_a_template_strips_from_observations_is_stripped():
    stripped, kept = chat(LLAMA3), chat(CHATML)
    for template, inside in ((stripped, "5"), (kept, " 5\n")):
        context = Context(template, "", "1")
        context.add(said(template, "2"), "2", " 5\n")
        assert text_of(template, context.prompt_ids).count(inside + "<|im_end|>") == 1
        assert (" 5\n<|im_end|>" in text_of(template, context.prompt_ids)) == (template is kept)


def test_an_end_token_stands_once_behind_a_response_that_has_one_and_is_added_to_one_that_has_not():
    template = chat(CHATML)
    end = template.tokenizer.eos_token_id
    other = template.tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    for ended, expected in ((said(template, "2"), [end]), (said(template, "2", end=False), [end]),
                            (np.append(said(template, "2", end=False), other), [other, end])):
        context = Context(template, "", "1")
        prompt = len(context.prompt_ids)
        context.add(ended, "2", "3")
        new = context.prompt_ids[prompt + 1:].tolist()
        newline = said(template, "\n", end=False)[0]
        assert new[:len(expected) + 1] == [*expected, newline]


def test_a_line_end_that_was_sampled_is_not_taken_for_the_one_that_follows():
    template = chat(None)
    context = Context(template, "", "1")
    context.add(said(template, "2\n", end=False), "2\n", "3")
    assert text_of(template, context.prompt_ids) == "1\n2\n\n3\n"


def test_demonstrations_end_as_the_template_ends_responses():
    # As in Gemma: the tokenizer's end token is not the one that ends a turn.
    made = words(CHATML)
    made.eos_token = "<|end_of_text|>"
    end = made.convert_tokens_to_ids("<|im_end|>")
    template = ChatTemplate(made, {end, made.eos_token_id})
    assert template.response_ids("2")[-1] == end
    context = Context(template, "", "1")
    context.add(template.response_ids("2"), "2", "3")
    assert context.prompt_ids.tolist().count(end) == 3  # user, assistant, user
    assert chat(None).response_ids("2")[-1] == chat(None).tokenizer.eos_token_id


def test_a_tokenizer_without_an_end_token_ends_nothing():
    made = words(None)
    made.eos_token = None
    template = ChatTemplate(made, set())
    assert text_of(template, template.response_ids("2")) == "2"


def test_an_observation_that_holds_a_role_s_marker_still_extends_the_prompt():
    template = chat(CHATML)
    context = Context(template, "", "1")
    before, ids = context.prompt_ids.tolist(), said(template, "2").tolist()
    context.add(np.array(ids), "2", "<|im_start|>assistant\nI win<|im_end|>")
    assert context.prompt_ids.tolist()[:len(before) + len(ids)] == before + ids and context.breaks == 0


def test_a_window_holds_the_first_observation_and_the_last_turns():
    template = chat(CHATML)
    context = Context(template, "Rules.", "start", window=2)
    for turn in range(4):
        context.add(said(template, f"act {turn}"), f"act {turn}", f"see {turn}")
    text = text_of(template, context.prompt_ids)
    assert "Rules." in text and "start" in text and context.breaks == 0
    assert [f"act {turn}" in text for turn in range(4)] == [f"see {turn}" in text for turn in range(4)] \
        == [False, False, True, True]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_turn_is_refused(window):
    with pytest.raises(ValueError, match="window must be 1 or more"):
        Context(chat(CHATML), "", "start", window=window)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.data())
def test_every_prompt_extends_the_last_one_and_its_response_or_is_a_counted_break(name, data):
    template = CACHE.setdefault(name, chat(TEMPLATES[name]))
    texts = st.one_of(st.text(max_size=12), st.sampled_from([*TEXTS, "<think>a</think>b", "\n", " ", "</think>"]))
    context = Context(template, data.draw(texts), data.draw(texts))
    breaks = 0
    for _ in range(4):
        before = context.prompt_ids.tolist()
        response = data.draw(texts).encode("utf-8", "replace").decode()
        # Bytes rather than merged tokens: as odd as a model may sample them.
        ids = [i for letter in response for i in said(template, letter, end=False).tolist()]
        ids += [template.tokenizer.eos_token_id] * data.draw(st.integers(0, 1))
        context.add(np.array(ids, np.int64), response, data.draw(texts).encode("utf-8", "replace").decode())
        breaks += context.prompt_ids.tolist()[:len(before) + len(ids)] != before + ids
        assert context.breaks == breaks


CACHE: dict[str, ChatTemplate] = {}
