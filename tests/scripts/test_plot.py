"""`scripts.plot` draws every run that it is given, or says which it cannot."""

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from scripts import plot
from tests.trainers.runs import rows, start


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs whose folders have the same name."""
    folders = [tmp_path_factory.mktemp(name) / "run" for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        start(folder, run={"steps": 6, "seed": seed}, evaluation={"episodes": 8, "samples": 4, "every": 2})
    return folders


def test_runs_of_the_same_name_are_all_drawn(runs, tmp_path):
    assert plot.main([*map(str, runs), "--out", str(tmp_path / "p.png")]) == 0
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.width > 600 and picture.height > 300 and len(picture.getcolors(1 << 24)) > 50


def test_the_points_are_the_logged_numbers(runs):
    curve, bars = plot.draw({str(folder): plot.read_run(folder) for folder in runs}).axes
    logs = {str(folder): (rows(folder), rows(folder, "evaluations")) for folder in runs}
    for index, (metrics, evaluations) in enumerate(logs.values()):
        training, panel = curve.lines[index * 4], curve.containers[index].lines[0]
        # A point of the training curve is the mean of at most 8 steps up to it: with 6 steps, of all so far.
        rates = [row["success_rate"] for row in metrics]
        assert list(training.get_ydata()) == pytest.approx([sum(rates[:i + 1]) / (i + 1) for i in range(6)])
        assert list(panel.get_xdata()) == [0, 2, 4, 6]
        assert list(panel.get_ydata()) == [row["success_rate"] for row in evaluations]
        assert to_hex(training.get_color()) == to_hex(panel.get_color())
        after = bars.lines[2 + index]
        assert list(after.get_ydata()) == [rate["success_rate"] for rate in evaluations[-1]["pass_at_k"].values()]
    assert [text.get_text() for text in curve.get_legend().get_texts()] == list(map(str, runs))


@pytest.mark.parametrize("name, content, message", [
    (None, "", "metrics.jsonl"), ("metrics.jsonl", "", "evaluations.jsonl"),
    ("metrics.jsonl", '{"step": 1, "suc', "metrics.jsonl line 1 is damaged"),
    ("metrics.jsonl", '{"step": 1, "success_rate": 0.5}\n', "evaluations.jsonl")])
def test_a_folder_without_a_run_is_named(name, content, message, tmp_path, capsys):
    if name:
        (tmp_path / name).write_text(content)
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "p.png")]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "p.png").exists()


def test_a_run_without_a_step_holds_nothing_yet(tmp_path, capsys):
    for name in ("metrics", "evaluations"):
        (tmp_path / f"{name}.jsonl").write_text("\n")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "p.png")]) == 2
    assert "holds nothing to draw yet" in capsys.readouterr().err


STEP = '{"step": 1, "success_rate": 0.5, "more": [1]}\n'
POINT = '{"step": 1, "success_rate": 0.5, "ci_low": 0.1, "ci_high": 0.9, "pass_at_k": {"1": {"success_rate": 0.5}}}\n'
NO_ROWS = ["1", '"text"', "null", "true", "[]", "[{}]", "{}", '{"step": 1}', '{"step": "x", "success_rate": 0.5}',
           '{"step": 1, "success_rate": null}', '{"step": 1, "success_rate": [0.5]}', "nonsense", "\x00", '{"step": 1']
NO_POINTS = [STEP, POINT.replace('"1":', '"x":'), POINT.replace('{"success_rate": 0.5}', "3"),
             POINT.replace('{"1": {"success_rate": 0.5}}', "[]"), POINT.replace("0.1", "{}")]


@pytest.mark.parametrize("name, line", [*(("metrics", line) for line in NO_ROWS),
                                        *(("evaluations", line) for line in NO_ROWS + NO_POINTS)])
def test_a_line_that_is_no_row_is_named(name, line, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(STEP)
    (tmp_path / "evaluations.jsonl").write_text(POINT)
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "p.svg")]) == 0
    with open(tmp_path / f"{name}.jsonl", "a") as log:
        log.write("\n" + line)
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "p.png")]) == 2
    assert f"{name}.jsonl line 3 is damaged: " in capsys.readouterr().err and not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("out", ["no_such_folder/p.png", "p.unknown", "folder.png"])
def test_a_picture_that_cannot_be_written_is_an_error(out, runs, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    assert plot.main([str(runs[0]), "--out", str(tmp_path / out)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown
    with pytest.raises(SystemExit):
        plot.main([str(runs[0]), "--out", str(tmp_path)])
    assert "says no kind of picture" in capsys.readouterr().err
