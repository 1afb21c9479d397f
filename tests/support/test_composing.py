"""Compositions that remember one another give what Hydra gives alone."""

import pytest

from perfexp.cli.composition import compose
from perfexp.errors import UserError
from tests.support import composing

pytestmark = pytest.mark.usefixtures("quick_commands")
COMMANDS = [
    ["model=fake", "gpu=fake"],
    [
        "model=fake",
        "gpu=fake",
        "batch_size=[1,2]",
        "stopping=fixed",
        "stopping.measure=7",
        "tracking=none",
    ],
    ["model=resnet18", "gpu=h200", "mode=train", "+mode.novelty=1"],
    ["experiment=quick", "gpu=h100", "probe=none", "model.name=vgg16"],
    ["model=nope", "gpu=fake"],
    ["model=fake", "gpu=fake", "stopping.target=abc"],
]


def answer(command):
    try:
        return compose(command)
    except UserError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.always("other tests rely on the memory of compositions")
def test_remembered_compositions_are_those_that_hydra_makes(monkeypatch):
    twice = [*COMMANDS, *COMMANDS]
    remembered = [answer(command) for command in twice]
    monkeypatch.setattr(composing, "_is_own", lambda repo: False)
    alone = [answer(command) for command in COMMANDS]
    assert remembered == [*alone, *alone]
    assert isinstance(alone[0], dict)
    assert {type(each) for each in alone} == {dict, str}


def test_a_file_of_the_user_is_read_each_time(tmp_path):
    (tmp_path / "stopping").mkdir()
    found = []
    for calls in (5, 6):
        (tmp_path / "stopping" / "own.yaml").write_text(f"defaults: [fixed]\nmeasure: {calls}\n")
        plan = compose([f"--config-dir={tmp_path}", "model=fake", "gpu=fake", "stopping=own"])
        found.append(plan["stopping"]["measure"])
    assert found == [5, 6]


@pytest.mark.parametrize("changed", ["seed", "stopping"])
def test_what_is_done_to_a_plan_is_not_remembered(changed):
    command = ["model=fake", "gpu=fake"]
    compose(command)[changed] = "another"
    assert compose(command)[changed] != "another"
