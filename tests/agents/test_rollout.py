"""The rollout: many episodes, none of which waits for, breaks, or lends its error to another."""

import asyncio
import gc
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from agents import episode
from agents.agent import Response
from agents.episode import Start
from agents.rollout import Rollout, RolloutError, RolloutReport, derive_seed
from agents.trajectory import Status, Trajectory, Turn
from tests.agents.episodes import tasks


@dataclass
class Script:
    """Says the same text in every turn, after waiting for something."""

    says: str = "+"
    seconds: float = 0.0
    finish_reason: str = "stop"
    breaks: int = 0

    def start(self, env, observation, seed):
        return self

    async def act(self):
        await asyncio.sleep(self.seconds)
        ids = np.arange(1, 3)
        return Response(text=self.says, prompt_ids=np.ones(1, np.int64), response_ids=ids,
                        logprobs=np.zeros(2, np.float32), finish_reason=self.finish_reason)

    def observe(self, response, observation):
        pass


def test_the_observation_at_the_end_is_the_episode_s_own_and_its_last_action_counts(counting):
    # Solved exactly on the last allowed turn: terminated, not truncated, and the last observation is "3", not "0".
    groups, _ = Rollout(counting).run(Script(), tasks(1), 1, seed=0)
    trajectory = groups[0].trajectories[0]
    assert [turn.observation for turn in trajectory.turns] == ["1", "2", "3"]
    assert (trajectory.status, trajectory.success, trajectory.reward, trajectory.score) \
        == (Status.COMPLETED, True, 1.0, 1.0)
    assert trajectory.first_observation == "0" and not trajectory.truncated


def test_an_episode_at_its_turn_limit_is_truncated_with_its_last_action_applied(counting):
    groups, _ = Rollout(counting).run(Script(says="-"), tasks(1), 1, seed=0)
    trajectory = groups[0].trajectories[0]
    assert (trajectory.status, trajectory.success, trajectory.reward) == (Status.TRUNCATED_TURNS, False, 0.0)
    assert [turn.valid for turn in trajectory.turns] == [False] * 3 and trajectory.truncated


@pytest.mark.parametrize("blocking", [False, True])
def test_one_bad_rollout_costs_only_its_own_group(counting, blocking, tmp_path):
    # 8 tasks x 4: task 3 always raises, task 5 fails once, task 7 never answers.
    failed_once = tmp_path / "failed"

    class Bad(counting):
        def _step(self, action):
            if self.task.key == "3":
                raise ZeroDivisionError("task three")
            if self.task.key == "5" and not failed_once.exists():
                failed_once.touch()
                raise OSError("once")
            return super()._step(action)

    class Silent(Script):
        def start(self, env, observation, seed):
            return Script(seconds=1000 if env.task.key == "7" else 0)

    Bad.blocking = blocking
    started, threads = time.monotonic(), threading.active_count()
    # Starting processes takes its time on a busy machine: there only the response has the short deadline.
    deadlines = {"engine_seconds": 1.0} if blocking else {"episode_seconds": 1.0}
    with closing(Rollout(Bad, retries=2, **deadlines)) as rollout:
        groups, report = rollout.run(Silent(), tasks(8), 4, seed=0)
    assert time.monotonic() - started < (100 if blocking else 10)
    assert [group.task.key for group in groups] == ["0", "1", "2", "4", "5", "6"]
    assert all(len(group.trajectories) == 4 and {t.task.key for t in group.trajectories} == {group.task.key}
               and list(group.rewards) == [1.0] * 4 for group in groups)
    assert report.dropped_groups == 2
    assert report.errors == Counter({"error_environment:ZeroDivisionError": 1, "error_timeout:TimeoutError": 1})
    assert "task three" in report.first_traceback and "in _step" in report.first_traceback
    assert report.episodes == 24 and report.turns == 72 and report.sampled_tokens == 144
    assert threading.active_count() == threads
    assert all(env.closed <= 1 for env in Bad.made)


def test_a_member_out_of_retries_ends_its_siblings_at_once(counting):
    class Members(Script):
        def start(self, env, observation, seed):
            if not started:
                started.append(1)
                raise LookupError("the first member")
            return Script(seconds=1000)

    started: list[int] = []
    rollout, begun = Rollout(counting, retries=0, concurrency=3), time.monotonic()
    with pytest.raises(RolloutError, match="all 1 groups failed") as caught:
        rollout.run(Members(), tasks(1), 4, seed=0)
    assert "the first member" in str(caught.value) and "error_agent:LookupError" in str(caught.value)
    assert time.monotonic() - begun < 5
    assert [env.closed for env in counting.made] == [1] * len(counting.made)


