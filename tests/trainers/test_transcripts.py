"""A trajectory in a file is the trajectory that was played."""

import json
import string
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from agents.agent import ModelAgent, ScriptedAgent
from agents.rollout import Rollout
from agents.tiny import make_tiny_policy
from agents.trajectory import Group, Status, Trajectory, Turn
from agents.transformers_engine import TransformersEngine
from envs.core import Task
from trainers.algorithms.sft import SFT
from trainers.batch import pack, sequence_starts
from trainers.supervised import gold_texts
from trainers.transcripts import fits, messages, read_trajectories, tokenise, trajectory_line, write_trajectories

ID = "turngym/Countdown-v0"


def make_env():
    return envs.make(ID, tool_rounds=2, demonstration_tries=1)


def make_talkative_env():
    """A turn ends at a letter, digit or sign, so that an untrained policy has several."""
    env = make_env()
    env.stop = tuple(string.ascii_letters + string.digits + string.punctuation)
    return env


@pytest.fixture(scope="module")
def policy():
    env = make_env()
    return make_tiny_policy(env, gold_texts(env, env.tasks("heldout")[:20], 0), hidden_size=32, layers=2)


@pytest.fixture(scope="module")
def played(policy):
    """What a tiny policy does, in one conversation and with a window."""
    tasks = make_env().tasks("heldout")[:3]
    engine, found = TransformersEngine(policy, slots=8), []
    for window, make in ((None, make_env), (1, make_talkative_env)):
        agent = ModelAgent(engine, policy, max_response_tokens=12, window=window)
        groups, _ = Rollout(make).run(agent, tasks, 2, seed=1)
        found += [trajectory for group in groups for trajectory in group.trajectories]
        # Half of the gold episodes have three turns, and so two rows with a window of one, whatever the policy does.
        gold, _ = Rollout(make_env).run(ScriptedAgent("gold", policy, window=window), tasks, 4, seed=1)
        found += [trajectory for group in gold for trajectory in group.trajectories]
    return found


