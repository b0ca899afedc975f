"""Supervised fine-tuning: gold solutions become likelier, and nothing but the agent's own tokens is learned."""

import copy

import numpy as np
import pytest
import torch

import envs
from agents.agent import ModelAgent
from agents.models import Policy
from agents.rollout import Rollout
from agents.tiny import make_tiny_policy
from agents.transformers_engine import TransformersEngine
from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation, group
from trainers.algorithms.sft import SFT
from trainers.algorithms.skill_teacher import skill_insertion
from trainers.batch import pack
from trainers.learner import Learner, OptimizerSettings
from trainers.supervised import fine_tune, fine_tune_policy, gold_texts, gold_trajectories, sample_batches, told
from trainers.teacher import feedback

COUNTDOWN = "turngym/Countdown-v0"


@pytest.fixture(scope="module")
def untrained():
    env = envs.make(COUNTDOWN)
    return make_tiny_policy(env, gold_texts(env, env.tasks("train")[:32], 0), hidden_size=32, layers=2)


@pytest.fixture(scope="module")
def demonstrations(untrained):
    rollout = Rollout(lambda: envs.make(COUNTDOWN, demonstration_tries=2))
    return gold_trajectories(rollout, untrained, rollout.make_env().tasks("train")[:16], seed=0)


def copied(policy):
    return Policy(copy.deepcopy(policy.model), policy.tokenizer)


def test_gold_trajectories_succeed_and_hold_what_a_model_would_have_read_and_written(untrained, demonstrations):
    assert len(demonstrations) == 16 and all(t.success and t.reward == 1.0 for t in demonstrations)
    assert max(len(t.turns) for t in demonstrations) > 2
    for trajectory in demonstrations:
        for turn in trajectory.turns:
            text = untrained.tokenizer.decode(turn.response_ids)
            assert text == turn.text + untrained.tokenizer.eos_token
            assert untrained.tokenizer.decode(turn.prompt_ids).endswith("<|assistant|>")
            first, last = turn.action_span
            assert untrained.tokenizer.decode(turn.response_ids[first:last]) == turn.action
        batch = pack([group(trajectory)], SFT().advantages([group(trajectory)]))
        assert len(batch.sequence_lengths) == 1
        assert batch.trained.sum() == trajectory.response_length


def test_texts_come_from_the_tasks_that_have_a_gold_solution():
    class Some(type(envs.make(COUNTDOWN))):
        def gold(self, rng):
            if self.task.key in unsolved:
                raise LookupError("no solution")
            return super().gold(rng)

    env = Some()
    tasks = env.tasks("train")[:3]
    unsolved = {tasks[1].key}
    texts = gold_texts(env, tasks, seed=0)
    assert texts and not any(env.reset(options={"task": tasks[1]})[0] == text for text in texts)
    unsolved = {task.key for task in tasks}
    with pytest.raises(LookupError, match="no solution"):
        gold_texts(env, tasks, seed=0)


def test_of_a_mistake_only_the_first_token_is_learned_and_of_other_turns_all(demonstrations):
    shown = max(demonstrations, key=lambda trajectory: len(trajectory.turns))
    assert [turn.imitate for turn in shown.turns] == [False] * (len(shown.turns) - 2) + [True, True]
    [[credit]] = SFT(first_token_weight=5.0).advantages([group(shown)])
    for turn, weights in zip(shown.turns, credit.advantages):
        assert weights.tolist() == [5.0] + [float(turn.imitate)] * (len(turn.response_ids) - 1)


def test_some_demonstrations_stand_in_the_prompts_of_teachers_and_say_the_same(untrained, demonstrations):
    mixed = told(untrained, demonstrations, 0, skill_share=0.3, feedback_share=0.4)
    kinds = []
    for before, after in zip(demonstrations, mixed, strict=True):
        skills = skill_insertion(before).before
        plain, prompts = ([untrained.tokenizer.decode(turn.prompt_ids) for turn in t.turns] for t in (before, after))
        ends = [prompt.removesuffix("<|assistant|>").removesuffix("<|end|>") for prompt in prompts]
        kinds.append("plain" if prompts == plain else "skills" if prompts == [skills + prompt for prompt in plain]
                     else "feedback" if all(end.endswith(feedback(turn.observation).after)
                                            for end, turn in zip(ends, after.turns)) else "neither")
        assert [turn.response_ids.tolist() for turn in after.turns] == [t.response_ids.tolist() for t in before.turns]
        rows = pack([group(after)], SFT().advantages([group(after)])).sequence_lengths
        assert len(rows) == (len(after.turns) if kinds[-1] == "feedback" else 1)
    assert {kind: kinds.count(kind) for kind in set(kinds)}.keys() == {"plain", "skills", "feedback"}
    # Shares of 0.3 and 0.4: of 2,000, within three standard deviations of 600 and 800.
    many = told(untrained, demonstrations[:1] * 2000, 1, skill_share=0.3, feedback_share=0.4)
    lengths = [len(t.turns[0].prompt_ids) for t in many]
    as_it_was = len(demonstrations[0].turns[0].prompt_ids)
    assert abs(lengths.count(max(lengths)) - 600) < 62 and abs(lengths.count(as_it_was) - 600) < 62


