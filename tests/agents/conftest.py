import pytest

from tests.agents.episodes import Counting


@pytest.fixture
def counting() -> type[Counting]:
    """A class of its own, so that `made` lists this test's environments."""
    return type("Counting", (Counting,), {"made": []})
