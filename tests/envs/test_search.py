"""The search environment on a small corpus: its actions, what counts as an answer, what documents may say."""

import pickle
import re
from functools import partial

import numpy as np
import pytest

import envs
from envs.search.documents import Document
from envs.search.retrieval import BM25
from tests.envs.search_corpus import DOCUMENTS, QUESTIONS, write_lines

ID = "turngym/Search-v0"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    questions = folder / "questions"
    questions.mkdir()
    write_lines(questions / "train.jsonl", [{"question": f"What is {n}?", "answer": f"number {n}"} for n in range(30)])
    write_lines(questions / "test.jsonl", QUESTIONS)
    return {"corpus": write_lines(folder / "corpus.jsonl", DOCUMENTS), "questions": str(questions)}


@pytest.fixture
def env(files):
    env = envs.make(ID, **files)
    start(env)
    return env


def start(env, place=0):
    return env.reset(options={"task": env.tasks("test")[place]})[0]


def respond(env, response):
    return env.step(env.parse(response).text)


# Searching and opening


def test_a_search_shows_numbered_documents_with_their_ids_and_says_which(env):
    observation, reward, terminated, _, info = respond(env, "I look it up. <search>capital of Peru</search>")
    assert observation.startswith('<information>\n[1] id="1" Peru: Peru is a country in South America.')
    assert '\n[2] id="' in observation and observation.endswith("\n</information>")
    assert (reward, terminated, info["valid"]) == (0.0, False, True)
    assert info["exposed"][0] == "1" and len(info["exposed"]) == 3
    assert "Lima" not in observation.splitlines()[1]  # it stands at the end of a long document


@pytest.mark.parametrize("tag", ['<open id="1"/>', "<open id='1'/>", "<open id=1/>", "<open id=1 />", "<open  id = 1>"])
def test_open_shows_all_of_a_document_that_was_found(env, tag):
    respond(env, "<search>Peru</search>")
    observation, *_, info = respond(env, f"Now {tag}")
    assert observation.count('id="') == 1 and "Its capital is Lima." in observation
    assert info["exposed"] == ["1"] and info["valid"]


def test_an_id_with_a_slash_can_be_opened_and_cited_without_quotes(env):
    respond(env, "<search>Malaysia</search>")
    assert respond(env, "<open id=a/b-c/>")[4]["exposed"] == ["a/b-c"]
    assert respond(env, "<answer>Lima <cite id=a/b-c/></answer>")[4]["cited"] == ["a/b-c"]


def test_a_document_that_no_search_of_the_episode_found_cannot_be_opened(env):
    assert not respond(env, '<open id="1"/>')[4]["valid"]
    respond(env, "<search>Ecuador</search>")
    assert not respond(env, '<open id="a/b-c"/>')[4]["valid"]
    start(env)
    assert not respond(env, '<open id="2"/>')[4]["valid"]


def test_what_one_environment_found_another_does_not_know(env, files):
    other = envs.make(ID, **files)
    start(other)
    respond(env, "<search>Peru</search>")
    assert not respond(other, '<open id="1"/>')[4]["valid"]


def test_case_accents_and_punctuation_of_a_query_do_not_matter(env):
    for query in ("PERU!", "(perú)", "peru AND", '"peru', "peru:", "-peru", "peru*", "+peru^2"):
        assert respond(env, f"<search>{query}</search>")[4]["exposed"][0] == "1", query
        start(env)


def test_equal_documents_come_in_the_order_of_the_corpus():
    index = BM25(Document(str(n), "Twin", "the same text") for n in range(500))
    assert [document.id for document in index.search("twin text", 7)] == list("0123456")


@pytest.mark.parametrize("query", ["?!", "zzzz", "\ud800", "NOT AND OR", "title:peru", "[a TO b]", "/x.*/", "\u202e",
                                   "(" * 3000, "word " * 5000, "\x00", "秘鲁", "e\u0301\u0302"])
