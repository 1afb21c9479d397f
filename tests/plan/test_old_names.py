"""Earlier names of settings are understood: on command lines, in users' files, stored plans and Python arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import perfexp
from perfexp.cli import composition, usage
from perfexp.errors import UserError
from perfexp.host import installation
from perfexp.main import main
from perfexp.plan import config, plan_file
from perfexp.records.old_names import arguments_of_today
from perfexp.records.record import Record
from tests.support import typed

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = (
    "model=fake",
    "gpu=fake",
    "tracking=none",
    "stopping=coarse",
    "stopping.processes=1",
    "quiet=true",
)
#: Settings by their earlier names, and where a plan has them.
OLD = ("replicate=2", "ttfp=true", "stopping.epsilon=0.03")


def chosen(plan: config.Plan) -> tuple[int | None, bool, float]:
    return plan.processes, plan.cold_start, plan.stopping["target"]


@pytest.mark.parametrize(
    ("text", "today"),
    [
        ("replicate=3", "processes=3"),
        ("+ttfp=true", "+cold_start=true"),
        ("~replicate", "~processes"),
        ("stopping.epsilon=0.1", "stopping.target=0.1"),
        ("stopping.epsilons=0.1", "stopping.epsilons=0.1"),
        ("model.replicate=3", "model.replicate=3"),
        ("output_dir=replicate=3", "output_dir=replicate=3"),
    ],
)
def test_an_override_of_an_earlier_name_gets_todays(text, today):
    assert arguments_of_today([text]) == [today]


@pytest.mark.parametrize("mode", ["mode=decode", "+mode=decode", "mode=inference,decode"])
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_decode_context_is_the_input_size_of_mode_decode(mode, sign):
    words = [f"{sign}decode.context=[512,4096]", mode]
    assert arguments_of_today(words) == [f"{sign}input_size=[512,4096]", mode]


@pytest.mark.parametrize("others", [[], ["mode=train"], ["model=decode"]])
def test_decode_context_of_another_mode_is_an_error(others):
    with pytest.raises(UserError, match=r"decode\.context is for mode=decode"):
        arguments_of_today(["decode.context=512", *others])
    assert arguments_of_today(["output_dir=decode.context=5"]) == ["output_dir=decode.context=5"]


def test_decode_context_has_the_same_plan_and_hash():
    llama = ("model=hf:llama", "mode=decode", "gpu=cpu", "tracking=none")
    one, other = (
        composition.compose([*llama, text])
        for text in ("decode.context=[64,128]", "input_size=[64,128]")
    )
    assert plan_file.differences(one, other) == []
    assert plan_file.plan_hash(one) == plan_file.plan_hash(other)
    assert (
        perfexp.compose(*llama, decode__context=64).input_size
        == perfexp.compose(*llama, input_size=64).input_size
    )


@pytest.mark.parametrize("text", ["decode.contxt=5", "context=5"])
def test_wrong_key_of_decoding_has_the_right_one_suggested(text):
    with pytest.raises(UserError, match=r"Did you mean decode\.context"):
        composition.compose(["model=hf:llama", "mode=decode", text])


def test_help_explains_decode_context():
    lines = usage.text([installation.conf_dir()], ["help", "decode.context"])
    assert "input_size of mode=decode" in " ".join(lines.split())


def test_command_with_earlier_names_has_the_same_plan():
    old, new = (composition.compose([*FAKE, *texts]) for texts in (OLD, arguments_of_today(OLD)))
    assert plan_file.differences(old, new) == []
    assert chosen(config.typed(old)) == (2, True, 0.03)


def test_python_arguments_may_have_earlier_names():
    plan = perfexp.compose(*FAKE, replicate=2, ttfp=True, stopping__epsilon=0.03)
    assert chosen(plan) == (2, True, 0.03)


def test_user_file_may_have_earlier_names_and_typed_values_win(tmp_path):
    file = tmp_path / "own" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nreplicate: 2\nttfp: true\nstopping:\n  epsilon: 0.03\n")
    own = (f"--config-dir={tmp_path / 'own'}", "experiment=mine", *FAKE)
    assert chosen(config.typed(composition.compose(own))) == (2, True, 0.03)
    assert chosen(
        config.typed(composition.compose([*own, "processes=4", "stopping.target=0.05"]))
    ) == (4, True, 0.05)


def test_settings_of_a_users_own_stopping_rule_keep_their_names():
    plain = composition.compose(FAKE) | {"stopping": {"_target_": "mine.Rule", "epsilon": 0.5}}
    assert config.typed(plain).stopping == {"_target_": "mine.Rule", "epsilon": 0.5}


def as_written_before(folder: Path) -> str:
    """Give the plan and the record of a run the names of earlier versions; return the plan's hash."""
    plan = folder / "details" / "plan.yaml"
    text = re.sub(r"^processes:", "replicate:", plan.read_text(), flags=re.M)
    text = re.sub(r"^cold_start:", "ttfp:", text, flags=re.M).replace("  target:", "  epsilon:")
    plan.write_text(text.replace("- processes=", "- replicate="))
    file = folder / "record.json"
    record = json.loads(file.read_text())
    stored = record["plan"]
    stored["replicate"], stored["ttfp"] = stored.pop("processes"), stored.pop("cold_start")
    stored["stopping"]["epsilon"] = stored["stopping"].pop("target")
    file.write_text(json.dumps(record))
    return record["plan_hash"]


def test_run_of_an_earlier_version_continues_with_the_same_hash(tmp_path, capsys):
    folder = tmp_path / "run"
    command = (*FAKE, "processes=1", f"output_dir={folder}")
    assert main(list(command)) == 0
    plan_hash = as_written_before(folder)
    record = Record.load(folder)
    assert (
        plan_file.plan_hash(record.plan)
        == plan_file.plan_hash(plan_file.read(folder / "details" / "plan.yaml"))
        == plan_hash
    )
    assert record.plan["processes"] == 1
    measured = record.points

    assert main([f"resume={folder}", "processes=2"]) == 2  # nobody has signed it
    assert main(typed.shown(capsys.readouterr().err)) == 0
    again = Record.load(folder)
    assert again.points[0] == measured[0]
    assert {point.key.replicate for point in again.points} == {0, 1}


def test_a_format_that_is_no_number_counts_as_an_older_one():
    new = {"format": plan_file.FORMAT, "model": {"name": "resnet18"}, "cache": "warm"}
    assert plan_file.differences({"format": [], "model": {"name": "resnet18"}}, new) == []
