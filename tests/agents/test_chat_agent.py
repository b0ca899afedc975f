"""A model behind a server of chat completions plays whole episodes: what it is sent, and what its answers mean."""

import pytest

from agents.openai_engine import ChatAgent
from agents.tiny import make_tiny_policy
from agents.trajectory import Status
from tests.agents.chat_server import MESSAGES, Reply, Talk, ask, failed, play, said, serving
from trainers.batch import pack
from trainers.credit import Credit
from trainers.transcripts import fits, read_trajectories, tokenise, write_trajectories


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


# What is sent


def test_a_request_is_the_conversation_and_the_sampling_parameters():
    with serving(lambda *_: said("x")) as server:
        assert ask(server, stop=("</a>",)) == ("x", "stop")
        assert server.paths == ["/v1/chat/completions"] and server.authorizations == [None]
        assert server.bodies == [{"model": "m", "messages": MESSAGES, "max_tokens": 9, "temperature": 0.5, "seed": 3,
                                  "stop": ["</a>"]}]  # 2^62 + 3 = 3 modulo 2^31
        ask(server)
        assert "stop" not in server.bodies[1]


def test_an_episode_is_one_growing_conversation_in_the_agents_own_words():
    with serving(lambda *_: said("go <do>x", message={"reasoning_content": "secret", "reasoning": "secret"})) as server:
        groups, _ = play(server)
        trajectory = groups[0].trajectories[0]
        assert [turn.action for turn in trajectory.turns] == ["x"] * 3 and trajectory.reward == 3.0
        opening = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "start"}]
        said_1 = [{"role": "assistant", "content": "go <do>x</do>"}, {"role": "user", "content": "seen 1"}]
        said_2 = [{"role": "assistant", "content": "go <do>x</do>"}, {"role": "user", "content": "seen 2"}]
        assert [body["messages"] for body in server.bodies] == [opening, opening + said_1, opening + said_1 + said_2]
        assert len({body["seed"] for body in server.bodies}) == 3


def test_a_window_holds_the_first_observation_and_the_last_turns():
    with serving(lambda number, _: said(f"<do>{number}</do>")) as server:
        play(server, window=1)
        assert [[m["content"] for m in body["messages"]] for body in server.bodies][2] == \
            ["Rules.", "start", "<do>2</do>", "seen 2"]
    with pytest.raises(ValueError, match="window must be 1 or more"):
        ChatAgent(None, window=0)


def test_an_environment_without_a_system_prompt_sends_none():
    with serving(lambda *_: said("<do>x</do>")) as server:
        play(server, env=type("Quiet", (Talk,), {"system_prompt": "", "max_turns": 1}))
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "start"}]


def test_no_more_stop_texts_are_sent_than_openai_takes_but_all_of_them_cut():
    stop = ("1", "2", "3", "4", "5")
    with serving(lambda *_: said("a5b")) as server:
        assert ask(server, stop=stop) == ("a5", "stop")
        assert server.bodies[0]["stop"] == ["1", "2", "3", "4"]


# What was said

TAGS = ("</tool>", "</answer>")


@pytest.mark.parametrize(("content", "stop", "extra", "text"), [
    ("<answer>1", TAGS, {}, "<answer>1</answer>"),
    ("<tool>1", TAGS, {}, "<tool>1</tool>"),
    ("<answer>1</answer>", TAGS, {}, "<answer>1</answer>"),
    ("<tool>1</tool> <answer>2", TAGS, {}, "<tool>1</tool>"),  # the model goes on behind a stop text: not here
    ("<answer>1</answer><obs>Right", TAGS, {}, "<answer>1</answer>"),
    ('<open id="a">1', ("</open>",), {}, '<open id="a">1</open>'),
    ("I give up", TAGS, {}, "I give up"),
    ("<answers>1", TAGS, {}, "<answers>1"),
    ("", TAGS, {}, ""),
    ("look", ("\n",), {}, "look\n"),
    ("look", ("\n", ";"), {}, "look"),  # nobody knows which
    ("<answer>1", TAGS, {"stop_reason": "</answer>"}, "<answer>1</answer>"),  # vLLM
    ("<answer>1", TAGS, {"stop_reason": None}, "<answer>1"),  # it ended by itself: unclosed, so wrong
    ("<answer>1", TAGS, {"stop_reason": 151645}, "<answer>1"),
    ("1", TAGS, {"stop_reason": "</answer>"}, "1</answer>"),
    ("look", ("\n", ";"), {"matched_stop": ";"}, "look;"),  # SGLang
    ("look", ("\n",), {"matched_stop": 2}, "look"),
])
def test_a_response_ends_with_the_stop_text_that_ended_it(content, stop, extra, text):
    with serving(lambda *_: said(content, **extra)) as server:
        assert ask(server, stop=stop) == (text, "stop")


@pytest.mark.parametrize(("content", "text"), [
    ("<think>try <answer>9</answer></think>\n\n<answer>1", "<answer>1</answer>"),
    ("try <answer>9</answer></think> <answer>1", "<answer>1</answer>"),
    ("<think>try <answer>9", ""), ("<think></think>", ""), (" <answer>1", " <answer>1</answer>")])
