"""The shop's pages as data: where a session stands, what its page shows, and where each click leads.

`Page(...)` holds the elements of the page that a `Session` is on; each clickable element holds the session after the
click. The three renderings say the same: plain text, text with marked buttons, HTML.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape

from envs.webshop.catalogue import Catalogue, Product

PER_PAGE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
# So that no product's page is endless; the original's longest are.
TITLE, TEXT, LINE = 300, 2000, 500
"""Characters that are shown of a title, of a description or instruction, and of a feature or review."""
LINES = 20
"""Features, reviews or attributes that are shown."""
SHOWN_OPTIONS = 100
"""Option values that a page shows; the others can be clicked all the same."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where a customer is. Never changed: a click makes another one."""

    page: str = "search"
    """`search`, `results`, `item`, one of `SUB_PAGES`, or `done`."""
    results: tuple[int, ...] = ()
    """Places in the catalogue of what the search found."""
    number: int = 1
    """The page of results, from 1."""
    product: int = 0
    """Place in the catalogue of the product that is looked at."""
    options: tuple[tuple[str, str], ...] = ()
    """Chosen (group, value) pairs, sorted."""
    visited: tuple[int, ...] = ()
    """Products looked at since the last search from the start page, sorted."""


@dataclass(frozen=True, kw_only=True)
class Element:
    """One visible piece of a page."""

    text: str
    tag: str = "p"
    """`h2`, `h4`, `p`; `search` (the button beside the search bar), `button`, `product` or `option`."""
    target: Session | None = None
    """The session after a click; None where a click does nothing."""
    group: str = ""
    """Of an option."""
    clicked: bool = False
    """A chosen option, a product looked at before."""
    hidden: bool = False
    """Can be clicked but is not shown."""


class Page:
    """The page that a session is on."""

    def __init__(self, catalogue: Catalogue, session: Session, instruction: str, *, per_page: int = PER_PAGE,
                 show_attributes: bool = False, score: float = 0.0):
        """`per_page`: products on a page of results. `score` is shown once the purchase is done."""
        self.searchable = session.page == "search"
        self.elements = list(_elements(catalogue, session, instruction[:TEXT], per_page, show_attributes, score))
        self.clickables: dict[str, Session] = {}
        for element in self.elements:
            if element.target is not None:
                self.clickables.setdefault(element.text.lower(), element.target)

    def render(self, mode: str) -> str:
        """The page as `text`, `text_rich` or `html`."""
        shown = [element for element in self.elements if not element.hidden]
        if mode == "text":
            return " [SEP] ".join(element.text for element in shown)
        return _text_rich(shown) if mode == "text_rich" else _html(shown)


def option_labels(product: Product, *, show_attributes: bool = False) -> dict[tuple[str, str], str]:
    """What is clicked for each (group, value): the value, or "group: value" where the page has another such button."""
    taken = {text.lower() for text in ("Back to Search", "< Prev", "Buy Now", *_sub_pages(show_attributes))}
    groups_with = Counter(value for values in product.options.values() for value in values)
    return {(group, value): value if groups_with[value] == 1 and value not in taken else f"{group}: {value}"
            for group, values_of_group in product.options.items() for value in values_of_group}


def _elements(catalogue: Catalogue, session: Session, instruction: str, per_page: int, show_attributes: bool,
              score: float) -> Iterator[Element]:
    if session.page == "done":
        yield Element(text="Thank you for shopping with us!", tag="h2")
        yield Element(text="Your score (min 0.0, max 1.0)")
        yield Element(text=str(round(score, 4)))
        return
    if session.page == "search":
        yield Element(text="WebShop", tag="h2")
    yield Element(text="Instruction:", tag="h4")
    yield Element(text=instruction, tag="h4")
    if session.page == "search":
        yield Element(text="Search", tag="search")
        return
    yield Element(text="Back to Search", tag="button", target=Session())
    if session.page == "results":
        yield from _results(catalogue, session, per_page)
    elif session.page == "item":
        yield from _item(catalogue.products[session.product], session, show_attributes)
    else:
        yield Element(text="< Prev", tag="button", target=replace(session, page="item"))
        yield from _sub_page(catalogue.products[session.product], session.page)


