"""WebShop's reward: how well a purchase fits an instruction."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MATCH_ABOVE = 85
"""Two texts match where their token-set ratio (0 to 100) is above this."""
COLOURS = (
    "alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush", "bordeaux",
    "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah", "chestnut",
    "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal", "dark", "denim",
    "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite", "grass", "gray", "green",
    "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon", "leopard", "light", "lilac", "lime",
    "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha", "multicolor", "mushroom", "mustard", "natural",
    "navy", "nude", "olive", "orange", "peach", "pewter", "pink", "plum", "purple", "rainbow", "red", "rose", "royal",
    "rust", "sand", "sapphire", "seashell", "silver", "skull", "slate", "steel", "stone", "stonewash", "sunflower",
    "tan", "taupe", "teal", "tiger", "turquoise", "violet", "walnut", "wheat", "white", "wine", "yellow",
)
"""The words that the original takes for colours, in its order, of which the first one found counts."""
NO_NOUNS = frozenset({
    "a", "an", "and", "as", "at", "by", "for", "from", "in", "into", "it", "its", "my", "of", "on", "or", "our", "out",
    "per", "plus", "that", "the", "this", "to", "up", "with", "without", "you", "your",
})
"""Words of a title that are never its nouns."""


@dataclass(frozen=True, kw_only=True)
class PurchaseGrade:
    """The reward and what it is made of."""

    score: float
    """type_factor * share, 0 to 1."""
    type_factor: float
    """1.0, 0.5, 0.1 or 0.0: how far this is the kind of product that was asked for."""
    title_score: float
    """Share of the goal title's nouns that the bought title has, 0 to 1."""
    attributes: int
    """Attributes of the goal that the product has."""
    options: int
    """Options of the goal that were chosen."""
    price: bool | None
    """Whether the price is within the limit; None where there is no limit."""


def webshop_reward(goal: Mapping[str, Any], purchase: Mapping[str, Any] | None, *, faithful: bool = False) -> float:
    """Reward of a purchase, 0 to 1: 1 only where the kind of product, all attributes, all options and the price fit.

    `goal` has the original's keys `query`, `product_category` ("A › B › C"), `name` (the title), `attributes`,
    `goal_options` (values, or {group: value}) and `price_upper`. `purchase` has a product's `query`,
    `product_category`, `name`, `Attributes` and, where there are any, `Title`, `BulletPoints`, `Description`; and
    `price` and `options` (values, or {group: value}). Either may carry `title_nouns`, the lower-case nouns of its
    title; else `title_words` stands in. `purchase=None`: nothing was bought, 0.

    `faithful=True` compares options as the original does, mistakes included: see docs/webshop.md. Raises ValueError
    where a key is missing, and ImportError without rapidfuzz.
    """
    return 0.0 if purchase is None else grade_purchase(goal, purchase, faithful=faithful).score


def grade_purchase(goal: Mapping[str, Any], purchase: Mapping[str, Any], *, faithful: bool = False) -> PurchaseGrade:
    """The parts of `webshop_reward`, which says what the arguments are."""
    _require("goal", goal, ("query", "product_category", "name", "attributes", "goal_options", "price_upper"))
    _require("purchase", purchase, ("query", "product_category", "name", "Attributes", "price", "options"))
    wanted = _goal_options(goal["goal_options"], faithful)
    chosen = _values(purchase["options"])
    title_score = _title_score(goal, purchase)
    type_factor = _type_factor(goal, purchase, title_score)
    attributes = sum(_has_attribute(purchase, attribute) for attribute in goal["attributes"])
    same = _same_option_faithful if faithful else same_option
    options = sum(any(same(option, value) for value in chosen) for option in wanted)
    # A limit of 0 or less is no limit: the original fails there.
    price = purchase["price"] <= goal["price_upper"] if goal["price_upper"] > 0 else None
    parts = len(goal["attributes"]) + len(wanted) + (price is not None)
    share = (attributes + options + bool(price)) / parts if parts else 1.0
    return PurchaseGrade(score=type_factor * share, type_factor=type_factor, title_score=title_score,
                         attributes=attributes, options=options, price=price)


def same_option(wanted: str, chosen: str) -> bool:
    """Whether a chosen option is the wanted one: alike, and of the same colours, as whole words."""
    if wanted == chosen:
        return True
    return token_set_ratio(wanted, chosen) > MATCH_ABOVE and _colours(wanted) == _colours(chosen)


def token_set_ratio(one: str, other: str, *, ascii_only: bool = False) -> int:
    """Likeness of two texts as sets of words, 0 to 100, whole numbers; of nothing but letters and digits.

    `ascii_only` leaves out all other letters first, as the original's library does.
    """
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise ImportError("WebShop's reward needs rapidfuzz: pip install 'turngym[webshop]'") from error
    if ascii_only:
        one, other = (text.encode("ascii", "ignore").decode() for text in (one, other))
    return round(fuzz.token_set_ratio(utils.default_process(one), utils.default_process(other)))


def title_words(title: str) -> list[str]:
    """Stands in for the nouns of a title where nobody has tagged it: its words, lower-case, without `NO_NOUNS` and
    whatever holds a digit."""
    words = re.findall(r"[^\W_]+", title.lower())
    return [word for word in words if len(word) > 1 and word not in NO_NOUNS and not any(map(str.isdigit, word))]


def _require(name: str, value: Mapping[str, Any], keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"the {name} lacks {', '.join(missing)}; it has {', '.join(map(str, value)) or 'nothing'}")


def _values(options: Mapping[str, str] | Sequence[str]) -> list[str]:
    return list(options.values()) if isinstance(options, Mapping) else list(options)


def _goal_options(options: Mapping[str, str] | Sequence[str], faithful: bool) -> list[str]:
    if faithful and isinstance(options, Mapping):
        # The original compares pairs there: a value that is a colour and nothing else stands for itself.
        return [value if value in COLOURS else f"{group} {value}" for group, value in options.items()]
    return _values(options)


def _same_option_faithful(wanted: str, chosen: str) -> bool:
    return token_set_ratio(_first_colour(wanted), _first_colour(chosen), ascii_only=True) > MATCH_ABOVE


def _first_colour(option: str) -> str:
    """The first colour found anywhere in the option, within a word too; without one, the option itself."""
    return next((colour for colour in COLOURS if colour in option), option)


def _colours(option: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", option.lower())).intersection(COLOURS)


def _title_score(goal: Mapping[str, Any], purchase: Mapping[str, Any]) -> float:
    wanted, bought = _nouns(goal), _nouns(purchase)
    return len(set(wanted) & set(bought)) / len(wanted) if wanted else 0.2


def _nouns(item: Mapping[str, Any]) -> Sequence[str]:
    nouns = item.get("title_nouns")
    return title_words(item["name"]) if nouns is None else nouns


def _type_factor(goal: Mapping[str, Any], purchase: Mapping[str, Any], title_score: float) -> float:
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    categories = [{part.strip() for part in item["product_category"].split("›")} for item in (goal, purchase)]
    alike = goal["query"] == purchase["query"] or len(categories[0] & categories[1]) >= 2 or title_score > 0.2
    return 1.0 if alike else 0.5


def _has_attribute(purchase: Mapping[str, Any], attribute: str) -> bool:
    if any(token_set_ratio(own, attribute, ascii_only=True) > MATCH_ABOVE for own in purchase["Attributes"]):
        return True
    texts = (purchase.get("Title", purchase["name"]), " ".join(purchase.get("BulletPoints", ())),
             purchase.get("Description", ""))
    return any(attribute in text.lower() for text in texts)