def test_thinking_is_no_part_of_what_is_said_whether_or_not_the_server_takes_it_out(content, text):
    with serving(lambda *_: said(content)) as server:
        assert ask(server, stop=("</answer>",)) == (text, "stop")


def test_reasoning_alone_is_an_empty_response():
    with serving(lambda *_: said(None, message={"reasoning_content": "<do>x</do>"}, stop_reason="</do>")) as server:
        groups, _ = play(server)
        assert [turn.text for turn in groups[0].trajectories[0].turns] == [""] * 3


@pytest.mark.parametrize("content", [None, "", "I call a tool."])
def test_a_native_tool_call_is_an_invalid_action(content):
    calls = [{"id": "1", "type": "function", "function": {"name": "do", "arguments": '{"x": "<do>x</do>"}'}}]
    with serving(lambda *_: said(content, "tool_calls", message={"tool_calls": calls})) as server:
        groups, report = play(server)
        trajectory = groups[0].trajectories[0]
        assert [(turn.action, turn.valid) for turn in trajectory.turns] == [("", False)] * 3
        assert trajectory.reward == 0.0 and not report.errors


def test_odd_text_is_played_like_any_other():
    with serving(lambda *_: said("<do>\x00é\u2028👍\x1b[31m</do>")) as server:
        groups, _ = play(server)
        assert groups[0].trajectories[0].turns[0].action == "é\u2028👍\x1b[31m"  # no tokenizer takes NUL


# Lengths


def test_a_response_cut_at_its_length_ends_the_episode_as_truncated():
    with serving(lambda number, _: said("<do>x</do>") if number == 1 else said("<do>y", "length")) as server:
        trajectory = play(server)[0][0].trajectories[0]
        assert (trajectory.status, trajectory.truncated) == (Status.TRUNCATED_LENGTH, True)
        assert [turn.text for turn in trajectory.turns] == ["<do>x</do>", "<do>y"] and len(server.bodies) == 2
        assert trajectory.turns[1].finish_reason == "length" and not trajectory.turns[1].valid


def test_a_response_that_is_all_reasoning_is_truncated_and_no_turn():
    with serving(lambda *_: said(None, "length", message={"reasoning_content": "hm"})) as server:
        trajectory = play(server)[0][0].trajectories[0]
        assert (trajectory.status, len(trajectory.turns)) == (Status.TRUNCATED_LENGTH, 0)


def test_a_stop_text_before_the_length_is_no_truncation():
    with serving(lambda *_: said("<do>x</do> and then", "length")) as server:
        trajectory = play(server)[0][0].trajectories[0]
        assert trajectory.status == Status.TRUNCATED_TURNS and len(trajectory.turns) == 3
        assert not any(turn.finish_reason == "length" for turn in trajectory.turns)


FULL = [
    failed(400, "no", code="context_length_exceeded"),
    failed(400, "This model's maximum context length is 8 tokens. However, you requested 19", code=400),
    failed(400, "the request exceeds the available context size", type="exceed_context_size_error"),
    Reply(status=400, body=b'{"object": "error", "message": "longer than the model\'s context length (8 tokens)"}')]


@pytest.mark.parametrize("full", FULL)
def test_a_conversation_longer_than_the_context_truncates_the_episode(full):
    with serving(lambda number, _: said("<do>x</do>") if number == 1 else full) as server:
        groups, report = play(server)
        trajectory = groups[0].trajectories[0]
        assert (trajectory.status, len(trajectory.turns), trajectory.reward) == (Status.TRUNCATED_LENGTH, 1, 1.0)
        assert not report.errors


@pytest.mark.parametrize("full", FULL)
def test_where_the_response_limit_alone_is_too_long_the_rest_of_the_context_is_the_limit(full):
    with serving(lambda _, body: full if "max_tokens" in body else said("x")) as server:
        assert ask(server) == ("x", "stop")


# Beyond evaluation



def test_what_a_chat_server_said_cannot_be_trained():
    with serving(lambda *_: said("<do>x</do>")) as server:
        groups, _ = play(server)
    turns = groups[0].trajectories[0].turns
    with pytest.raises(ValueError, match=r"empty prompt.*its episodes are for evaluation"):
        pack(groups, [[Credit(advantages=[turn.logprobs for turn in turns])]])


def test_what_a_chat_server_said_can_be_imitated_as_text(tmp_path):
    with serving(lambda *_: said("<do>x")) as server:
        groups, _ = play(server)
    write_trajectories(tmp_path / "t.jsonl", groups[0].trajectories)
    read, = read_trajectories(tmp_path / "t.jsonl")
    policy = make_tiny_policy(Talk(), ["start", "<do>x</do>", "seen 1"], hidden_size=32, layers=1)
    assert [turn.text for turn in read.turns] == ["<do>x</do>"] * 3 and not fits(read, policy)
    assert fits(tokenise(read, policy), policy)
