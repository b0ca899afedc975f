"""How an outcome becomes a number: verifiers and pure functions."""

from rewards.answers import extract_answer
from rewards.countdown import calculate, score_countdown
from rewards.mathematics import verify_math, verify_math_batch
from rewards.text import contains_match, exact_match, f1_score
from rewards.webshop import webshop_reward

__all__ = ["calculate", "contains_match", "exact_match", "extract_answer", "f1_score", "score_countdown", "verify_math",
           "verify_math_batch", "webshop_reward"]
