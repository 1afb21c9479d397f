"""Commands of folders: which go on by themselves, and how the others are shown."""

import json
import shlex

import pytest
import yaml

from perfexp.cli.resume import Begun, line_to_type, with_resumed
from perfexp.errors import UserError
from perfexp.plan import plan_fields

INVISIBLE = ("\x1b[2J", "\u202e", "\u200b", "\u3164", "\u2800", "\ufe0f", "\u00a0", "\n", "  ")


def refuse(words, place):
    begun = Begun(list(words), str(place), {})
    begun.refuse_untyped(words, "x", words)


@pytest.mark.parametrize(
    "word",
    [
        "model.weights=my\\ file",
        "model.weights='my file'",
        "--config-dir=my file",
        "data.root=./x",
        "data.root=.",
        "data.root=../x",
        "hydra.searchpath=[file://mine]",
        "hydra.searchpath=[pkg://a,'mine/x']",
        "data.root=${hydra:runtime.cwd}/x",
        "model.config='it\\'s'",
        "stopping.x={a:mine}",
    ],
)
def test_a_word_that_may_name_a_file_here_must_be_typed(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my file", "mine", "it's"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="begun in /elsewhere"):
        refuse([word], "/elsewhere")
    refuse([word], tmp_path)


@pytest.mark.parametrize(
    "word", ["model=resnet50", "data.root=/a/mine/x", "output_dir=/a-mine/mine", "seed=0.5", "-m"]
)
def test_a_word_that_names_no_file_goes_on_elsewhere(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    refuse([word], "/elsewhere")


def test_a_shown_command_is_read_by_a_shell_as_it_was_stored():
    words = ["model=a b", "x=$(touch y)", "z='q'", "data.root=/home/Jörg/数据", "e=;#!&"]
    assert shlex.split(line_to_type(words)) == ["perfexp", *words]


@pytest.mark.parametrize("text", [*INVISIBLE, "\\'\"; touch x #", "x" * 60_000])
def test_a_command_that_could_be_taken_for_another_is_not_shown(text):
    assert line_to_type([f"model.name=a{text}b"]) is None


@pytest.mark.parametrize("words", [["clean", "--yes"], ["--help"], ["ui"]])
def test_a_stored_command_of_perfexp_is_not_shown(words, tmp_path):
    (tmp_path / "details").mkdir()
    content = {"format": plan_fields.FORMAT, "command": [*words, "model=fake"]}
    (tmp_path / "details" / "plan.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="can't be shown"):
        with_resumed([f"resume={tmp_path}"])


def test_a_foreign_ab_comparison_is_shown_only_if_it_can_be(tmp_path):
    summary = {"uid": "1", "name": "x", "started": "2026-01-01T00:00:00Z"}
    for word, shown in (("batch_size=1", "if you trust it: perfexp ab"), ("x=\u3164", "can't be")):
        content = json.dumps({**summary, "command": ["ab", word]})
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(UserError, match=shown):
            with_resumed([f"resume={tmp_path}"])
