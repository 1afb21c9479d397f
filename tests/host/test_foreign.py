"""Texts of others: a byte order mark of UTF-8 is read, UTF-16 is refused in one line."""

from __future__ import annotations

import codecs
import json
import shlex
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.plan import plan_file
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.report.tables import vendor_file

INVISIBLE = ("\x1b[2J", "\u202e", "\u200b", "\u3164", "\u2800", "\ufe0f", "\u00a0", "\n", "  ")


def write(path: Path, text: str, encoding: str) -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("read", [foreign.json_data, foreign.yaml_data])
def test_the_mark_of_utf_8_is_read_and_utf_16_refused(read):
    assert read('{"größe": 1}'.encode("utf-8-sig")) == {"größe": 1}
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        with pytest.raises(ValueError, match=r"^its text is UTF-16, save it as UTF-8$"):
            read('{"a": 1}'.encode(encoding))


def test_records_are_read_with_a_mark_and_refused_as_utf_16(make_record, tmp_path):
    record, path = make_record(), tmp_path / "record.json"
    text = record.to_json().decode()
    assert Record.load(write(path, text, "utf-8-sig")).points == record.points
    for encoding in ("utf-16", "utf-16-le"):
        with pytest.raises(
            UserError, match="is not a perfexp record: its text is UTF-16, save it as UTF-8"
        ):
            Record.load(write(path, text, encoding))


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (Sweep.load, "sweep.json"),
        (vendor_file.load, "vendor_x.json"),
        (plan_file.read, "plan.yaml"),
    ],
)
def test_other_files_say_so_too(load, name, tmp_path):
    with pytest.raises(UserError, match="UTF-16, save it as UTF-8") as caught:
        load(write(tmp_path / name, '{"a": 1}', "utf-16"))
    assert "\n" not in str(caught.value)


def test_a_speed_file_with_a_mark_is_replaced_like_any_other(
    make_record, leave_run, tmp_path, capsys
):
    folder = leave_run(make_record(phases=("train",)), tmp_path / "run")
    assert commands.run(["speed", str(folder), "--out", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*_speed.json")
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert commands.run(["speed", str(folder), "--out", str(tmp_path)]) == 0
    assert json.loads(file.read_bytes())["JOB_FAIL_FLAG"] == 0


@pytest.mark.parametrize(
    "text",
    [
        '!!int ""',
        '!!float ""',
        "!!bool foo",
        "!!timestamp foo",
        f"1{':0' * 400}:0.5",
        "!!timestamp 2020-99-99",
    ],
)
def test_yaml_values_of_the_wrong_type_are_refused_in_one_line(text, tmp_path):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        foreign.yaml_data(f"x: {text}".encode())
    assert type(caught.value) is ValueError
    with pytest.raises(UserError, match="cannot be read as a plan"):
        plan_file.read(write(tmp_path / "plan.yaml", f"x: {text}", "utf-8"))


@pytest.mark.parametrize("form", ["1{}", '!!int "1{}"', "!!int '1{} '", "1{}.5"])
def test_numbers_in_base_60_have_a_limited_length(form):
    with pytest.raises(ValueError, match="a number of more than 1000 characters"):
        foreign.yaml_data(b"x: " + form.format(":59" * 100_000).encode())
    assert foreign.yaml_data(b"x: " + b"ab " * 100_000)["x"] == ("ab " * 100_000).strip()


@pytest.mark.parametrize("text", ["1: x\na: b", "1: x", "a: {1: x, b: y}", "a: {2020-01-01: x}"])
def test_a_plan_has_texts_as_keys(text, tmp_path):
    with pytest.raises(UserError, match=r"plan\.yaml is not a plan"):
        plan_file.read(write(tmp_path / "plan.yaml", text, "utf-8"))


def test_settings_of_a_model_may_have_numbers_as_keys(tmp_path):
    assert plan_file.read(write(tmp_path / "plan.yaml", "a: {1: x, 2: y}", "utf-8")) == {
        "a": {1: "x", 2: "y"}
    }


def test_a_shown_command_is_read_by_a_shell_as_it_was_stored():
    words = ["model=a b", "x=$(touch y)", "z='q'", "data.root=/home/Jörg/数据", "e=;#&"]
    assert shlex.split(foreign.command_line(words)) == ["perfexp", *words]


def test_a_name_with_a_nul_is_no_file(tmp_path):
    assert not foreign.is_regular(tmp_path / "a\0.csv")


@pytest.mark.parametrize("text", [*INVISIBLE, "\\'\"; touch x #", "\\\\x", "!ls", "x" * 60_000])
def test_a_command_that_could_be_taken_for_another_is_not_shown(text):
    assert foreign.command_line([f"model.name=a{text}b"]) is None
