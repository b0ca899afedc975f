"""The page shows what was said and trained, and nothing in it can run or reach the network."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import envs
from agents.agent import ScriptedAgent
from agents.rollout import Rollout
from agents.tiny import make_tiny_policy
from agents.trajectory import Trajectory, Turn
from envs.core import Task
from scripts import view
from trainers.transcripts import trajectory_line, write_trajectories

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }}{% if x %} & <b>"


class Page(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def policy():
    return make_tiny_policy(envs.make("turngym/Countdown-v0"), ["<tool>1+2</tool> <answer>3</answer> é"],
                            hidden_size=32, layers=1)


@pytest.fixture(scope="module")
def gold(policy):
    panel = envs.make("turngym/Countdown-v0").tasks("heldout")[:3]
    groups, _ = Rollout(lambda: envs.make("turngym/Countdown-v0")).run(ScriptedAgent("gold", policy), panel, 2, seed=0)
    return [trajectory for group in groups for trajectory in group.trajectories]


@pytest.fixture
def run(tmp_path, policy, gold):
    """A run's folder, as training leaves it."""
    lines = [trajectory_line(trajectory, step=1) for trajectory in gold]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": i, "success_rate": i / 4, "reward": None, "entropy": 1.0}) + "\n" for i in range(4)))
    policy.save(tmp_path / "checkpoints" / "step-000001")
    return tmp_path


def page_of(path, *arguments):
    assert view.main([str(path), "--out", str(path.parent / "page.html"), *arguments]) == 0
    return Page((path.parent / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", ['{"step": 5, "succ', "1", '"text"', "null", "[]", "[1]", "{}", '{"success_rate": 1}',
                                  '{"step": null}', '{"step": 5, "reward": "high"}', '{"step": 5, "entropy": [1]}'])
def test_damaged_metrics_are_named(line, run, capsys):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(line)
    assert view.main([str(run)]) == 2
    assert f"{run / 'metrics.jsonl'} line 5 is damaged" in capsys.readouterr().err.replace("\n", "")


def test_a_tokenizer_that_is_nowhere_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in ("no/such", "./nowhere"):
        assert view.main([str(run), "--tokenizer", path]) == 2
        assert path in capsys.readouterr().err


def test_a_runs_page_shows_messages_tokens_and_charts(run, gold, capsys):
    assert view.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "view.html")
    page = Page((run / "view.html").read_text(encoding="utf-8"))
    assert [image["alt"] for image in page.named("img")] == ["success_rate", "entropy"]
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.named("img"))
    assert len(page.named("details")) == 6 and len(page.named("section")) == 3
    for trajectory in gold:
        assert trajectory.first_observation in page.text and trajectory.turns[0].text in page.text
    classes = [span.get("class") for span in page.named("span")]
    assert classes.count("trained") == sum(t.response_length for t in gold)
    assert classes.count("untrained") > 0


def test_the_log_probability_of_a_trained_token_is_shown(tmp_path, policy):
    ids = policy.tokenizer("1+2", add_special_tokens=False).input_ids
    turn = Turn(prompt_ids=ids, response_ids=ids, logprobs=[-0.25, -1.5, 0.0], text="1+2")
    write_trajectories(tmp_path / "t.jsonl", [Trajectory(turns=(turn,), reward=1.0)])
    policy.save(tmp_path / "model")
    spans = page_of(tmp_path / "t.jsonl", "--tokenizer", str(tmp_path / "model")).named("span")
    assert [span.get("title") for span in spans if "trained" in span.get("class")] == \
        [None] * 3 + ["-0.250", "-1.500", "0.000"]


def test_the_parts_of_a_character_stay_together(policy):
    ids = policy.tokenizer("a🚪b", add_special_tokens=False).input_ids
    assert len(ids) == 6  # four bytes for the door
    found = list(view.pieces(policy.tokenizer, ids, [0, 1, 1, 1, 1, 1], [0, -1, -1, -1, -1, -2]))
    assert [(p["text"], p["trained"], p["logprob"]) for p in found] == \
        [("a", False, "0.000"), ("🚪", True, "-4.000"), ("b", True, "-2.000")]


def test_half_a_character_is_shown_and_no_token_is_lost(policy):
    ids = policy.tokenizer("🚪", add_special_tokens=False).input_ids
    for odd in ([ids[0]] * 9, ids[:3], ids[1:] * 3):
        found = list(view.pieces(policy.tokenizer, odd, [1] * len(odd), [-1.0] * len(odd)))
        assert sum(float(p["logprob"]) for p in found) == -len(odd)


