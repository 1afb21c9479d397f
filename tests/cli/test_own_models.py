"""Models that a command line names as `module:Name`."""

import sys

import pytest

from perfexp.cli import composition, own_models
from perfexp.cli.composition import compose
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.records.record import Record, Status

MINE = """
import torch

class TinyNet(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.head = torch.nn.Linear(3, width)

    def forward(self, x):
        return self.head(x.mean(dim=(2, 3)))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The current folder with a module `mine_here`, and the module path without it."""
    (tmp_path / "mine_here.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return tmp_path


def test_a_typed_class_becomes_an_option_with_the_typed_keys(mine):
    words = ["model=mine_here:TinyNet", "model.width=32", "model.a.b=1", "batch_size=2"]
    node = {"_target_": "mine_here.TinyNet", "_partial_": True, "width": None, "a": {"b": None}}
    assert own_models.nodes(words) == {"mine_here:TinyNet": node}
    assert sys.path[-1] == str(mine)


def test_the_file_of_a_class_may_be_typed_instead_of_its_module(mine):
    words = ["gpu=cpu", "tracking=none"]
    by_file = compose(["model=mine_here.py:TinyNet", *words])
    assert by_file["model"]["_target_"] == "mine_here.TinyNet"
    assert by_file == compose(["model=mine_here:TinyNet", *words])


@pytest.mark.parametrize("keys", [("model.a=1", "model.a.b=2"), ("model.a.b=2", "model.a=1")])
def test_a_key_and_a_key_within_it_are_both_possible(mine, keys):
    nodes = own_models.nodes(["model=mine_here:TinyNet", *keys])
    assert nodes["mine_here:TinyNet"]["a"] == {"b": None}


def test_each_class_of_a_sweep_becomes_an_option(mine):
    assert list(own_models.nodes(["model=mine_here:A,mine_here:B,resnet18"])) == [
        "mine_here:A",
        "mine_here:B",
    ]


@pytest.mark.parametrize("text", ["model=resnet18", "model=timm:vit_tiny", "gpu=mine_here:TinyNet"])
def test_other_words_name_no_own_model(mine, text):
    assert own_models.nodes([text, "model.width=3"]) == {}
    assert str(mine) not in sys.path


def test_a_module_that_does_not_exist_is_named(mine):
    with pytest.raises(UserError, match="there is no module nowhere"):
        own_models.nodes(["model=nowhere:TinyNet"])


def test_typed_values_reach_the_plan(mine):
    words = ["model=mine_here:TinyNet", "model.width=32"]
    plain = compose(words, own_models.nodes(words))
    assert plain["model"]["_target_"] == "mine_here.TinyNet"
    assert plain["model"]["width"] == 32


@pytest.mark.slow
@pytest.mark.always("README: own models on the command line")
def test_an_own_model_is_resumed_where_its_run_began(mine, monkeypatch, capsys):
    words = ["model=mine_here:TinyNet", "model.width=32", "gpu=cpu", "input_size=8"]
    others = ["stopping=fixed", "stopping.measure=3", "tracking=none", "output_dir=x"]
    assert main([*words, *others]) == 0
    record = Record.load(mine / "x")
    assert record.status is Status.OK
    assert record.plan["model"]["width"] == 32
    assert main(["resume=x"]) == 0
    (mine / "elsewhere").mkdir()
    monkeypatch.chdir(mine / "elsewhere")
    assert main([f"resume={mine / 'x'}"]) == 2
    assert "model=mine_here:TinyNet model.width=32" in capsys.readouterr().err


def test_a_key_holds_for_all_swept_models(mine):
    (mine / "mine_here.py").write_text(MINE + "\nclass Other(TinyNet): pass\n")
    words = ["model=mine_here:TinyNet,mine_here:Other", "model.width=5", "output_dir=x"]
    short = ["gpu=cpu", "input_size=8", "stopping=fixed", "processes=1", "tracking=none"]
    assert main(["-m", *words, *short]) == 0
    plans = [Record.load(file).plan["model"] for file in (mine / "x").glob("*/record.json")]
    assert sorted((plan["_target_"], plan["width"]) for plan in plans) == [
        ("mine_here.Other", 5),
        ("mine_here.TinyNet", 5),
    ]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["-m", "model=mine:A,mine:B", "model.width=1,2"], True),
        (["-m", "model=mine:A", "model.width=1", "batch_size=1,2"], True),
        (["-m", "model=resnet18,vgg16", "model.num_classes=3"], True),
        (["-m", "model=hf:bert,hf:gpt2", "model.config.num_hidden_layers=1"], False),
    ],
)
def test_single_values_of_swept_models_with_keys_are_changed(words, kept):
    changed = composition._with_keys_in_runs(words)
    assert changed == (words if kept else [*words[:2], "model.config.num_hidden_layers=choice(1)"])
