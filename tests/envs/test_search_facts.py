"""The built-in corpus and questions: unique answers, true evidence, the same everywhere, solvable by search."""

import hashlib
import itertools
import pickle
import re
import time
from collections import Counter

import numpy as np
import pytest

import envs
from envs.core import panel_sha256
from envs.search.facts import facts, fold
from rewards import contains_match

ID = "turngym/Search-v0"
SPLITS = ("train", "heldout", "test")


@pytest.fixture(scope="module")
def env():
    return envs.make(ID)


@pytest.fixture(scope="module")
def tasks(env):
    """A few hundred tasks of each split."""
    return {split: env.tasks(split)[:256] for split in SPLITS}


@pytest.fixture(scope="module")
def texts():
    return {name: entity.document() for name, entity in facts().entities.items()}


def all_of(tasks):
    return list(itertools.chain(*tasks.values()))


def play(env, task, responses):
    env.reset(options={"task": task})
    return [env.step(env.parse(response).text) for response in responses]


def number(alias):
    return float(re.sub(r"[^0-9.]", "", alias.split(" ")[0]))


def test_the_questions_are_the_same_on_every_machine(tasks):
    assert {split: panel_sha256(few)[:16] for split, few in tasks.items()} == {
        "train": "230223e5b8a60496", "heldout": "823a0f0be835ae17", "test": "27183ae035e5e117"}


def test_the_corpus_is_the_same_on_every_machine(texts):
    digest = hashlib.sha256("\n".join("\t".join(texts[name]) for name in sorted(texts)).encode()).hexdigest()
    assert len(texts) == 47_782
    assert digest[:16] == "b4de89e6680b4a2f"


def test_the_splits_are_of_the_documented_size(env):
    assert [len(env.tasks(split)) for split in SPLITS] == [100_000, 1_024, 256]
    with pytest.raises(ValueError, match="no split 'dev'"):
        env.tasks("dev")


def test_what_a_question_names_is_named_in_one_split_only(tasks):
    named = {}
    for split, few in tasks.items():
        for task in few:
            for name in re.findall(r"\b[a-z]+/[^ ,]+", task.key):
                assert named.setdefault(name, split) == split, task.key


def test_every_family_is_there(tasks):
    for few in tasks.values():
        families = Counter(task.family for task in few)
        assert sorted(families) == ["1 hop", "2 hops", "3 hops", "4 hops", "bridge comparison", "comparison"]
        assert min(families.values()) > 20


def test_chosen_families_are_asked_alone_and_of_the_same_panel(env, tasks):
    some = envs.make(ID, families=["1 hop", "comparison"])
    assert {task.family for task in some.tasks("train")[:40]} == {"1 hop", "comparison"}
    wanted = [task for task in env.tasks("test") if task.family in ("1 hop", "comparison")]
    assert list(some.tasks("test")) == wanted and len(wanted) > 50


def test_the_names_in_a_question_belong_to_one_thing_only(tasks):
    owners = Counter(name for entity in facts().entities.values()
                     for name in {fold(name) for name in (entity.name, *entity.aliases)})
    for task in all_of(tasks):
        relations = task.data["evidence"]["relations"]
        first = {relation["head"] for relation in relations} - {relation["tail"] for relation in relations}
        for unit in task.data["evidence"]["entities"]:
            if unit["id"] in first:
                assert unit["aliases"][0] in task.data["question"]
                assert [owners[fold(alias)] for alias in unit["aliases"]] == [1] * len(unit["aliases"]), task.key


def test_each_fact_of_the_evidence_stands_in_each_of_its_documents(tasks, texts):
    for task in all_of(tasks):
        evidence = task.data["evidence"]
        names = {unit["id"]: unit["aliases"] for unit in evidence["entities"]}
        for relation in evidence["relations"]:
            for name in relation["documents"]:
                text = f"{texts[name].title} {texts[name].text}"
                for wanted in (names[relation["head"]], names[relation["tail"]], relation["cues"]):
                    assert contains_match(wanted, text), (task.key, relation, text)


def test_each_entity_of_the_evidence_is_named_in_each_of_its_documents(tasks, texts):
    for task in all_of(tasks)[::3]:
        for unit in task.data["evidence"]["entities"]:
            assert unit["documents"]
            for name in unit["documents"]:
                assert contains_match(unit["aliases"], f"{texts[name].title} {texts[name].text}"), (task.key, unit)


