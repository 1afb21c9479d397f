"""Pages of docs/results show their data, and data that breaks the schema is refused."""

import copy
import hashlib
import json
import lzma
import re

import pytest

from tools import results

SHA = "0123456789abcdef" * 4
MEASURED = {"case", "figures", "intervals", "outcome"}
ROW_KEYS = MEASURED | {
    "command",
    "version",
    "commit",
    "date",
    "host",
    "device",
    "software",
    "records",
}


@pytest.fixture
def claim():
    row = {
        "case": {"model": "resnet50", "batch": 16},
        "figures": {"device_ms": 7, "latency_ms": None},
        "intervals": {"device_ms": {"low": 6, "high": 8}},
        "outcome": {"method": "queue"},
        "command": "python -m perfexp model=resnet50",
        "version": "0.1.0",
        "commit": "0123abc",
        "date": "2026-11-23",
        "host": None,
        "device": "NVIDIA H200",
        "software": None,
        "records": SHA,
    }
    other = {
        **copy.deepcopy(row),
        "case": {"model": "vgg16", "batch": 16},
        "date": None,
        "records": "none",
    }
    texts = {
        "title": "Times",
        "group": "Times",
        "claim": "Times are times.",
        "notes": [],
        "labels": {},
    }
    return {**texts, "rows": [row, other]}


@pytest.fixture
def folder(tmp_path, claim):
    (tmp_path / "times.json").write_text(results.dump(claim))
    assert results.main(["--folder", str(tmp_path)]) == 0
    return tmp_path


def test_every_row_has_all_keys_and_every_file_its_form():
    files = sorted(results.FOLDER.glob("*.json"))
    assert len(files) > 30
    for file in files:
        assert all(set(row) == ROW_KEYS for row in json.loads(file.read_text())["rows"]), file
        assert results.dump(results.parse(file.read_text())) == file.read_text(), file


def test_stored_records_are_those_whose_hashes_the_pages_show():
    shown = {
        row["records"]
        for claim in results.read_claims(results.FOLDER).values()
        for row in claim["rows"]
    }
    stored = list((results.FOLDER / "records").iterdir())
    assert stored
    for file in stored:
        assert (
            hashlib.sha256(lzma.decompress(file.read_bytes())).hexdigest() + ".json.xz" == file.name
        )
        assert file.name.removesuffix(".json.xz") in shown


def test_pages_have_short_lines_and_links_that_lead_somewhere():
    made = results.pages(results.FOLDER)
    assert len(made) > 30
    for file, text in made.items():
        assert [
            line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")
        ] == [], file
        links = re.findall(r"\]\(([^)#]+)", text)
        targets = [results.FOLDER / link for link in links]
        assert [link for link in targets if link not in made and not link.is_file()] == [], file


def test_a_page_shows_figures_with_units_intervals_and_sources(folder):
    text = (folder / "times.md").read_text()
    assert "| model | batch | device, ms | latency, ms | method | source |" in text
    assert "| resnet50 | 16 | 7 (6 … 8) | – | queue | 1 |" in text
    assert f"2026-11-23 | not recorded | NVIDIA H200 | not recorded | `{SHA}` |" in text
    assert "[Times](times.md)" in (folder / "index.md").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("7.20", "7.20"),
        ("-0.0", "−0.0"),
        ("0.0064", "0.0064"),
        ("2679.04", "2,679.04"),
        ("-5", "−5"),
    ],
)
def test_numbers_have_the_digits_of_the_file(text, shown):
    assert results.shown(results.parse(text)) == shown
    assert results._compact(results.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("4e-7", "4e-7"), ("0.0003", "3e-4"), ("1.10e-15", "1.10e-15"), ("0.0", "0.0")],
)
def test_errors_have_an_exponent(text, shown):
    assert results.shown(results.parse(text), is_error=True) == shown


def spoil_row(**values):
    return lambda claim: claim["rows"][0].update(values)


