"""Groups made by hand and at random, for tests of credit."""

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agents.trajectory import Group, Trajectory, Turn

quickly = hypothesis_settings(max_examples=50, deadline=None)


def played(reward, lengths=(2,), *, states="", rewards=None, **fields):
    """A trajectory of turns with so many tokens; `states` are their state keys, `rewards` the turns' own (by default
    the return comes with the last turn). A return above 0 is a success."""
    rewards = rewards or [0.0] * (len(lengths) - 1) + [reward or 0.0]
    turns = [Turn(response_ids=range(length), reward=r, state_key=states[t] if states else "")
             for t, (length, r) in enumerate(zip(lengths, rewards))]
    return Trajectory(turns=turns, reward=reward, **{"success": bool(reward and reward > 0), **fields})


def group(*trajectories, **fields):
    return Group(trajectories=trajectories, **fields)


lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@st.composite
def random_trajectories(draw, rewards=(0.0, 1.0, None)):
    sizes = draw(lengths)
    return played(draw(st.sampled_from(rewards)), sizes, states=draw(st.text("abc", min_size=len(sizes),
                                                                             max_size=len(sizes))))


def random_groups(rewards=(0.0, 1.0, None)):
    return st.lists(random_trajectories(rewards), min_size=2, max_size=6).map(lambda members: group(*members))


def per_turn(algorithm, *groups, **arguments):
    """For each group and trajectory the advantage of each turn; all tokens of a turn must have the same."""
    return [[[float(np.unique(turn).item()) for turn in credit.advantages] for credit in credits]
            for credits in algorithm.advantages(groups, **arguments)]


def same(ours, theirs):
    """Whether two lists of credits are equal bit for bit."""
    return all(a.excluded == b.excluded and all(np.array_equal(x, y) for x, y in zip(a.advantages, b.advantages,
                                                                                     strict=True))
               for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
