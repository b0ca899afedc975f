r"""Exact arithmetic on what people write for a number: `1/2^{103}`, `2\frac13`, `6.02 \times 10^5`, `1,234.50`, `36\%`.

A small recursive-descent evaluator over Fractions. Sizes are bounded before anything is computed, so that no text can
keep it busy; whatever is not rational arithmetic is left to `rewards.symbolic`.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_BITS = 20_000
"""Size of a number beyond which it is refused: 1/1998! still fits."""
MAX_FACTORIAL = 2_000
MAX_DEPTH = 40
SURE_DIGITS = 6
"""Significant digits that a rounded answer must show to stand for an exact gold."""

NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(\.\d+)?(?:[eE]([-+]?\d{1,4}))?(?![a-zA-Z])")
DECIMAL = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(\.\d+)")
MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
TIMES = re.compile(r"\*|\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z])")
DIVIDE = re.compile(r"/|\\div(?![a-zA-Z])")
FRACTION = re.compile(r"\\frac(?![a-zA-Z])\s*")
SPACE = re.compile(r"\s*")


class NotRational(ValueError):
    """The text is not rational arithmetic (letters, roots, sets, ...)."""


class Unusable(ValueError):
    """The text is arithmetic without a usable value: too large, too deep, or divided by zero."""


@dataclass(frozen=True)
class Quantity:
    """An exact number and how it was written."""

    value: Fraction
    """The number, before the percent sign is applied."""
    percent: bool = False
    """Written with a percent sign."""
    places: int = 0
    """Digits after the decimal point, when the text is a plain decimal such as `-3.50`; else 0."""
    digits: int = 0
    """Significant digits of such a decimal."""


def read_quantity(text: str) -> Quantity:
    r"""The number that `text` (already normalised, see `rewards.mathematics`) denotes.

    Raises NotRational for anything but rational arithmetic, Unusable for numbers that are too large to compute with,
    nested too deeply or undefined.
    """
    percent = text.endswith("%")
    text = text[:-1].rstrip() if percent else text
    if mixed := MIXED.fullmatch(text):
        sign, whole, numerator, denominator = mixed.groups()
        text = f"{sign}({whole}+{numerator}/{denominator})"
    value = _Evaluator(text).result()
    if decimal := DECIMAL.fullmatch(text):
        shown = re.sub(r"\D", "", text).lstrip("0")
        return Quantity(value, percent, len(decimal.group(1)) - 1, len(shown))
    return Quantity(value, percent)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Equal numbers, to all the digits that a decimal gold shows.

    A percent sign on one side only is read either way: `36%` is 36 and 0.36, but 0.36 is not 36.
    """
    if _same_value(gold, answer, 0, 0):
        return True
    return gold.percent != answer.percent and _same_value(gold, answer, 2 * gold.percent, 2 * answer.percent)


def _same_value(gold: Quantity, answer: Quantity, gold_shift: int, answer_shift: int) -> bool:
    """Equality after division by 10**shift; the decimal places move with it."""
    gold_value, answer_value = gold.value / 10**gold_shift, answer.value / 10**answer_shift
    if gold_value == answer_value:
        return True
    difference = abs(gold_value - answer_value)
    if gold.places:
        return difference <= Fraction(1, 2 * 10 ** (gold.places + gold_shift))
    if answer.digits >= SURE_DIGITS and not _terminates(gold_value):
        return difference <= Fraction(1, 2 * 10 ** (answer.places + answer_shift))
    return False


