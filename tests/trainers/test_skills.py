"""Every built-in environment with skills gets the advice for its kind of task, and a file that is wrong is named."""

import pytest

from envs.core import Task
from trainers.settings import SettingsError
from trainers.skills import FOLDER, load_skills


def advice(env_id, prompt="", **task):
    """Names of the kinds whose advice is given."""
    library = load_skills(env_id)
    text = library.match(Task(key="", **task), prompt)
    assert text.startswith(library.general.strip())
    return [name for name, skill in library.skills.items() if skill.text.strip() in text]


@pytest.mark.parametrize("family, kinds", [
    ("heat", ["heat"]), ("pick_heat_then_place_in_recep", ["heat"]), ("cool", ["cool"]), ("clean", ["clean"]),
    ("look", ["look_at_obj_in_light"]), ("look_at_obj_in_light", ["look_at_obj_in_light"]),
    ("pick", ["pick_and_place"]), ("pick two", ["pick_and_place"]), ("pick_and_place_simple", ["pick_and_place"]),
    ("pick_two_obj_and_place", ["pick_and_place"]), ("pick_clean_then_place_in_recep", ["clean"])])
def test_alfworld_s_families_have_their_skills(family, kinds):
    assert advice("turngym/ALFWorld-v0", family=family) == kinds
    assert advice("turngym/ALFWorld-v0", "put a hot lamp", family=family) == kinds  # the family comes first


def test_search_s_skills_go_by_family_or_source():
    assert advice("turngym/Search-v0", family="1 hop") == ["direct_retrieval"]
    assert advice("turngym/Search-v0", family="3 hops") == ["multi_hop_reasoning"]
    assert advice("turngym/Search-v0", family="bridge comparison") == ["compare"]
    for source, kind in [("popqa", "entity_attribute_lookup"), ("NQ", "direct_retrieval"),
                         ("2wikimultihopqa", "multi_hop_reasoning"), ("bamboogle", "multi_hop_reasoning")]:
        assert advice("turngym/Search-v0", family="x", data={"source": source}) == [kind]
    assert advice("turngym/Search-v0", "Which is larger, Peru or Chile?") == ["compare"]


def test_without_a_known_family_every_keyword_counts_and_none_leaves_the_general_advice():
    assert advice("turngym/ALFWorld-v0", "heat some egg and put a lamp") == [
        "pick_and_place", "look_at_obj_in_light", "heat"]
    assert advice("turngym/ALFWorld-v0", "reheated") == [] == advice("turngym/ALFWorld-v0")
    assert advice("turngym/WebShop-v0", family="groceries") == ["other"]
    assert advice("turngym/WebShop-v0", "i need SHOES and a shirt") == ["apparel", "footwear"]


def test_countdown_and_scienceworld_families_have_their_skills():
    assert advice("turngym/Countdown-v0", family="3 numbers") == ["three"]
    for family in ("boil", "use-thermometer", "power-component", "find-animal", "grow-plant", "chemistry-mix",
                   "inclined-plane-friction-named-surfaces", "find-non-living-thing", "lifespan-longest-lived"):
        assert len(advice("turngym/ScienceWorld-v0", family=family)) == 1, family


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_skills_are_short_and_their_patterns_match_something(path):
    library = load_skills(f"turngym/{path.stem}-v0")
    assert len(library.general.split()) < 100
    for skill in library.skills.values():
        assert skill.families and len(skill.text.split()) < 40 and skill.text.strip()


def test_an_environment_without_skills_is_named_and_a_file_helps(tmp_path):
    for env_id in ("turngym/Math-v0", "mine:me/Guess-v0", ""):
        with pytest.raises(SettingsError, match=r"no skills for the environment .*alfworld.*algorithm\.skills"):
            load_skills(env_id)
    (tmp_path / "mine.toml").write_text('general = "Halve the range."\n')
    assert load_skills("me/Guess-v0", str(tmp_path / "mine.toml")).match(Task(key=""), "") == "Halve the range."
    (tmp_path / "wrong.toml").write_text('general = "x"\n[skills.a]\ntxt = "y"\n')
    with pytest.raises(SettingsError, match="txt"):
        load_skills("", str(tmp_path / "wrong.toml"))
    with pytest.raises(SettingsError, match="no config file"):
        load_skills("", str(tmp_path / "absent.toml"))
