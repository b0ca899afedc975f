"""What a measuring process answers reaches its parent, whatever becomes of it."""

import subprocess
import sys

import pytest

from scripts._bench.child import ROOT, ask

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
    # In a process of its own: of a large one the system may take other pages back meanwhile.
    script = f"""
from scripts._bench.child import memory
before = memory()
much = b"1" * {200 * MIB}
del much
after = memory()
assert after["peak"] >= before["now"] + {150 * MIB} and after["now"] < after["peak"], (before, after)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
