"""The WebShop environment.

    gymnasium.make("turngym/WebShop-v0")                     # a generated catalogue of 5,000 products
    gymnasium.make("turngym/WebShop-v0", size=10_000, observation_mode="text_rich", reward="success")
    gymnasium.make("turngym/WebShop-v0", products="items_shuffle.json", attributes="items_ins_v2.json",
                   instructions="items_human_ins.json")      # the original's data
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.core import LazyTasks, Outcome, Task, TextEnv
from envs.webshop.catalogue import Catalogue, Goal, Product
from envs.webshop.files import Files, read_catalogue
from envs.webshop.generator import generate_catalogue
from envs.webshop.gold import gold_actions, plain_words
from envs.webshop.nouns import spacy_model, tagged_nouns
from envs.webshop.pages import PER_PAGE, Page, Session
from rewards.webshop import PurchaseGrade, grade_purchase

SIZE = 5000
CHOICES = {"observation_mode": ("text", "text_rich", "html"), "reward": ("score", "success"),
           "title_nouns": ("words", "spacy")}
TEST, HELDOUT = 500, 1000
"""Goals of the two splits; of fewer than 5,000 goals a tenth and a fifth."""
ACTION = re.compile(r"(search|click)\[(.+)\]")
RULES = """You shop in an online store. Buy what the instruction asks for: the kind of product, its attributes, its \
options, its price. Reply with one action inside <action></action>:
search[keywords] on the start page;
click[value] for a button, a product number or an option of the page, as in click[next >], click[b0abc12345], \
click[black].
Choose the options before click[buy now], which ends the task."""


class WebShop(TextEnv):
    """Each response holds one `<action>`: `search[keywords]` on the start page, or `click[value]` of the page.

    `click[buy now]` ends the episode with the score of `rewards.webshop_reward`; only 1.0 is a success. Any other text
    is an invalid action: the page stays. The splits are `test` (sessions 0 to 499), `heldout` (500 to 1,499) and
    `train`, as in the original.
    """

    action_tags = ("action",)
    stop = ("</action>",)
    system_prompt = RULES
    max_turns = 15

    def __init__(self, *, size: int | None = None, products: str | None = None, attributes: str | None = None,
                 instructions: str | None = None, reviews: str | None = None, observation_mode: str = "text",
                 reward: str = "score", reward_scale: float = 1.0, faithful: bool = False, title_nouns: str = "words",
                 per_page: int = PER_PAGE, show_attributes: bool = False, max_turns: int | None = None):
        """`size`: products of the generated catalogue (5,000), or of the files the first ones (all). `products`,
        `attributes`, `instructions`, `reviews`: paths of the original's files, see `envs.webshop.files.Files`.
        `observation_mode`: `text`, `text_rich` or `html`. `reward`: `score`, or `success` (1 or 0); times
        `reward_scale`. `faithful`: score as the original does, mistakes included. `title_nouns`: how the nouns of the
        files' titles are found, as `words` or, as in the original, by `spacy`. `per_page`: products on a page of
        results. `show_attributes`: products have a page of their attributes too. Raises ValueError for an unknown
        choice or a number out of range, and what `read_catalogue` raises.
        """
        super().__init__(max_turns=max_turns)
        for name, value in (("observation_mode", observation_mode), ("reward", reward), ("title_nouns", title_nouns)):
            if value not in CHOICES[name]:
                raise ValueError(f"{name} is one of {', '.join(CHOICES[name])}, not {value!r}")
        if per_page < 1:
            raise ValueError(f"per_page must be at least 1, got {per_page}")
        if title_nouns == "spacy":
            spacy_model()
        self.observation_mode, self.reward, self.reward_scale = observation_mode, reward, reward_scale
        self.faithful, self.title_nouns = faithful, title_nouns
        self.per_page, self.show_attributes = per_page, show_attributes
        self._source = _source(size, products, attributes, instructions, reviews)
        self.catalogue = _load(*self._source)
        self._goal: Goal = self.catalogue.goals[0]

    def __getstate__(self) -> dict[str, Any]:
        """All but the catalogue, which every process makes once for all its environments."""
        return {name: value for name, value in self.__dict__.items() if name != "catalogue"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.catalogue = _load(*self._source)

    def tasks(self, split: str) -> Sequence[Task]:
        sessions = split_sessions(len(self.catalogue.goals))
        if split not in sessions:
            raise ValueError(f"WebShop has the splits {', '.join(sessions)}, not {split!r}")
        return LazyTasks(len(sessions[split]), lambda i: replace(self.session_task(sessions[split][i]), split=split))

    def session_task(self, session: int) -> Task:
        """The task of a session number: the place of its goal in the catalogue, as in the original. Raises ValueError
        for a number that the catalogue lacks."""
        catalogue = self.catalogue
        if not 0 <= session < len(catalogue.goals):
            raise ValueError(f"{catalogue.name} has the sessions 0 to {len(catalogue.goals) - 1}, not {session}")
        return Task(key=f"{catalogue.name}-{session}", env_id=self.env_id, data={"session": session},
                    family=catalogue.product_of(catalogue.goals[session]).category)

    def admissible_actions(self) -> list[str]:
        """All clicks; on the start page, which takes any search, one for the instruction's own words."""
        if self._page.searchable:
            return [f"search[{plain_words(self._goal.instruction_text)}]"]
        return [f"click[{text}]" for text in self._page.clickables]

    def state_key(self) -> str:
        # Plain text does not show which products were looked at before.
        session = replace(self._session, visited=()) if self.observation_mode == "text" else self._session
        return hashlib.sha256(json.dumps([self.task.key, asdict(session)]).encode()).hexdigest()[:16]

    def copy_state(self) -> Session:
        return self._session

    def load_state(self, state: Session) -> None:
        self._go(state)

    def gold(self, rng: np.random.Generator) -> list[str]:
        """Search, page through the results, choose the options and buy; `rng` varies the words and the order."""
        actions = gold_actions(self.catalogue, self._goal, lambda *purchase: self._grade(*purchase).score, rng,
                               per_page=self.per_page, show_attributes=self.show_attributes)
        if len(actions) > self.max_turns:
            raise LookupError(f"{self._goal.asin} takes {len(actions)} turns to buy, more than {self.max_turns}")
        return [f"<action>{action}</action>" for action in actions]

    def random_action(self, rng: np.random.Generator) -> str:
        """A search for three words of the instruction, or any click."""
        if not self._page.searchable:
            return super().random_action(rng)
        words = plain_words(self._goal.instruction_text).split()
        return f"<action>search[{' '.join(rng.choice(words, size=3))}]</action>"

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        session = task.data["session"]
        if task.key != self.session_task(session).key:
            raise ValueError(f"task {task.key} is of another catalogue than {self.catalogue.name}")
        self._goal = self.catalogue.goals[session]
        self._go(Session())
        return self._page.render(self.observation_mode)

    def _step(self, action: str) -> Outcome:
        target = self._target(action)
        if target is not None:
            self._go(target)
        observation = self._page.render(self.observation_mode)
        if self._grade_now is None:
            return Outcome(observation=observation, valid=target is not None)
        success = self._grade_now.score == 1.0
        reward = self.reward_scale * (success if self.reward == "success" else self._grade_now.score)
        return Outcome(observation=observation, reward=reward, terminated=True, success=success,
                       score=self._grade_now.score, info={"purchase": self._bought().asin, **asdict(self._grade_now)})

    def _target(self, action: str) -> Session | None:
        """The session after the action; None for what is no action here."""
        match = ACTION.match(action)
        if match is None:
            return None
        verb, argument = match[1], match[2].lower()
        if verb == "click":
            return self._page.clickables.get(argument)
        if not self._page.searchable or not argument.strip() or set("[]") & set(argument):
            return None
        return Session(page="results", results=self.catalogue.search(argument))

    def _go(self, session: Session) -> None:
        self._session = session
        self._grade_now = self._grade(self._bought(), dict(session.options)) if session.page == "done" else None
        self._page = Page(self.catalogue, session, self._goal.instruction_text, per_page=self.per_page,
                          show_attributes=self.show_attributes, score=self._grade_now.score if self._grade_now else 0.0)

    def _bought(self) -> Product:
        return self.catalogue.products[self._session.product]

    def _grade(self, product: Product, options: Mapping[str, str]) -> PurchaseGrade:
        goal, purchase = self.catalogue.wanted(self._goal), product.purchase(options)
        return grade_purchase(self._tagged(goal), self._tagged(purchase), faithful=self.faithful)

    def _tagged(self, item: dict[str, Any]) -> dict[str, Any]:
        if self.title_nouns == "spacy" and item["title_nouns"] is None:
            item["title_nouns"] = tagged_nouns(item["name"])
        return item


