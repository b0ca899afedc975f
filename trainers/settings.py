"""Typed settings: frozen dataclasses checked by pydantic, read from TOML and from `--section.key VALUE`.

The value of a command-line override is TOML too: `--rollout.group_size 8` means the line `rollout.group_size = 8`, so
that both ways share one grammar, one set of types and one error message. No value is converted: `true` is no number.
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
    """The settings in a file. Raises SettingsError where it cannot be read or is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SettingsError(f"no config file {path}") from None
    except OSError as error:
        raise SettingsError(f"cannot read the config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
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
        if not all(key.split(".")):
            raise SettingsError(f"--{key} has an empty part; settings are given as --section.key VALUE")
        nested: Any = _read_value(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        result = merge(result, nested)
    return result


def _read_value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text  # a bare word is a string
    return read["value"] if read.keys() == {"value"} else text


def merge(base: Mapping[str, Any], over: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """`over` on top of `base`, section by section. Neither is changed. Raises SettingsError where a section meets a
    value."""
    result = dict(base)
    for key, value in over.items():
        name = f"{section}.{key}" if section else key
        sections = isinstance(value, Mapping), isinstance(result.get(key), Mapping)
        if key in result and sections[0] != sections[1]:
            raise SettingsError(f"{name} is given both as a section and as the value "
                                f"{result[key] if sections[0] else value!r}")
        result[key] = merge(result[key], value, name) if all(sections) else value
    return result


def validate(cls: type[T], data: Any, *, section: str = "", known: Sequence[str] = ()) -> T:
    """The `section` of a config as a checked `cls`. `known` are further setting names that an error may propose."""
    try:
        # JSON has TOML's types, and its strict mode alone reads lists as tuples but `true` and "1" as no numbers.
        return TypeAdapter(cls).validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        names = [*setting_names(cls, section), *known]
        raise SettingsError("\n".join(_explain(e, section, names) for e in error.errors())) from None


def unknown_setting(name: str, value: Any, known: Sequence[str]) -> str:
    """What an error says of a setting that does not exist; of a section, it names the first setting in it."""
    while isinstance(value, Mapping) and value:
        part, value = next(iter(value.items()))
        name = f"{name}.{part}"
    return f"unknown setting {name!r}; the nearest is {nearest_setting(name, known)!r}"


def setting_names(cls: type, section: str = "") -> list[str]:
    """Dotted names of all settings of a settings class."""
    names = []
    for f in dataclasses.fields(cls):
        name = f"{section}.{f.name}" if section else f.name
        nested = dataclasses.is_dataclass(f.type) and isinstance(f.type, type)
        names += setting_names(f.type, name) if nested else [name]
    return names


def nearest_setting(name: str, known: Sequence[str]) -> str:
    """The known setting that `name` most likely means: its last part counts most, then the section; of equals the first
    known."""
    def parts(dotted: str) -> tuple[str, str]:
        section, _, last = dotted.replace("-", "_").rpartition(".")
        return section, last

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    section, last = parts(name)
    misspelt = section not in {parts(candidate)[0] for candidate in known}

    def likeness(candidate: str) -> float:
        its_section, its_last = parts(candidate)
        if not section:
            return max(ratio(last, its_last), ratio(last, its_section))
        # A section that exists was meant: how its name looks like another's says nothing.
        return 4 * ratio(last, its_last) + (ratio(section, its_section) if misspelt else section == its_section)
    return max(known, key=likeness)


def _explain(error: Mapping[str, Any], section: str, known: Sequence[str]) -> str:
    name = ".".join([section] * bool(section) + [str(part) for part in error["loc"]])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_setting(name, error["input"], known)
    message = error["msg"].removeprefix("Value error, ")
    return f"{name or 'settings'}: {message}" + (f" (got {error['input']!r})" if error["loc"] else "")
