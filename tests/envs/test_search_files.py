"""Question sets and corpora from files: the usual forms, and errors that say where."""

import pytest

import envs
from envs.search.files import read_corpus, read_questions
from tests.envs.search_corpus import DOCUMENTS, QUESTIONS, write_lines

FORMS = {
    "common": ({"id": "test_0", "question": "q", "golden_answers": ["a", "b"]}, ["a", "b"], "nq"),
    "NQ": ({"question": "q", "answer": ["a", "b"]}, ["a", "b"], "nq"),
    "TriviaQA": ({"question": "q", "question_id": "t", "answer": {"value": "a", "aliases": ["b", "a"],
                                                                  "normalized_value": "a"}}, ["a", "b"], "nq"),
    "TriviaQA's first form": ({"Question": "q", "Answer": {"Value": "a", "Aliases": ["b"]}}, ["a", "b"], "nq"),
    "PopQA": ({"id": 42, "question": "q", "obj": "a", "possible_answers": '["a", "b \\"c\\""]'}, ["a", 'b "c"'], "nq"),
    "HotpotQA": ({"_id": "5a", "question": "q", "answer": "a", "type": "bridge", "level": "hard",
                  "supporting_facts": [["t", 0]]}, ["a"], "bridge"),
    "2WikiMultihopQA": ({"_id": "x", "question": "q", "answer": "no", "type": "comparison"}, ["no"], "comparison"),
    "common with metadata": ({"question": "q", "golden_answers": ["a"], "metadata": {"type": "bridge"}}, ["a"],
                             "bridge"),
    "MuSiQue": ({"id": "3hop1__1_2_3", "question": "q", "answer": "a", "answer_aliases": ["b"], "answerable": True},
                ["a", "b"], "3 hops"),
    "Bamboogle": ({"Question": "q", "Answer": "a"}, ["a"], "nq"),
    "a number": ({"question": "q", "answer": 1969}, ["1969"], "nq"),
    "a bracket": ({"question": "q", "answer": "[citation needed"}, ["[citation needed"], "nq"),
    "repeats and blanks": ({"question": " q ", "answer": ["a", " a", ""]}, ["a"], "nq"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_usual_forms_of_a_question_are_read(tmp_path, form):
    record, answers, family = FORMS[form]
    splits = read_questions(write_lines(tmp_path / "nq.jsonl", [{"question": "other", "answer": "x"}, record]))
    rows = [row for split in splits.values() for row in split if row.question == "q"]
    assert [(row.answers, row.family) for row in rows] == [(answers, family)]


def test_questions_that_their_set_calls_unanswerable_are_left_out(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", [{"question": "q", "answer": "a", "answerable": False},
                                                {"question": "r", "answer": "b", "answerable": True}])
    assert [row.question for row in read_questions(path)["heldout"]] == ["r"]


@pytest.mark.parametrize(("row", "message"), [
    (b"{", "line 2 is no JSON"), (b"[1]", "line 2 is no JSON object"), (b'"text"', "line 2 is no JSON object"),
    (b"\xff\xfe", "line 2 is no JSON"), (b"[" * 100_000, "line 2 is no JSON"),
    ({"answer": "a"}, "line 2: no text in `question`; it has 'answer'"), ({"question": " ", "answer": "a"}, "line 2"),
    ({"question": 5, "answer": "a"}, "line 2"), ({"question": "q"}, "line 2: none of golden_answers"),
    ({"question": "q", "answer": []}, "line 2: `answer` holds no answer"),
    ({"question": "q", "answer": None}, "line 2: none of"), ({"question": "q", "answer": ""}, "line 2"),
    ({"question": "q", "answer": True}, "line 2: an answer is a text"),
    ({"question": "q", "golden_answers": [None]}, "line 2: an answer is a text"),
])
def test_a_broken_question_is_named_by_file_and_line(tmp_path, row, message):
    path = write_lines(tmp_path / "train.jsonl", [QUESTIONS[0], row])
    with pytest.raises(ValueError, match=f"train.jsonl, {message}"):
        read_questions(path)


@pytest.mark.parametrize(("row", "message"), [
    (b"{", "line 2 is no JSON"), (b"null", "line 2 is no JSON object"), (b"\xff", "line 2 is no JSON"),
    ({"contents": "t\nx"}, "line 2: a document needs an id"), ({"id": "", "contents": "x"}, "line 2: .* needs an id"),
    ({"id": None, "contents": "x"}, "line 2"), ({"id": True, "contents": "x"}, "line 2"),
    ({"id": "7"}, "line 2: document '7' needs a text in `contents`"),
    ({"id": "7", "contents": ["x"]}, "line 2: document '7' needs a text"), ({"id": "7", "title": "t"}, "line 2"),
    ({"id": 'a"b', "contents": "x"}, "line 2: the id"), ({"id": "a b", "contents": "x"}, "line 2: the id"),
    ({"id": "a>b", "contents": "x"}, "line 2: the id"), ({"id": "1", "contents": "x"}, "line 2: the id '1'"),
    ({"id": 1, "contents": "x"}, "line 2: the id '1'"),
])
def test_a_broken_document_is_named_by_file_and_line(tmp_path, row, message):
    path = write_lines(tmp_path / "corpus.jsonl", [DOCUMENTS[0], row])
    with pytest.raises(ValueError, match=f"corpus.jsonl, {message}"):
        read_corpus(path)


def test_the_forms_of_a_document_are_read(tmp_path):
    first = b'\xef\xbb\xbf{"id": 0, "contents": "\\"A B\\"\\n text\\nmore "}'  # after a byte order mark
    path = write_lines(tmp_path / "c.jsonl", [first, b"", {"id": "x", "title": "T", "text": "text"},
                                              {"id": "y", "text": "bare"}, {"id": "z", "contents": "one line"},
                                              {"id": "u", "title": "T", "contents": "T\na"},
                                              {"id": "v", "title": "T", "contents": "a\nb"}])
    assert read_corpus(path) == [("0", "A B", "text\nmore"), ("x", "T", "text"), ("y", "", "bare"),
                                 ("z", "", "one line"), ("u", "T", "a"), ("v", "T", "a\nb")]


@pytest.mark.parametrize("read", [read_questions, read_corpus])
def test_missing_and_empty_files_are_one_clear_error(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="has no"):
        read(write_lines(tmp_path / "empty.jsonl", []))


def test_a_folder_without_questions_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no \.jsonl file"):
        read_questions(str(tmp_path))


def test_a_file_belongs_to_the_split_of_its_name_and_no_question_to_two(tmp_path):
    def question(name):
        return {"question": name, "answer": "a"}
    write_lines(tmp_path / "hotpotqa_train.jsonl", [question(n) for n in "abcab"])
    write_lines(tmp_path / "dev.jsonl", [question(n) for n in "bd"])
    write_lines(tmp_path / "test.jsonl", [question(n) for n in "de"])
    splits = {split: [row.question for row in rows] for split, rows in read_questions(str(tmp_path)).items()}
    assert splits == {"test": ["d", "e"], "heldout": ["b"], "train": ["a", "c"]}


def test_without_a_heldout_file_a_tenth_of_training_is_held_out(tmp_path):
    path = write_lines(tmp_path / "nq.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(500)])
    splits = read_questions(path)
    assert len(splits["train"]) + len(splits["heldout"]) == 500
    assert 25 < len(splits["heldout"]) < 80
    assert not {row.key for row in splits["train"]} & {row.key for row in splits["heldout"]}


def test_a_split_that_the_files_lack_is_named(tmp_path):
    env = envs.make("turngym/Search-v0", corpus=write_lines(tmp_path / "c.jsonl", DOCUMENTS),
                    questions=write_lines(tmp_path / "dev.jsonl", QUESTIONS))
    assert len(env.tasks("heldout")) == 3
    with pytest.raises(ValueError, match="no split 'train' here; there are: heldout"):
        env.tasks("train")
