"""Records survive being written, cut off, read by others and read later."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

import perfexp
from perfexp.errors import UserError
from perfexp.records.diagnostics import DIAGNOSTICS, MERGED, Diagnostic, Severity, make
from perfexp.records.paths import append_line
from perfexp.records.record import (
    Key,
    Point,
    Record,
    Series,
    Status,
    Stop,
    missing,
    overall_status,
    point_to_line,
    points_from_lines,
    read_points,
)

SHIPPED_SCHEMA = Path(perfexp.__file__).parent / "records" / "record-1.json"
GOLDEN = Path(__file__).parents[1] / "golden" / "record-1.json"


def key(batch_size=1, **changes):
    return Key(
        phase="inference", input_size=(224, 224), batch_size=batch_size, precision="fp32", **changes
    )


def point(batch_size=1, status=Status.OK):
    series = Series(
        name="latency", samples=[3e-3, 1e-3, 1.1e-3], warmup=1, stop=Stop(reason="fixed")
    )
    return Point(key=key(batch_size), status=status, series=[series])


def record(*points):
    return Record(
        uid="a1",
        name="resnet50-default-inference",
        perfexp_version="0.1.0",
        status=Status.OK,
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:01:00+00:00",
        plan={"model": {"name": "resnet50"}},
        plan_hash="0" * 64,
        points=list(points),
    )


def test_a_record_is_the_same_after_writing_and_reading():
    before = record(point(1), point(2, Status.OOM))
    assert Record.from_json(before.to_json()) == before


def test_a_record_fits_the_shipped_schema():
    schema = json.loads(SHIPPED_SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(record(point()).to_json()))


def test_a_wrong_record_does_not_fit_the_schema():
    wrong = json.loads(record(point()).to_json())
    wrong["points"][0]["status"] = "fine"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(SHIPPED_SCHEMA.read_text())).validate(wrong)


def test_a_record_of_version_1_stays_readable():
    golden = Record.load(GOLDEN)
    assert golden.schema_version == 1
    assert golden.points[0].find_series("throughput").measured
    assert [(doubt.code, doubt.severity, doubt.help) for doubt in golden.doubts] == [
        ("simulated", Severity.WARNING, "choose a real one: gpu=auto")
    ]


@pytest.mark.parametrize(
    ("code", "severity"),
    [(code, rule.severity) for code, rule in DIAGNOSTICS.items()] + [("later", Severity.WARNING)],
)
def test_a_diagnostic_without_a_severity_has_that_of_its_code(code, severity):
    old = {"code": code, "detail": "seen", "remedy": "try"}
    read = msgspec.convert(old, Diagnostic)
    assert (read.severity, read.message, read.help, read.is_note) == (
        severity,
        "seen",
        "try",
        severity == "note",
    )
    assert msgspec.to_builtins(read) == {**old, "severity": severity.value}
    assert (
        msgspec.convert({**old, "code": "later", "severity": "error"}, Diagnostic).severity
        is Severity.ERROR
    )


def test_a_record_of_a_later_version_is_refused_with_its_number():
    later = json.loads(record().to_json()) | {"schema_version": 99, "novelty": 1}
    with pytest.raises(UserError, match="schema version 99"):
        Record.from_json(json.dumps(later).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema_version": 1}', b'{"a": 1}'])
def test_something_else_is_no_record(text):
    with pytest.raises(UserError, match="not a perfexp record"):
        Record.from_json(text)


def test_a_folder_without_a_record_is_told(tmp_path):
    with pytest.raises(UserError, match="No record can be read"):
        Record.load(tmp_path)


def test_the_warm_up_stays_in_the_samples():
    series = point().series[0]
    assert len(series.samples) == 3
    assert series.measured == [1e-3, 1.1e-3]


def test_points_cut_off_by_a_crash_are_left_out():
    text = point_to_line(point(1)) + point_to_line(point(2))
    assert [p.key.batch_size for p in points_from_lines(text[:-20])] == [1]


def test_a_line_after_a_torn_one_is_not_lost(tmp_path):
    file = tmp_path / "points.jsonl"
    append_line(file, point_to_line(point(1)))
    with file.open("ab") as torn:
        torn.write(point_to_line(point(2))[:30])
    append_line(file, point_to_line(point(3)))
    assert [p.key.batch_size for p in read_points(file)] == [1, 3]


def test_what_has_no_result_is_missing(tmp_path):
    file = tmp_path / "points.jsonl"
    assert missing([key(1), key(2)], read_points(file)) == [key(1), key(2)]
    append_line(file, point_to_line(point(1)))
    assert missing([key(1), key(2)], read_points(file)) == [key(2)]


def test_replicates_are_different_points(tmp_path):
    file = tmp_path / "points.jsonl"
    append_line(file, point_to_line(point(1)))
    assert missing([key(1, replicate=1)], read_points(file)) == [key(1, replicate=1)]


def test_run_status_is_that_of_its_first_bad_point():
    assert overall_status([point(1), point(2)]) is Status.OK
    assert overall_status([point(1), point(2, Status.OOM), point(3, Status.FAILED)]) is Status.OOM
    assert overall_status([]) is Status.FAILED


def test_sizes_are_written_height_times_width():
    assert key().size_label == "224"
    assert (
        Key(phase="train", input_size=(512, 1024), batch_size=1, precision="fp32").size_label
        == "512x1024"
    )


def test_stored_diagnostic_keeps_the_values_of_its_message():
    made = make("device_idle", idle=0.2, of_mean="", cause="launches", advice="larger batch_size")
    stored = msgspec.convert(json.loads(msgspec.json.encode(made)), Diagnostic)
    assert stored == made
    assert (stored.figure, stored.fields["cause"]) == (0.2, "launches")


@pytest.mark.parametrize(("old", "code"), MERGED.items())
def test_a_code_of_an_earlier_version_is_read_as_todays(old, code):
    read = msgspec.convert({"code": old, "detail": "seen", "remedy": "try"}, Diagnostic)
    assert (read.code, read.severity, read.message, read.figure) == (
        code,
        DIAGNOSTICS[code].severity,
        "seen",
        None,
    )
    assert old not in DIAGNOSTICS
