"""`scripts.gpu_check` runs whole without a GPU, and no check takes another with it."""

import json
import math

import pytest
import torch

from scripts import gpu_check
from scripts._bench import accelerator


def rows_of(check):
    rows = []
    accelerator.work({"check": check, "device": "cpu", "small": True, "seconds": 60.0}, rows.append)
    return {row["what"]: row for row in rows}


@pytest.mark.parametrize("check", gpu_check.CHECKS)
def test_every_check_has_a_small_form_that_holds(check):
    rows = rows_of(check)
    assert rows and all(gpu_check.holds(row) and math.isfinite(row["value"]) for row in rows.values())


def test_a_processor_in_float32_equals_itself():
    rows = rows_of("equality")
    assert rows["float32: log-probabilities, mean difference"]["value"] == 0.0
    assert rows["float32: of 16 sampled responses, differing"]["value"] == 0
    assert rows["bfloat16: log-probabilities, mean difference"]["value"] > 0


def test_training_ends_when_its_time_is_up():
    rows = []
    accelerator.work({"check": "training", "device": "cpu", "small": True, "seconds": 0.0}, rows.append)
    found = {row["what"]: row["value"] for row in rows}
    assert found["steps"] == 1 and "stopped as planned after" in found


def test_a_failed_check_is_a_row_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "CHECKS", {"no such check": 600, "equality": 600})
    assert gpu_check.main(["--out", str(tmp_path / "f.json")]) == 1
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["small"] and "the small form" in capsys.readouterr().out
    first, *others = found["rows"]
    assert first["check"] == "no such check" and "no such check" in first["error"] and not first["holds"]
    assert len(others) > 5 and all(row["holds"] for row in others)


@pytest.mark.parametrize("row, holds", [
    ({"value": 1.0, "limit": None}, True), ({"value": 1.0, "limit": 1.0}, True), ({"value": 1.1, "limit": 1.0}, False),
    ({"value": math.nan, "limit": 1.0}, False), ({"error": "OutOfMemoryError"}, False)])
def test_what_holds(row, holds):
    assert gpu_check.holds(row) is holds


def test_its_checks_take_less_than_eight_minutes():
    assert sum(gpu_check.CHECKS.values()) < 480


def test_a_file_that_cannot_be_written_ends_with_2():
    with pytest.raises(SystemExit) as exit:
        gpu_check.main(["--out", "no/such/folder/f.json"])
    assert exit.value.code == 2
