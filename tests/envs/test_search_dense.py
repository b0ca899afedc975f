"""Dense retrieval with a tiny encoder of random weights: exact search, the cache, and the environment's option."""

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import envs
from envs.search import dense
from envs.search.dense import Dense, Encoder, cache_folder
from envs.search.documents import Document
from scripts.serve import main as serve
from tests.envs.search_corpus import DOCUMENTS, QUESTIONS, write_lines

ID = "turngym/Search-v0"
PREFIXES = ("query: ", "passage: ")
WORDS = ["peru", "lima", "is", "a", "country", "in", "south", "america", ".", "its", "capital", "ecuador", "quito",
         "malaysia", "kuala", "lumpur", "the", "of", "what", "has", "mountains", "query", "passage", ":", "river"]
CORPUS = [Document(str(number), f"River {word}", f"{word} is a river in {other} . " * (1 + number % 5))
          for number, (word, other) in enumerate(zip(WORDS * 3, WORDS[7:] * 4))]


def save_encoder(folder, *, seed=0, words=WORDS):
    """A BERT of two layers whose vocabulary are the words."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]",
                            model_max_length=48).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(BertConfig(vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                             intermediate_size=64, max_position_embeddings=48)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path, encoder):
    questions = tmp_path / "questions"
    questions.mkdir()
    for split in ("train", "test"):
        write_lines(questions / f"{split}.jsonl", [{**row, "question": f"{row['question']} ({split})"}
                                                   for row in QUESTIONS])
    return {"corpus": write_lines(tmp_path / "corpus.jsonl", DOCUMENTS), "retriever": f"dense:{encoder}",
            "questions": str(questions)}


@functools.cache
def load(folder):
    return BertModel.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def vector(folder, text):
    """By hand: one text without padding, the plain mean of its tokens' last states, to length 1."""
    model, tokenizer = load(folder)
    with torch.no_grad():
        mean = model(torch.tensor([tokenizer(text)["input_ids"][:48]])).last_hidden_state[0].mean(dim=0)
    return (mean / mean.norm()).numpy()


def test_vectors_are_means_of_length_one_however_texts_are_batched(encoder):
    texts = ["Peru", "the capital of Ecuador is Quito .", "mountains " * 200]
    together, alone = Encoder(encoder).encode(texts), [Encoder(encoder).encode([text])[0] for text in texts]
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(together, [vector(encoder, text) for text in texts], atol=1e-5)
    np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("query", ["Lima is a river", "capital", "kuala lumpur in the south", "unknown words"])
def test_search_gives_the_largest_inner_products_in_order(encoder, query):
    found = Dense(CORPUS, encoder, PREFIXES).search(query, 7)
    asked = vector(encoder, f"query: {query}")
    scores = [float(vector(encoder, f"passage: {document.title}\n{document.text}") @ asked) for document in CORPUS]
    by_id = {document.id: score for document, score in zip(CORPUS, scores)}
    np.testing.assert_allclose([by_id[document.id] for document in found], sorted(scores, reverse=True)[:7], atol=1e-5)


def test_a_document_is_its_own_nearest_and_no_more_are_given_than_there_are(encoder):
    index = Dense(CORPUS[:9], encoder, ("", ""))
    for document in CORPUS[:9]:
        assert index.search(f"{document.title}\n{document.text}", 1) == [document]
    assert {document.id for document in index.search("Peru", 50)} == {document.id for document in CORPUS[:9]}


def test_equal_documents_come_in_the_order_of_the_corpus(encoder):
    index = Dense([Document(str(n), "Peru", "a country") for n in range(200)], encoder, PREFIXES)
    assert [document.id for document in index.search("Peru", 5)] == list("01234")


def test_the_corpus_is_embedded_once_and_again_only_where_something_changed(encoder, tmp_path, monkeypatch):
    def index(corpus=CORPUS, folder=encoder, prefixes=PREFIXES):
        embedded.clear()
        return Dense(corpus, folder, prefixes).search("capital", 5), bool(embedded)
    embedded, whole = [], Dense._encode_all
    monkeypatch.setattr(Dense, "_encode_all", lambda self, texts: embedded.append(1) or whole(self, texts))
    first, worked = index()
    assert worked and index() == (first, False)
    assert index(prefixes=("other: ", "passage: "))[1] is False  # of queries alone
    for change in ({"corpus": [*CORPUS[1:], CORPUS[0]]}, {"prefixes": ("query: ", "")},
                   {"folder": save_encoder(tmp_path / "weights", seed=1)},
                   {"folder": save_encoder(tmp_path / "words", words=WORDS[::-1])}):
        assert index(**change)[1], change
    assert len(list(cache_folder().iterdir())) == 5  # nothing half-written is left


