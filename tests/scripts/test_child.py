"""What a measuring process answers reaches its parent, whatever becomes of it."""

import pytest

from scripts._bench.child import ask, memory

MIB = 2**20


def test_answers_are_not_mixed_with_what_libraries_print():
    assert ask("tests.scripts.answering", {"number": 2}) == [{"doubled": 4}]


@pytest.mark.parametrize("then, error", [("fail", "ValueError: as told"), ("die", "ended with code 3"),
                                         ("sleep", "not done after 5 s")])
def test_a_process_that_fails_says_why_after_what_it_had_found(then, error):
    first, last = ask("tests.scripts.answering", {"number": 2, "then": then}, seconds=5 if then == "sleep" else None)
    assert first == {"doubled": 4} and error in last["error"]


def test_a_module_that_cannot_be_imported_is_an_error_with_its_last_line():
    answers = ask("tests.scripts.no_such_module", {"number": 2})
    assert len(answers) == 1 and "No module named" in answers[0]["error"]


def test_a_peak_of_memory_stays_after_it_was_given_back():
    before = memory()
    much = b"\1" * (200 * MIB)  # not zeros, which take no memory before they are changed
    del much
    after = memory()
    assert after["peak"] >= before["now"] + 150 * MIB and after["now"] < after["peak"]
