"""One spelling for the many ways of writing an answer: LaTeX and Unicode variants, wrappers, units, percent words."""

import re
import unicodedata

CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "°": r"^\circ ", "√": r"\sqrt ", "∪": r"\cup ",
    "∩": r"\cap ", "±": r"\pm ", "’": "'",
})
# NFKC would glue these to the digits before them: 2⁴ is not 24, nor 3½ 31/2.
SCRIPTS = re.compile(r"([⁰¹²³⁴-⁹⁺⁻]+)(?!⁄)|([₀-₉]+)")
VULGAR_FRACTION = re.compile(r"(\d\s*)?([¼-¾⅐-⅞])")
TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?)\s*\{([^{}]*)\}")
DEGREES = r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z]))"
FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|arc(?:sin|cos|tan)|sin|cos|tan|sec|csc|cot|ln|log|exp|pi|infty)(?![a-zA-Z])")
REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in (
    (r"\\(?:left|right)\s*\.|\\(?:left|right|bigg?[lr]?|Bigg?[lr]?|displaystyle)(?![a-zA-Z])", ""),
    (r"\\[lr]brace(?![a-zA-Z])", lambda match: r"\{" if match.group()[1] == "l" else r"\}"),
    (r"\{\s*,\s*\}", ","),                                            # 12{,}345
    (r"(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))", ""),                         # 12\,345
    (r"(?<!\\)\\[,!;: ]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\?\$|€|£", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(leq|geq)(?:slant)?(?![a-zA-Z])|\\(neq)(?![a-zA-Z])", lambda match: match.group()[:3]),
    (r"<=", r"\\le "), (r">=", r"\\ge "), (r"!=", r"\\ne "),
    (r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])", r"\\infty"),
    (r"\*\*", "^"),
    (r"\s*\\?%|\s*(?<![a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])", "%"),
    (rf"((?:sin|cos|tan|sec|csc|cot)(?:\^\{{?\d\}}?)?\s*[({{]?\s*)(\d[\d.]*){DEGREES}", r"\1(\2\\pi/180)"),
    (rf"(?<=[\d)}}]){DEGREES}", " degrees "),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}", lambda match: _repeating(*match.groups())),
    (r"^\s*(?i:final )?(?i:answer)\s*[:=]\s*", ""),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"^\s*(\d{1,3}(?: \d{3})+)\s*$", lambda match: match.group(1).replace(" ", "")),
    (r"(?:^|(?<=[(\[,]))\s*\+\s*(?=[\d\\.])", ""),                    # +5, (-\infty, +\infty)
)]
ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
CONNECTIVE = re.compile(r"\s*,?\s*(?<![a-zA-Z\\])(or|and)(?![a-zA-Z])\s*")
INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])")
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))
OUTER_SPACE = re.compile(r"(?<![0-9A-Za-z,])\s+|\s+(?![0-9A-Za-z])")

UNITS = {alias: unit for unit, aliases in {
    "foot": "ft feet foot", "inch": "in inch inches", "yard": "yd yard yards", "mile": "mi mile miles",
    "metre": "m meter meters metre metres", "centimetre": "cm centimeter centimeters centimetre centimetres",
    "millimetre": "mm millimeter millimeters millimetre millimetres", "litre": "l liter liters litre litres",
    "kilometre": "km kilometer kilometers kilometre kilometres", "gram": "g gram grams",
    "kilogram": "kg kilogram kilograms", "pound": "lb lbs pound pounds", "second": "s sec secs second seconds",
    "minute": "min mins minute minutes", "hour": "h hr hrs hour hours", "day": "day days", "year": "yr year years",
    "degree": "deg degree degrees", "radian": "rad radian radians", "dollar": "dollar dollars", "cent": "cent cents",
    "per": "per",
}.items() for alias in aliases.split()}
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
# Words that change the number before them, so that they are no unit.
NUMBER_WORDS = frozenset((
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves", "third", "thirds", "quarter",
    "quarters", "over", "times", "plus", "minus", "mod", "squared", "cubed", "point", "pi", "choose", "base"))
UNIT_TAIL = re.compile(r"(.*[\d)}%])(\s*)([a-zA-Z][a-zA-Z ./]*)(?:\^\{?(\d)\}?)?", re.DOTALL)
BASE = re.compile(r"(\d+)_\{?(\d+)\}?")


def normalise(text: str) -> str:
    """`text` in the one spelling that the comparison reads. It stays LaTeX, without wrappers, fonts and odd spaces."""
    text = SCRIPTS.sub(lambda match: f"^{{{match[1]}}}" if match[1] else f"_{{{match[2]}}}", text.translate(CHARACTERS))
    text = VULGAR_FRACTION.sub(lambda match: f"{match[1]} {match[2]}" if match[1] else f"({match[2]})", text)
    # NFKC makes a fraction slash of ½, and minus signs of ⁻.
    text = _unwrapped(unicodedata.normalize("NFKC", text).replace("⁄", "/").replace("−", "-"))
    for _ in range(3):
        text = TEXT_COMMAND.sub(r" \1 ", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    # "x<1 or x>2" is one condition; "3 or 5" are two values.
    joined = {"or": r"\lor ", "and": r"\land "} if INEQUALITY.search(text) else {"or": ", ", "and": ", "}
    text = CONNECTIVE.sub(lambda match: joined[match.group(1)], text)
    text = ROOT.sub(r"\\sqrt{\1}", FUNCTIONS.sub(r"\\\1 ", text))
    text = OUTER_SPACE.sub("", " ".join(text.split())).strip(",;")
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def split_unit(text: str) -> tuple[str, str]:
    """A number text and the unit written behind it ("12 sq ft" -> "12", "foot 2"; "101_2" -> "101", "base 2").

    The unit is "" without one, and "?" for a word that is no unit we know (apples). A single letter is a unit only
    after a space: 12m may be an expression.
    """
    if match := BASE.fullmatch(text):
        return match[1], f"base {match[2]}"
    match = UNIT_TAIL.fullmatch(text)
    if not match:
        return text, ""
    number, space, tail, power = match.groups()
    words = tail.replace("/", " per ").replace(".", " ").lower().split()
    if not words or (len(words[0]) == 1 and not space) or NUMBER_WORDS.intersection(words):
        return text, ""
    if any(len(word) < 3 and word not in UNITS and word not in POWERS for word in words):
        return text, ""
    units: list[str] = []
    for before, word in zip(["", *words], words):
        if word not in POWERS:
            units += [UNITS.get(word, "?"), *([POWERS[before]] if before in POWERS else [])]
    return number, "?" if "?" in units else " ".join([*units, *([power] if power else [])])


def _repeating(whole: str, start: str, period: str) -> str:
    r"""The fraction that `0.1\overline{6}` is: (16 - 1)/90."""
    return f"(({whole}{start}{period}-0{whole}{start})/{(10 ** len(period) - 1) * 10 ** len(start)})"


def _unwrapped(text: str) -> str:
    """`text` without math delimiters, Markdown emphasis and a closing full stop around it."""
    for _ in range(4):
        text = text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in WRAPPERS:
            inner = text[len(opening):-len(closing)]
            if (len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing)
                    and opening not in inner):
                text = inner
    return text