def split_sessions(count: int) -> dict[str, range]:
    """The session numbers of each split, of `count` sessions."""
    test, heldout = min(TEST, count // 10), min(HELDOUT, count // 5)
    return {"test": range(test), "heldout": range(test, test + heldout), "train": range(test + heldout, count)}


def _source(size: int | None, products: str | None, attributes: str | None, instructions: str | None,
            reviews: str | None) -> tuple[Files | int, tuple[int, ...]]:
    """What the catalogue is made from: its size, or the files and when they were written."""
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if products is None and attributes is None:
        if instructions or reviews:
            raise ValueError("instructions and reviews belong to files of products and attributes: give these too")
        return size or SIZE, ()
    if products is None or attributes is None:
        raise ValueError("products and attributes go together: give the paths of both files, or of neither")
    paths = [path and str(Path(path).resolve()) for path in (products, attributes, instructions, reviews)]
    files = Files(products=paths[0], attributes=paths[1], instructions=paths[2], reviews=paths[3], size=size)
    return files, tuple(Path(path).stat().st_mtime_ns for path in paths if path and Path(path).exists())


_LOADING = threading.Lock()
"""Threads that ask for the same catalogue wait for one of them to make it."""


def _load(source: Files | int, written: tuple[int, ...]) -> Catalogue:
    with _LOADING:
        return _made(source, written)


@lru_cache(maxsize=4)
def _made(source: Files | int, written: tuple[int, ...]) -> Catalogue:
    return generate_catalogue(source) if isinstance(source, int) else read_catalogue(source)
