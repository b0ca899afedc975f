"""What a shop sells and what its customers want: products, goals, and the search over them."""

import hashlib
import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

try:
    import bm25s
    import Stemmer
except ImportError as error:
    raise ImportError(f"WebShop needs {error.name}: pip install 'turngym[webshop]'") from error

HITS = 50
"""A search gives at most so many products."""
SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
"""The price limit of a goal that names none."""
LONGEST_QUERY = 500
"""Characters of a search that count."""
# Lucene's English analyser and the two weights of the original's search.
K1, B = 0.9, 0.4
STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
})


@dataclass(frozen=True, kw_only=True)
class Review:
    """What a customer says of a product."""

    title: str
    score: int
    """Stars, 0 to 5."""
    body: str


@dataclass(frozen=True, kw_only=True)
class Product:
    """One thing to buy."""

    asin: str
    """Its number, at most 10 characters."""
    title: str
    query: str
    """The search that it is a typical answer to, lower-case."""
    category: str
    product_category: str
    """Its place in the shop, as in "A › B › C"."""
    description: str
    features: tuple[str, ...]
    price: float
    """What it costs, in dollars."""
    price_text: str
    """What its page says, which may be a range."""
    options: Mapping[str, tuple[str, ...]]
    """Lower-case values of each option group, in the order of the page."""
    attributes: tuple[str, ...]
    reviews: tuple[Review, ...] = ()
    rating: str = "N.A."
    title_nouns: tuple[str, ...] | None = None
    """Lower-case nouns of the title; None where nobody has tagged it."""

    def purchase(self, options: Mapping[str, str]) -> dict[str, Any]:
        """The product with these options chosen, as `rewards.webshop_reward` reads it."""
        return {"query": self.query, "product_category": self.product_category, "name": self.title,
                "Attributes": self.attributes, "BulletPoints": self.features, "Description": self.description,
                "price": self.price, "options": dict(options), "title_nouns": self.title_nouns}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a customer wants: an instruction and the product that it was written about."""

    asin: str
    instruction_text: str
    attributes: tuple[str, ...]
    goal_options: Mapping[str, str] | tuple[str, ...]
    price_upper: float


@dataclass
class Catalogue:
    """All products and goals. `goals` holds them in the order of their session numbers."""

    name: str
    """Differs wherever a product or a goal differs."""
    products: Sequence[Product]
    goals: Sequence[Goal]
    index: dict[str, int] = field(init=False)
    """Place of each asin in `products`."""

    def __post_init__(self):
        self.index = {product.asin: i for i, product in enumerate(self.products)}
        self.goals = shuffled(self.goals)
        self._engine = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._engine.index([_words(_document(product)) for product in self.products], show_progress=False)

    def product_of(self, goal: Goal) -> Product:
        return self.products[self.index[goal.asin]]

    def wanted(self, goal: Goal) -> dict[str, Any]:
        """The goal, as `rewards.webshop_reward` reads it."""
        product = self.product_of(goal)
        return {"query": product.query, "product_category": product.product_category, "name": product.title,
                "attributes": goal.attributes, "goal_options": goal.goal_options, "price_upper": goal.price_upper,
                "title_nouns": product.title_nouns}

    def search(self, keywords: str) -> tuple[int, ...]:
        """Places in `products` of at most `HITS` products that share a word with `keywords`, the best first by BM25;
        equally good ones in the catalogue's order."""
        words = [word for word in _words(keywords[:LONGEST_QUERY]) if word in self._engine.vocab_dict]
        if not words:
            return ()
        # Rounded, so that the last digit of another machine's floats does not change the order.
        scores = np.round(self._engine.get_scores(words), 4)
        found = np.flatnonzero(scores > 0)
        if len(found) > HITS:
            found = found[scores[found] >= np.partition(scores[found], -HITS)[-HITS]]
        return tuple(found[np.argsort(-scores[found], kind="stable")][:HITS].tolist())


def shuffled(goals: Sequence[Goal]) -> list[Goal]:
    """The order of the sessions, which is the original's for the original's goals."""
    goals = list(goals)
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def price_limit(price: float, rng: random.Random) -> float:
    """A round limit somewhat above the price; `NO_LIMIT` for very dear products."""
    above = [limit for limit in range(10, 1000, 10) if limit > price][:4]
    return float(max(rng.sample(above, 2))) if len(above) >= 2 else NO_LIMIT


def sha256(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _document(product: Product) -> str:
    options = ", and ".join(f"{group}: {', '.join(values)}" for group, values in product.options.items())
    return " ".join((product.title, product.description, *product.features[:1], options))


_STEMMER, _STEMMING = Stemmer.Stemmer("porter"), threading.Lock()
"""A stemmer serves one thread at a time."""


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", re.sub(r"['’]s\b", "", text.lower()))
    with _STEMMING:
        return _STEMMER.stemWords([word for word in words if word not in STOP_WORDS])
