"""Settings are found or named with their nearest kin, and never converted, dropped or guessed."""

import pytest
from pydantic import PositiveInt

from trainers.settings import (
    SettingsError,
    merge,
    nearest_setting,
    read_overrides,
    read_toml,
    setting_names,
    settings,
    validate,
)


@settings
class Example:
    """A section."""

    count: PositiveInt = 1
    rate: float = 0.5
    flag: bool = False
    name: str | None = None
    pair: tuple[float, float] = (0.0, 1.0)


@pytest.mark.parametrize("text, value", [
    ("8", 8), ("-1", -1), ("1e-3", 1e-3), ("true", True), ("heldout", "heldout"), ("'8'", "8"), ("[1, 2]", [1, 2]),
    ("{a = 1}", {"a": 1}), ("a b", "a b"), ("", ""), ("my_env:me/Guess-v0", "my_env:me/Guess-v0"), ("a=b", "a=b"),
    ("True", "True"), ("[1", "[1"), ("1\nother = 2", "1\nother = 2"), ("x # y", "x # y"), ("[" * 5000, "[" * 5000),
    ("9" * 5000, "9" * 5000), ("ü", "ü"), ("a\"b'c", "a\"b'c"), ("C:\\new", "C:\\new"), ("--", "--")])
def test_a_value_is_toml_or_else_text(text, value):
    assert read_overrides([f"--a.b={text}"]) == {"a": {"b": value}}


def test_a_flag_without_a_value_means_true_and_a_negative_number_is_a_value():
    assert read_overrides(["--a.b", "--c", "-1", "--d.e", "-1e-3", "--f"]) == {
        "a": {"b": True}, "c": -1, "d": {"e": -1e-3}, "f": True}


def test_overrides_add_up_and_the_last_one_counts():
    assert read_overrides(["--a.b", "1", "--a.c", "2", "--a.b", "3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize("words", [["--a..b=1"], ["--.a", "1"], ["--a.", "1"], ["--=1"], ["--"], ["--", "1"]])
def test_an_empty_part_of_a_name_is_refused(words):
    with pytest.raises(SettingsError, match="has an empty part; settings are given as"):
        read_overrides(words)


@pytest.mark.parametrize("words", [["x"], ["-a.b", "1"], ["--a.b", "1", "2"], ["a.b=1"]])
def test_what_is_no_setting_is_named(words):
    with pytest.raises(SettingsError, match="unexpected argument"):
        read_overrides(words)


@pytest.mark.parametrize("base, over, name", [
    ({"algorithm": "DAPO"}, {"algorithm": {"clip_low": 0.1}}, "algorithm"),
    ({"rollout": {"window": 1}}, {"rollout": 3}, "rollout"), ({"a": {"b": {"c": 1}}}, {"a": {"b": 2}}, "a.b")])
def test_a_section_and_a_value_of_one_name_are_not_silently_merged(base, over, name):
    with pytest.raises(SettingsError, match=f"{name} is given both as a section and as the value"):
        merge(base, over)


def test_merging_changes_neither_side():
    base, over = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}
    assert merge(base, over) == {"a": {"b": 3, "c": 2}, "d": 4}
    assert (base, over) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4})


@pytest.mark.parametrize("data, message", [
    ({"cuont": 2}, "unknown setting 'part.cuont'; the nearest is 'part.count'"),
    ({"count": {"x": 1}}, "part.count: Input should be a valid integer"),
    ({"count": 0}, r"part.count: Input should be greater than 0 \(got 0\)"),
    ({"count": -3}, "part.count: Input should be greater than 0"), ({"count": True}, "part.count: .*got True"),
    ({"count": "2"}, "part.count: .*got '2'"), ({"count": 2.0}, "part.count"), ({"count": [2]}, "part.count"),
    ({"rate": True}, "part.rate: .*got True"), ({"rate": "0.5"}, "part.rate"),
    ({"rate": float("nan")}, "part.rate: Input should be a finite number"), ({"rate": float("inf")}, "part.rate"),
    ({"flag": 1}, "part.flag"), ({"flag": "yes"}, "part.flag"), ({"name": 7}, "part.name"),
    ({"name": True}, "part.name"), ({"pair": [1.0]}, "part.pair"), ({"pair": [1.0, "x"]}, "part.pair.1"),
    (3, "part: "), ([], "part: "), ("x", "part: "), (True, "part: ")])
def test_a_wrong_value_is_named_with_its_setting(data, message):
    with pytest.raises(SettingsError, match=message):
        validate(Example, data, section="part")


def test_all_faults_are_named_at_once():
    with pytest.raises(SettingsError) as error:
        validate(Example, {"count": 0, "flag": 1, "nmae": "x"}, section="part")
    assert [line.split(":")[0].split(";")[0] for line in str(error.value).splitlines()] == [
        "part.count", "part.flag", "unknown setting 'part.nmae'"]


def test_right_values_are_taken_as_they_are():
    found = validate(Example, {"count": 3, "rate": 2, "flag": True, "name": "x", "pair": [0, 2]}, section="part")
    assert found == Example(count=3, rate=2.0, flag=True, name="x", pair=(0.0, 2.0))
    assert validate(Example, {}, section="part") == Example()


@pytest.mark.parametrize("name, nearest", [
    ("num-epochs", "optimizer.epochs"), ("algo.gropu_size", "rollout.group_size"), ("run.step", "run.steps"),
    ("learning_rtae", "optimizer.learning_rate"), ("rollout.learning_rate", "optimizer.learning_rate")])
def test_the_nearest_setting_is_the_one_meant(name, nearest):
    known = ["optimizer.epochs", "optimizer.learning_rate", "rollout.group_size", "rollout.retries", "run.steps"]
    assert nearest_setting(name, known) == nearest


def test_names_of_settings_are_dotted():
    assert setting_names(Example, "part") == ["part.count", "part.rate", "part.flag", "part.name", "part.pair"]


@pytest.mark.parametrize("content", [
    b"a = ", b"a = 1\na = 2\n", b"[s]\nx = 1\n[s]\ny = 2\n", b"a: 1\n", b"a = 01", b"\xff\xfea = 1", b"a = \"\x00\"",
    b"a.b = 1\na = 2", b"a = " + b"9" * 5000, b"a = " + b"[" * 5000])
def test_what_is_not_toml_is_said_with_the_file(content, tmp_path):
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(SettingsError, match="is not a TOML file"):
        read_toml(tmp_path / "c.toml")


@pytest.mark.parametrize("content", [b"", b"\n# nothing\n", b"\xef\xbb\xbf"])
def test_an_empty_file_holds_no_settings(content, tmp_path):
    (tmp_path / "c.toml").write_bytes(content)
    assert read_toml(tmp_path / "c.toml") == {}


def test_a_byte_order_mark_and_line_ends_of_windows_are_fine(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\n[b]\r\nc = 'd'\r\n")
    assert read_toml(tmp_path / "c.toml") == {"a": 1, "b": {"c": "d"}}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path, "cannot read"), (tmp_path / "none.toml", "no config file"), ("", "cannot read"),
                          (tmp_path / "file" / "c.toml", "cannot read"), ("c\x00.toml", "not a TOML file")):
        with pytest.raises(SettingsError, match=message):
            read_toml(path)
