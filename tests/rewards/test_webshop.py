"""WebShop's reward, worked out by hand from its formula
    type * (attributes + options + [price within the limit]) / (attributes wanted + options wanted + 1).
"""

import sys

import pytest

from rewards import webshop_reward
from rewards.webshop import COLOURS, grade_purchase, same_option, title_words, token_set_ratio

GOAL = {"query": "rain boots", "product_category": "Shoes › Outdoor › Boots", "name": "Aldane Rubber Rain Boots",
        "attributes": ("non slip", "vegan friendly"), "goal_options": {"color": "navy blue", "size": "9"},
        "price_upper": 40.0}
BOUGHT = {"query": "rain boots", "product_category": "Shoes › Outdoor › Boots", "name": "Aldane Rubber Rain Boots",
          "Attributes": ("non slip", "vegan friendly", "lace up"), "BulletPoints": ("Keeps dry.",),
          "Description": "For wet days.", "price": 39.99, "options": {"color": "navy blue", "size": "9"}}
OTHER_KIND = {"query": "tea pot", "product_category": "Kitchen › Tea › Pots"}


def reward(goal=None, bought=None, **options):
    return webshop_reward({**GOAL, **(goal or {})}, {**BOUGHT, **(bought or {})}, **options)


def test_the_wanted_purchase_scores_one():
    assert reward() == 1.0
    assert reward(faithful=True) == 1.0


@pytest.mark.parametrize(("bought", "score"), [
    ({"options": {"color": "navy blue", "size": "8"}}, 4 / 5),
    ({"options": {"size": "9"}}, 4 / 5),
    ({"options": {}}, 3 / 5),
    ({"price": 40.0}, 1.0),
    ({"price": 40.01}, 4 / 5),
    ({"Attributes": ("non slip",)}, 4 / 5),
    ({"Attributes": ("lace up",)}, 3 / 5),
    ({"Attributes": (), "options": {}, "price": 1e9}, 0.0),
])
def test_each_part_that_does_not_fit_costs_its_share(bought, score):
    assert reward(bought=bought) == pytest.approx(score)
    assert reward(bought=bought, faithful=True) == pytest.approx(score)


@pytest.mark.parametrize("place", [{"Title": "Boots, Vegan Friendly"}, {"BulletPoints": ["It is VEGAN friendly"]},
                                   {"Description": "A vegan friendly boot"}])
def test_an_attribute_may_stand_in_the_text_of_the_product(place):
    assert reward(bought={"Attributes": ("non slip",), **place}) == 1.0


def test_an_attribute_matches_a_similar_one():
    # "essential oil" and "essential oils": 2 * 13 / 27 of the letters are common, 96 of 100
    assert reward({"attributes": ["essential oils"]}, {"Attributes": ["essential oil"]}) == 1.0
    assert reward({"attributes": ["tea tree"]}, {"Attributes": ["tea bag"]}) == pytest.approx(3 / 4)


def test_options_may_be_lists_of_values():
    assert reward({"goal_options": ["9", "navy blue"]}, {"options": ["navy blue", "9"]}) == 1.0
    assert reward({"goal_options": []}, {"options": {}}) == 1.0


@pytest.mark.parametrize(("name", "query", "category", "factor"), [
    # goal's words: aldane, rubber, rain, boots
    ("Aldane Rubber Rain Boots", "tea pot", "Kitchen › Tea › Pots", 1.0),
    ("Galdane Rain Coat", "tea pot", "Kitchen › Tea › Pots", 1.0),  # 1 of 4 is more than 0.2
    ("Galdane Tea Pot", "rain boots", "Shoes › Outdoor › Boots", 0.0),  # no word in common: nothing else counts
])
def test_the_kind_of_product_is_judged_by_title_query_and_category(name, query, category, factor):
    assert reward(bought={"name": name, "query": query, "product_category": category}) == factor


NOUNS = tuple("abcdefghijklmnopqrst")  # 20


@pytest.mark.parametrize(("common", "bought", "factor"), [
    (0, {}, 0.0), (1, {}, 0.1), (2, {}, 1.0), (2, OTHER_KIND, 0.5), (4, OTHER_KIND, 0.5), (5, OTHER_KIND, 1.0),
    (2, {**OTHER_KIND, "query": "rain boots"}, 1.0),
    (2, {**OTHER_KIND, "product_category": "Boots › Shoes › Kitchen"}, 1.0),  # two parts in common, in any order
    (2, {**OTHER_KIND, "product_category": "Shoes › Shoes › Kitchen"}, 0.5),
])
def test_the_factor_of_the_kind_changes_at_its_thresholds(common, bought, factor):
    # shares of 20 nouns: 1 is 0.05, 2 is 0.1, 4 is 0.2, 5 is 0.25
    assert reward({"title_nouns": NOUNS}, {"title_nouns": NOUNS[:common], **bought}) == factor


def test_a_title_without_nouns_counts_as_a_fifth():
    assert grade_purchase({**GOAL, "title_nouns": ()}, BOUGHT).title_score == 0.2
    assert reward({"name": "4 x 6"}) == 1.0