def test_a_retry_differs_from_the_first_try_and_is_counted(counting):
    seeds = []

    class Once(Script):
        def start(self, env, observation, seed):
            seeds.append(seed)
            if len(seeds) == 1:
                raise LookupError
            return Script()

    groups, report = Rollout(counting).run(Once(), tasks(1), 1, seed=0)
    assert len(groups) == 1 and report.retries == 1 and not report.errors
    assert len(set(seeds)) == 2


def test_an_environment_that_cannot_be_made_or_closed_stops_nothing(counting):
    class Broken(counting):
        def __init__(self):
            super().__init__()
            if len(self.made) == 1:
                raise OSError("no server")

        def _reset(self, task, rng):
            if task.key == "1":
                raise ValueError
            return super()._reset(task, rng)

        def close(self):
            raise OSError("cannot close")

    rollout = Rollout(Broken, retries=1)
    with pytest.warns(UserWarning, match="closing a Broken failed: OSError: cannot close"):
        groups, report = rollout.run(Script(), tasks(3), 2, seed=0)
        rollout.close()
    assert [group.task.key for group in groups] == ["0", "2"]
    assert report.errors == Counter({"error_environment:ValueError": 1})


@pytest.mark.parametrize("blocking", [False, True])
def test_an_environment_that_raises_stop_iteration_is_an_error_like_any_other(counting, blocking):
    class Exhausted(counting):
        def _step(self, action):
            return next(iter(()))

    Exhausted.blocking = blocking
    with pytest.raises(RolloutError, match="error_environment"):
        Rollout(Exhausted, retries=0, episode_seconds=60).run(Script(), tasks(1), 2, seed=0)


def test_a_slow_environment_in_the_loop_is_told_of(counting, monkeypatch):
    monkeypatch.setattr(episode, "SLOW_SECONDS", 0.0)
    with pytest.warns(UserWarning, match=r"a call of Counting took .* set `blocking = True`"):
        Rollout(counting).run(Script(), tasks(1), 1, seed=0)


def test_a_response_has_a_deadline_of_its_own(counting):
    rollout = Rollout(counting, retries=0, engine_seconds=0.05)
    with pytest.raises(RolloutError, match=r"no response within engine_seconds = 0\.05") as caught:
        rollout.run(Script(seconds=1000), tasks(1), 2, seed=0)
    assert caught.value.report.errors == Counter({"error_timeout:TimeoutError": 1})


def test_enough_whole_groups_cancel_the_slowest(counting):
    class Uneven(Script):
        def start(self, env, observation, seed):
            return Script(seconds=1000 if env.task.key in "14" else 0)

    began = time.monotonic()
    groups, report = Rollout(counting).run(Uneven(), tasks(6), 3, seed=0, wanted=4)
    assert [group.task.key for group in groups] == list("0235") and report.cancelled == [1, 4]
    assert report.episodes == 12 and report.dropped_groups == 0 and time.monotonic() - began < 60


def test_fewer_whole_groups_than_wanted_are_all(counting):
    groups, report = Rollout(counting).run(Script(), tasks(2), 2, seed=0, wanted=3)
    assert len(groups) == 2 and report.cancelled == []


def test_blocking_environments_wait_beside_each_other_and_not_for_each_other(counting):
    class Slow(counting):
        blocking = True

        def _step(self, action):
            time.sleep(0.1)
            return super()._step(action)

    with closing(Rollout(Slow)) as rollout:
        groups, report = rollout.run(Script(), tasks(4), 8, seed=0)
    assert len(groups) == 4 and report.environment_seconds > 9.6 - 0.5  # 32 episodes, 3 turns
    assert report.environment_seconds > 3 * report.seconds  # as many if they waited for each other


def test_environments_are_reused_up_to_the_concurrency_and_closed_once(counting):
    rollout = Rollout(counting, concurrency=3)
    for seed in range(2):
        rollout.run(Script(), tasks(8), 4, seed=seed)
    assert len(counting.made) <= 3
    rollout.close()
    rollout.close()
    assert [env.closed for env in counting.made] == [1] * len(counting.made)


def test_groups_come_back_whole_and_in_order_and_every_episode_is_told_once(counting):
    class Uneven(Script):
        def start(self, env, observation, seed):
            return Script(seconds=seed % 5 / 100)

    heard: list[Trajectory] = []
    groups, _ = Rollout(counting).run(Uneven(), tasks(5), 3, seed=0, on_episode=heard.append)
    assert [g.task.key for g in groups] == list("01234")
    assert sorted(map(id, heard)) == sorted(id(t) for g in groups for t in g.trajectories)


def test_no_tasks_give_no_groups(counting):
    assert Rollout(counting).run(Script(), [], 4, seed=0)[0] == []


