"""The calculator and the verifier of Countdown answers."""

import random
import threading
import time

import pytest

from envs.countdown_problems import random_expression
from rewards import calculate, score_countdown


@pytest.mark.parametrize("expression, value", [
    ("2+3*4", "14"), ("7/3", "7/3"), ("8/(3-8/3)", "24"), ("-5", "-5"), ("-(3+8)", "-11"), ("3--8", "11"),
    ("2-3", "-1"), ("1/3+1/6", "1/2"), ("1.5*2", "3"), ("0.1+0.2", "3/10"), ("6/4", "3/2"), ("0/5", "0"),
    (" 3 * 8 ", "24"), ("0", "0"),
    ("3 *\n8", "24"), ("3×8", "24"), ("3·8", "24"), ("8÷2", "4"), ("9−4", "5"), ("４*６", "24"), ("（1＋2）＊3", "9"),
    ("0.1234567890123456789*10000000000000000000", "1234567890123456789"),
])
def test_the_calculator_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", [
    "__import__('os').getpid()", "().__class__.__base__", "().__class__", "9**9**9**9", "9**9**9", "2**10", "1/0",
    "1/(2-2)",
    "'a'*10**9", "(" * 5000 + "1" + ")" * 5000, "(" * 31 + "1" + ")" * 31, "", " ", "()", "...", "1,2", "3 8", "3(8)",
    "(3)(8)", "+5", "3++8", "*3", "3*", "7//2", "7%2", "7<<2", "7|2", "~7", "1e9", "1j", "0x10", "1_000", "05+2", "00",
    "1 if 1 else 2", "[print(1)]", "x", "3=3", "3*8=24", "\\frac{8}{2}", "3²", "٣*٨", "½", "\x00",
    "\ud800", "1\u20002", "#3",
    "lambda:1", "3;8", "1.2.3", "9" * 201, "-" * 300 + "1", "1+" * 5000 + "1", "<tool>3</tool>",
    "3 plus 8", "{3}", "5!",
])
def test_c4_what_is_no_arithmetic_is_an_error_at_once(expression):
    started = time.monotonic()
    assert calculate(expression) == "error"
    assert time.monotonic() - started < 0.2


def test_the_longest_expressions_are_calculated():
    # 100 ones make 99 additions in 199 characters; 199 signs leave the one negative.
    assert calculate("+".join(["1"] * 100)) == "100"
    assert calculate("-" * 199 + "1") == "-1"
    assert calculate("(" * 30 + "1" + ")" * 30) == "1"
    assert calculate("9" * 200) == "9" * 200
    assert calculate("*".join(["99"] * 66)) == str(99 ** 66)


def test_no_text_makes_the_calculator_raise():
    rng, alphabet = random.Random(0), "0123456789.+-*/() =_xe\n×÷−９{}[]'\"\\#\x00\ud800"
    for _ in range(5000):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(30)))
        assert isinstance(calculate(text), str)
        assert score_countdown([3, 8], 24, f"<answer>{text}</answer>") in (0.0, 1.0)


def answer(expression):
    return f"<think>Let me see.</think>\n<answer>{expression}</answer>"


@pytest.mark.parametrize("numbers, target, expression, right", [
    ([50, 2, 2, 2], 100, "50*2", 0),
    ([7, 3], 2, "7/3", 0),
    ([8, 8, 3, 3], 24, "8/(3-8/3)", 1),
    ([5, 6, 7], 42, "6*7", 0),
    ([5, 6, 7], 42, "40+2", 0),
    ([1, 5, 2], 3, "1.5*2", 0),
    ([2, 10], 1024, "2**10", 0),
    ([9, 9, 9], 1, "9**9**9", 0),
    ([6, 4, 4], 6, "6/(4-4)", 0),
    ([3, 8, 1], 25, "3*8+1=25", 1),
    ([3, 8, 1], 25, "25=25", 0),
    ([9, 4], 5, "9−4", 1),
    ([8, 2, 3], 12, "\\frac{8}{2}\\times 3", 0),
    ([5, 2], 7, "05+2", 0),
    ([4, 6], 24, "４*６", 1),
    ([3, 8], -5, "3-8", 1),
    # a number more often than given, glued numbers, foreign numbers that cancel out
    ([3, 8], 24, "3*8*8/8", 0),
    ([3, 8], 38, "38", 0),
    ([2, 4], 24, "2 4", 0),
    ([3, 8], 24, "3*8+1-1", 0),
    ([3, 8], 24, "3*8*1", 0),
    ([1, 3, 8], 24, "3*8*1", 1),
    ([3, 8], 24, "3.0*8", 0),
    ([3, 8], 24, "8*3", 1),
    ([3, 8], -11, "-(3+8)", 1),
    ([3, 8], -11, "-3-8", 1),
    ([3, 8], 5, "-3+8", 1),
    ([3, 8], 11, "3--8", 1),
    ([3, 8], 11, "+3+8", 0),
    ([7, 2], 3, "7//2", 0),
    ([7, 2], 1, "7%2", 0),
    ([0, 5], 5, "0+5", 1),
    ([10, 4, 2], 3, "10/4+2", 0),
    ([24], 24, "24", 1),
    # the part after "=" is the target, written plainly, or nothing counts
    ([3, 8], 24, "3*8 = 24", 1),
    ([3, 8], 24, "3*8=25", 0),
    ([3, 8], 24, "3*8=", 0),
    ([3, 8], 24, "24=3*8", 0),
    ([3, 8], 24, "3*8=24=24", 0),
    ([3, 8], 24, "3*8=8*3", 0),
    ([3, 8], -5, "3-8=-5", 1),
    ([3, 8], -5, "3−8＝−5", 1),
    ([3, 8, 1], 25, "3*8+1=24", 0),
    # not an expression
    ([3, 8], 24, "", 0), ([3, 8], 24, "24", 0), ([3, 8], 24, "no idea", 0), ([3, 8], 24, "$3*8$", 0),
    ([3, 8], 24, "`3*8`", 0), ([3, 8], 24, "3*8.", 0), ([3, 8], 24, "the answer is 3*8", 0), ([3, 8], 24, "(3*8", 0),
    ([3, 8], 24, "3*8, 8*3", 0), ([3, 8], 24, "[3*8][0]", 0), ([3, 8], 24, "3*8 # 24", 0),
    ([3, 8], 24, "print(3*8)", 0), ([3, 8], 24, "3*8 if True else 0", 0),
])
def test_c2_an_answer_uses_every_number_once_and_reaches_the_target(numbers, target, expression, right):
    assert score_countdown(numbers, target, answer(expression)) == right


