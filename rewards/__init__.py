"""How an outcome becomes a number: verifiers and pure functions."""

from rewards.countdown import calculate, score_countdown

__all__ = ["calculate", "score_countdown"]
