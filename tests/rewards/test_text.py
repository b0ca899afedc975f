import pytest

from rewards import contains_match, exact_match, f1_score


@pytest.mark.parametrize("golds, answer, score", [
    ("Beijing", "beijing.", 1.0), (["Lima", "The Beijing"], "Beijing", 1.0),
    ("Beijing", "I think that it is Beijing", 0.0),
    ("Beijing", "<answer>Beijing</answer>", 1.0), ("Beijing", "<answer>Beijing</answer> or <answer>Lima</answer>", 0.0),
    ("Beijing", "<answer>Beijing</answer>, no: <answer>Lima</answer>", 0.0), ("Beijing", "<answer>Beijing", 0.0),
    ("Beijing", "<think><answer>Beijing</answer></think> no idea", 0.0), ("Beijing", "<think>Beijing</think>", 0.0),
    ("Beijing", "", 0.0), ("U.S.", "us", 1.0), ("São Paulo", "são  paulo", 1.0), ("vitamin A", "vitamin", 1.0),
    ("A", "", 0.0), ("A", "the", 0.0), ("The The", "the the", 1.0), ("1,000", "1000", 1.0), ("?", "!", 0.0),
    ("Rock ’n’ Roll", "rock n roll", 1.0), ("Lima", "<search>x</search> <answer>Quito</answer>", 0.0),
])
def test_exact_match_normalises_as_squad_does(golds, answer, score):
    assert exact_match(golds, answer) == score


@pytest.mark.parametrize("golds, answer, score", [
    # "cat sat" of "cat sat mat" (the article is dropped): precision 1, recall 2/3, F1 = 2 * 2 / (3 + 2)
    ("the cat sat mat", "cat sat", 0.8), ("cat", "dog", 0.0), (["dog", "cat sat"], "the cat", 2 / 3),
    ("yes", "yes it is", 0.0), ("yes", "Yes.", 1.0), ("a b c c", "c c c", 2 * 2 / (3 + 3)), ("Lima", "", 0.0),
])
def test_f1_is_the_best_token_overlap(golds, answer, score):
    assert f1_score(golds, answer) == pytest.approx(score)


def test_a_contained_gold_must_stand_as_whole_words():
    assert contains_match("Lima", "The capital is Lima, I think") == 1.0
    assert contains_match("Lima", "Limassol") == 0.0


@pytest.mark.parametrize("golds", [[], "", [""], [3]])
def test_unusable_golds_are_an_error(golds):
    with pytest.raises(ValueError, match="golds"):
        exact_match(golds, "x")
