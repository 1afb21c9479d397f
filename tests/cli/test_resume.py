"""Commands of folders: which go on by themselves, and how the others are shown."""

import json

import pytest
import yaml

from perfexp.cli.resume import Begun, with_resumed
from perfexp.errors import UserError
from perfexp.plan import plan_fields


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
