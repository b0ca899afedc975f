"""Imports point one way, and no file is too long to read."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "rewards": set(),
    "envs": {"rewards"},
    "agents": {"envs", "rewards"},
    "trainers": {"agents", "envs", "rewards"},
    "scripts": {"trainers", "agents", "envs", "rewards"},
}
"""Rooms, and the other rooms that each may import."""
MODULES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
LONGEST = 500


def imported_packages(source):
    """First parts of the names of all imported modules, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    wrong = imported_packages(path.read_text(encoding="utf-8")) & (MAY_IMPORT.keys() | {"tests"}) - {room}
    assert wrong <= MAY_IMPORT[room]


def test_a_wrong_import_is_seen_even_inside_a_function():
    assert imported_packages("import os.path\ndef f():\n    from trainers.loss import kl") == {"os", "trainers"}


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