def _terminates(value: Fraction) -> bool:
    """Whether the decimal expansion ends: the denominator has no prime factors but 2 and 5."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Unusable(f"a number of more than {MAX_BITS} bits")
    return value


class _Evaluator:
    """One pass over one text. `position` is the next character to read."""

    def __init__(self, text: str):
        self.text, self.position, self.depth = text, 0, 0

    def result(self) -> Fraction:
        value = self._sum()
        if self.position < len(self.text):
            raise NotRational(f"unexpected {self.text[self.position:][:20]!r}")
        return value

    def _take(self, pattern: re.Pattern | str) -> bool:
        """Skip blanks, then read `pattern` if it comes next."""
        self.position = SPACE.match(self.text, self.position).end()
        if isinstance(pattern, str):
            found = self.text.startswith(pattern, self.position)
            end = self.position + len(pattern)
        else:
            match = pattern.match(self.text, self.position)
            found, end = match is not None, match.end() if match else self.position
        if found:
            self.position = SPACE.match(self.text, end).end()
        return found

    def _peek(self) -> str:
        return self.text[self.position:self.position + 1]

    def _sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unusable(f"nested deeper than {MAX_DEPTH}")
        value = self._product()
        while True:
            if self._take("+"):
                value = _bounded(value + self._product())
            elif self._take("-"):
                value = _bounded(value - self._product())
            else:
                self.depth -= 1
                return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take(TIMES):
                value = _bounded(value * self._signed())
            elif self._take(DIVIDE):
                value = _bounded(_quotient(value, self._signed()))
            elif self._peek() and self._peek() in "({\\":
                value = _bounded(value * self._power())
            else:
                return value

    def _signed(self) -> Fraction:
        negative = False
        while self._peek() and self._peek() in "+-":
            negative ^= self._take("-")
            self._take("+")
        return -self._power() if negative else self._power()

    def _power(self) -> Fraction:
        base = self._factorial()
        if not self._take("^"):
            return base
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unusable(f"nested deeper than {MAX_DEPTH}")
        exponent = self._signed()
        self.depth -= 1
        return _power(base, exponent)

    def _factorial(self) -> Fraction:
        value = self._atom()
        if not self._take("!"):
            return value
        if self._take("!"):
            raise NotRational("a double factorial")
        if value.denominator != 1 or value < 0:
            raise NotRational("the factorial of something else than a natural number")
        if value > MAX_FACTORIAL:
            raise Unusable(f"a factorial beyond {MAX_FACTORIAL}!")
        return Fraction(math.factorial(int(value)))

    def _atom(self) -> Fraction:
        for opening, closing in ("()", "{}"):
            if self._take(opening):
                value = self._sum()
                if not self._take(closing):
                    raise NotRational(f"no closing {closing!r}")
                return value
        if self._take(FRACTION):
            return _bounded(_quotient(self._fraction_part(), self._fraction_part()))
        return self._number()

    def _fraction_part(self) -> Fraction:
        r"""A group, or the one digit of `\frac12`."""
        if self._peek().isdecimal():
            self.position += 1
            digit = self.text[self.position - 1]
            self._take("")
            return Fraction(int(digit))
        if self._peek() != "{":
            raise NotRational(r"\frac needs two arguments")
        return self._atom()

    def _number(self) -> Fraction:
        match = NUMBER.match(self.text, self.position)
        whole, decimals, exponent = match.groups() if match else (None, None, None)
        if whole is None and decimals is None:
            raise NotRational(f"no number at {self.text[self.position:][:20]!r}")
        # In a tuple a comma separates; a thousands comma stands only in a number of its own.
        if whole and "," in whole and self.depth > 1:
            raise NotRational("a comma inside parentheses")
        if len(match.group()) > 1_000:
            raise Unusable("a number of more than 1000 digits")
        self.position = match.end()
        value = Fraction((whole or "0").replace(",", "") + (decimals or ""))
        if exponent:
            value = _bounded(value * _power(Fraction(10), Fraction(int(exponent))))
        if decimals is None and exponent is None and self.text.startswith("\\frac", self.position):
            self._take(FRACTION)
            part = _quotient(self._fraction_part(), self._fraction_part())
            # 2\frac13 is a mixed number; before an improper fraction it can only be a product.
            return _bounded(value + part if 0 < part < 1 else value * part)
        self._take("")
        return value


def _quotient(numerator: Fraction, denominator: Fraction) -> Fraction:
    if denominator == 0:
        raise Unusable("a division by zero")
    return numerator / denominator


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotRational("a root")
    if base == 0 and exponent <= 0:
        raise Unusable("zero to the power of a number that is not positive")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and size * abs(exponent) > MAX_BITS:
        raise Unusable(f"a number of more than {MAX_BITS} bits")
    # Python's 1**huge and (-1)**huge are instant, and the bound above covers every other base.
    return base ** int(exponent)
