"""What a step's rollout says about the policy."""

from collections.abc import Sequence

import numpy as np

from agents.rollout import RolloutReport
from agents.trajectory import Group


def rollout_metrics(sampled: Sequence[Group], kept: int, report: RolloutReport, version: int) -> dict[str, float]:
    """Means over all episodes sampled for a step (also those of groups that were not kept), and what they cost
    together with what branched off them (`environment_steps`, `sampled_tokens`). `version` is that of the weights that
    learn from them."""
    trajectories = [trajectory for group in sampled for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    ages = [trajectory.age(version) for trajectory in trajectories]
    return {
        "success_rate": float(np.mean([t.success for t in trajectories])),
        "score": float(np.mean([t.score for t in trajectories])),
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "unscorable": len(trajectories) - len(rewards),
        "turns": len(turns) / len(trajectories),
        "response_tokens": float(np.mean([t.response_length for t in trajectories])),
        "invalid_actions": float(np.mean([not turn.valid for turn in turns])) if turns else 0.0,
        "truncated": float(np.mean([t.truncated for t in trajectories])),
        "context_breaks": sum(t.context_breaks for t in trajectories),
        "groups_kept": kept, "groups_sampled": len(sampled), "dropped_groups": report.dropped_groups,
        "cancelled_groups": len(report.cancelled), "stale_groups": report.stale_groups,
        "staleness": float(np.mean(ages)), "staleness_max": max(ages),
        "lost_episodes": report.lost_episodes, "lost_responses": report.lost_responses,
        "retries": report.retries, "failed_episodes": report.errors.total(),
        "environment_steps": report.turns, "sampled_tokens": report.sampled_tokens,
        "tokens_per_second": report.sampled_tokens / max(report.seconds, 1e-9),
        "rollout_seconds": report.seconds, "environment_seconds": report.environment_seconds,
    }
