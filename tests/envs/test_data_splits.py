"""Splits of problems from files: every problem once, and in one split."""

import pytest

from envs.data_splits import separate, split_named


@pytest.mark.parametrize("name, split", [
    ("train", "train"), ("gsm8k_test", "test"), ("nq-dev.v2", "heldout"), ("Validation", "heldout"),
    ("questions", "train"), ("latest", "train"), ("contest", "train"), ("trainset", "train"),
])
def test_a_word_of_the_name_says_the_split(name, split):
    assert split_named(name) == split


def test_a_problem_is_in_the_split_that_is_judged():
    splits = {"train": dict(a=1, b=2, c=3), "heldout": dict(b=4, c=5), "test": dict(c=6)}
    assert separate(splits) == {"test": [6], "heldout": [4], "train": [1]}


def test_without_a_heldout_split_the_same_tenth_is_held_out_whatever_the_order():
    rows = {f"question {i}": i for i in range(2000)}
    one, other = separate({"train": rows}), separate({"train": dict(reversed(rows.items()))})
    assert sorted(one["heldout"] + one["train"]) == list(range(2000)) and 150 < len(one["heldout"]) < 250
    assert {split: set(numbers) for split, numbers in one.items()} == \
        {split: set(numbers) for split, numbers in other.items()}


def test_what_is_tested_is_neither_held_out_nor_trained_on():
    rows = {f"question {i}": i for i in range(100)}
    assert separate({"train": rows, "test": rows}) == {"test": list(range(100)), "heldout": [], "train": []}
