"""Formulas in Python's notation (`3*x**2*sin(x) + C`), read from hostile text without evaluating it as code.

Runs in a worker process only (`rewards.pool`): expanding or differentiating a hostile formula may take any time.
"""

import ast
import math
import operator

import sympy

from rewards.symbolic import values_agree

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos}
FUNCTIONS = {name: getattr(sympy, name) for name in (
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln",
    "sqrt", "Abs")}
CONSTANTS = {"pi": sympy.pi, "E": sympy.E}
MAX_LENGTH = 2_000


class FormulaError(ValueError):
    """The text is no formula of the small notation that is read here."""


def read_formula(text: str) -> sympy.Expr:
    """The expression that `text` denotes: numbers, names of at most two letters, + - * / ** ^ and known functions."""
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError("not an arithmetic formula") from error
    return _build(tree.body)


def _build(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            return sympy.Rational(str(value))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Name(id=name) if len(name) <= 2:
            return sympy.Symbol(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_build(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_build(argument))
    raise FormulaError(f"{type(node).__name__} has no place in a formula")


def same_polynomial(gold: str, answer: str) -> bool:
    """Whether `answer` is the polynomial `gold`, both multiplied out."""
    gold, answer = read_formula(gold), read_formula(answer)
    return bool(gold == answer or sympy.expand(gold - answer) == 0)


def is_antiderivative(integrand: str, variable: str, answer: str) -> bool:
    """Whether the derivative of `answer` by `variable` is `integrand`; any constant may be added."""
    derivative = sympy.diff(read_formula(answer), sympy.Symbol(variable))
    difference = derivative - read_formula(integrand)
    return bool(difference == 0 or values_agree(read_formula(integrand), derivative))