@pytest.mark.parametrize("completion, right", [
    ("<think><answer>4*6</answer></think> I give up", 0),
    ("<think>..</think><answer>4*6</answer>", 1),
    ("<answer>\n4*6\n</answer>", 1),
    ("<answer>\n4\n*\n6\n</answer>", 1),
    ("<answer>4*6</answer>\nThat is my answer.", 1),
    ("<answer>4+6</answer> no, <answer>4*6</answer>", 1),
    ("<answer>4*6</answer> no, <answer>4+6</answer>", 0),
    ("<answer>4*6", 0),
    ("4*6</answer>", 0),
    ("<answer>4*6</answer> <answer>4+6", 1),  # only closed answers count
    ("<answer><answer>4*6</answer>", 1),
    ("4*6", 0),
    ("4*6 = 24", 0),
    ("\\boxed{4*6}", 0),
    ("", 0),
    ("<answer></answer>", 0),
    ("<think>hm <answer>4*6</answer>", 0),  # thinking that is never closed
    ("hm <answer>4*6</answer></think> I give up", 0),  # the template opened the thinking in the prompt
    ("hm</think><answer>4*6</answer>", 1),
    ("<think>a</think><think>b <answer>4+6</answer></think><answer>4*6</answer>", 1),
    ("<answer>4*6</answer><think>was that right?</think>", 1),
    ("<think>I should write <think> first.</think><answer>4*6</answer>", 1),
    ("<tool>4*6</tool>", 0),
    ("<answer>4*6</answer", 0),
    ("Reply <answer>expression</answer>.", 0),  # the prompt's own example
])
def test_the_last_closed_answer_outside_thinking_counts(completion, right):
    assert score_countdown([4, 6], 24, completion) == right


def test_a_long_completion_is_scored_at_once():
    started = time.monotonic()
    for text in ("<answer>" * 50_000, "<think>" * 50_000, "</think>" * 50_000, "<answer>4*6" * 30_000, "(" * 500_000,
                 "<think></think>" * 30_000, "<answer>" + "4" * 500_000 + "</answer>"):
        assert score_countdown([4, 6], 24, text) == 0
    assert time.monotonic() - started < 10


def test_an_injection_has_no_side_effect(tmp_path, capfd):
    marker = tmp_path / "marker"
    for code in (f"open({str(marker)!r}, 'w')", f"__import__('pathlib').Path({str(marker)!r}).touch()", "[print(1)]",
                 "getattr(().__class__, '__ba' + 'se__')", f"exec('open({str(marker)!r}, chr(119))')"):
        assert score_countdown([4, 6], 24, answer(code)) == 0
        assert calculate(code) == "error"
    assert not marker.exists()
    assert capfd.readouterr().out == ""


def test_scoring_works_in_a_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(score_countdown([4, 6], 24, answer("4*6"))))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("numbers, target", [
    ([], 24), ("38", 24), ([3, 8.0], 24), ([3, "8"], 24), ([3, True], 24), ([3, -8], 24), ([3, None], 24), (None, 24),
    ([3, 8], "24"), ([3, 8], 24.0), ([3, 8], None), ([3, 8], True),
])
def test_malformed_task_data_is_refused(numbers, target):
    with pytest.raises(ValueError, match=r"numbers must be|target must be"):
        score_countdown(numbers, target, "<answer>3*8</answer>")


def test_the_score_agrees_with_exact_arithmetic_on_random_expressions():
    rng = random.Random(1)
    for _ in range(500):
        numbers = [rng.randrange(1, 20) for _ in range(rng.randrange(2, 6))]
        expression = random_expression(rng, numbers)
        assert calculate(expression.text) == str(expression.value)
        if expression.value.denominator == 1:
            target = int(expression.value)
            assert score_countdown(numbers, target, answer(expression.text)) == 1
            assert score_countdown([*numbers, 1], target, answer(expression.text)) == 0
            assert score_countdown(numbers[1:] or [99], target, answer(expression.text)) == 0
            assert score_countdown(numbers, target + 1, answer(expression.text)) == 0
