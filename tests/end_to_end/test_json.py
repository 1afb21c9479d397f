"""`--json`: results on stdout, everything else on stderr."""

import json

from perfexp.__main__ import dispatch
from perfexp.records import diagnostics
from perfexp.records.analysis import Analysis
from perfexp.report.tables import json_results
from tests.roofline.listings import long_form, many

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "processes=1")


def printed(capsys, *arguments):
    capsys.readouterr()
    code = dispatch(list(arguments))
    return code, json.loads(capsys.readouterr().out)


def test_a_sweep_and_the_commands_print_one_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, sweep = printed(capsys, "-m", *FAKE, "seed=0,1", "output_dir=sweep", "--json")
    assert (code, sweep["sweep"]) == (0, str(tmp_path / "sweep"))
    assert [run["name"] for run in sweep["runs"]] == [
        f"seed={n}-fake-default-inference" for n in (0, 1)
    ]
    assert all(run["points"][0]["median_ms"] > 0 for run in sweep["runs"])
    code, shown = printed(capsys, "show", "sweep", "--json")
    assert [run["uid"] for run in shown["runs"]] == [run["uid"] for run in sweep["runs"]]
    code, alone = printed(capsys, "show", sweep["runs"][0]["folder"], "--json")
    assert alone["runs"] == [sweep["runs"][0]]
    code, progress = printed(capsys, "status", "sweep", "--json")
    assert (code, progress["is_complete"], [run["points"] for run in progress["runs"]]) == (
        0,
        True,
        [{"ok": 1}] * 2,
    )
    code, checked = printed(
        capsys, "check", "sweep/1-seed-1", "--against", "sweep/0-seed-0", "--json"
    )
    assert checked["outcome"] in ("passed", "failed", "not decided")


def test_a_refused_command_prints_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, content = printed(capsys, *FAKE, "batch_size=0", "--json")
    assert (code, content["runs"]) == (2, [])


def test_options_are_listed_with_their_descriptions(capsys):
    code, models = printed(capsys, "list", "models", "--json")
    assert (code, models["swin_t"]) == (0, "of torchvision")
    assert "Alias" in models["ocrnet_hrnetw48"]


def test_commands_on_files_print_what_they_made(
    make_record, leave_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    leave_run(make_record(phases=("train",)), tmp_path / "run")
    code, exported = printed(capsys, "export", "run", "--format", "csv", "--json")
    assert (code, exported) == (0, {"lines": 1, "runs": 1, "files": [str(tmp_path / "export.csv")]})
    code, speeds = printed(capsys, "speed", "run", "--json")
    (training,) = speeds["trainings"]
    assert (code, training["model_name"], training["UNIT"]) == (0, "resnet50", "images/s")
    assert (tmp_path / training["file"]).is_file()
    store = ("--folder", "store", "--machine", "here", "--json")
    code, added = printed(capsys, "baseline", "add", "first", "run", *store)
    assert code == 0
    code, known = printed(capsys, "baseline", "list", *store)
    assert [(one["name"], one["content"]) for one in known["baselines"]] == [("first", "1 run")]
    code, shown = printed(capsys, "baseline", "show", "first", *store)
    assert [run["name"] for run in shown["runs"]] == ["resnet50-default-inference"]
    code, removed = printed(capsys, "baseline", "rm", "first", *store)
    assert removed["removed"] == added["added"]
    code, left = printed(capsys, "clean", "run", "--dry-run", "--json")
    assert (code, left) == (0, {"files": []})


def test_a_roofline_prints_the_rows_of_its_csv_and_its_files(tmp_path, capsys):
    table = tmp_path / "ncu.csv"
    table.write_text(long_form(many(3)))
    code, found = printed(capsys, "roofline", str(table), "--gpu", "h100", "--json")
    (roofline,) = found["rooflines"]
    assert code == 0
    assert [row["level"] for row in roofline["rows"]].count("kernel") == 3
    assert str(tmp_path / "ncu_roofline.csv") in roofline["files"]


def test_json_run_has_the_diagnostics_of_its_measurements(make_record, tmp_path):
    record = make_record(sizes=(224, 256))
    record.doubts[:] = [diagnostics.Diagnostic(code="of_the_run", message="x")]
    for point, load in zip(
        [one for one in record.points if one.key.is_timed], (9.0, 12.0), strict=True
    ):
        point.doubts.append(diagnostics.make("busy_host", load=load, cores=64))
    found = json_results.of_run(Analysis.of(record), tmp_path)["diagnostics"]
    [busy] = [one for one in found if one["code"] == "busy_host"]
    assert busy["where"] == ["256", "224"]
    assert "12.0 of 64" in busy["detail"]
    assert [one["where"] for one in found if one["code"] == "of_the_run"] == [[]]
