"""`scripts.export` writes a model that loads anywhere and says what the checkpoint said."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agents.adapters import has_adapter
from agents.models import load_policy
from agents.scoring import score_sequences
from scripts import export
from tests.trainers.runs import start


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that trained an adapter."""
    folder = tmp_path_factory.mktemp("run")
    start(folder, model={"lora": {"rank": 2, "alpha": 64.0}}, optimizer={"learning_rate": 0.1})
    return folder


def test_an_adapter_becomes_part_of_a_plain_model(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-000002"
    assert export.main([str(checkpoint), "--out", str(tmp_path / "out")]) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not has_adapter(plain) and not (tmp_path / "out" / "adapter_config.json").exists()
    ids = [np.arange(5, 25)]
    expected = score_sequences(load_policy(str(checkpoint)).model, ids)[0]
    np.testing.assert_allclose(score_sequences(plain.eval(), ids)[0], expected, atol=1e-5)
    assert np.abs(score_sequences(load_policy(str(run / "initial")).model, ids)[0] - expected).max() > 1e-3


def test_the_weights_may_be_halved(run, tmp_path):
    assert export.main([str(run / "initial"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_model_that_is_not_there_and_a_folder_that_is_full_end_with_2(run, tmp_path, capsys):
    assert export.main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "no model folder" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stopped:
        export.main([str(run / "initial"), "--out", str(run)])
    assert stopped.value.code == 2
