"""A catalogue of its own, made from a few hundred words: the same on every machine, without a download."""

import random

from envs.webshop.catalogue import NO_LIMIT, Catalogue, Goal, Product, Review, price_limit
from envs.webshop.vocabulary import (
    BRANDS,
    CATEGORIES,
    OPENINGS,
    OPTION_WAYS,
    OPTIONS,
    OTHER_OPTION_WAYS,
    PRAISE,
    PRICE_WAYS,
    THINGS,
    Category,
    Kind,
)

GOALS_PER_PRODUCT = 2
LISTINGS = (2, 3, 4)
"""How many near-duplicates stand beside each other."""
ASIN_SIGNS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
SMALLEST, LARGEST = 24, 200_000


def generate_catalogue(size: int) -> Catalogue:
    """A catalogue of `size` products (24 to 200,000) in twelve categories, and two goals for each.

    Products come in bunches of two to four near-duplicates, which share title, brand and attributes; each differs from
    the first in one value of one option, and in price. Raises ValueError for a size out of range.
    """
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"size must be between {SMALLEST} and {LARGEST:,} products, got {size}")
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    names, bunch = list(CATEGORIES), 0
    while len(products) < size:
        rng = random.Random(f"webshop bunch {bunch}")
        for product in _bunch(rng, names[bunch % len(names)]):
            if len(products) < size and product.asin not in products:
                products[product.asin] = product
                goals += _goals(rng, product)
        bunch += 1
    return Catalogue(name=f"generated-{size}", products=list(products.values()), goals=goals)


def _bunch(rng: random.Random, name: str) -> list[Product]:
    category = CATEGORIES[name]
    first = _product(rng, name, category, rng.choice(category.kinds))
    return [first, *(_near_duplicate(rng, first) for _ in range(rng.choice(LISTINGS) - 1))]


def _product(rng: random.Random, name: str, category: Category, kind: Kind) -> Product:
    brand, material = rng.choice(BRANDS), rng.choice(category.materials)
    noun = f"{rng.choice(category.audiences)} {kind.noun}" if category.audiences else kind.noun
    attributes = rng.sample(category.attributes, rng.randint(3, 5))
    title = f"{brand} {attributes[0]} {material} {noun}, {attributes[1]}"
    groups = rng.sample(kind.groups.split(), rng.randint(1, min(3, len(kind.groups.split()))))
    options = {}
    for group in sorted(groups):
        shown, values = OPTIONS[group]
        chosen = rng.sample(range(len(values)), rng.randint(2, min(6, len(values))))
        options[shown] = tuple(values[i] for i in sorted(chosen))
    low, high = kind.prices
    price, price_text = _price(rng, rng.randrange(low * 100, high * 100))
    reviews = tuple(_review(rng, attributes, noun) for _ in range(rng.randrange(4)))
    sentences = [f"Made of {material}.", f"What you get: {', '.join(attributes[:-1])} and {attributes[-1]}.",
                 f"From the {kind.noun} range of {brand}."]
    rng.shuffle(sentences)
    return Product(
        asin=_asin(rng), title=_capitals(title), query=noun, category=name,
        product_category=f"{category.department} › {kind.section}", description=" ".join(sentences),
        features=tuple(_sentence(attribute) for attribute in attributes), price=price, price_text=price_text,
        options=options, attributes=tuple(attributes), reviews=reviews, rating=_rating(reviews),
        title_nouns=tuple(word.strip("'").removesuffix("'s") for word in f"{brand} {material} {noun}".lower().split()))


def _near_duplicate(rng: random.Random, first: Product) -> Product:
    """The same with one value exchanged for another of its group, or left out where the group has no other."""
    group = rng.choice(sorted(first.options))
    values = first.options[group]
    pools = [pool for shown, pool in OPTIONS.values() if shown == group and set(values) <= set(pool)]
    others = [value for value in pools[0] if value not in values]
    old = rng.choice(values)
    kept = {*values} - {old} | ({rng.choice(others)} if others else set())
    price, price_text = _price(rng, round(first.price * rng.uniform(85, 125)))
    return Product(**{**vars(first), "asin": _asin(rng), "price": price, "price_text": price_text,
                      "options": {**first.options, group: tuple(value for value in pools[0] if value in kept)}})


def _goals(rng: random.Random, product: Product) -> list[Goal]:
    """Different goals of one product."""
    goals: dict[tuple, Goal] = {}
    for _ in range(4 * GOALS_PER_PRODUCT):
        attributes = tuple(rng.sample(product.attributes, rng.randint(1, 2)))
        asked = rng.sample(sorted(product.options), rng.randint(1, len(product.options)))
        options = {group: rng.choice(product.options[group]) for group in asked}
        limit = price_limit(product.price, rng)
        goal = Goal(asin=product.asin, instruction_text=_instruction(rng, product.query, attributes, options, limit),
                    attributes=attributes, goal_options=options, price_upper=limit)
        goals.setdefault((frozenset(attributes), frozenset(options.items())), goal)
        if len(goals) == GOALS_PER_PRODUCT:
            break
    return list(goals.values())


def _instruction(rng: random.Random, noun: str, attributes: tuple[str, ...], options: dict[str, str],
                 limit: float) -> str:
    thing = rng.choice(THINGS).format(noun=noun, attributes=rng.choice((", ", " and ")).join(attributes))
    text = rng.choice(OPENINGS).format(thing)
    for group, value in options.items():
        text += ", " + rng.choice(OPTION_WAYS.get(group, OTHER_OPTION_WAYS)).format(
            *([value] if group in OPTION_WAYS else [group, value]))
    return text + (rng.choice(PRICE_WAYS).format(limit) if limit < NO_LIMIT else "")


def _price(rng: random.Random, cents: int) -> tuple[float, str]:
    """A price, and what the page says: now and then a range that holds it."""
    price = cents / 100
    if rng.random() < 0.15:
        return price, f"${cents * 9 // 10 / 100} to ${cents * 12 // 10 / 100}"
    return price, f"${price}"


def _review(rng: random.Random, attributes: list[str], noun: str) -> Review:
    score, title, body = rng.choice(PRAISE)
    return Review(title=title, score=score, body=body.format(attribute=rng.choice(attributes), noun=noun))


def _rating(reviews: tuple[Review, ...]) -> str:
    return f"{sum(review.score for review in reviews) / len(reviews):.1f}" if reviews else "N.A."


def _asin(rng: random.Random) -> str:
    return "B0" + "".join(rng.choice(ASIN_SIGNS) for _ in range(8))


def _capitals(title: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in title.split())


def _sentence(attribute: str) -> str:
    return f"{attribute[:1].upper()}{attribute[1:]}."