SPOILT = {
    **{f"no {key}": lambda claim, key=key: claim["rows"][1].pop(key) for key in sorted(ROW_KEYS)},
    **{
        f"no {key} of the file": lambda claim, key=key: claim.pop(key)
        for key in sorted(results.FILE_KEYS)
    },
    "unknown key": spoil_row(comment="fast"),
    "unknown key of the file": lambda claim: claim.update(comment="fast"),
    "unknown group": lambda claim: claim.update(group="Others"),
    "no rows": lambda claim: claim.update(rows=[]),
    "a row twice": lambda claim: claim["rows"].append(claim["rows"][0]),
    "a row that is a list": lambda claim: claim["rows"].append([]),
    "other figures than in row 1": lambda claim: claim["rows"][1].update(figures={"device_ms": 7}),
    "label of no column": lambda claim: claim.update(labels={"energy_joules": "energy"}),
    "figure without a unit": spoil_row(figures={"device": 7, "latency_ms": None}, intervals={}),
    "figure that is text": spoil_row(figures={"device_ms": "7", "latency_ms": None}, intervals={}),
    "figure that is a flag": spoil_row(
        figures={"device_ms": True, "latency_ms": None}, intervals={}
    ),
    "interval of no figure": spoil_row(intervals={"energy_joules": {"low": 6, "high": 8}}),
    "interval of a missing figure": spoil_row(intervals={"latency_ms": {"low": 6, "high": 8}}),
    "interval with one end": spoil_row(intervals={"device_ms": {"low": 6}}),
    "interval without its figure": spoil_row(intervals={"device_ms": {"low": 8, "high": 9}}),
    "negative half-width": spoil_row(intervals={"device_ms": {"half_width_percent": -1}}),
    "date in another form": spoil_row(date="23.11.2026"),
    "day that does not exist": spoil_row(date="2026-02-30"),
    "hash that is too short": spoil_row(records="0123abc"),
    "records that are null": spoil_row(records=None),
    "commit that is a word": spoil_row(commit="main"),
    "empty command": spoil_row(command=""),
    "outcome with a cell's end": spoil_row(outcome={"method": "queue | graph"}),
    "empty case": spoil_row(case={}),
}


def test_the_claim_of_these_tests_is_valid(claim):
    results.check_claim(claim, "times.json")


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_data_that_breaks_the_schema_is_refused(claim, spoil):
    spoil(claim)
    with pytest.raises(results.SchemaError, match=r"^times\.json"):
        results.check_claim(claim, "times.json")


@pytest.mark.parametrize("text", ["{", '{"rows": NaN}', "[]"])
def test_a_file_that_is_not_a_claim_has_exit_code_2(folder, text, capsys):
    (folder / "times.json").write_text(text)
    assert results.main(["--folder", str(folder)]) == 2
    assert "error: times.json" in capsys.readouterr().err


def test_pages_without_data_are_deleted(folder):
    (folder / "energy.md").write_text("# Energy\n")
    assert results.main(["--folder", str(folder)]) == 0
    assert {file.name for file in folder.glob("*.md")} == {"index.md", "times.md"}


def test_a_new_measurement_replaces_the_row_of_its_case(folder, claim, tmp_path):
    new = json.dumps(
        {**claim["rows"][1], "figures": {"device_ms": 5.25, "latency_ms": 6}, "intervals": {}}
    )
    (tmp_path / "new").write_text(new.replace("5.25", "5.250"))
    assert results.main(["--folder", str(folder), "--replace", "times", str(tmp_path / "new")]) == 0
    rows = json.loads((folder / "times.json").read_text())["rows"]
    assert rows[0] == claim["rows"][0]
    assert rows[1]["figures"] == {"device_ms": 5.25, "latency_ms": 6}
    assert "| vgg16 | 16 | 5.250 | 6 | queue | 2 |" in (folder / "times.md").read_text()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("energy", {}, "claim 'energy' not found; choose from times"),
        ("times", {"case": {"model": "alexnet", "batch": 16}}, "no row of times has the case"),
        ("times", {"records": "deleted"}, "the new row: records"),
        ("times", {"figures": {"device_ms": 7}}, "keys of figures differ"),
    ],
)
def test_a_row_that_fits_nowhere_changes_nothing(
    folder, claim, tmp_path, name, change, message, capsys
):
    (tmp_path / "new").write_text(json.dumps({**claim["rows"][1], "intervals": {}, **change}))
    before = (folder / "times.json").read_bytes()
    assert results.main(["--folder", str(folder), "--replace", name, str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "times.json").read_bytes() == before


def test_no_line_of_a_page_begins_as_a_comment():
    for length in range(80, 110):
        lines = results._paragraph("x" * length + " 5 % of it")
        assert not any(line.startswith("%") for line in lines)
        assert " ".join(lines).strip() == "x" * length + " 5 % of it"