def test_the_original_projects_own_example_of_a_wrong_kind():
    goal = {"name": "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar",
            "attributes": ["tea tree", "essential oils", "natural ingredients"], "query": "Query 1",
            "product_category": "a › b › c", "price_upper": 40.0,
            "goal_options": {"color": "grey", "size": "XL", "amount": "pack of 12"}}
    bought = {"name": "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home "
                      "Theater System", "query": "Query 2", "product_category": "a › d › e", "Attributes": [],
              "Title": "", "BulletPoints": [], "Description": "Best shampoo, made with natural ingredients",
              "price": 35, "options": {"color": "grey", "size": "XL"}}
    # "power" and "cord" are 2 of 13 words: half of (1 + 2 + 1) / (3 + 3 + 1)
    assert webshop_reward(goal, bought) == pytest.approx(2 / 7)
    assert webshop_reward(goal, bought, faithful=True) == pytest.approx(2 / 7)


@pytest.mark.parametrize(("wanted", "chosen"), [
    ("titanium", "tan"), ("navy blue", "blue"), ("blue", "navy blue"), ("navy blue", "light blue"), ("redwood", "red"),
    ("black | white", "black"), ("rose gold", "gold"), ("tanzanite", "tan"), ("greenland", "green"),
])
def test_another_colour_is_another_option_whatever_letters_they_share(wanted, chosen):
    bought = {"options": {"color": chosen}}
    assert reward({"goal_options": [wanted]}, bought) == pytest.approx(3 / 4)
    assert reward({"goal_options": [chosen]}, {"options": {"color": wanted}}) == pytest.approx(3 / 4)


@pytest.mark.parametrize(("wanted", "chosen"), [("titanium", "tan"), ("navy blue", "blue"), ("redwood", "red")])
def test_faithful_takes_the_first_colour_found_within_a_word(wanted, chosen):
    assert reward({"goal_options": [wanted]}, {"options": {"color": chosen}}, faithful=True) == 1.0


@pytest.mark.parametrize(("wanted", "chosen"), [("grey", "GREY"), ("cool powder snow", "powder snow"), ("9", " 9 "),
                                                ("stainless steel", "steel"), ("黑色", "黑色"), ("—", "—")])
def test_an_option_in_other_words_is_the_same(wanted, chosen):
    assert same_option(wanted, chosen)


def test_options_without_a_latin_letter_only_match_where_the_mistake_is_mended():
    assert reward({"goal_options": ["黑色"]}, {"options": ["黑色"]}) == 1.0
    assert reward({"goal_options": ["黑色"]}, {"options": ["白色"]}) == pytest.approx(3 / 4)
    assert reward({"goal_options": ["黑色"]}, {"options": ["黑色"]}, faithful=True) == pytest.approx(3 / 4)


@pytest.mark.parametrize("limit", [0, 0.0, -5])
@pytest.mark.parametrize("faithful", [False, True])
def test_a_limit_of_nothing_is_no_limit(limit, faithful):
    assert reward({"price_upper": limit}, faithful=faithful) == 1.0
    # 2 attributes of 2, 1 option of 2, and no price
    assert reward({"price_upper": limit}, {"options": {"size": "9"}}, faithful=faithful) == pytest.approx(3 / 4)
    assert grade_purchase({**GOAL, "price_upper": limit}, BOUGHT).price is None


def test_a_goal_that_wants_nothing_but_the_kind_is_met_by_the_kind():
    assert reward({"attributes": [], "goal_options": [], "price_upper": 0}) == 1.0


def test_without_a_purchase_there_is_no_reward():
    assert webshop_reward(GOAL, None) == 0.0


@pytest.mark.parametrize("key", ["query", "product_category", "name", "attributes", "goal_options", "price_upper"])
def test_a_goal_that_lacks_a_key_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"the goal lacks {key};"):
        webshop_reward({name: value for name, value in GOAL.items() if name != key}, BOUGHT)


@pytest.mark.parametrize("key", ["Attributes", "price", "options"])
def test_a_purchase_that_lacks_a_key_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"the purchase lacks {key};"):
        webshop_reward(GOAL, {name: value for name, value in BOUGHT.items() if name != key})


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(ImportError, match=r"turngym\[webshop\]"):
        token_set_ratio("a", "b")


def test_likeness_is_a_whole_number_of_words_not_of_signs():
    assert token_set_ratio("Pack of 12!", "12 (pack)") == 100  # all words of the second are in the first
    assert token_set_ratio("xl", "xxl") == 80  # 2 * 2 of 5 letters
    assert token_set_ratio("", "") == token_set_ratio("?", "!") == 0


def test_words_of_a_title():
    assert title_words("Men's 2-Pack of Rain-Boots for JBL 4K, with A Box") == ["men", "pack", "rain", "boots", "jbl",
                                                                               "box"]


def test_colours_are_in_the_order_that_decides():
    assert tuple(sorted(COLOURS)) == COLOURS and len(set(COLOURS)) == len(COLOURS)
