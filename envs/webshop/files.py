"""The original's product and instruction files, read by path."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from itertools import product as combinations
from pathlib import Path
from typing import Any

from envs.core import clean_text
from envs.webshop.catalogue import NO_LIMIT, Catalogue, Goal, Product, Review, price_limit, sha256

ASIN_LENGTH = 10
OPTION_LENGTH = 150
"""Characters of an option value; pages show it whole."""
NO_PRICE = 100.0
"""The price of a product whose page has none."""
MOST_COMBINATIONS = 10_000
"""Synthetic goals of one product; without a bound a product of many options would have millions."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the data lie, and how much of them is used."""

    products: str
    """`items_shuffle.json` or its `_1000` form."""
    attributes: str
    """`items_ins_v2.json` or its `_1000` form: attributes, and synthetic instructions, by asin."""
    instructions: str | None = None
    """`items_human_ins.json`: instructions that people wrote, by asin. Without it the synthetic ones are the goals."""
    reviews: str | None = None
    """A list of {asin, average_rating, reviews}."""
    size: int | None = None
    """Only so many products, the first ones."""


def read_catalogue(files: Files) -> Catalogue:
    """The catalogue of these files. Prices and price limits are drawn from each product's asin, never from a global
    generator. Raises OSError for a file that cannot be read, and ValueError that names the file and the entry for what
    is broken in it."""
    entries = _load(files.products, list)
    attributes = _load(files.attributes, dict)
    instructions = _load(files.instructions, dict) if files.instructions else None
    reviews = {}
    for number, entry in enumerate(_load(files.reviews, list) if files.reviews else ()):
        with _naming(f"{files.reviews}: entry {number}"):
            reviews[_text(entry, "asin")] = entry
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    for number, entry in enumerate(entries[:files.size]):
        with _naming(f"{files.products}: product {number}"):
            asin = _text(entry, "asin")
            if asin in products or asin == "nan" or len(asin) > ASIN_LENGTH:
                continue
            product = _product(entry)
        with _naming(f"{files.attributes}: the entry of {asin}"):
            extra = attributes.get(asin, {})
            product = replace(product, attributes=_texts({"attributes": [], **extra}, "attributes"))
            if instructions is None:
                goals += _synthetic_goals(product, extra)
        if instructions is not None:
            with _naming(f"{files.instructions}: the entry of {asin}"):
                goals += _human_goals(product, instructions.get(asin, []))
        if asin in reviews:
            with _naming(f"{files.reviews}: the entry of {asin}"):
                product = replace(product, rating=str(reviews[asin]["average_rating"]),
                                  reviews=tuple(map(_review, reviews[asin]["reviews"])))
        products[asin] = product
    for thing, found, source in (("product", products, files.products),
                                 ("instruction for its products", goals, files.instructions or files.attributes)):
        if not found:
            raise ValueError(f"{source} holds no usable {thing}: is it the right file?")
    name = sha256(*map(repr, products.values()), *map(repr, goals))[:12]
    return Catalogue(name=f"files-{name}", products=list(products.values()), goals=goals)


def _load(path: str, kind: type) -> Any:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(error.errno, f"the WebShop file cannot be read ({error.strerror}): give the path of the "
                      "original's file, or no path to play in the generated catalogue", path) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON (cut off while it was copied?): {error}") from error
    if not isinstance(data, kind):
        raise ValueError(f"{path} should hold a JSON {'list' if kind is list else 'object'}, not a "
                         f"{type(data).__name__}: are the files mixed up?")
    return data


@contextmanager
def _naming(entry: str) -> Iterator[None]:
    """Whatever is wrong with an entry is a ValueError that names it."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{entry} is broken: {error.args[0]!r} is missing") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{entry} is broken: {error}") from error


def _text(entry: Mapping[str, Any], key: str, null: str | None = None) -> str:
    """A text of an entry; `null`, if given, where the file has null."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"a {type(entry).__name__} stands where an object should")
    value = null if entry[key] is None else entry[key]
    if not isinstance(value, str):
        raise TypeError(f"{key!r} is {value!r}, not text")
    return clean_text(value)


def _texts(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = entry[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{key!r} is {values!r}, not a list of texts")
    return tuple(map(clean_text, values))


def _product(entry: Mapping[str, Any]) -> Product:
    """The product, but for what other files say of it."""
    entry = {"full_description": None, "pricing": None, **entry}
    asin, features = _text(entry, "asin"), entry.get("small_description") or []
    features = [features] if isinstance(features, str) else features
    price, price_text = _price(asin, _text(entry, "pricing", ""))
    return Product(
        asin=asin, title=_text(entry, "name"), query=_text(entry, "query").lower().strip(),
        category=_text(entry, "category", ""), product_category=_text(entry, "product_category", ""),
        description=_text(entry, "full_description", ""),
        features=tuple(clean_text(str(text)) for text in features if text), attributes=(),
        price=price, price_text=price_text, options=_options(entry.get("customization_options") or {}))


def _price(asin: str, text: str) -> tuple[float, str]:
    """The price, drawn from the range where there is one, and what the page says."""
    prices = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)][:2]
    if not prices:
        return NO_PRICE, f"${NO_PRICE}"
    if len(prices) == 1:
        return prices[0], f"${prices[0]}"
    return random.Random(f"price of {asin}").uniform(min(prices), max(prices)), f"${prices[0]} to ${prices[1]}"


def _options(groups: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    options: dict[str, dict[str, None]] = {}
    for group, contents in groups.items():
        for content in contents or ():
            value = " ".join(_text(content, "value").replace("/", " | ").lower().split())[:OPTION_LENGTH].strip()
            if value:
                options.setdefault(clean_text(group.lower()), {})[value] = None
    return {group: tuple(values) for group, values in options.items()}


def _review(entry: Mapping[str, Any]) -> Review:
    """A review, whose stars are called `score` or `stars`, its text `review` or not at all."""
    entry = {"title": None, "review": None, **entry}
    return Review(title=_text(entry, "title", ""), score=int(float(entry.get("score", entry.get("stars", 0)))),
                  body=_text(entry, "review", ""))


def _human_goals(item: Product, instructions: list[Mapping[str, Any]]) -> Iterator[Goal]:
    for number, entry in enumerate(instructions):
        attributes = _texts(entry, "instruction_attributes")
        if attributes:  # the original leaves out the others
            limit = price_limit(item.price, random.Random(f"limit of {item.asin} {number}"))
            yield Goal(asin=item.asin, instruction_text=_text(entry, "instruction").strip(".") + _limit_text(limit),
                       attributes=attributes, goal_options=_texts(entry, "instruction_options"), price_upper=limit)


def _synthetic_goals(item: Product, extra: Mapping[str, Any]) -> Iterator[Goal]:
    """One goal for each combination of the product's options."""
    if not (instruction := _text({"instruction": None, **extra}, "instruction", "")):
        return
    limit = price_limit(item.price, random.Random(f"limit of {item.asin}"))
    groups = sorted(item.options)
    for values in islice(combinations(*(item.options[group] for group in groups)), MOST_COMBINATIONS):
        chosen = ", and ".join(f"{group}: {value}" for group, value in zip(groups, values))
        text = instruction + (f" with {chosen}" if chosen else "") + _limit_text(limit)
        yield Goal(asin=item.asin, instruction_text=text, attributes=_texts(extra, "instruction_attributes"),
                   goal_options=dict(zip(groups, values)), price_upper=limit)


def _limit_text(limit: float) -> str:
    return f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""
