"""What some learners learn from the same batches, run as a process of its own for each rank of several.

    python -m tests.trainers.learning RANK RANKS FOLDER
"""

import copy
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agents.adapters import add_adapter
from agents.models import Policy
from agents.trajectory import Group
from tests.agents.policies import random_policy
from tests.trainers.trajectories import group, random_conversation
from trainers.algorithms import FACTOR, GRPO, PPO, SERL
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.checkpoint import load_tensors, save_tensors
from trainers.distributed import whole_weights
from trainers.learner import Learner, OptimizerSettings
from trainers.ranks import gather, rank

STEPS = 2
CASES = {
    "adapters": (GRPO(kl_coefficient=0.1), {}, {}),
    "layers computed again": (GRPO(), {"gradient_checkpointing": True}, {}),
    "reference": (GRPO(kl_coefficient=0.1, entropy_coefficient=0.01), {}, {}),
    "by sequence, minibatches": (GRPO(aggregation="sequence_mean_token_mean", ratio="sequence"),
                                 {"epochs": 2, "minibatches": 4, "schedule": "linear"}, {}),
    "untied, Muon, SFT": (SFT(), {"name": "muon", "weight_decay": 0.1}, {"tie_word_embeddings": False}),
    "critic": (PPO(critic={"learning_rate": 1e-3, "head": "hl_gauss"}), {"minibatches": 2}, {}),
    "value head and the policy as teacher": (FACTOR(warmup_steps=0, value_head={"learning_rate": 1e-3}), {}, {}),
    "teacher of its own": (SERL(teacher_steps=2), {}, {}),
}


def some_groups(seed: int) -> list[Group]:
    """Three tasks of three episodes, one of which is far longer than the others; those of the last are equally good."""
    rng = np.random.default_rng(seed)
    found = [group(*(random_conversation(rng, int(rng.integers(1, 4)) + 5 * (i == j == 0),
                                         (float(rng.integers(2)) + i / 10) * (j < 2)) for i in range(3)))
             for j in range(3)]
    return [Group(trajectories=[replace(trajectory, turns=[
        replace(turn, action_span=(0, len(turn.response_ids)), observation="told") for turn in trajectory.turns])
        for trajectory in one.trajectories]) for one in found]


def learner_of(case: str, checkpoint: Path | None = None) -> Learner:
    """A new learner, or one that goes on from a checkpoint."""
    algorithm, optimizer, model = CASES[case]
    policy = random_policy(**{"initializer_range": 0.2, "tie_word_embeddings": True, **model})
    policy.tokenizer.chat_template = None
    model, reference = policy.model, None
    if case == "adapters":
        add_adapter(model, rank=4, alpha=8.0)
    else:
        reference = copy.deepcopy(model.double())
    saved = torch.load(checkpoint / "state.pt") if checkpoint else {}
    if saved:
        model.load_state_dict(saved["weights"])
    settings = OptimizerSettings(**{"learning_rate": 1e-3, "micro_batch_tokens": 60, **optimizer})
    learner = Learner(Policy(model, policy.tokenizer), algorithm, settings, total_steps=100, reference=reference)
    if saved:
        learner.load_state(saved["state"])
        load_tensors(learner.tensors(), checkpoint / "tensors")
    return learner


def save(learner: Learner, folder: Path) -> None:
    weights = whole_weights(learner.policy.model)
    if rank() == 0:
        folder.mkdir()
        torch.save({"weights": weights, "state": learner.state()}, folder / "state.pt")
    gather(None)
    save_tensors(learner.tensors(), folder / "tensors")


def learn(learner: Learner, first: int = 0, steps: int = STEPS) -> list[dict[str, float]]:
    """The metrics of some steps."""
    reports = []
    for step in range(first, first + steps):
        groups = some_groups(step)
        scores = learner.score(groups, step)
        batch = pack(groups, learner.algorithm.advantages(groups, scores, step), step)
        reports.append(learner.update(batch, np.random.default_rng(step)))
    return reports


def run_case(case: str, folder: Path, ours: str, theirs: str) -> dict[str, Any]:
    """Learn for some steps, keep a checkpoint called `ours`, and go on; go on from the checkpoint `theirs` too, if it
    is there."""
    learner, places = learner_of(case), [folder / f"{case}-{name}" for name in (ours, theirs)]
    found = {"sharded": [isinstance(p, DTensor) for p in learner.policy.model.parameters()], "metrics": learn(learner)}
    save(learner, places[0])
    found["metrics"] += learn(learner, STEPS)
    found["weights"] = whole_weights(learner.policy.model)
    if places[1].exists():
        other = learner_of(case, places[1])
        found["resumed metrics"] = learn(other, STEPS)
        found["resumed weights"] = whole_weights(other.policy.model)
    return found


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks,
                            timeout=timedelta(minutes=5))
    torch.save({case: run_case(case, folder, "many", "one") for case in CASES}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
