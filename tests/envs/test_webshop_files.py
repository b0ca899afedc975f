"""The original's files, read by path: what is in them, and what may be wrong with them."""

import json
import os
import random

import numpy as np
import pytest

import envs
from envs.webshop.files import Files, read_catalogue

ID = "turngym/WebShop-v0"


def entry(asin, **changes):
    """A product as `items_shuffle.json` has it."""
    return {"asin": asin, "name": "Tall Rubber Boots", "query": " Rain Boots ", "category": "fashion",
            "product_category": "Shoes › Boots", "full_description": "For rain.",
            "small_description": ["Dry.", "Warm."], "pricing": "$24.99", "list_price": "", "customization_options": {
                "Size": [{"value": " 9 ", "image": None}, {"value": "10/11"}, {"value": "9"}], "Color": None,
                "Style": [{"value": "Dark  Red"}, {"value": ""}]}, **changes}


@pytest.fixture
def shop(tmp_path):
    """A function that writes the files and gives the options of the environment that reads them."""
    def write(products=None, attributes=None, instructions=None, reviews=None):
        products = [entry("B01")] if products is None else products
        attributes = {"B01": {"attributes": ["non slip"], "instruction": "find me rain boots",
                              "instruction_attributes": ["non slip"]}} if attributes is None else attributes
        paths = {}
        for name, data in (("products", products), ("attributes", attributes), ("instructions", instructions),
                           ("reviews", reviews)):
            if data is not None:
                path = tmp_path / f"{name}.json"
                path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
                paths[name] = str(path)
        return paths
    return write


def human(text="i need non slip boots.", options=("9", "dark red"), attributes=("non slip",)):
    """An instruction as `items_human_ins.json` has it."""
    return {"asin": "B01", "instruction": text, "instruction_options": list(options),
            "instruction_attributes": list(attributes)}


def read(paths, **options):
    return read_catalogue(Files(**paths, **options))


def test_a_product_is_read_as_the_original_reads_it(shop):
    product = read(shop(reviews=[{"asin": "B01", "average_rating": 4.5, "reviews": [
        {"title": "Good", "stars": "5", "review": "Dry feet."}, {"title": "Bad", "score": 1}]}])).products[0]
    assert (product.title, product.query) == ("Tall Rubber Boots", "rain boots")
    assert (product.price, product.price_text) == (24.99, "$24.99")
    assert product.options == {"size": ("9", "10 | 11"), "style": ("dark red",)}
    assert product.features == ("Dry.", "Warm.") and product.attributes == ("non slip",)
    assert product.rating == "4.5" and [review.score for review in product.reviews] == [5, 1]
    assert product.title_nouns is None


@pytest.mark.parametrize(("pricing", "low", "high", "text"), [
    (None, 100.0, 100.0, "$100.0"), ("", 100.0, 100.0, "$100.0"), ("free", 100.0, 100.0, "$100.0"),
    ("$1,299.00", 1299.0, 1299.0, "$1299.0"), ("$9.99$19.99", 9.99, 19.99, "$9.99 to $19.99"),
    ("$20.00$10.00$5.00", 10.0, 20.0, "$20.0 to $10.0"), ("$0.00", 0.0, 0.0, "$0.0"),
])
def test_prices(shop, pricing, low, high, text):
    product = read(shop([entry("B01", pricing=pricing)])).products[0]
    assert low <= product.price <= high and product.price_text == text


def test_prices_and_limits_do_not_depend_on_the_global_generator(shop):
    paths = shop([entry("B01", pricing="$5.00$95.00")], instructions={"B01": [human(), human("other boots")]})
    catalogues = []
    for seed in (1, 2):
        random.seed(seed)
        state = random.getstate()
        catalogues.append(read(paths))
        assert random.getstate() == state
    assert repr(catalogues[0]) == repr(catalogues[1])
    goal = catalogues[0].goals[0]
    assert goal.instruction_text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")
    assert goal.price_upper > catalogues[0].products[0].price and goal.price_upper % 10 == 0


def test_a_product_too_dear_for_a_round_limit_has_none(shop):
    goal = read(shop([entry("B01", pricing="$990.00")])).goals[0]
    assert "price" not in goal.instruction_text and goal.price_upper == 1_000_000


def test_goals_of_people_and_synthetic_goals(shop):
    attributes = {"B01": {"attributes": ["dry"], "instruction": "find me boots", "instruction_attributes": ["dry"]}}
    goals = read(shop(attributes=attributes)).goals  # two sizes, one style
    assert {tuple(goal.goal_options.items()) for goal in goals} == {
        (("size", "9"), ("style", "dark red")), (("size", "10 | 11"), ("style", "dark red"))}
    assert any(goal.instruction_text.startswith("find me boots with size: 9, and style: dark red, and price lower than")
               for goal in goals)
    instructions = {"B01": [human(), human("no attributes", attributes=())], "B99": [human()]}
    goals = read(shop(attributes=attributes, instructions=instructions)).goals
    assert [(goal.attributes, goal.goal_options) for goal in goals] == [(("non slip",), ("9", "dark red"))]
    assert goals[0].instruction_text.startswith("i need non slip boots, and price lower than ")