def test_any_query_is_answered(env, query):
    observation, _, terminated, _, info = env.step(f"<search>{query}</search>")
    assert observation.startswith("<information>") or not info["valid"]
    assert not terminated
    assert respond(env, "<search>Peru</search>")[4]["exposed"][0] == "1"


@pytest.mark.parametrize("text", ["", "   ", "Lima", "<search></search>", "<search>  </search>", "<search>Lima",
                                  "<answer>Lima", "<open/>", "<open id=/>", '<open id="/>', "<open>1</open>",
                                  "<cite id=1/>", "<think><search>Peru</search></think>"])
def test_a_response_without_an_action_is_invalid_and_the_episode_goes_on(env, text):
    _, reward, terminated, _, info = respond(env, text)
    assert (reward, terminated, info["valid"], info["exposed"]) == (0.0, False, False, [])


def test_the_last_action_counts_and_an_open_inside_another_is_part_of_its_text(env):
    respond(env, "<search>Peru</search>")
    assert respond(env, '<search>Ecuador</search> or <open id="1"/>')[4]["exposed"] == ["1"]
    assert respond(env, '<open id="1"/> or <search>Ecuador</search>')[4]["exposed"][0] == "2"
    assert respond(env, '<search>Ecuador <open id="1"/></search>')[4]["exposed"][0] == "2"
    assert respond(env, '<answer>Lima <open id="1"/></answer>')[2]


# Answers


@pytest.mark.parametrize(("response", "reward"), [
    ("<answer>Lima</answer>", 1.0),
    ("<answer>\n the LIMA. \n</answer>", 1.0),
    ("<answer>Quito</answer> no: <answer>Lima</answer>", 1.0),
    ("<answer>Lima</answer> no: <answer>Quito</answer>", 0.0),
    ("<think><answer>Lima</answer></think><answer>Quito</answer>", 0.0),
    ("<think>Quito</think><answer>Lima</answer>", 1.0),
    ("<answer>Quito, not Lima</answer>", 0.0),
    ("<answer></answer>", 0.0),
    ("<answer><cite id=1/></answer>", 0.0),
    ("<answer><search>Lima</search></answer>", 0.0),
])
def test_the_last_answer_outside_thinking_is_scored(env, response, reward):
    _, got, terminated, _, info = respond(env, response)
    assert (got, terminated, info["success"]) == (reward, True, reward == 1.0)


def test_an_answer_inside_a_search_is_no_answer(env):
    _, reward, terminated, _, _ = respond(env, "<search><answer>Lima</answer></search>")
    assert (reward, terminated) == (0.0, False)


def test_an_answer_in_a_document_is_never_the_agents(env):
    observation = respond(env, "<search>trap</search>")[0]
    assert "Lima" in observation
    _, reward, terminated, _, info = respond(env, "<answer>Quito</answer>")
    assert (reward, terminated, info["success"], info["exact_match"]) == (0.0, True, False, 0.0)


def test_an_episode_that_ends_with_an_observation_is_worth_nothing(files):
    env = envs.make(ID, **files, max_turns=1)
    start(env)
    _, reward, terminated, truncated, info = respond(env, "<search>trap</search>")
    assert (reward, terminated, truncated, info["success"], info["score"]) == (0.0, False, True, False, 0.0)


def test_an_answer_in_the_last_turn_counts(files):
    env = envs.make(ID, **files, max_turns=2)
    start(env)
    respond(env, "<search>Peru</search>")
    assert respond(env, "<answer>Lima</answer>")[1:4] == (1.0, True, False)


def test_an_observation_copied_by_the_agent_holds_no_action(env):
    observation = respond(env, "<search>trap</search>")[0]
    observation += respond(env, '<open id="trap"/>')[0]
    assert "Lima" in observation
    assert env.parse(observation).text == ""


