"""Typed settings: frozen dataclasses checked by pydantic, read from TOML and from `--section.key VALUE`.

A command-line override is TOML too: `--rollout.group_size 8` is read as the line `rollout.group_size = 8`, so that both
ways share one grammar, one set of types and one error message.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

settings = partial(pydantic_dataclass, frozen=True, kw_only=True,
                   config=ConfigDict(extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True,
                                     allow_inf_nan=False))
"""Decorator of every settings class: frozen, keyword-only, unknown keys and NaN refused."""

T = TypeVar("T")


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type or out of range; the message names it and the nearest known one."""


def read_toml(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no config file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from None


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--a.b", "1", "--c=x"]` as nested settings. A flag without a value means true."""
    result: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise SettingsError(f"unexpected argument {word!r}; settings are given as --section.key VALUE")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        result = merge(result, _read_override(key, value))
    return result


def _read_override(key: str, value: str) -> dict[str, Any]:
    if not all(key.split(".")):
        raise SettingsError(f"--{key} has an empty part; settings are given as --section.key VALUE")
    try:
        return tomllib.loads(f"{key} = {value}")
    except tomllib.TOMLDecodeError:
        pass  # a bare word is a string: the next line quotes it
    try:
        return tomllib.loads(f"{key} = {json.dumps(value)}")
    except tomllib.TOMLDecodeError:
        raise SettingsError(f"--{key} is not a setting's name; settings are given as --section.key VALUE") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, section by section. Neither is changed."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if nested else value
    return result


def validate(cls: type[T], data: Mapping[str, Any], *, section: str = "", known: Sequence[str] = ()) -> T:
    """`data` as a checked `cls`. `known` are further setting names that an error may propose."""
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as error:
        names = [*setting_names(cls, section), *known]
        raise SettingsError("\n".join(_explain(e, section, names) for e in error.errors())) from None


def setting_names(cls: type, section: str = "") -> list[str]:
    """Dotted names of all settings of a settings class."""
    names = []
    for f in dataclasses.fields(cls):
        name = f"{section}.{f.name}" if section else f.name
        nested = dataclasses.is_dataclass(f.type) and isinstance(f.type, type)
        names += setting_names(f.type, name) if nested else [name]
    return names


def nearest_setting(name: str, known: Sequence[str]) -> str:
    """The known setting that `name` most likely means: its own last part counts most, then the whole."""
    def likeness(candidate: str) -> float:
        def ratio(a: str, b: str) -> float:
            return difflib.SequenceMatcher(None, a.replace("-", "_"), b).ratio()
        return 2 * ratio(name.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]) + ratio(name, candidate)
    return max(known, key=likeness)


def _explain(error: Mapping[str, Any], section: str, known: Sequence[str]) -> str:
    path, value = [section] * bool(section) + [str(part) for part in error["loc"]], error["input"]
    unknown = error["type"] in ("unexpected_keyword_argument", "extra_forbidden")
    while unknown and isinstance(value, Mapping) and value:  # of an unknown section, name a setting in it
        part, value = next(iter(value.items()))
        path.append(str(part))
    name = ".".join(path)
    if unknown:
        return f"unknown setting {name!r}; the nearest is {nearest_setting(name, known)!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name or 'settings'}: {message}" + (f" (got {error['input']!r})" if error["loc"] else "")