def test_an_interrupted_embedding_leaves_nothing(encoder, monkeypatch):
    monkeypatch.setattr(dense, "track", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Dense(CORPUS, encoder, PREFIXES)
    assert list(cache_folder().iterdir()) == []


def test_threads_get_what_one_gets(encoder):
    index = Dense(CORPUS, encoder, PREFIXES)
    queries = [f"{word} " * (1 + number % 9) for number, word in enumerate(WORDS)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda query: index.search(query, 5), queries)) == [index.search(q, 5) for q in queries]


def test_the_environment_searches_densely(files, encoder):
    env = envs.make(ID, **files)
    assert env.blocking
    env.reset(options={"task": env.tasks("test")[0]})
    shown = env.step("<search>the capital of Ecuador</search>")[4]["exposed"]
    documents = [Document("1", "Peru", DOCUMENTS[0]["contents"].split("\n")[1]),
                 Document("2", "Ecuador", "Ecuador is a country. Its capital is Quito."),
                 Document("trap", *DOCUMENTS[2]["contents"].split("\n")),
                 Document("a/b-c", "Malaysia", DOCUMENTS[3]["text"])]
    assert shown == [document.id for document in
                     Dense(documents, encoder, PREFIXES).search("the capital of Ecuador", 3)]
    assert env.step("<search>\ud800</search>")[4]["valid"] and not env.step("<search> </search>")[4]["valid"]


def test_the_environment_passes_its_check(files):
    wrong = [result for result in envs.check_text_env(ID, episodes=3, **files) if not result.ok]
    assert not wrong


@pytest.mark.parametrize(("options", "message"), [
    ({"retriever": "dense"}, "'bm25' or 'dense:FOLDER'"), ({"retriever": "dense:"}, "'bm25' or 'dense:FOLDER'"),
    ({"retriever": "bm26"}, "bm26"), ({"retriever": "dense:nowhere"}, "no folder .*nowhere"),
    ({"corpus": None, "server": "http://127.0.0.1:1"}, "set server or retriever"),
    ({"dense_prefixes": "ab"}, "two texts"), ({"dense_prefixes": ["query: "]}, "two texts"),
    ({"dense_prefixes": ["query: ", 3]}, "two texts"),
])
def test_options_that_do_not_fit_are_refused(files, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        envs.make(ID, **{**files, **options})


def test_a_model_that_is_none_or_lacks_weights_is_an_error_that_names_it(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot load the embedding model .*empty"):
        Encoder(str(tmp_path / "empty"))
    folder = save_encoder(tmp_path / "lacking")
    model = BertModel.from_pretrained(folder)
    weights = {name: value for name, value in model.state_dict().items() if "layer.1" not in name}
    model.save_pretrained(folder, state_dict=weights)
    with pytest.raises(ValueError, match="lacks 16 weights"):  # of its second layer: 8 pairs of weight and bias
        Encoder(folder)


def test_making_an_index_leaves_the_global_generator_alone(encoder):
    before = torch.random.get_rng_state()
    Dense(CORPUS, encoder, PREFIXES)
    assert torch.equal(before, torch.random.get_rng_state())


def test_torch_is_imported_only_where_it_is_asked_for():
    code = ("import sys, envs; envs.make('turngym/Search-v0'); "
            "print([name in sys.modules for name in ('torch', 'transformers')])")
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["[False,", "False]"]


def test_a_server_can_offer_it(files, monkeypatch):
    offered = []
    monkeypatch.setattr("scripts.serve.run", lambda app, *_: offered.append(app))
    options = [argument for key, value in files.items() for argument in ("--option", f"{key}={value}")]
    assert serve([ID, "--retrieval", "--port", "0", *options]) == 0
    assert offered