def test_without_shares_demonstrations_stay_and_the_seed_says_which_are_told(untrained, demonstrations):
    def prompts(seed, **shares):
        shares = {"skill_share": 0.0, "feedback_share": 0.0} | shares
        return [turn.prompt_ids.tolist() for t in told(untrained, demonstrations, seed, **shares) for turn in t.turns]
    assert prompts(0) == [turn.prompt_ids.tolist() for t in demonstrations for turn in t.turns]
    assert prompts(1, skill_share=0.5) == prompts(1, skill_share=0.5) != prompts(2, skill_share=0.5)
    assert all("[Privileged" in untrained.tokenizer.decode(ids) for ids in prompts(0, skill_share=1.0))


def test_a_model_agent_reads_the_same_prompts_as_the_demonstrator(untrained, demonstrations):
    agent = ModelAgent(TransformersEngine(untrained), untrained, max_response_tokens=2)
    shown = [t.task for t in demonstrations[:4]]
    groups, _ = Rollout(lambda: envs.make(COUNTDOWN)).run(agent, shown, 1, seed=0)
    for demonstration, played in zip(demonstrations, groups):
        assert played.trajectories[0].turns[0].prompt_ids.tolist() == demonstration.turns[0].prompt_ids.tolist()


def test_the_same_seed_gives_the_same_demonstrations(untrained, demonstrations):
    rollout = Rollout(lambda: envs.make(COUNTDOWN, demonstration_tries=2))
    again = gold_trajectories(rollout, untrained, [t.task for t in demonstrations], seed=0)
    assert [[turn.text for turn in t.turns] for t in again] == [[turn.text for turn in t.turns] for t in demonstrations]


def test_the_texts_of_gold_episodes_are_observations_and_responses_in_turn():
    env = envs.make(COUNTDOWN)
    texts = gold_texts(env, env.tasks("train")[:1], seed=0)
    assert texts[0].startswith("Numbers:") and texts[1].startswith("<tool>") and texts[2].startswith("<obs>")
    assert texts[-2].startswith("<answer>") and texts[-1] == "Right."


def test_the_loss_is_minus_the_mean_log_probability_of_the_agent_s_tokens():
    policy, one, two = random_policy(), conversation([9, 8], [10, 11], [30, 31], [12]), conversation([9], [20])
    expected = []
    for ids, written in (([9, 8, 10, 11, 30, 31, 12], (2, 3, 6)), ([9, 20], (1,))):
        logprobs = policy.model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        expected += [float(logprobs[i - 1, ids[i]]) for i in written]
    learner = Learner(policy, SFT(), OptimizerSettings())
    both = group(one, two)
    metrics = learner.accumulate_gradients(pack([both], SFT().advantages([both])))
    assert metrics["loss"] == pytest.approx(-np.mean(expected), rel=1e-5)


def test_fine_tuning_makes_the_demonstrations_likelier(untrained, demonstrations):
    policy, losses = copied(untrained), []
    fine_tune_policy(policy, demonstrations, steps=60, batch_size=8, learning_rate=1e-2, seed=0,
                     on_step=lambda step, metrics: losses.append((step, metrics["loss"])))
    assert [step for step, _ in losses] == list(range(60))
    assert losses[0][1] > 5 and losses[-1][1] < 2.5
    again = copied(untrained)
    fine_tune_policy(again, demonstrations, steps=60, batch_size=8, learning_rate=1e-2, seed=0)
    for one, other in zip(policy.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


def test_what_only_the_environment_says_is_not_learned():
    # 40 never comes from the agent; its probability after the agent's words must not rise as that of 11 does.
    policy = random_policy(initializer_range=0.2)
    shown = conversation([9], [10, 11], [40, 40], [10, 11])

    def probabilities():
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[9, 10]])).logits[0, -1].softmax(-1)
            after = policy.model(input_ids=torch.tensor([[9, 10, 11]])).logits[0, -1].softmax(-1)
        return float(logits[11]), float(after[40])

    before = probabilities()
    fine_tune_policy(policy, [shown], steps=30, batch_size=1, learning_rate=3e-3, seed=0)
    after = probabilities()
    assert after[0] > 0.5 > before[0] and after[1] < 0.1


def test_every_trajectory_comes_once_per_epoch_in_an_order_of_its_own():
    some = [conversation([i], [i]) for i in range(5)]
    batches = list(sample_batches(some, 2, 10, np.random.default_rng(0)))
    assert [len(batch) for batch in batches] == [2] * 10
    order = [some.index(t) for batch in batches for t in batch]
    epochs = [order[i:i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len({tuple(e) for e in epochs}) > 1
    large = list(sample_batches(some, 12, 2, np.random.default_rng(0)))
    assert [len(batch) for batch in large] == [12, 12]


def test_no_trajectories_are_refused():
    with pytest.raises(ValueError, match="no trajectories to train on"):
        next(sample_batches([], 2, 1, np.random.default_rng(0)))


def test_each_batch_is_one_step():
    learner, some = Learner(random_policy(), SFT(), OptimizerSettings()), [conversation([9], [10])]
    steps: list[int] = []
    fine_tune(learner, iter([some, some, some]), np.random.default_rng(0), lambda step, metrics: steps.append(step))
    assert steps == [0, 1, 2] and learner.schedulers[0].last_epoch == 3
