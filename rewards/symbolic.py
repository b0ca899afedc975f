r"""Equality of mathematical expressions by math-verify, with a numeric judge in front of it.

Runs in a worker process only (`rewards.pool`): sympy may need any time and memory on a hostile text. Expressions are
compared by their values to many digits, relative to their size, at points of the real line: 1/2^{103} is not 1/2^{102},
and \sqrt{1/m} is 1/\sqrt{m} wherever the gold is real. Relations, sets and matrices are left to math-verify.
"""

import logging
import re
import warnings

import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.evalf import PrecisionExhausted
from sympy.core.relational import Relational

from rewards.equivalence import same_answer
from rewards.exact import DECIMAL, SURE_DIGITS

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

# Units and boxes are handled before; math-verify's own unit list would strip the variable of 12m.
LATEX = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"))]
SERIES = (sympy.Sum, sympy.Product)
INEQUALITIES = (sympy.Interval, sympy.Union, sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan,
                sympy.GreaterThan, sympy.Ne, sympy.And, sympy.Or)
COUNTS = [sympy.Integer(n) for n in (1, 2, 3, 4, 6, 7, 9, 12)]
"""Values of a variable that a sum or a product runs to."""
POINTS = [sympy.Rational(*ratio) for ratio in
          ((7, 5), (-13, 11), (31, 7), (-2, 9), (5, 13), (-37, 10), (101, 17), (1, 19))]
DIGITS = 50
CLOSE = sympy.Rational(1, 10**40)


def equal(gold: str, answer: str) -> bool:
    """Whether `gold` and `answer` (one answer each, no whole completions) are the same."""
    try:
        return same_answer(gold, answer, equal_expressions)
    except Exception:  # sympy raises nearly anything on a hostile text, which is then simply no right answer
        return False


def equal_expressions(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions are equal; False where one of them cannot be read."""
    gold_value, answer_value = _read(gold), _read(answer)
    if gold_value is None or answer_value is None:
        return False
    if isinstance(gold_value, sympy.Expr) and isinstance(answer_value, sympy.Expr):
        verdict = _same_values(gold_value, answer_value, gold, answer)
        if verdict is not None:
            return verdict
    if _same_solutions(gold_value, answer_value):
        return True
    relations = isinstance(gold_value, Relational | sympy.And), isinstance(answer_value, Relational | sympy.And)
    sets = isinstance(gold_value, sympy.Set) or isinstance(answer_value, sympy.Set)
    # math-verify would compare the right-hand side of an equation with a plain expression.
    if relations[0] != relations[1] and not sets:
        return False
    return bool(verify(gold_value, answer_value, float_rounding=12, numeric_precision=50, strict=True,
                  allow_set_relation_comp=True, timeout_seconds=None))


def _read(text: str) -> sympy.Basic | None:
    """The expression that `text` denotes: decimals as exact fractions, a free i as the imaginary unit, joined
    conditions as the set they describe."""
    for connective, join in ((r"\lor", sympy.Union), (r"\land", sympy.Intersection)):
        if connective in text:
            parts = [_read(part) for part in text.split(connective)]
            return None if None in parts else join(*(
                part if isinstance(part, sympy.Set) else part.as_set() for part in parts))
    parsed = parse(f"${text}$", extraction_config=LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed or not isinstance(parsed[0], sympy.Basic | sympy.MatrixBase):
        return None
    exact = parsed[0].replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))
    exact = exact.subs({symbol: sympy.I for symbol in exact.free_symbols if symbol.name == "i"})
    # Beside an i math-verify makes all symbols complex, and then n is not n.
    return exact.xreplace({symbol: sympy.Symbol(symbol.name, real=True) for symbol in exact.atoms(sympy.Symbol)})


def _same_solutions(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    """Whether two inequalities in one and the same variable, or one and an interval, describe one set of numbers."""
    sides = gold, answer
    if len(gold.free_symbols | answer.free_symbols) != 1 or not all(isinstance(side, INEQUALITIES) for side in sides):
        return False
    try:
        first, second = (side if isinstance(side, sympy.Set) else side.as_set() for side in sides)
    except NotImplementedError:  # sympy finds no solution
        return False
    return bool(first == second)


def _same_values(gold: sympy.Expr, answer: sympy.Expr, gold_text: str, answer_text: str) -> bool | None:
    """Equality by values, a plain decimal to its own digits; None where too few points say anything."""
    if gold.free_symbols | answer.free_symbols:
        return values_agree(gold, answer)
    gold_number, answer_number = _evaluate(gold), _evaluate(answer)
    if gold_number is None or answer_number is None:
        return None
    return (_close(gold_number, answer_number) or _rounds_to(answer_number, gold_text, 1)
            or _rounds_to(gold_number, answer_text, SURE_DIGITS))


def values_agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions have equal values wherever `gold` is real; None where that is nowhere to be seen."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    counted = {symbol for side in (gold, answer) for series in side.atoms(*SERIES)
               for _, *ends in series.limits for end in ends for symbol in end.free_symbols}
    judged = 0
    for start in range(len(POINTS)):
        point = {symbol: (COUNTS if symbol in counted else POINTS)[(start + 3 * place) % len(POINTS)] + place
                 for place, symbol in enumerate(symbols)}
        gold_number, answer_number = _evaluate(gold.subs(point)), _evaluate(answer.subs(point))
        if gold_number is None or (_is_real_expression(gold) and not gold_number.is_real):
            continue
        if answer_number is None or not _close(gold_number, answer_number):
            return False
        judged += 1
    return True if judged >= 3 else None


def _is_real_expression(expression: sympy.Expr) -> bool:
    return not expression.has(sympy.I)


def _evaluate(expression: sympy.Expr) -> sympy.Expr | None:
    """The number to DIGITS digits, or None where there is none."""
    try:
        expression = expression.replace(lambda part: isinstance(part, SERIES), lambda part: part.doit())
        number = sympy.N(expression, DIGITS, strict=True)
    except PrecisionExhausted:
        # Everything cancels, however many digits are taken: the value is zero. A limit is only not found so.
        return None if expression.has(*SERIES, sympy.Integral, sympy.Limit) else sympy.Integer(0)
    except (ArithmeticError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        return None
    real, imaginary = number.as_real_imag()
    if not (real.is_Float or real.is_Integer) or not (imaginary.is_Float or imaginary.is_Integer):
        return None
    # Rounding noise in the imaginary part is not a complex number.
    return number if abs(imaginary) > CLOSE * abs(real) else real


def _close(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    return bool(abs(gold - answer) <= CLOSE * max(abs(gold), abs(answer)))


def _rounds_to(number: sympy.Expr, decimal: str, digits: int) -> bool:
    """Whether the plain decimal `decimal`, of at least `digits` significant digits, is `number` rounded."""
    match = DECIMAL.fullmatch(decimal)
    if not match or not number.is_real or len(re.sub(r"\D", "", decimal).lstrip("0")) < digits:
        return False
    shown = sympy.Rational(decimal.replace(",", ""))
    return bool(abs(number - shown) <= sympy.Rational(1, 2 * 10 ** (len(match.group(1)) - 1)))
