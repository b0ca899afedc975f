"""The reference verifier: which documents support which units, and what that credits to which step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rewards.evidence import (
    canonical_id,
    cited_support,
    document_credit,
    first_exposures,
    mentions,
    shown_documents,
    step_credit,
    supporting_documents,
)

PERU = {"entities": [{"id": "E0", "aliases": ["Peru"]}, {"id": "E1", "aliases": ["Lima"]}],
        "relations": [{"head": "E0", "relation": "capital", "tail": "E1", "cues": ["capital", "seat of government"]}]}


@pytest.mark.parametrize("name, right", [
    ("HTTPS://Example.ORG/A/b/#part", "https://example.org/A/b"), ("https://example.org/", "https://example.org"),
    ("https://e.org/p?b=2&a=1&utm_source=x&fbclid=3", "https://e.org/p?a=1&b=2"), ("http://e.org:80/p", "http://e.org/p"),
    ("https://e.org:443/p", "https://e.org/p"), ("https://e.org:8443/p", "https://e.org:8443/p"),
    ("https://e.org/p?UTM_Campaign=x", "https://e.org/p"), ("https://e.org/p?q=a%20b&empty=", "https://e.org/p?empty=&q=a+b"),
    ("https://e.org/p?q=a+b&empty=", "https://e.org/p?empty=&q=a+b"), ("country/PE", "country/PE"), (" 17 ", "17"),
    ("doc:17", "doc:17"), ("Doc/", "Doc/"), ("http://[broken", "http://[broken"), ("", "")])
def test_a_document_has_one_name_however_it_is_written(name, right):
    assert canonical_id(name) == right == canonical_id(canonical_id(name))


@pytest.mark.parametrize("text, name, right", [
    ("Lima is large.", "lima", True), ("LIMA", "Lima", True), ("Limassol", "Lima", False), ("Somalia", "Mali", False),
    ("Lima's port", "Lima", True), ("São Tomé", "Sao Tome", True), ("Guinea Bissau", "Guinea-Bissau", True),
    ("It has 1,234 people", "234", False), ("It has 1,234 people", "1234", True), ("in 1990.", "1990", True),
    ("3.5 km", "5", False), ("the Gambia", "The Gambia", True), ("Gambia", "The Gambia", True), ("The", "the", True),
    ("Côte d’Ivoire", "Cote d'Ivoire", True), ("New  York\nCity", "New York City", True),
    ("York New", "New York", False),
    ("anything", "", False), ("anything", "?!", False), ("", "Lima", False), ("秘鲁的首都是利马。", "利马", True),
    ("vitamin C", "vitamin A", False), ("STRASSE", "Straße", True)])
def test_a_name_is_mentioned_as_whole_words(text, name, right):
    assert mentions(text, [name]) is right
    assert mentions(text, ["zzz", name]) is right


@pytest.mark.parametrize("text, right", [
    ("Lima is the capital of Peru.", [True, True, True]), ("Peru. Its seat of government: Lima.", [True, True, True]),
    ("Lima is in Peru.", [True, True, False]), ("The capital is Lima.", [False, True, False]),
    ("Peru has a capital.\n\nLima is large.", [True, True, False]),  # not in one passage
    ("Peru\nThe capital is Lima.", [True, True, True]),  # a title and its text are
    ("", [False, False, False])])
def test_a_relation_is_supported_by_both_ends_and_a_cue_in_one_passage(text, right):
    assert [bool(support) for support in supporting_documents(PERU, {"d": text})] == right


def test_a_relation_without_cues_needs_its_ends_alone():
    graph = PERU | {"relations": [{"head": "E0", "tail": "E1"}]}
    assert supporting_documents(graph, {"d": "Lima, Peru"})[2] == {"d"}


def test_a_unit_s_own_documents_support_it_without_their_texts():
    graph = {"entities": [{"id": "E0", "aliases": ["Peru"], "documents": ["HTTP://A.org/x/", "b"]}]}
    assert supporting_documents(graph, {"http://a.org/x": "", "c": "", "b": ""}) == [{"http://a.org/x", "b"}]


def test_a_relation_to_an_unknown_entity_is_named():
    with pytest.raises(ValueError, match=r"relation 'capital' .*\['E9'\]"):
        supporting_documents(PERU | {"relations": [{"head": "E0", "relation": "capital", "tail": "E9"}]}, {})


def test_a_cited_document_that_was_never_shown_supports_nothing():
    shown = shown_documents([{"a": "Peru"}, {"b": "Lima"}])
    assert cited_support(PERU, shown, ["a", "never"]) == [{"a"}, set(), set()]
    assert cited_support(PERU, shown, []) == [set(), set(), set()]


def test_what_several_steps_showed_of_a_document_counts_together():
    shown = shown_documents([{"https://a.org/": "Peru ..."}, ["other"], {"https://A.org#x": "Its capital, Lima, ..."}])
    assert cited_support(PERU, shown, ["https://a.org"]) == [{"https://a.org"}, {"https://a.org"}, set()]
    assert first_exposures(shown) == {"https://a.org": 0, "other": 1}


supports = st.lists(st.sets(st.sampled_from("abcdef")), max_size=6)
exposures = st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), min_size=1, max_size=5).map(
    lambda steps: [*steps, list("abcdef")])  # the last step shows them all
quickly = hypothesis_settings(max_examples=50, deadline=None)


@given(supports, st.floats(0, 1))
@quickly
def test_s5_a_unit_gives_the_same_credit_however_many_documents_support_it(support, unit_credit):
    assert sum(document_credit(support, unit_credit).values()) == pytest.approx(unit_credit * sum(map(bool, support)))
    for documents in support:
        assert sum(document_credit([documents], unit_credit).values()) == pytest.approx(unit_credit * bool(documents))


@given(supports, exposures, st.floats(0, 0.5), st.floats(0, 0.99))
@quickly
def test_s1_s5_steps_get_at_most_the_cap_and_together_at_most_what_the_units_give(support, shown, unit_credit, cap):
    credit = step_credit(support, shown, unit_credit=unit_credit, cap=cap)
    assert credit.shape == (len(shown),) and (credit >= 0).all() and (credit <= cap).all()
    assert credit.sum() <= unit_credit * len(support) + 1e-9
    uncapped = step_credit(support, shown, unit_credit=unit_credit, cap=1e9)
    assert uncapped.sum() == pytest.approx(unit_credit * sum(map(bool, support)))


@given(supports, exposures, st.randoms(use_true_random=False))
@quickly
def test_s6_showing_a_document_again_changes_nothing(support, shown, random):
    credit = step_credit(support, shown, unit_credit=0.03, cap=0.1)
    first, again = first_exposures(shown), [*shown, list("fedcba")]
    assert step_credit(support, again, unit_credit=0.03, cap=0.1)[:-1].tolist() == credit.tolist()
    later = [(step, name) for step, names in enumerate(shown) for name in names if first[name] < step]
    kept = [[name for name in dict.fromkeys(names) if first[name] == step] for step, names in enumerate(shown)]
    for _, name in later:  # every later exposure moves to another step after the first
        kept[random.randint(first[name], len(shown) - 1)].append(name)
    assert step_credit(support, kept, unit_credit=0.03, cap=0.1).tolist() == credit.tolist()


def test_credit_worked_by_hand():
    # δ .03: unit 0 gives a .03; unit 1 gives a and b .015 each; unit 2 gives b .03. a: .045 at step 0, b: .045 at
    # step 2; unit 3 is not supported. With a cap of .04 both are cut.
    support, shown = [{"a"}, {"a", "b"}, {"b"}, set()], [["a", "x"], ["a"], ["x", "b"]]
    assert step_credit(support, shown, unit_credit=0.03, cap=0.1) == pytest.approx(np.array([0.045, 0, 0.045]))
    assert step_credit(support, shown, unit_credit=0.03, cap=0.04).tolist() == [0.04, 0.0, 0.04]