def test_without_a_tokenizer_the_messages_are_shown(tmp_path, gold):
    write_trajectories(tmp_path / "t.jsonl", gold)
    page = page_of(tmp_path / "t.jsonl")
    assert gold[0].turns[-1].text in page.text and "training row" not in page.text


def test_nothing_a_model_or_an_environment_wrote_can_run(tmp_path, policy):
    ids = policy.tokenizer(HOSTILE, add_special_tokens=False).input_ids
    turn = Turn(prompt_ids=ids, response_ids=ids, text=HOSTILE, observation=HOSTILE, action=HOSTILE, state_key=HOSTILE)
    task = Task(key=HOSTILE, family=HOSTILE, env_id=HOSTILE, split=HOSTILE)
    write_trajectories(tmp_path / "t.jsonl", [Trajectory(
        turns=(turn,), reward=1.0, task=task, first_observation=HOSTILE, system_prompt=HOSTILE)])
    policy.save(tmp_path / "model")
    page = page_of(tmp_path / "t.jsonl", "--tokenizer", str(tmp_path / "model"))
    assert len(page.named("script")) == 1 and not page.named("img") and not page.named("b")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    # In the heading, the filter, four messages and the row twice.
    assert page.text.count(HOSTILE) >= 6 and "49" not in page.text
    assert page.named("details")[0]["data-family"] == HOSTILE


def test_the_page_reaches_nothing_outside_itself(run):
    view.main([str(run)])
    html = (run / "view.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert "url(" not in html and "@import" not in html and "fetch" not in html
    attributes = [item for _, found in Page(html).elements for item in found.items()]
    assert {name for name, _ in attributes} & {"href", "src", "srcset", "action", "data"} == {"src"}
    assert all(value.startswith("data:") for name, value in attributes if name == "src")


def test_filters_and_counts_are_of_what_is_there(tmp_path, gold):
    failed = [Trajectory(turns=(), reward=None, task=Task(key="k", family="odd"), status=status)
              for status in ("truncated_turns", "truncated_length")]
    write_trajectories(tmp_path / "t.jsonl", gold + failed)
    page = page_of(tmp_path / "t.jsonl")
    values = {name: {d[f"data-{name}"] for d in page.named("details")} for name in ("success", "family", "status")}
    assert values == {"success": {"yes", "no"}, "family": {"odd"} | {t.task.family for t in gold},
                      "status": {"completed", "truncated_turns", "truncated_length"}}
    assert [select["data-filter"] for select in page.named("select")] == ["success", "family", "status"]
    assert "0 of 2 solved" in page.text and "2 of 2 solved" in page.text and "reward none" in page.text


def test_the_newest_are_shown_up_to_the_limit(tmp_path):
    write_trajectories(tmp_path / "t.jsonl", [Trajectory(turns=(), reward=0.0, task=Task(key=f"task {i}"))
                                              for i in range(9)])
    page = page_of(tmp_path / "t.jsonl", "--limit", "2")
    assert "2 of 9 trajectories" in page.text
    assert re.findall(r"task \d", page.text) == ["task 7", "task 8"]


@pytest.mark.parametrize("content, message", [(None, "t.jsonl"), ("nonsense\n", "t.jsonl line 1")])
def test_nothing_to_show_is_said(tmp_path, content, message, capsys):
    if content:
        (tmp_path / "t.jsonl").write_text(content)
    assert view.main([str(tmp_path / "t.jsonl")]) == 2
    assert message in "".join(capsys.readouterr().err.split("\n"))
    assert not (tmp_path / "view.html").exists()


def test_an_empty_file_is_an_empty_page(tmp_path):
    (tmp_path / "t.jsonl").touch()
    assert "0 of 0 trajectories" in page_of(tmp_path / "t.jsonl").text


def test_the_shade_says_how_unlikely_a_token_was(policy):
    ids = policy.tokenizer("1+2", add_special_tokens=False).input_ids
    shades = [float(p["colour"].split(",")[-1][:-1])
              for p in view.pieces(policy.tokenizer, ids, [1] * 3, list(np.log([0.9, 0.5, 0.01])))]
    assert shades == sorted(shades) and shades[-1] > 2 * shades[0]
