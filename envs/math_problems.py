"""Generated arithmetic and algebra problems: question, short worked solution, exact answer. No data file is needed."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Problem:
    """A question with one right answer."""

    family: str
    question: str
    solution: str
    """Worked reasoning, without the final box."""
    answer: str
    """LaTeX, as it stands in the box."""


def make_problem(rng: random.Random) -> Problem:
    """A problem of a family drawn by `rng`; the same generator state gives the same problem on every machine."""
    family = rng.choice(sorted(FAMILIES))
    question, solution, answer = FAMILIES[family](rng)
    return Problem(family, question, solution, _latex(answer) if isinstance(answer, int | Fraction) else answer)


def _latex(value: int | Fraction) -> str:
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _term(coefficient: int, symbol: str, first: bool = False) -> str:
    """A summand with its sign: `3x` or ` - x`."""
    sign = ("-" if coefficient < 0 else "") if first else (" - " if coefficient < 0 else " + ")
    number = "" if abs(coefficient) == 1 and symbol else str(abs(coefficient))
    return f"{sign}{number}{symbol}"


def _nonzero(rng: random.Random, largest: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, largest)


def _chain(rng: random.Random):
    a, b, c, d = (rng.randint(2, 60) for _ in range(4))
    product = b * c
    sign = rng.choice("+-")
    total = a + product - d if sign == "+" else a - product + d
    other = "-" if sign == "+" else "+"
    return (f"Compute ${a} {sign} {b} \\times {c} {other} {d}$.",
            f"First the product: {b} * {c} = {product}. Then {a} {sign} {product} {other} {d} = {total}.", total)


def _fractions(rng: random.Random):
    p, q = Fraction(rng.randint(1, 19), rng.randint(2, 15)), Fraction(rng.randint(1, 19), rng.randint(2, 15))
    name, sign, value = rng.choice((("sum", "+", p + q), ("difference", "-", p - q), ("product", r"\times", p * q),
                                    ("quotient", r"\div", p / q)))
    return (f"Compute ${_latex(p)} {sign} {_latex(q)}$ as a fraction in lowest terms or an integer.",
            f"The {name} of {p} and {q} is {value}.", value)


def _percentage(rng: random.Random):
    percent, whole = rng.randint(1, 150), rng.randint(2, 99) * 20
    part = Fraction(percent * whole, 100)
    if rng.random() < 0.5:
        return (f"What is ${percent}\\%$ of ${whole}$?", f"{percent}/100 * {whole} = {part}.", part)
    return (f"${_latex(part)}$ is ${percent}\\%$ of which number?", f"{part} / ({percent}/100) = {whole}.", whole)


def _linear_equation(rng: random.Random):
    a, c = rng.sample([k for k in range(-12, 13) if k], 2)
    b, d = _nonzero(rng, 40), _nonzero(rng, 40)
    x = Fraction(d - b, a - c)
    return (f"Solve ${_term(a, 'x', True)}{_term(b, '')} = {_term(c, 'x', True)}{_term(d, '')}$ for $x$.",
            f"Collect the terms: {a - c}x = {d - b}, so x = {x}.", x)


def _linear_system(rng: random.Random):
    x, y = rng.randint(-15, 15), rng.randint(-15, 15)
    a, b, c, d = (_nonzero(rng, 9) for _ in range(4))
    if a * d == b * c:
        d += b if d + b else 2 * b
    e, f = a * x + b * y, c * x + d * y
    determinant = a * d - b * c
    return (f"Solve the system ${_term(a, 'x', True)}{_term(b, 'y')} = {e}$ and "
            f"${_term(c, 'x', True)}{_term(d, 'y')} = {f}$. Give the answer as $(x, y)$.",
            f"The determinant is {determinant}. x = {e * d - b * f}/{determinant} = {x} and "
            f"y = {a * f - c * e}/{determinant} = {y}.", f"({x}, {y})")


def _polynomial_value(rng: random.Random):
    a, b, c, d, x = (_nonzero(rng, 9) for _ in range(5))
    value = a * x**3 + b * x**2 + c * x + d
    polynomial = _term(a, "x^3", True) + _term(b, "x^2") + _term(c, "x") + _term(d, "")
    return (f"Let $f(x) = {polynomial}$. Find $f({x})$.",
            f"The terms at x = {x} are {a * x**3}, {b * x**2}, {c * x} and {d}; their sum is {value}.", value)


def _gcd_lcm(rng: random.Random):
    common = rng.randint(2, 24)
    a, b = common * rng.randint(2, 30), common * rng.randint(2, 30)
    divisor = math.gcd(a, b)
    if rng.random() < 0.5:
        return (f"What is the greatest common divisor of ${a}$ and ${b}$?",
                f"{a} = {divisor} * {a // divisor} and {b} = {divisor} * {b // divisor}, whose cofactors share no "
                "factor.", divisor)
    return (f"What is the least common multiple of ${a}$ and ${b}$?",
            f"The greatest common divisor is {divisor}, and {a} * {b} / {divisor} = {math.lcm(a, b)}.", math.lcm(a, b))


def _expansion(rng: random.Random):
    a, b, c, d = (_nonzero(rng, 9) for _ in range(4))
    answer = _term(a * c, "x^2", True) + (_term(a * d + b * c, "x") if a * d + b * c else "") + _term(b * d, "")
    return (f"Expand $({_term(a, 'x', True)}{_term(b, '')})({_term(c, 'x', True)}{_term(d, '')})$.",
            f"The square term is {a * c}, the linear term {a * d} + {b * c} = {a * d + b * c}, the constant {b * d}.",
            answer)


def _quadratic_roots(rng: random.Random):
    p, q = rng.sample(range(-40, 41), 2)
    low, high = min(p, q), max(p, q)
    polynomial = "x^2" + (_term(-p - q, "x") if p + q else "") + (_term(p * q, "") if p * q else "")
    return (f"Find all roots of ${polynomial} = 0$. Give them separated by a comma.",
            f"Two numbers with the sum {p + q} and the product {p * q} are {low} and {high}.", f"{low}, {high}")


def _word_problem(rng: random.Random):
    name = rng.choice(("Ada", "Bela", "Chidi", "Dara", "Emil", "Fatou", "Goran", "Hana"))
    boxes, each, given, price = rng.randint(3, 20), rng.randint(4, 25), rng.randint(2, 11), rng.randint(2, 15)
    thing = rng.choice(("pencils", "apples", "stickers", "marbles", "tickets"))
    left = boxes * each - given
    if rng.random() < 0.5:
        return (f"{name} has {boxes} boxes with {each} {thing} each and gives {given} {thing} away. How many {thing} "
                "are left?", f"{boxes} * {each} = {boxes * each}, and {boxes * each} - {given} = {left}.", left)
    return (f"{name} buys {boxes} boxes with {each} {thing} each, keeps {given} {thing} and sells the others for "
            f"{price} coins apiece. How many coins is that?",
            f"{boxes} * {each} - {given} = {left} are sold, and {left} * {price} = {left * price}.", left * price)


FAMILIES: dict[str, Callable[[random.Random], tuple[str, str, int | Fraction | str]]] = {
    "arithmetic": _chain, "fractions": _fractions, "percentages": _percentage, "linear equations": _linear_equation,
    "linear systems": _linear_system, "polynomial values": _polynomial_value, "divisors": _gcd_lcm,
    "expansions": _expansion, "quadratic roots": _quadratic_roots, "word problems": _word_problem,
}
