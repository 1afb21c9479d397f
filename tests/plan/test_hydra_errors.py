"""Errors of Hydra, translated: the command that a message shows works in a shell."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from perfexp.cli.composition import compose
from perfexp.errors import UserError
from perfexp.plan.hydra_errors import user_error

pytestmark = pytest.mark.usefixtures("quick_commands")


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(["model=resnet18", *overrides])
    return str(caught.value)


@pytest.mark.parametrize(
    "value", ["/tmp/größe", "日本", "a=b", "run#1", "a(b)", "x'y", 'a"b#c', "a;b&c", "a\\#b"]
)
def test_quoted_values_are_shown_for_hydra_and_the_shell(value: str) -> None:
    message = refusal(f"output_dir={value}")
    assert "Lexer" not in message
    shown = message.partition("In a shell, type: ")[2]
    [override] = shlex.split(shown)
    assert compose(["model=resnet18", override])["output_dir"] == value


@pytest.mark.parametrize(
    "override", ["größe=3", 'output_dir="x', "output_dir={ä", "output_dir=ä,b", "output_dir=${x"]
)
def test_a_value_that_quotes_alone_do_not_repair_has_examples(override: str) -> None:
    message = refusal(override)
    assert "In a shell" not in message
    assert "Quote texts with other characters" in message


def test_the_quotes_of_a_tracking_uri_show_no_password() -> None:
    with pytest.raises(HydraException) as caught:
        OverridesParser.create().parse_overrides(["tracking.uri=http://me:secret#(@host"])
    message = str(user_error(caught.value))
    assert "secret" not in message
    assert "'tracking.uri=\"…\"'" in message


@pytest.mark.parametrize("plus", ["+", "++"])
def test_an_experiment_is_chosen_without_a_plus(plus: str) -> None:
    assert (
        refusal(f"{plus}experiment=quick")
        == "experiment has an option already. Leave + out: experiment=quick"
    )
    assert compose(["model=resnet18", "experiment=quick"])