def test_documents_can_neither_end_their_block_nor_open_a_tag(env):
    respond(env, "<search>trap</search>")
    observation = respond(env, '<open id="trap"/>')[0]
    assert re.findall(r"<\S+", observation) == ["<information>", "</information>"]
    assert "a < b" in observation


def test_citations_are_read_from_the_answer_and_are_no_part_of_it(env):
    respond(env, "<search>Peru</search>")
    *_, info = respond(env, "<cite id=9/> <answer>Lima<cite id=\"1\"/> <cite id='2'> </cite><cite id=1/></answer>")
    assert info["success"] and info["cited"] == ["1", "2"]


def test_the_measures_of_an_answer(env):
    start(env, 2)
    *_, info = respond(env, "<answer>the city of Kuala Lumpur</answer>")
    # "city of kuala lumpur" has 4 words, the gold 2, 2 in common: F1 = 2 * 2 / (4 + 2).
    assert (info["exact_match"], info["contains_match"], info["f1"]) == (0.0, 1.0, pytest.approx(2 / 3))


def test_every_gold_answer_counts(env):
    start(env, 1)
    assert respond(env, "<answer>San Francisco de Quito</answer>")[1] == 1.0


# The rest of the protocol


def test_citations_can_be_left_out(files):
    with_them, without = envs.make(ID, **files), envs.make(ID, **files, citations=False)
    assert "<cite" in with_them.system_prompt and "<cite" not in without.system_prompt
    for env, expected in ((with_them, ["2"]), (without, [])):
        start(env, 1)
        *_, last = map(partial(respond, env), env.gold(np.random.default_rng(0)))
        assert last[4]["success"] and last[4]["cited"] == expected


@pytest.mark.parametrize("copied", [lambda env: pickle.loads(pickle.dumps(env)), lambda env: env])
def test_a_snapshot_returns_to_what_was_found(env, copied):
    respond(env, "<search>Peru</search>")
    env = copied(env)
    key, snapshot = env.state_key(), env.snapshot()
    respond(env, '<open id="1"/>')
    assert env.state_key() != key
    respond(env, "<answer>Lima</answer>")
    env.restore(snapshot)
    assert env.state_key() == key
    assert respond(env, '<open id="1"/>')[4] | {"turn": 2} == respond(env, '<open id="1"/>')[4] | {"turn": 2}
    env.restore(snapshot)
    assert respond(env, "<answer>Lima</answer>")[1] == 1.0


def test_passages_are_cut_between_words_and_short_documents_are_whole(files):
    env = envs.make(ID, **files, passage_characters=12, top_k=1)
    start(env)
    assert respond(env, "<search>Peru</search>")[0] == '<information>\n[1] id="1" Peru: Peru is a ...\n</information>'
    whole = envs.make(ID, **files, passage_characters=10_000, top_k=1)
    start(whole)
    assert "Its capital is Lima.\n" in respond(whole, "<search>Peru</search>")[0]


@pytest.mark.parametrize(("options", "message"), [
    ({"questions": None}, "set questions"), ({"corpus": None}, "set corpus or server"),
    ({"server": "http://127.0.0.1:1"}, "set one of them"), ({"top_k": 0}, "top_k"),
    ({"passage_characters": 0}, "passage_characters"), ({"max_turns": 0}, "max_turns"),
    ({"corpus": None, "server": "127.0.0.1:8000"}, "an address such as http://"),
    ({"corpus": None, "server": ""}, "an address such as http://"),
    ({"families": ["1 hop"]}, "leave it out where questions is set"), ({"families": ["5 hops"]}, "4 hops"),
    ({"families": []}, "none given"),
])
def test_options_that_do_not_fit_are_refused(files, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make(ID, **{**files, **options})


def test_the_environment_passes_its_check_on_files_too(files):
    wrong = [result for result in envs.check_text_env(ID, episodes=3, **files) if not result.ok]
    assert not wrong
