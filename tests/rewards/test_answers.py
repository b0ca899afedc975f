import time

import pytest

from rewards import extract_answer


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{4}", "4"), ("I do not know", None), (r"\boxed{137}", "137"), ("", None), (r"\boxed{}", None),
    (r"first \boxed{5}, then \boxed{8}", "8"), (r"\boxed{615} and again \boxed{615}", "615"),
    (r"\boxed{8} or \boxed{9}", None), (r"$\boxed{8}$, or possibly $\boxed{9}$", None),
    (r"\boxed{8} or rather \boxed{8}", "8"), (r"\boxed{0.5} or \boxed{\frac12}", r"\frac12"),
    (r"\boxed{7} or \boxed{8} or \boxed{8}", None),
    (r"\boxed{7} or \boxed{8}. No, checking it all once more gives another value, which is \boxed{9}", "9"),
    (r"\boxed{\frac{9}{16}", None), (r"\boxed{5} and then \boxed{\frac{9}{16}", None),
    (r"\boxed{\boxed{\frac{9}{16}}}", r"\frac{9}{16}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\fbox{3}", "3"),
    (r"<think>\boxed{3}</think> The answer is \boxed{4}", "4"), (r"<think>\boxed{3}</think> so", None),
    (r"\boxed{3} hm</think> \boxed{4}", "4"), (r"\boxed{3}<think>or \boxed{5}?", "3"),
    ("<answer>4*6</answer>", "4*6"), ("<answer>\n12\n</answer>\nDone.", "12"), ("<answer>12", None),
    ("<answer>1</answer> then <answer>2</answer>", "2"), ("<answer>1</answer> or <answer>2</answer>", None),
    ("<think><answer>1</answer></think> none", None), ("<answer>1 <answer>2</answer>", "2"),
    ("work\n#### 1,234", "1,234"), ("Answer: **91**", "91"), ("**Answer:** 91", "91"), ("The answer is 42.", "42"),
    ("The final answer is: $x = 3$.", "$x = 3$"), ("Answer = -5", "-5"), ("The answer is 3.5. Good.", "3.5"),
    ("the answer eludes me", None),
    # a hedge, however long
    (r"\boxed{8}, if the first reading of the question is the one that was meant, or, if not, \boxed{9}", None),
    (r"\boxed{5}. Or, if one counts the empty set as a subset too, which may well be meant here, \boxed{7}", None),
    ("<answer>1</answer>, which is what the first of both equations gives us, or perhaps <answer>2</answer>", None),
    (r"\boxed{8}" + " " * 1000 + r"or \boxed{9}", None), (r"\boxed{5} or maybe 7", None),
    (r"\boxed{5}, as I found above by adding all of the numbers in the list together, or maybe 7", None),
    (r"\boxed{5}. Or, perhaps, no. Or possibly $7$.", None), (r"\boxed{\frac12}, or perhaps 0.6.", None),
    # an "or" that joins no answers
    (r"\boxed{\frac12}, or possibly 0.5", r"\frac12"), (r"\boxed{5}, or maybe there is a simpler way", "5"),
    (r"\boxed{120} minutes or 2 hours", "120"),
    (r"\boxed{5}. Let me check by counting one or two of them again, which is easy. So it is \boxed{8}", "8"),
    ("\\boxed{5}\n\nNow check whether the count includes one or both of its ends by going through: \\boxed{8}", "8"),
])
def test_the_last_marked_answer_outside_the_reasoning_counts(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", r"\boxed{", r"\boxed{}",
                                   r"\boxed{8} or \boxed{8.0} or ", "answer is ", "#### ", "answer ****",
                                   "answer:" + " " * 50, "{", "\\", r"\boxed{8}" + " or" * 40 + " ",
                                   r"\boxed{8}, or maybe 7 ", r"\boxed{8}" + "\n" * 100, "or maybe ", "\n \n", ". "])
def test_extraction_takes_time_in_proportion_to_the_text(piece):
    begin = time.process_time()
    extract_answer(piece * (300_000 // len(piece)))
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("first", ["1" * 300_000, "1 " * 150_000, "{" * 300_000 + "}" * 300_000, "." * 300_000])
def test_a_hedge_is_seen_in_bounded_time(first):
    begin = time.process_time()
    assert extract_answer(rf"\boxed{{{first}}} or \boxed{{8}}") is None
    assert time.process_time() - begin < 10