def _results(catalogue: Catalogue, session: Session, per_page: int) -> Iterator[Element]:
    start = (session.number - 1) * per_page
    yield Element(text=f"Page {session.number} (Total results: {len(session.results)})")
    if session.number > 1:
        yield Element(text="< Prev", tag="button", target=replace(session, number=session.number - 1))
    if start + per_page < len(session.results):
        yield Element(text="Next >", tag="button", target=replace(session, number=session.number + 1))
    for place in session.results[start:start + per_page]:
        product = catalogue.products[place]
        visited = tuple(sorted({*session.visited, place}))
        yield Element(text=product.asin, tag="product", clicked=place in session.visited,
                      target=replace(session, page="item", product=place, visited=visited))
        yield Element(text=product.title[:TITLE], tag="h4")
        yield Element(text=product.price_text)


def _item(product: Product, session: Session, show_attributes: bool) -> Iterator[Element]:
    yield Element(text="< Prev", tag="button", target=replace(session, page="results", product=0, options=()))
    labels, shown = option_labels(product, show_attributes=show_attributes), 0
    chosen: Mapping[str, str] = dict(session.options)
    for group, values in product.options.items():
        yield Element(text=group[:TITLE], tag="h4", hidden=shown >= SHOWN_OPTIONS)
        for value in values:
            target = replace(session, options=tuple(sorted({**chosen, group: value}.items())))
            yield Element(text=labels[group, value], tag="option", group=group, clicked=chosen.get(group) == value,
                          target=target, hidden=shown >= SHOWN_OPTIONS)
            shown += 1
    if shown > SHOWN_OPTIONS:
        yield Element(text=f"(and {shown - SHOWN_OPTIONS} more)")
    yield Element(text=product.title[:TITLE], tag="h2")
    yield Element(text=f"Price: {product.price_text}", tag="h4")
    yield Element(text=f"Rating: {product.rating}", tag="h4")
    for name in _sub_pages(show_attributes):
        yield Element(text=name, tag="button", target=replace(session, page=name))
    yield Element(text="Buy Now", tag="button", target=replace(session, page="done"))


def _sub_pages(show_attributes: bool) -> tuple[str, ...]:
    return SUB_PAGES if show_attributes else SUB_PAGES[:3]


def _sub_page(product: Product, name: str) -> Iterator[Element]:
    if name == "Description":
        yield Element(text=product.description[:TEXT] or "No Description")
    elif name == "Features":
        for feature in product.features[:LINES]:
            yield Element(text=feature[:LINE])
    elif name == "Attributes":
        for attribute in product.attributes[:LINES]:
            yield Element(text=attribute[:LINE])
    else:
        for review in product.reviews[:LINES]:
            yield Element(text=f'"{review.title[:TITLE]}"', tag="h4")
            yield Element(text=str(review.score))
            yield Element(text=review.body[:LINE])
        if not product.reviews:
            yield Element(text="No reviews found", tag="h4")


def _text_rich(elements: list[Element]) -> str:
    lines: list[str] = []
    for element in elements:
        if element.tag in ("p", "h2", "h4"):
            lines.append(element.text)
            continue
        start = {"product": "\n", "option": "  "}.get(element.tag, "")
        button = "clicked button" if element.clicked else "button"
        lines.append(f"{start}[{button}] {element.text} [{button}_]")
        if element.tag == "option" and element.clicked:
            lines.insert(0, f"You have clicked {element.text}.")
    return "\n".join(lines) + "\n"


def _html(elements: list[Element]) -> str:
    """One form, in which each button's `action` is the action that it stands for; the search button's is `search`."""
    body = "\n".join(_html_element(element) for element in elements)
    return ('<!DOCTYPE html>\n<html>\n<head><meta charset="utf-8"><title>WebShop</title></head>\n<body>\n'
            f'<form method="post">\n{body}\n</form>\n</body>\n</html>\n')


def _html_element(element: Element) -> str:
    text = escape(element.text)
    action = f'name="action" value="click[{escape(element.text.lower())}]"'
    match element.tag:
        case "search":
            return ('<input id="search_input" type="text" name="search_query" placeholder="Search...">\n'
                    '<button class="btn" type="submit" name="action" value="search">Search</button>')
        case "button":
            return f'<button class="btn" type="submit" {action}>{text}</button>'
        case "product":
            return f'<button class="product-link{" visited" * element.clicked}" type="submit" {action}>{text}</button>'
        case "option":
            return (f'<label><input type="radio" name="{escape(element.group)}" value="{text}"'
                    f'{" checked" * element.clicked} onclick="this.nextElementSibling.click()">'
                    f'<button type="submit" {action}>{text}</button></label>')
    return f"<{element.tag}>{text}</{element.tag}>"
