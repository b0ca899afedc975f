import json

import pytest

import envs
from rewards import verify_math

PANEL = "8a8b2690fc5a2519"
QUESTION_FORMS = [
    # GSM8K, MATH, MATH-500, and a plain table with a number for an answer
    ({"question": "2+40?", "answer": "2 + 40 = <<2+40=42>>42\n#### 42"}, "42"),
    ({"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "1"}, r"\frac{1}{2}"),
    ({"problem": "Half of 1?", "solution": r"So $\boxed{0.5}$.", "answer": r"\frac12"}, r"\frac12"),
    ({"prompt": "6*7?", "target": 42}, "42"),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def play(env, task, response):
    env.reset(options={"task": task})
    return env.step(response)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_the_environment_has_every_property():
    failed = [result for result in envs.check_text_env("turngym/Math-v0", episodes=5) if not result.ok]
    assert not failed


def test_every_family_is_solved_by_its_gold_and_by_nothing_near_it():
    env = envs.make("turngym/Math-v0")
    families = set()
    for task in env.tasks("heldout")[:80]:
        families.add(task.family)
        env.reset(options={"task": task})
        [gold] = env.gold(None)
        _, reward, terminated, truncated, info = env.step(gold)
        assert (reward, terminated, truncated, info["success"], info["valid"]) == (1.0, True, False, True, True), task
        assert play(env, task, r"\boxed{123456789}")[1] == 0.0
        assert play(env, task, "I cannot do it")[4]["valid"] is False
    assert len(families) == 10


def test_splits_have_their_sizes_and_share_no_problem():
    env = envs.make("turngym/Math-v0")
    heldout, test = ({task.key for task in env.tasks(split)} for split in ("heldout", "test"))
    train = {task.key for task in env.tasks("train")[:3000]}
    assert (len(heldout), len(test)) == (1024, 256)
    assert not heldout & test and not train & (heldout | test)
    # The same on every machine: the hash of this panel was printed once and written down.
    assert envs.panel_sha256(env.tasks("test"))[:16] == PANEL


def test_item_i_does_not_depend_on_what_was_asked_before():
    first, second = envs.make("turngym/Math-v0").tasks("train"), envs.make("turngym/Math-v0").tasks("train")
    assert [first[i] for i in (9, 123_456, 0)] == [second[i] for i in (9, 123_456, 0)]


@pytest.mark.parametrize("row, answer", QUESTION_FORMS)
def test_known_column_names_and_gold_forms_work_as_they_are(tmp_path, row, answer):
    env = envs.make("turngym/Math-v0", data=write(tmp_path / "test.jsonl", [row]))
    [task] = env.tasks("test")
    assert task.data["answer"] == answer
    env.reset(options={"task": task})
    assert env.step(env.gold(None)[0])[1] == 1.0
    assert play(env, task, r"\boxed{7}")[1] == 0.0


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_other_file_formats(tmp_path, suffix):
    import datasets

    table = datasets.Dataset.from_list([{"q": "1+1?", "a": "2"}, {"q": "2+2?", "a": "4"}])
    path = tmp_path / f"test.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(table.to_list()))
    else:
        getattr(table, f"to_{suffix}")(path)
    env = envs.make("turngym/Math-v0", data=str(path), question_column="q", answer_column="a")
    pairs = [(task.data["question"], task.data["answer"]) for task in env.tasks("test")]
    assert pairs == [("1+1?", "2"), ("2+2?", "4")]


def test_a_folder_holds_a_file_for_each_split_and_no_question_twice(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(60)]
    write(tmp_path / "train.jsonl", rows + rows[:5])
    write(tmp_path / "gsm8k_test.jsonl", rows[:10])
    env = envs.make("turngym/Math-v0", data=str(tmp_path))
    sizes = {split: len(env.tasks(split)) for split in ("train", "heldout", "test")}
    keys = [task.key for split in sizes for task in env.tasks(split)]
    # 10 test questions are taken out of the 60; the other 50 are divided between train and heldout.
    assert sizes["test"] == 10 and sizes["train"] + sizes["heldout"] == 50 and sizes["heldout"] > 0
    assert len(keys) == len(set(keys)) == 60


@pytest.mark.parametrize("content, message", [
    ("", "is empty"),
    ('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "ans\n', "line 2 is no JSON"),
    ('{"text": "1+1?", "label": "2"}\n', "it has text, label. Set question_column"),
    ('{"question": "1+1?", "label": "2"}\n', "it has question, label. Set answer_column"),
    ('{"question": "1+1?", "answer": ""}\n', "row 1"),
    ('{"question": "1+1?", "answer": "2"}\n{"question": null, "answer": "2"}\n', "row 2: the column 'question' is"),
    ('{"question": "1+1?", "answer": "so \\\\boxed{2"}\n', "unclosed"),
])
def test_unusable_files_are_one_clear_error(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        envs.make("turngym/Math-v0", data=str(path))
    assert "data.jsonl" in str(caught.value)


@pytest.mark.parametrize("name, content, message", [
    ("data.parquet", b"PAR1 cut off in the middle", "cannot be read: Parquet"),
    ("data.csv", b'question,answer\n"2+2",4\n"x,5\n', "cannot be read: "),
    ("data.csv", b"question,answer\n2+2,000,2\n", "more cells"),
    ("data.csv", b'question,answer\n"1+1",2,\n"2+2",4,\n', "more cells"),
    ("data.json", b'[{"question": "1+1?", "answ', "cannot be read: "),
])
def test_damaged_files_of_other_formats_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        envs.make("turngym/Math-v0", data=str(path))
    assert name in str(caught.value)


def test_missing_files_columns_and_splits_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no_such\.jsonl"):
        envs.make("turngym/Math-v0", data="no_such.jsonl")
    with pytest.raises(FileNotFoundError, match="no_such_folder"):
        envs.make("turngym/Math-v0", data="no_such_folder")
    path = write(tmp_path / "test.jsonl", [{"question": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match="no column 'prob'; it has question, answer"):
        envs.make("turngym/Math-v0", data=path, question_column="prob")
    with pytest.raises(ValueError, match="there are: test"):
        envs.make("turngym/Math-v0", data=path).tasks("train")
    with pytest.raises(ValueError, match="set data as well"):
        envs.make("turngym/Math-v0", question_column="q")


def test_the_gold_and_the_answer_are_not_swapped_at_the_call(tmp_path):
    # With the two swapped, the completion would be read as a gold, and its missing box would be an error.
    env = envs.make("turngym/Math-v0", data=write(tmp_path / "test.jsonl", [{"question": "?", "answer": "x<6"}]))
    [task] = env.tasks("test")
    assert play(env, task, r"\boxed{(-\infty,6)}")[1] == 1.0
    assert play(env, task, r"\boxed{")[1] == 0.0
    assert verify_math(gold="x<6", answer=r"\boxed{(-\infty,6)}")
