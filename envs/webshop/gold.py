"""How somebody shops who knows the product that an instruction was written about."""

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from envs.webshop.catalogue import Catalogue, Goal, Product
from envs.webshop.pages import option_labels
from rewards.webshop import same_option, token_set_ratio


def gold_actions(catalogue: Catalogue, goal: Goal, score: Callable[[Product, Mapping[str, str]], float],
                 rng: np.random.Generator, *, per_page: int, show_attributes: bool = False) -> list[str]:
    """Actions that buy the goal's product with its options: a search, pages of results, the product, its options.

    `rng` varies the order of the words and of the options. Raises LookupError where no search finds the product, or
    where even this purchase scores below 1.
    """
    product = catalogue.product_of(goal)
    options = wanted_options(product, goal)
    if (best := score(product, options)) < 1.0:
        raise LookupError(f"{product.asin} as wanted scores only {best:.3f}: its data do not fit its instruction")
    place = catalogue.index[product.asin]
    for keywords in _searches(product, goal, options, rng):
        results = catalogue.search(keywords)
        if place in results:
            break
    else:
        raise LookupError(f"no search finds {product.asin} among the first {len(results)} products")
    labels = option_labels(product, show_attributes=show_attributes)
    choices = [labels[pair] for pair in options.items()]
    clicks = ["next >"] * (results.index(place) // per_page) + [product.asin.lower()]
    clicks += [choices[i] for i in rng.permutation(len(choices))] + ["buy now"]
    return [f"search[{keywords}]", *(f"click[{click}]" for click in clicks)]


def wanted_options(product: Product, goal: Goal) -> dict[str, str]:
    """The product's value for each option that the goal names, by group; the nearest where it names values only."""
    if isinstance(goal.goal_options, Mapping):
        return dict(goal.goal_options)
    chosen: dict[str, str] = {}
    for wanted in goal.goal_options:
        matches = [(token_set_ratio(wanted, value), wanted == value, group, value)
                   for group, values in product.options.items() for value in values
                   if group not in chosen and same_option(wanted, value)]
        if matches:
            *_, group, value = max(matches, key=lambda match: (match[1], match[0]))
            chosen[group] = value
    return chosen


def plain_words(text: str) -> str:
    """`text` as keywords of a search: on one line, without brackets."""
    return " ".join(re.sub(r"[\[\]]", " ", text).split())


def _searches(product: Product, goal: Goal, options: Mapping[str, str], rng: np.random.Generator) -> Iterator[str]:
    """Keywords from the instruction first, from the title where those find too many other products."""
    parts = [*goal.attributes, *options.values()]
    shuffled = [parts[i] for i in rng.permutation(len(parts))]
    yield plain_words(" ".join([product.query, *shuffled]).lower())
    yield plain_words(product.title.lower())
