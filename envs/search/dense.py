"""Dense retrieval in this process: texts as vectors, exact search by inner products.

The encoder is any of transformers' text encoders, used as Wang et al., "Text Embeddings by Weakly-Supervised
Contrastive Pre-training" (2022), use theirs (E5): the mean of the last hidden states over a text's tokens, of length 1,
with a prefix that says whether the text is a query or a passage.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModel, AutoTokenizer

from envs.core import clean_text
from envs.search.documents import Document

MOST_TOKENS = 512
"""Of a longer text the rest is left out; fewer where the model reads fewer."""
BATCH = 64


class Encoder:
    """A text encoder from a folder in transformers' format. Raises FileNotFoundError where there is none, ValueError
    where it cannot be used."""

    def __init__(self, folder: str):
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"no folder {folder} with an embedding model in transformers' format")
        try:
            # A model without a pooler gets a random one, which is not used, from the global generator.
            with torch.random.fork_rng(devices=[]):
                model, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # each part of a broken model breaks another library, with exceptions of its own
            raise ValueError(f"cannot load the embedding model {folder}: {type(error).__name__}: {error}") from error
        if missing := sorted(name for name in report["missing_keys"] if "pooler" not in name):
            raise ValueError(f"the embedding model {folder} lacks {len(missing)} weights ({', '.join(missing[:3])}, "
                             "...), which would be random")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self._device)
        self._most_tokens = min(MOST_TOKENS, self._tokenizer.model_max_length,
                                getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS)
        self._lock = threading.Lock()
        """The tokenizer keeps its settings of one call, so that threads take turns."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """The texts' vectors, each of length 1. # float32 [texts, hidden]"""
        with self._lock, torch.inference_mode():
            inputs = self._tokenizer(list(texts), padding=True, truncation=True, max_length=self._most_tokens,
                                     return_tensors="pt").to(self._device)
            hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


class Dense:
    """An index of documents by the vectors of an encoder, each document as its title, a new line and its text.

    The corpus is embedded once and kept on disk, named by the hash of the model's files and all texts. Equal scores
    keep the documents' order.
    """

    def __init__(self, documents: Iterable[Document], folder: str, prefixes: tuple[str, str]):
        """`prefixes`: of queries and of passages. Raises what `Encoder` raises, and OSError where the cache cannot be
        written."""
        self.documents = list(documents)
        self._encoder = Encoder(folder)
        self._query_prefix, prefix = prefixes
        texts = [clean_text(f"{prefix}{document.title}\n{document.text}") for document in self.documents]
        self._vectors = self._embed(texts, cache_folder() / f"{content_hash(folder, texts)}.npy")

    def search(self, query: str, count: int) -> list[Document]:
        scores = self._vectors @ self._encoder.encode([clean_text(self._query_prefix + query)])[0]
        least = np.partition(scores, -count)[-count] if count < len(scores) else -np.inf
        best = np.flatnonzero(scores >= least)
        return [self.documents[number] for number in best[np.argsort(-scores[best], kind="stable")][:count]]

    def _embed(self, texts: list[str], file: Path) -> np.ndarray:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)  # that it can be written is known before the long work
            partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
            try:
                with partial.open("wb") as stored:
                    np.save(stored, self._encode_all(texts))
                os.replace(partial, file)
            finally:
                partial.unlink(missing_ok=True)
        return np.load(file, mmap_mode="r")  # the processes of a machine share it

    def _encode_all(self, texts: list[str]) -> np.ndarray:
        """Texts of like length together, so that little is padded."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        batches = [order[start:start + BATCH] for start in range(0, len(order), BATCH)]
        vectors: list[np.ndarray | None] = [None] * len(texts)
        for batch in track(batches, "embedding the corpus", console=Console(stderr=True), transient=True,
                           disable=not sys.stderr.isatty()):
            for number, vector in zip(batch, self._encoder.encode([texts[number] for number in batch])):
                vectors[number] = vector
        return np.stack(vectors)


def cache_folder() -> Path:
    """Where vectors are kept: `turngym/embeddings` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turngym" / "embeddings"


def content_hash(folder: str, texts: Iterable[str]) -> str:
    """Of all that decides the vectors."""
    digest = hashlib.sha256(f"{MOST_TOKENS}\n".encode())
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:32]