def test_a_chain_leads_from_the_question_to_the_answer_in_as_many_hops_as_its_family_says(tasks):
    for task in all_of(tasks):
        evidence = task.data["evidence"]
        if "comparison" not in task.family:
            units = {unit["id"]: unit["aliases"] for unit in evidence["entities"]}
            chain = evidence["relations"]
            assert len(chain) == int(task.family[0])
            assert units[chain[0]["head"]][0] in task.data["question"]
            assert all(one["tail"] == other["head"] for one, other in itertools.pairwise(chain))
            assert units[chain[-1]["tail"]] == task.data["answers"]
            assert not contains_match(task.data["answers"], task.data["question"])


def test_a_comparison_is_won_by_the_figures_in_its_documents(tasks):
    for task in all_of(tasks):
        evidence, question = task.data["evidence"], task.data["question"]
        names = {unit["id"]: unit["aliases"] for unit in evidence["entities"]}
        if "comparison" in task.family:
            owner = {relation["tail"]: relation["head"] for relation in evidence["relations"]
                     if relation["relation"] == "country"}
            figures = {owner.get(relation["head"], relation["head"]): number(names[relation["tail"]][0])
                       for relation in evidence["relations"] if relation["relation"] != "country"}
            least = re.search(r"\b(lower|lowest|fewer|fewest|smaller|smallest|less|least)\b", question.split(":")[0])
            best = (min if least else max)(figures, key=figures.get)
            assert names[best] == task.data["answers"], task.key
            assert list(figures.values()).count(figures[best]) == 1
            assert all(names[unit][0] in question for unit in figures)


def test_gold_finds_its_documents_by_searching_and_cites_what_it_was_shown(env, tasks):
    for place, task in enumerate(few[i] for few in tasks.values() for i in range(60)):
        env.reset(options={"task": task})
        steps = play(env, task, env.gold(np.random.default_rng(place)))
        assert all(step[4]["valid"] for step in steps) and steps[-1][4]["success"]
        exposed = {name for step in steps for name in step[4]["exposed"]}
        needed = {relation["documents"][0] for relation in task.data["evidence"]["relations"]}
        assert set(steps[-1][4]["cited"]) == needed <= exposed
        facts_read = " ".join(step[0] for step in steps[:-1])
        if "comparison" not in task.family:
            assert contains_match(task.data["answers"], facts_read), task.key


def test_gold_varies_its_queries(env, tasks):
    env.reset(options={"task": tasks["test"][0]})
    assert len({tuple(env.gold(np.random.default_rng(seed))) for seed in range(20)}) > 1


def test_a_random_agent_hardly_ever_succeeds(env, tasks):
    wins = 0
    for seed, task in enumerate(all_of(tasks)[::4]):
        rng = np.random.default_rng(seed)
        env.reset(options={"task": task})
        for _ in range(env.max_turns):
            *_, terminated, truncated, info = env.step(env.parse(env.random_action(rng)).text)
            if terminated or truncated:
                break
        wins += info["success"]
    assert wins <= 0.05 * len(all_of(tasks)[::4])


def test_environments_of_a_process_share_one_index_and_are_small_when_pickled(env, tasks):
    other = envs.make(ID)
    assert other.retriever is env.retriever
    play(other, tasks["test"][0], ["<search>Peru</search>"])
    assert len(pickle.dumps(other)) < 50_000


def test_a_step_takes_little_time(env, tasks):
    few = tasks["train"][:50]
    started = time.process_time()
    for task in few:
        play(env, task, [f"<search>{task.data['question']}</search>"] * 4)
    assert (time.process_time() - started) / (4 * len(few)) < 0.02  # 1 ms is usual


def test_what_the_packages_have_wrong_is_put_right():
    entities = facts().entities
    assert entities[entities["country/KZ"].links["capital"]].name == "Astana"
    assert entities[entities["country/US"].links["capital"]].id == "city/4140963"  # not one of its namesakes
    assert "Cuba" not in " ".join(entities["country/US"].sentences)
    assert "country/AN" not in entities
    assert "density" not in entities["element/O"].values
    assert "elevation" not in entities["airport/ZIN"].values  # 0 in the data: not known


def test_the_environment_passes_its_check():
    wrong = [result for result in envs.check_text_env(ID, episodes=4) if not result.ok]
    assert not wrong
