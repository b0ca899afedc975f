import asyncio
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rewards import verify_math, verify_math_batch

EQUAL = [
    # several boxes, tags, marks
    ("615", r"so \boxed{615}. Then prose. **Final Answer** \boxed{615}"),
    ("7", r"\boxed{007}, again \boxed{007}"),
    ("8", r"first \boxed{5}, after a check \boxed{8}"),
    ("9/16", r"\boxed{\boxed{\frac{9}{16}}}"),
    ("91", "Answer: **91**"),
    (r"We find \boxed{42}.", "42"),
    ("48/2 = <<48/2=24>>24 clips\n#### 72", r"\boxed{72}"),
    # numbers
    ("0.333333", "1/3"),
    ("1/3", "0.333333"),
    ("3.14", r"\pi"),
    (r"\pi", "3.14159"),
    (r"\frac{2}{7}", r"\boxed{\frac{4}{14}}"),
    (r"-\frac{7}{3}", "-2 1/3"),
    (r"\frac{7}{3}", r"2\frac13"),
    ("12345.67", "12{,}345.67"),
    ("3482", r"\boxed{\$3,482.00}"),
    (r"6.02 \times 10^5", "602000"),
    ("-5", "\u22125"),
    (r"\frac{7}{12}", r"\dfrac7{12}"),
    ("2^{10}", "1024"),
    (r"\binom{5}{2}", "10"),
    (r"2\sqrt{3}", "sqrt(12)"),
    (r"\frac{1}{1998!}", "1/1998!"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"-\frac{1}{6}", r"-0.1\overline{6}"),
    (r"\sum_{k=1}^{10} k", "55"),
    # Unicode: powers, indices, fractions
    ("16", "2⁴"),
    ("1/2", "2⁻¹"),
    ("x^{12}", "x¹²"),
    ("3", "log₂ 8"),
    ("0.5", "½"),
    ("7/2", "3½"),
    ("-7/2", "-3 ½"),
    ("x/2", "½x"),
    # percent
    (r"36\%", r"\boxed{36 percent}"),
    (r"36\%", r"\boxed{36\%}"),
    (r"36\%", "0.36"),
    (r"65\%", "65%"),
    ("36", r"36\%"),
    (r"12.5\%", r"\frac18"),
    # units and fonts
    ("12", "12 ft"),
    (r"12\text{ cm}", "12"),
    (r"12 \text{ feet}", "12 ft"),
    ("90", r"90^\circ"),
    ("90", r"90\degree"),
    ("50 cm^2", r"50 \text{ square centimetres}"),
    ("50 m/s", "50 metres per second"),
    ("50", r"50 \text{ cm}^3"),
    ("101_2", "101_{2}"),
    ("101_2", "101"),
    (r"\text{27}", "27"),
    (r"\text{Tuesday}", "tuesday."),
    (r"\text{(C)}", "C"),
    (r"\infty", r"+\infty"),
    # tuples, lists, sets, intervals, relations
    ("(3,-8)", r"\left(3,-8\right)"),
    (r"(3,\frac{\pi}{6})", r"\left( 3, \frac{\pi}{6} \right)"),
    (r"\{3,-8\}", r"\{-8,3\}"),
    ("n=3, 5, 7", "7, 3, 5"),
    ("8, 9", r"\boxed{8 \text{ or } 9}"),
    (r"[0,1)\cup(2,3]", r"(2,3]\cup[0,1)"),
    ("x<6", r"(-\infty,6)"),
    (r"(-\infty,6)", "x<6"),
    ("1<x<3", "(1,3)"),
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"(-\infty,1)\cup(2,\infty)", "x>2 or x<1"),
    ("x>1 and x<2", "1<x<2"),
    (r"\pm 2", "2, -2"),
    ("x=2, y=3", "y=3, x=2"),
    ("15 minutes", "15 min"),
    ("1,000", "1 000"),
    ("2x-5y+7=0", "-4x+10y-14=0"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("5", "2+3=5"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    # expressions
    (r"\frac{1}{\sqrt{m}}", r"\sqrt{1/m}"),
    ("e^{12}-3", r"\boxed{-3 + exp(12)}"),
    ("14-2i", "14.0 + -2.0i"),
    ("2i", r"\sqrt{-4}"),
    ("-1", r"e^{i\pi}"),
    (r"\frac{1}{2}", r"\sin 30^\circ"),
    (r"\frac{1}{4}", r"\cos^2(60^{\circ})"),
    (r"\tan^2 y+1", r"\sec^2 y"),
    ("x^2+2x+1", "(x+1)^2"),
    ("0", r"\sin^2 x + \cos^2 x - 1"),
    ("x+2i", "2i+x"),
    # inequalities that describe one set
    ("|x|<2", "-2<x<2"),
    ("-2<x<2", r"\left|x\right|<2"),
    ("|x|<2", "(-2,2)"),
    (r"[-3,3]", r"|x| \le 3"),
    ("x^2<4", "|x|<2"),
    ("|x-1|>3", "x<-2 or x>4"),
    ("2x<4", "x<2"),
    (r"x \ne 3", r"(-\infty,3)\cup(3,\infty)"),
    # sums and products that run to a variable or to infinity
    (r"\frac{n(n+1)}{2}", r"\sum_{i=1}^{n} i"),
    (r"\sum_{i=1}^{n} i", "n(n+1)/2"),
    (r"\sum_{k=1}^{n} k", r"\sum_{j=0}^{n} j"),
    (r"\sum_{k=1}^{n} (2k-1)", "n^2"),
    (r"\frac{1-r^{n+1}}{1-r}", r"\sum_{k=0}^{n} r^k"),
    ("n!", r"\prod_{k=1}^{n} k"),
    ("2^n", r"\sum_{k=0}^{n} \binom{n}{k}"),
    (r"\frac{n}{n+1}", r"\sum_{k=1}^{n} \frac{1}{k(k+1)}"),
    (r"\frac{\pi^2}{6}", r"\sum_{k=1}^{\infty} \frac{1}{k^2}"),
]

DIFFERENT = [
    # small numbers: no absolute tolerance
    ("1/2^103", "1/2^102"),
    (r"\frac{1}{2^{103}}", r"\frac{1}{2^{102}}"),
    ("1/1998!", "1/1997!"),
    ("10^{-30}", "10^{-31}"),
    (r"\frac{\pi}{2^{300}}", r"\frac{\pi}{2^{301}}"),
    (r"\frac{x}{2^{103}}", r"\frac{x}{2^{102}}"),
    ("x^2", "x^2 + 10^{-30}"),
    ("0.0000003", "0.0000005"),
    ("5", "5.0000001"),
    ("1/3", "0.33"),
    (r"\pi", "3.14"),
    # hedges, unclosed, empty, reasoning only
    ("24", "2⁴"),
    ("31/2", "3½"),
    ("102", "10₂"),
    ("8", r"\boxed{8} or \boxed{9}"),
    ("9", r"\boxed{8} or \boxed{9}"),
    ("8", r"\boxed{8 \text{ or } 9}"),
    ("42", "the answer is 42 or 43"),
    ("9/16", r"\boxed{\frac{9}{16}"),
    ("0", r"\boxed{}"),
    ("0", ""),
    ("3", r"<think>\boxed{3}</think> The answer is \boxed{4}"),
    ("3", r"<think>\boxed{3}</think> I give up"),
    ("3", r"<think>it is \boxed{3}"),
    ("4", "I do not know"),
    # percent
    (r"36\%", r"36.5\%"),
    ("0.36", "36"),
    ("36", "0.36"),
    # other things that only look alike
    ("n=3, 5, 7", "n=3, 5, 8"),
    (r"1-\frac{3}{e}", r"1+\frac{3}{e}"),
    (r"\pm 314", "314"),
    ("11:30", "1:30"),
    ("2x-5y+7=0", "2x+6y+9=0"),
    ("(2,5]", "[2,5)"),
    ("(1,2)", "[1,2]"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("1", r"\frac{1}{0}"),
    ("1234", "(1,234)"),
    ("1,234", "(1,234)"),
    ("50 cm", "50 m"),
    ("50 cm^2", "50 cm^3"),
    ("50 square feet", "50 ft"),
    ("50 m/s", "50 m/s^2"),
    ("1 degree", "1 radian"),
    ("101_2", "101_3"),
    (r"0.\overline{12}", r"0.\overline{21}"),
    ("3+4i", "3-4i"),
    ("1/2", r"\cos 60"),
    ("12m", "12"),
    ("5t", "5s"),
    ("|x|", "x"),
    ("1", "2x+z=1"),
    ("x=1", "y=1"),
    ("5", "2+2=5"),
    ("x>3", r"x \ge 3"),
    ("x<1 or x>2", "x<1 and x>2"),
    ("42", r"\boxed{41 or 42}"),
    ("42", r"\boxed{41}, or else \boxed{42}"),
    ("10^{-20}", "0"),
    ("e^{-100}", "0"),
    ("2/3", "0.666"),
    # inequalities
    ("|x|<2", r"|x| \le 2"),
    ("|x|<2", "x<2"),
    ("|x|<2", "|x|>2"),
    ("|x|<2", "-2<y<2"),
    ("|x|<2", "-2<x<3"),
    ("|x|<2", "2"),
    ("|x|<2", "x=2"),
    ("|x-1|<2", "-2<x<2"),
    ("|x|>2", "x>2"),
    ("[-2,2]", "|x|<2"),
    ("(-2,2)", r"|x| \le 2"),
    ("x^2<4", "x<2"),
    ("x<2 or x>3", "2<x<3"),
    (r"x \ne 3", "x>3"),
    # sums
    (r"\frac{n(n+1)}{2}", r"\sum_{i=1}^{n-1} i"),
    (r"\frac{n(n+1)}{2}", r"\sum_{i=0}^{n+1} i"),
    (r"\frac{n(n+1)}{2}", r"\sum_{i=1}^{n} i^2"),
    (r"\frac{m(m+1)}{2}", r"\sum_{i=1}^{n} i"),
    ("n^2", r"\sum_{k=1}^{n} k"),
    ("n", r"\sum_{i=1}^{n} i"),
    ("n!", r"\prod_{k=1}^{n-1} k"),
    ("2^n", r"\sum_{k=1}^{n} \binom{n}{k}"),
    (r"\frac{1}{1-r}", r"\sum_{k=0}^{n} r^k"),
    ("55", r"\sum_{i=1}^{n} i"),
    ("0", r"\sum_{k=1}^{\infty} \frac{1}{k^2}"),
    ("1", r"\sum_{k=1}^{\infty} \frac{1}{k}"),
    # i
    ("x+2i", "x-2i"),
    ("x", "x+i"),
]


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_the_same_value_is_right_however_it_is_written(gold, answer):
    assert verify_math(gold=gold, answer=answer) is True


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_another_value_is_wrong_however_close_it_looks(gold, answer):
    assert verify_math(gold=gold, answer=answer) is False


def test_arguments_are_passed_by_keyword_only():
    with pytest.raises(TypeError):
        verify_math("1", "1")


def test_a_batch_has_one_verdict_for_each_pair_in_order():
    answers = [r"\boxed{4}", "I do not know", r"\boxed{137}", "", r"\boxed{4}"]
    assert verify_math_batch(golds=["4"] * 5, answers=answers) == [True, False, False, False, True]
    with pytest.raises(ValueError, match="one length"):
        verify_math_batch(golds=["4"], answers=answers)
    assert verify_math_batch(golds=[], answers=[]) == []


@pytest.mark.parametrize("gold", ["", "  ", r"\boxed{", r"\boxed{}", r"\boxed{1} or \boxed{2}"])
def test_a_gold_without_an_answer_is_an_error_of_the_data(gold):
    with pytest.raises(ValueError, match="gold"):
        verify_math(gold=gold, answer="1")


HOSTILE = [
    "9^{9^{9^{9}}}", "20000000!", r"\sqrt{9^{9^{9}}}", "x^{9^{9^{9}}}", r"\binom{10^9}{5 \cdot 10^8}", "100!!!",
    r"\sum_{i=1}^{10^9} \frac{1}{i^2}", r"\prod_{n=1}^{10^8} n", "(" * 200 + "x" + ")" * 200, "{" * 5000 + "}" * 5000,
    "1" * 5000, " " * 300_000 + "or", "9" + " or" * 100_000,
    "(x+1)^{100000}", r"\frac{1}{" * 300 + "2" + "}" * 300, "-" * 3000 + "9 + 1", "9" + "^9" * 500,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_could_run_for_ever_is_wrong_in_bounded_time(text):
    begin = time.monotonic()
    assert verify_math(gold="9", answer=rf"\boxed{{{text}}}") is False
    # One second of CPU time is the limit; the rest is room for a busy machine.
    assert time.monotonic() - begin < 20
    assert verify_math(gold="x+y", answer="y+x") is True


def test_a_power_tower_in_the_prose_is_not_evaluated():
    assert verify_math(gold="9", answer=r"since \(7^{7^{77}}\) is large, \boxed{9}") is True


@pytest.mark.parametrize("call", ["__import__('os').system('touch {marker}')", "().__class__.__bases__[0]",
                                  "getattr(__builtins__, '__imp' + 'ort__')('pathlib').Path('{marker}').touch()",
                                  "[print(1)]", "open('{marker}', 'w')", r"\text{{__import__('os')}}",
                                  "1 if print('pwned') else 5", "lambda: open('{marker}','w')"])
def test_no_code_of_an_answer_is_run(call, tmp_path, capfd):
    marker = tmp_path / "marker"
    text = call.replace("{marker}", str(marker))
    assert verify_math(gold="5", answer=rf"\boxed{{{text}}}") is False
    assert verify_math(gold="x+1", answer=text) is False
    assert not marker.exists()
    assert capfd.readouterr() == ("", "")


# A gold and an answer that only the worker processes can compare.
SYMBOLIC = {"gold": "x^2-1", "answer": r"\boxed{(x-1)(x+1)}"}


def test_verification_works_in_threads_and_in_a_running_event_loop(capfd):
    verdicts = []
    threads = [threading.Thread(target=lambda: verdicts.append(verify_math(**SYMBOLIC))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 6

    async def ask():
        return await asyncio.gather(*(asyncio.to_thread(verify_math, **SYMBOLIC) for _ in range(3)))
    assert asyncio.run(ask()) == [True] * 3
    assert capfd.readouterr() == ("", "")


def _verify_and_leave():
    os._exit(0 if verify_math(**SYMBOLIC) and verify_math(gold="1/2", answer="0.5") else 1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("daemon", [False, True])
def test_verification_works_in_child_processes(method, daemon):
    assert verify_math(**SYMBOLIC)
    child = multiprocessing.get_context(method).Process(target=_verify_and_leave, daemon=daemon)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert verify_math(**SYMBOLIC)


def test_hanging_texts_in_a_worker_thread_of_a_process_with_little_memory():
    script = r"""
        import resource, threading, time
        resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
        from rewards import verify_math
        verdicts = []
        def work():
            for answer in (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{20000000!}", r"\boxed{x^{9^{9^{9}}}}",
                           r"see \(7^{7^{77}}\), \boxed{9}"):
                verdicts.append(verify_math(gold="9", answer=answer))
            verdicts.append(verify_math(gold="x+y", answer="y+x"))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(verdicts)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[False, False, False, True, True]\n", done.stderr