def test_sessions_are_in_the_order_of_the_originals_shuffle(shop):
    texts = [f"boots {i}" for i in range(8)]
    goals = read(shop(instructions={"B01": [human(text) for text in texts]})).goals
    random.Random(233).shuffle(texts)
    assert [goal.instruction_text.split(",")[0] for goal in goals] == texts


def test_products_named_twice_or_not_at_all_are_left_out_and_size_takes_the_first(shop):
    paths = shop([entry("B01"), entry("B01", name="Again"), entry("nan"), entry("B0123456789"), entry("B02")])
    assert [product.asin for product in read(paths).products] == ["B01", "B02"]
    assert [product.asin for product in read(paths, size=2).products] == ["B01"]


def test_an_episode_in_the_originals_data(shop):
    paths = shop([entry("B01"), entry("B02", name="Garden Hose", query="hose", product_category="Garden › Hoses")],
                 instructions={"B01": [human()]})
    env = envs.make(ID, **paths)
    task = env.session_task(0)
    assert task.key.startswith("files-") and task.family == "fashion" and len(env.tasks("train")) == 1
    env.reset(options={"task": task})
    responses = env.gold(np.random.default_rng(0))
    for response in responses:
        step = env.step(env.parse(response).text)
    assert step[4]["success"] and {"<action>click[9]</action>", "<action>click[dark red]</action>"} <= {*responses}
    env.reset(options={"task": task})
    for action in ("search[garden hose]", "click[b02]", "click[buy now]"):
        step = env.step(action)
    assert step[1:3] == (0.0, True) and not step[4]["success"]  # no word of the titles in common


def test_an_instruction_that_its_own_product_does_not_fit_has_no_gold(shop):
    env = envs.make(ID, **shop(instructions={"B01": [human(options=["purple"])]}))
    env.reset(seed=0)
    with pytest.raises(LookupError, match=r"B01 as wanted scores only 0\.667"):  # 1 attribute and the price of 3
        env.gold(np.random.default_rng(0))


def test_options_with_brackets_can_be_chosen(shop):
    options = {"Size": [{"value": "large [us]"}, {"value": "a]b\nc"}]}
    env = envs.make(ID, **shop([entry("B01", customization_options=options)]))
    env.reset(seed=0)
    for action in ("search[boots]", "click[b01]", "click[large [us]]", "click[a]b c]"):
        assert env.step(action)[4]["valid"]


def test_changed_files_are_another_catalogue(shop):
    first = envs.make(ID, **shop())
    again = envs.make(ID, **shop())
    paths = shop([entry("B01", full_description="New.")])
    os.utime(paths["products"], (1, 1))
    changed = envs.make(ID, **paths)
    assert first.session_task(0).key == again.session_task(0).key != changed.session_task(0).key


@pytest.mark.parametrize(("files", "message"), [
    ({"products": "[{"}, r"products\.json is not JSON \(cut off"),
    ({"products": {"B01": {}}}, r"products\.json should hold a JSON list, not a dict: are the files mixed up"),
    ({"attributes": []}, r"attributes\.json should hold a JSON object, not a list"),
    ({"instructions": "null"}, r"instructions\.json should hold a JSON object, not a NoneType"),
    ({"products": []}, r"products\.json holds no usable product"),
    ({"attributes": {}}, r"attributes\.json holds no usable instruction"),
    ({"instructions": {"B99": []}}, r"instructions\.json holds no usable instruction"),
    ({"products": [entry("B01"), {"asin": "B02"}]}, r"products\.json: product 1 is broken: 'name' is missing"),
    ({"products": [entry("B01", name=float("nan"))]}, "product 0 is broken: 'name' is nan, not text"),
    ({"products": ["B01"]}, "product 0 is broken: a str stands where an object should"),
    ({"products": [entry("B01", customization_options={"Size": [{"image": 1}]})]}, "product 0 is broken: 'value' is"),
    ({"products": [entry("B01", customization_options=[1])]}, "product 0 is broken"),
    ({"attributes": {"B01": ["non slip"]}}, r"attributes\.json: the entry of B01 is broken"),
    ({"attributes": {"B01": {"attributes": "non slip"}}}, "the entry of B01 is broken: 'attributes' is 'non slip'"),
    ({"instructions": {"B01": [{"instruction": "x", "instruction_attributes": ["x"]}]}},
     r"instructions\.json: the entry of B01 is broken: 'instruction_options' is missing"),
    ({"reviews": [{"asin": "B01"}]}, r"reviews\.json: the entry of B01 is broken: 'average_rating' is missing"),
    ({"reviews": [3]}, r"reviews\.json: entry 0 is broken"),
])
def test_a_broken_file_is_named_with_the_entry(shop, files, message):
    with pytest.raises(ValueError, match=message):
        envs.make(ID, **shop(**files))


def test_a_missing_file_is_named_and_what_to_do(shop, tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(OSError, match="give the path of the original's file, or no path") as caught:
            envs.make(ID, **{**shop(), "attributes": str(path)})
        assert caught.value.filename == str(path)


def test_half_of_the_paths_is_refused(shop):
    paths = shop(instructions={"B01": [human()]})
    with pytest.raises(ValueError, match="products and attributes go together"):
        envs.make(ID, products=paths["products"])
    with pytest.raises(ValueError, match="give these too"):
        envs.make(ID, instructions=paths["instructions"])