def same(a, b):
    """Equal in every field, arrays bit by bit."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, Trajectory | Turn):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_round_trip_keeps_everything(played, tmp_path):
    write_trajectories(tmp_path / "t.jsonl", played)
    read = read_trajectories(tmp_path / "t.jsonl")
    assert len(read) == len(played) and all(map(same, played, read))
    assert any(t.success for t in read) and any(t.truncated for t in read)
    assert any((turn.logprobs != 0).any() for t in read for turn in t.turns)
    assert any(len(sequence_starts(t)) > 1 for t in read), "the window gave no second row"
    assert list(tmp_path.iterdir()) == [tmp_path / "t.jsonl"]


ANY_TEXT = st.text(max_size=20)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT
PLAIN = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3))


@st.composite
def random_trajectories(draw):
    turns, before = [], np.zeros(0, np.int64)
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
    for _ in range(draw(st.integers(0, 3))):
        prompt = draw(ids) if draw(st.booleans()) else [*before, *draw(ids)]
        response = draw(st.lists(st.integers(0, 300), max_size=4))
        ends = sorted(draw(st.sets(st.integers(1, len(response)))) | {len(response)}) if response else []
        versions = tuple((draw(st.integers(0, 9)), end) for end in ends)
        turns.append(Turn(
            prompt_ids=prompt, response_ids=response, weight_versions=versions,
            weight_version=versions[0][0] if versions else draw(st.integers(0, 9)), text=draw(ANY_TEXT),
            logprobs=draw(st.lists(FLOAT32, min_size=len(response), max_size=len(response))), action=draw(ANY_TEXT),
            finish_reason=draw(st.sampled_from(["stop", "length"])), action_span=(0, len(response)),
            observation=draw(ANY_TEXT), reward=draw(st.floats(-1e9, 1e9)), state_key=draw(ANY_TEXT),
            valid=draw(st.booleans()), imitate=draw(st.booleans()),
            info=draw(st.dictionaries(ANY_TEXT, PLAIN, max_size=2))))
        before = [*prompt, *response]
    task = Task(key=draw(ANY_TEXT), split=draw(ANY_TEXT), seed=draw(st.integers(0, 2**62)), family=draw(ANY_TEXT),
                data=draw(st.dictionaries(ANY_TEXT, PLAIN, max_size=2)))
    return Trajectory(turns=tuple(turns), reward=draw(st.none() | st.floats(-1e9, 1e9)), task=task,
                      status=draw(st.sampled_from(Status)), success=draw(st.booleans()), score=draw(st.floats(0, 1)),
                      context_breaks=draw(st.integers(0, 3)), first_observation=draw(ANY_TEXT),
                      system_prompt=draw(ANY_TEXT))


@given(st.lists(random_trajectories(), max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_round_trip_keeps_any_trajectory(tmp_path_factory, trajectories):
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    write_trajectories(path, trajectories)
    read = read_trajectories(path)
    assert len(read) == len(trajectories) and all(map(same, trajectories, read))
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(trajectories), "a text broke its line"


def test_the_rows_are_those_that_training_reads(played):
    for trajectory in played:
        rows = json.loads(trajectory_line(trajectory))["sequences"]
        batch = pack_one(trajectory)
        assert [row["ids"] for row in rows] == [ids.tolist() for ids in batch.sequences()]
        assert [bit for row in rows for bit in row["mask"]] == batch.trained.astype(int).tolist()
        assert [number for row in rows for number in row["logprobs"]] == batch.behaviour_logprobs.tolist()


def pack_one(trajectory):
    group = Group(trajectories=[trajectory])
    return pack([group], SFT().advantages([group]))


def test_messages_alternate_and_hold_what_was_said(played):
    said = messages(played[-1])
    assert [m["role"] for m in said] == ["system", "user"] + ["assistant", "user"] * len(played[-1].turns)
    assert said[0]["content"].startswith("Make the target") and said[-1]["content"] == "Right."


def test_numpy_values_in_info_become_plain_numbers():
    turn = Turn(response_ids=[1], info={"count": np.int64(3), "row": np.array([1.5]), "flag": np.bool_(True)})
    line = json.loads(trajectory_line(Trajectory(turns=(turn,), reward=np.float64(1.0))))
    assert line["turns"][0]["info"] == {"count": 3, "row": [1.5], "flag": True}


@pytest.mark.parametrize("broken", [
    Trajectory(turns=(), reward=float("nan"), task=Task(key="odd one")),
    Trajectory(turns=(Turn(response_ids=[1], logprobs=[-np.inf]),), reward=0.0, task=Task(key="odd one")),
    Trajectory(turns=(Turn(response_ids=[1], info={"x": object()}),), reward=0.0, task=Task(key="odd one"))])
def test_what_json_cannot_say_is_refused_by_the_tasks_name(broken, tmp_path):
    with pytest.raises(ValueError, match="odd one"):
        write_trajectories(tmp_path / "t.jsonl", [broken])
    assert not list(tmp_path.iterdir()), "half a file was left behind"


def test_a_failed_write_keeps_the_old_file(tmp_path):
    write_trajectories(tmp_path / "t.jsonl", [Trajectory(turns=(), reward=1.0)])
    with pytest.raises(ValueError):
        write_trajectories(tmp_path / "t.jsonl", [Trajectory(turns=(), reward=float("inf"))])
    assert read_trajectories(tmp_path / "t.jsonl")[0].reward == 1.0


def test_a_lone_surrogate_is_replaced(tmp_path):
    turn = Turn(response_ids=[], prompt_ids=[], text="go \ud800", info={"echo": "\udfff"})
    write_trajectories(tmp_path / "t.jsonl", [Trajectory(turns=(turn,), reward=0.0)])
    assert read_trajectories(tmp_path / "t.jsonl")[0].turns[0].text == "go ?"


def edited(line, *path, value):
    """A record with one value changed."""
    record = json.loads(line)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(record)


@pytest.mark.parametrize("change, message", [
    (lambda line: line[:len(line) // 2], "EOF"), (lambda line: "nonsense", "expected"),
    (lambda line: "[1, 2]", "object"), (lambda line: "null", "object"), (lambda line: "[" * 100_000, "recursion"),
    (lambda line: line.replace('"reward"', '"rewrad"', 1), "reward: Field required"),
    (lambda line: edited(line, "reward", value=float("nan")), "expected value at column"),
    (lambda line: edited(line, "turns", 0, "info", value={"x": float("inf")}), "expected value at column"),
    (lambda line: edited(line, "reward", value="1.0"), "reward: "),
    (lambda line: edited(line, "schema", value=2), "schema: "),
    (lambda line: edited(line, "extra", value=1), "extra: "),
    (lambda line: edited(line, "status", value="fine"), "status: "),
    (lambda line: edited(line, "sequences", 0, "ids", 0, value=-1), "sequences.0.ids.0: "),
    (lambda line: edited(line, "sequences", 0, "ids", 0, value=1.5), "sequences.0.ids.0: "),
    (lambda line: edited(line, "sequences", 0, "ids", 0, value=10**30), "sequences.0.ids.0: "),
    (lambda line: edited(line, "sequences", 0, "mask", 0, value=1), "sequences.0: "),
    (lambda line: edited(line, "sequences", 0, "logprobs", value=[]), "sequences.0: "),
    (lambda line: edited(line, "sequences", value=[]), "turns.0: "),
    (lambda line: edited(line, "turns", 0, "length", value=10_000), "turns.0: "),
    (lambda line: edited(line, "turns", value=[]), "2 assistant messages but 0 turns"),
    (lambda line: edited(line, "messages", 1, "role", value="assistant"), "messages.1: role 'assistant'"),
    (lambda line: edited(line, "messages", 1, "role", value="tool"), "messages.1.role: "),
    (lambda line: edited(line, "messages", value=[]), "no user message")])
def test_a_malformed_line_is_named(played, tmp_path, change, message):
    good, path = trajectory_line(played[-1]), tmp_path / "t.jsonl"
    path.write_text(f"{good}\n\n{change(good)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl line 3: ") as error:
        read_trajectories(path)
    assert message in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"messages": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl line 1: "):
        read_trajectories(tmp_path / "t.jsonl")


def test_a_line_of_a_run_keeps_its_step(played, tmp_path):
    (tmp_path / "t.jsonl").write_text(trajectory_line(played[0], step=3) + "\n", encoding="utf-8")
    assert json.loads(trajectory_line(played[0], step=3))["step"] == 3
    assert same(read_trajectories(tmp_path / "t.jsonl")[0], played[0])


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Numbers: 2 3. Target: 6."},
        {"role": "assistant", "content": "<tool>2*3</tool>"}, {"role": "user", "content": "<obs>6</obs>"},
        {"role": "assistant", "content": "<answer>2*3</answer>"}]


def conversation(tmp_path, said):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": said, "source": "elsewhere"}) + "\n")
    return read_trajectories(tmp_path / "chat.jsonl")[0]


def test_a_conversation_trains_the_assistants_tokens_only(policy, tmp_path):
    trajectory = tokenise(conversation(tmp_path, CHAT), policy)
    batch, tokenizer = pack_one(trajectory), policy.tokenizer
    assert tokenizer.decode(batch.token_ids[batch.trained]) == \
        "<tool>2*3</tool><|end|><answer>2*3</answer><|end|>"
    assert tokenizer.decode(batch.token_ids) == (
        "<|system|>Be brief.<|end|><|user|>Numbers: 2 3. Target: 6.<|end|><|assistant|><tool>2*3</tool><|end|>"
        "<|user|><obs>6</obs><|end|><|assistant|><answer>2*3</answer><|end|>")
    assert batch.trained.sum() == trajectory.response_length


def test_a_conversation_may_lack_the_system_message_and_end_with_the_user(policy, tmp_path):
    trajectory = conversation(tmp_path, [*CHAT[1:], {"role": "user", "content": "Right."}])
    assert trajectory.system_prompt == "" and trajectory.turns[-1].observation == "Right."
    assert len(pack_one(tokenise(trajectory, policy)).sequence_lengths) == 1


@pytest.mark.parametrize("said, message", [
    (CHAT[:2], "no assistant message"), ([], "no user message"), (CHAT[:1], "no user message"),
    ([CHAT[0], CHAT[2]], "messages.1: role 'assistant'"), (CHAT[1:3] * 2 + CHAT[2:3], "messages.4: role 'assistant'"),
    ([*CHAT[:2], CHAT[0]], "messages.2: role 'system'"), ([{"role": "user", "content": None}], "messages.0.content")])
def test_a_conversation_out_of_order_is_refused(tmp_path, said, message):
    with pytest.raises(ValueError, match=r"chat\.jsonl line 1: ") as error:
        conversation(tmp_path, said)
    assert message in str(error.value)


def test_ids_fit_the_tokenizer_that_made_them_and_no_other(policy, played):
    other = make_tiny_policy(make_env(), ["Entirely different words were said here"], hidden_size=32, layers=1)
    assert all(fits(trajectory, policy) for trajectory in played)
    assert not any(fits(trajectory, other) for trajectory in played)
    assert all(fits(tokenise(trajectory, other), other) for trajectory in played)


def test_tokenising_what_a_demonstrator_said_gives_the_ids_it_had(policy, played):
    gold = played[-1]
    again = tokenise(replace(gold, turns=tuple(replace(turn, prompt_ids=[], response_ids=[], logprobs=None)
                                               for turn in gold.turns)), policy)
    for turn, other in zip(gold.turns, again.turns, strict=True):
        assert same(turn.prompt_ids, other.prompt_ids) and same(turn.response_ids, other.response_ids)


def test_a_response_that_was_cut_is_not_taught_to_end(policy):
    turn = Turn(prompt_ids=[], response_ids=[], text="<tool>2", finish_reason="length")
    ids = tokenise(Trajectory(turns=(turn,), reward=0.0), policy).turns[0].response_ids
    assert policy.tokenizer.decode(ids) == "<tool>2"
