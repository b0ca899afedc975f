"""`scripts.sft` teaches a model what gold solutions, saved trajectories or conversations say."""

import json

import pytest
import torch

import envs
from agents.models import load_policy
from agents.rollout import Rollout
from agents.trajectory import Group
from scripts import evaluate, sft
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.learner import Learner, OptimizerSettings
from trainers.supervised import gold_trajectories, sample_batches
from trainers.transcripts import read_trajectories, tokenise, write_trajectories

GOLD = ["--env", "turngym/Countdown-v0", "--option", "tool=false"]
TINY = ["--model", "tiny", "--hidden-size", "32", "--layers", "1"]


def train(folder, *arguments):
    assert sft.main([*arguments, "--out", str(folder)]) == 0
    return load_policy(str(folder), device="cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a policy that was taught a little of eight gold solutions."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    train(folder, *GOLD, *TINY, "--demonstrations", "8", "--steps", "40", "--batch-size", "8")
    return str(folder)


def loss_of(policy, trajectories):
    """Mean negative log-likelihood of the agent's tokens."""
    batch = pack_all(trajectories)
    learner = Learner(policy, SFT(), OptimizerSettings(learning_rate=1e-9))
    return learner.accumulate_gradients(batch)["loss"]


def pack_all(trajectories):
    group = Group(trajectories=trajectories)
    return pack([group], SFT().advantages([group]))


def weights(policy):
    return torch.cat([p.flatten() for p in policy.model.state_dict().values()])


def test_gold_solutions_become_likely(trained, tmp_path, capsys):
    rollout = Rollout(lambda: envs.make("turngym/Countdown-v0", tool=False))
    fresh = train(tmp_path / "fresh", *GOLD, *TINY, "--demonstrations", "8", "--steps", "1")
    policy = load_policy(trained, device="cpu")
    gold = gold_trajectories(rollout, policy, envs.make("turngym/Countdown-v0").tasks("train")[:8], 0)
    assert loss_of(policy, gold) < loss_of(fresh, gold) - 1
    shown = capsys.readouterr()
    assert "8 transcripts, 1 steps, loss " in shown.out and shown.err == ""


def test_the_same_seed_gives_the_same_model(tmp_path):
    arguments = [*GOLD, *TINY, "--demonstrations", "8", "--steps", "3", "--batch-size", "4", "--seed"]
    a, b, c = (weights(train(tmp_path / name, *arguments, seed)) for name, seed in (("a", "1"), ("b", "1"), ("c", "2")))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_saved_trajectories_are_trained_on_in_their_own_ids(trained, tmp_path):
    data = tmp_path / "played.jsonl"
    evaluate.main([*GOLD, "--agent", "model", "--model", trained, "--episodes", "4", "--max-response-tokens", "8",
                   "--temperature", "1", "--trajectories", str(data)])
    before, played = load_policy(trained, device="cpu"), read_trajectories(data)
    after = train(tmp_path / "after", "--model", trained, "--data", str(data), "--steps", "20", "--batch-size", "4",
                  "--learning-rate", "1e-3")
    assert loss_of(after, played) < loss_of(before, played) - 0.1


def test_conversations_teach_any_model(trained, tmp_path):
    data = tmp_path / "chat.jsonl"
    chat = {"messages": [{"role": "user", "content": "Numbers: 1 2. Target: 3."},
                         {"role": "assistant", "content": "<answer>1+2</answer>"}]}
    data.write_text(json.dumps(chat) + "\n", encoding="utf-8")
    for name, model in (("a", ["--model", trained]), ("b", [*TINY, *GOLD])):
        after = train(tmp_path / name, *model, "--data", str(data), "--steps", "30", "--learning-rate", "1e-2")
        assert loss_of(after, [tokenise(read_trajectories(data)[0], after)]) < 2.0  # untrained: about 5


def test_only_successes_are_taught_where_asked(trained, tmp_path, capsys):
    data, none = tmp_path / "mixed.jsonl", tmp_path / "failed.jsonl"
    for agent, name in (("gold", "gold.jsonl"), ("noop", "failed.jsonl")):
        evaluate.main([*GOLD, "--agent", agent, "--episodes", "3", "--trajectories", str(tmp_path / name)])
    write_trajectories(data, read_trajectories(tmp_path / "gold.jsonl") + read_trajectories(none))
    capsys.readouterr()
    train(tmp_path / "all", "--model", trained, "--data", str(data), "--steps", "1")
    train(tmp_path / "good", "--model", trained, "--data", str(data), "--steps", "1", "--successes-only")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["6", "3"]
    assert sft.main(["--model", trained, "--data", str(none), "--successes-only", "--out", str(tmp_path / "x")]) == 2
    assert "none of which can be trained on with --successes-only" in " ".join(capsys.readouterr().err.split())


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(ValueError, match="no trajectories to train on"):
        next(sample_batches([], 4, 1, None))


@pytest.mark.parametrize("arguments, message", [
    (["--env", "turngym/Cuntdown-v0", *TINY], "Did you mean: `Countdown`"),
    ([*GOLD, "--split", "validation", *TINY], "'heldout'"), ([*GOLD, "--model", "/no/such"], "no model folder"),
    ([*GOLD, *TINY, "--data", "/no/such.jsonl"], "/no/such.jsonl")])
def test_what_does_not_exist_is_named(arguments, message, tmp_path, capsys):
    assert sft.main([*arguments, "--out", str(tmp_path / "m")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_malformed_line_of_the_data_is_named(trained, tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    assert sft.main(["--model", trained, "--data", str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "m")]) == 2
    assert "d.jsonl line 1: messages: no user message" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments, message", [
    (TINY, "--env is needed"), (["--model", "x"], "--env is needed"), ([*TINY, "--data", "d.jsonl"], "--env is needed"),
    ([*GOLD, *TINY, "--successes-only"], "--successes-only chooses among --data"),
    ([*GOLD, *TINY, "--steps", "0"], "--steps must be positive"),
    ([*GOLD, *TINY, "--learning-rate", "nan"], "--learning-rate must be positive")])
def test_wrong_arguments_are_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        sft.main([*arguments, "--out", str(tmp_path / "m")])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_with_files_is_not_overwritten(trained, capsys):
    with pytest.raises(SystemExit):
        sft.main([*GOLD, *TINY, "--out", trained])
    assert "exists already" in capsys.readouterr().err


def test_an_interrupt_ends_with_130_and_saves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt
    monkeypatch.setattr("trainers.learner.Learner.update", interrupted)
    assert sft.main([*GOLD, *TINY, "--demonstrations", "4", "--out", str(tmp_path / "m")]) == 130
    assert not list((tmp_path / "m").iterdir()) and "interrupted" in capsys.readouterr().err


def test_a_loss_that_blows_up_ends_with_1(tmp_path, monkeypatch, capsys):
    def exploding(*arguments, **options):
        raise FloatingPointError("the gradient's norm is nan")
    monkeypatch.setattr("trainers.learner.Learner.update", exploding)
    assert sft.main([*GOLD, *TINY, "--demonstrations", "4", "--out", str(tmp_path / "m")]) == 1
    assert "lower --learning-rate" in capsys.readouterr().err
