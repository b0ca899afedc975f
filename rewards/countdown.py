"""Countdown: a calculator for what a model wrote, and the verifier of final answers. Exact; nothing is run."""

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral

from rewards.tags import last_block

MAX_LENGTH = 200
"""Longest expression, in characters. Without a power operator it also bounds every value, to some 200 digits."""
MAX_DEPTH = 30
"""Most parentheses open at once."""

SAME_SIGNS = str.maketrans("×·⋅∗＊÷∕／−–－＋（）＝０１２３４５６７８９", "*****///---+()=0123456789")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LEADING_ZERO = re.compile(r"(?<![\d.])0\d")


def calculate(expression: str) -> str:
    """The exact value of an expression, as "14" or "7/3", or "error". Never raises on any text.

    It knows + - * / (also × · ÷ − and full-width signs), parentheses, unary minus and decimal numbers such as 2.5.
    Anything else is an error, and so are a leading zero as in 05, a division by zero, more than 200 characters and
    more than 30 open parentheses.
    """
    try:
        return str(_evaluate(_normalise(expression))[0])
    except (ValueError, ZeroDivisionError):
        return "error"


def score_countdown(numbers: Sequence[int], target: int, completion: str) -> float:
    """1.0 where the completion's answer reaches the target with every given number used exactly once, else 0.0.

    The answer is the last closed `<answer>` outside `<think>`: an expression as `calculate` takes it, of the given
    integers only, optionally followed by `= target`. Never raises on a completion; ValueError where `numbers` is
    not a non-empty list or tuple of non-negative integers, or `target` is
    not an integer.
    """
    _check_problem(numbers, target)
    block = last_block(completion, ("answer",))
    if block is None:
        return 0.0
    try:
        expression, equals, claimed = _normalise(block[2]).partition("=")
        if equals and claimed.strip() != str(target):
            return 0.0
        value, literals = _evaluate(expression.strip())
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(literals) == sorted(map(str, numbers)))


def _check_problem(numbers: Sequence[int], target: int) -> None:
    def is_integer(x) -> bool:
        return isinstance(x, Integral) and not isinstance(x, bool)
    if not isinstance(numbers, list | tuple) or not numbers or not all(is_integer(n) and n >= 0 for n in numbers):
        raise ValueError(f"numbers must be a list of non-negative integers, at least one, got {numbers!r}")
    if not is_integer(target):
        raise ValueError(f"target must be an integer, got {target!r}")


def _normalise(expression: str) -> str:
    """One line, ASCII signs. ValueError where it is too long to be looked at."""
    expression = expression.strip()
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    return " ".join(expression.translate(SAME_SIGNS).split())


def _evaluate(expression: str) -> tuple[Fraction, list[str]]:
    """Value and number literals of a normalised expression. Raises ValueError or ZeroDivisionError."""
    # Only digits, points, signs and parentheses reach Python's parser: no names, no strings, no comments.
    if not re.fullmatch(r"[0-9.+\-*/() ]+", expression) or LEADING_ZERO.search(expression):
        raise ValueError("not an expression of numbers, + - * / and parentheses")
    depth = 0
    for character in expression:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} open parentheses")
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error}") from None
    literals: list[str] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant():
                literals.append(expression[node.col_offset:node.end_col_offset])
                return Fraction(literals[-1])
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{type(node).__name__} is not allowed")

    return value(tree), literals
