import itertools

import numpy as np
import pytest

from trainers.statistics import bootstrap_interval, pass_at_k, wilson_interval


# Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3.
@pytest.mark.parametrize("successes, n, low, high", [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605),
                                                     (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_interval_gives_the_published_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 3, 7, 20, 134, 1000])
def test_wilson_interval_holds_the_rate_stays_in_0_1_and_mirrors(n):
    for successes in range(n + 1):
        low, high = wilson_interval(successes, n)
        assert 0 <= low <= successes / n <= high <= 1
        assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_wilson_interval_of_nothing_is_everything():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_wilson_interval_widens_with_confidence():
    (low, high), (lower, higher) = wilson_interval(3, 9, 0.9), wilson_interval(3, 9, 0.99)
    assert lower < low < high < higher


@pytest.mark.parametrize("arguments", [(5, 4), (-1, 4), (0, -1), (1, 4, 0.0), (1, 4, 95)])
def test_wilson_interval_refuses_impossible_numbers(arguments):
    with pytest.raises(ValueError):
        wilson_interval(*arguments)


@pytest.mark.parametrize("n, c, k, right", [(5, 2, 3, 0.9), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (4, 0, 4, 0.0),
                                            (1, 1, 1, 1.0), (2, 1, 2, 1.0), (2, 2, 2, 1.0)])
def test_pass_at_k_is_unbiased(n, c, k, right):
    assert pass_at_k(n, c, k) == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize("n, c, k", [(6, 2, 3), (7, 5, 2), (5, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (2, 1, 5), (1, 1, 10), (1, 0, 10)])
def test_pass_at_k_is_refused_for_more_than_the_samples(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples per problem, got {n}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (0, 0, 1), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_numbers(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_pass_at_k_takes_large_numbers():
    # 1 − Π_{i<1000} (9000−i)/(10000−i) is 1 − 3e-48 or so.
    assert pass_at_k(10_000, 1_000, 1_000) == 1.0
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_bootstrap_interval_is_seeded_and_leaves_the_global_generator_alone():
    values = np.random.default_rng(0).random(20)
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    assert (np.random.get_state()[1] == before).all()


def test_bootstrap_interval_agrees_with_the_normal_interval_on_many_problems():
    values = np.random.default_rng(0).random(1000)
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    assert bootstrap_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=2e-3)


def test_bootstrap_interval_of_equal_values_is_a_point():
    assert bootstrap_interval([0.5] * 4) == (0.5, 0.5)


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [[0.5, 1.0]]])
def test_bootstrap_interval_refuses_what_is_no_list_of_values(values):
    with pytest.raises(ValueError, match="one finite value per problem"):
        bootstrap_interval(values)


@pytest.mark.parametrize("resamples", [0, -1])
def test_bootstrap_interval_refuses_to_draw_nothing(resamples):
    with pytest.raises(ValueError, match=f"resamples must be at least 1, got {resamples}"):
        bootstrap_interval([0.0, 1.0], resamples=resamples)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, float("nan")])
def test_bootstrap_interval_refuses_an_impossible_confidence(confidence):
    with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
        bootstrap_interval([0.0, 1.0], confidence=confidence)
