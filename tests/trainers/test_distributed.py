"""Two ranks learn what one process learns, with weights sharded and micro-batches as equal as they can be."""

import os
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers import learning
from trainers import distributed
from trainers.batch import pack
from trainers.credit import Credit
from trainers.distributed import micro_batches, rank_parts


def run_ranks(module: str, folder, *arguments: str, ranks: int = 2) -> None:
    """`python -m module RANK RANKS FOLDER ...` once for each rank; each must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([sys.executable, "-m", module, str(rank), str(ranks), str(folder), *arguments],
                                  env=environment) for rank in range(ranks)]
    assert [process.wait(600) for process in processes] == [0] * ranks


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What one process and each of two ranks learn, both going on from the other's checkpoints too."""
    folder = tmp_path_factory.mktemp("ranks")
    for case in learning.CASES:
        learning.run_case(case, folder, "one", "many")
    run_ranks("tests.trainers.learning", folder)
    alone = {case: learning.run_case(case, folder, "one again", "many") for case in learning.CASES}
    return alone, *(torch.load(folder / f"{rank}.pt") for rank in range(2))


@pytest.mark.parametrize("case", learning.CASES)
def test_two_ranks_learn_what_one_learns_and_go_on_from_its_checkpoint(case, learnt):
    alone, leader, other = (results[case] for results in learnt)
    assert not other["weights"]
    # In float64 up to the log-probabilities, adapters in float32; Muon turns its step in bfloat16, where the last bits
    # become 1% of it.
    muon, near = "Muon" in case, {"untied, Muon, SFT": 2e-4, "adapters": 1e-5}.get(case, 1e-7)
    for report in ("metrics", "resumed metrics"):
        assert leader[report] == other[report]
        for ours, its in zip(alone[report], leader[report], strict=True):
            assert its == pytest.approx(ours, rel=1e-3 if muon else 1e-4, abs=1e-6)
    for weights in ("weights", "resumed weights"):
        assert leader[weights].keys() == alone[weights].keys()
        for found in (leader[weights], alone[weights]):
            torch.testing.assert_close(found, alone["weights"], rtol=0, atol=near)


def test_every_parameter_is_sharded(learnt):
    assert not any(chain.from_iterable(results["sharded"] for results in learnt[0].values()))
    assert all(chain.from_iterable(results["sharded"] for rank in learnt[1:] for results in rank.values()))


@pytest.fixture
def of_ranks(monkeypatch):
    """Say how many ranks there are."""
    return lambda ranks: monkeypatch.setattr(distributed, "world_size", lambda: ranks)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.integers(1, 5))
def test_parts_hold_each_item_once_and_every_rank_has_equally_many(lengths, limit, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "world_size", lambda: ranks)
        parts = rank_parts(lengths, limit)
    assert len(parts) == ranks and len(set(map(len, parts))) == 1
    in_order = list(chain.from_iterable(chain.from_iterable(zip(*parts))))
    assert in_order == list(range(len(lengths)))
    for part in chain.from_iterable(parts):
        assert sum(lengths[i] for i in part) <= limit or len(part) == 1


def test_ranks_read_nearly_equally_many_tokens(of_ranks):
    # 400 trajectories of 20 to 400 tokens: no rank has more than 3% above the mean.
    of_ranks(8)
    lengths = np.random.default_rng(0).integers(20, 400, 400)
    tokens = [sum(lengths[i] for part in parts for i in part) for parts in rank_parts(lengths, 4096)]
    assert max(tokens) <= 1.03 * np.mean(tokens)


def test_the_parts_of_one_rank_are_filled_one_after_the_other():
    assert rank_parts([5, 5, 5, 30, 5], 12) == [[[0, 1], [2], [3], [4]]]
    assert rank_parts([], 12) == [[]]


def test_a_rank_without_a_trajectory_keeps_step_with_a_weight_of_zero(of_ranks, monkeypatch):
    of_ranks(3)
    groups = learning.some_groups(0)
    credits = [[Credit.uniform(t, 1.0, excluded=(g, i) != (1, 2)) for i, t in enumerate(group.trajectories)]
               for g, group in enumerate(groups)]
    batch, found = pack(groups, credits), []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        found += [(set(part.trajectory_index), weight) for part, weight in micro_batches(batch, 4096)]
    assert found == [({5}, 1.0), ({5}, 0.0), ({5}, 0.0)]