def test_reports_add_up():
    total = RolloutReport(episodes=1, errors=Counter(a=1))
    total.add(RolloutReport(episodes=2, errors=Counter(a=1, b=2), first_traceback="x"))
    total.add(RolloutReport(first_traceback="y"))
    assert (total.episodes, total.errors, total.first_traceback) == (3, Counter(a=2, b=2), "x")


@pytest.mark.parametrize(("reasons", "truncated"), [(("stop", "stop"), False), (("stop", "length"), True),
                                                    (("length", "stop"), True)])
def test_a_trajectory_is_truncated_where_any_of_its_turns_is(reasons, truncated):
    turns = [Turn(response_ids=np.ones(2), finish_reason=reason) for reason in reasons]
    assert Trajectory(turns=turns, reward=0.0).truncated == truncated


def test_log_probabilities_must_be_as_many_as_tokens():
    with pytest.raises(ValueError, match="3 response ids but 2 log-probabilities"):
        Turn(response_ids=np.ones(3), logprobs=np.zeros(2))


def test_a_response_cut_at_its_length_ends_the_episode_after_its_action(counting):
    groups, _ = Rollout(counting).run(Script(finish_reason="length"), tasks(1), 1, seed=0)
    trajectory = groups[0].trajectories[0]
    assert (len(trajectory.turns), trajectory.status, trajectory.turns[0].observation) \
        == (1, Status.TRUNCATED_LENGTH, "1")


def test_seeds_depend_on_every_part():
    seeds = {derive_seed(*parts) for parts in ((0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a1"), (0, "a"))}
    assert len(seeds) == 6 and all(0 <= seed < 2**62 for seed in seeds)
    assert derive_seed(0, "a", 1) == derive_seed("0", "a", "1")


def heard(script):
    """What an agent is told of an episode."""
    told = []

    class Hearing(Script):
        def start(self, env, observation, seed):
            told.append([observation])
            return self

        def observe(self, response, observation):
            told[-1].append((response.text, observation))
    return Hearing(**vars(script)), told


@pytest.mark.parametrize("blocking", [False, True])
def test_episodes_branch_off_inside_another_and_go_on_as_it_would_have(counting, blocking):
    counting.blocking = blocking
    (whole,), _ = Rollout(counting).run(Script(says="+"), tasks(1), 1, seed=0)
    first, second, _ = played = whole.trajectories[0].turns
    agent, told = heard(Script(says="+"))
    starts = [Start(task=whole.task, turns=played[:2]), Start(task=whole.task, turns=played[:1], max_turns=1)]
    with closing(Rollout(counting, concurrency=1)) as rollout:
        (near, cut), report = rollout.branch(agent, starts, 2, seed=5)
    for trajectory in near.trajectories:
        assert list(trajectory.turns[:2]) == [first, second] and trajectory.turns[2].observation == "3"
        assert (trajectory.status, trajectory.success, trajectory.reward) == (Status.COMPLETED, True, 1.0)
    for trajectory in cut.trajectories:  # one turn more, of the two that it would have needed
        assert [turn.observation for turn in trajectory.turns] == ["1", "2"]
        assert (trajectory.status, trajectory.success) == (Status.TRUNCATED_TURNS, False)
    assert told[0] == ["0", ("+", "1"), ("+", "2"), ("+", "3")]
    assert (report.episodes, report.turns, report.sampled_tokens, report.dropped_groups) == (4, 4, 8, 0)


def test_a_start_whose_episodes_fail_has_none_and_the_others_stay(counting):
    class Broken(counting):
        def _step(self, action):
            if self.task.key == "1" and action == "-":
                raise OSError("broken")
            return super()._step(action)
    starts = [Start(task=task) for task in tasks(2)]
    (group, nothing), report = Rollout(Broken, retries=0).branch(Script(says="-"), starts, 2, seed=0)
    assert len(group.trajectories) == 2 and nothing is None
    assert report.dropped_groups == 1 and report.errors == Counter({"error_environment:OSError": 1})


def test_thousands_of_episodes_at_once_cost_little_each_and_leave_no_memory(counting):
    """4,096 at once. A turn is to cost at most 1 ms of the scheduler (about 0.1 ms where it was written; the limit here
    is one for broken machines), and the second run no more memory than the first."""
    rollout, process = Rollout(counting, concurrency=4096), psutil.Process()
    memory, seconds = [], []
    for seed in range(3):
        began = time.process_time()
        groups, report = rollout.run(Script(), tasks(4096), 1, seed=seed)
        assert len(groups) == 4096 and report.turns == 3 * 4096
        seconds.append((time.process_time() - began) / report.turns)
        del groups
        gc.collect()
        memory.append(process.memory_info().rss)
    assert min(seconds) < 0.005 and len(counting.made) == 4096
    assert memory[2] - memory[1] < 20 * 2**20
