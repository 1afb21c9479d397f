"""Links in a stranger's folder lead nowhere, and a folder that it names is not measured into."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perfexp import commands
from perfexp.cluster import element
from perfexp.errors import UserError
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plots import roofline_files
from perfexp.profilers import profile_key
from perfexp.records.paths import RunPaths
from perfexp.records.record import Point, Record, Status
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.reports.console import Console
from perfexp.roofline import of_csv

SECRET = "machine example.com login me password hunter2\n"


def profile(make_record, files) -> Record:
    record = make_record()
    facts = {"profile": {"profiler": "ncu", "files": files}}
    record.points.append(
        Point(key=profile_key(record.points[0].key), status=Status.OK, facts=facts)
    )
    return record


@pytest.mark.parametrize("is_link", [True, False])
def test_file_that_is_not_an_ncu_table_is_not_followed_or_quoted(make_record, tmp_path, is_link):
    secret, folder = tmp_path / "netrc", tmp_path / "run"
    folder.mkdir()
    secret.write_text(SECRET)
    place = folder / "inference_ncu.csv"
    if is_link:
        place.symlink_to(secret)
    else:
        place.write_text(SECRET)
    record = profile(make_record, [place.name])
    roofline_files.write_profiled(record, RunPaths(folder), {})
    [doubt] = record.points[-1].doubts
    assert doubt.code == "profile_incomplete"
    assert ("it is a link" in doubt.message or "Too many levels" in doubt.message) == is_link
    assert b"hunter2" not in record.to_json()


@pytest.mark.parametrize(
    "files", [["../inference_ncu.csv"], ["/etc/passwd"], ["a\0_ncu.csv"], ["a" * 300], 5, [5]]
)
def test_files_of_a_profile_are_names_in_the_runs_folder(make_record, files):
    record = profile(make_record, files)
    with pytest.raises(UserError, match=r"is not a perfexp record: "):
        Record.from_json(record.to_json())


@pytest.mark.parametrize("facts", [5, "x", [1]])
def test_a_profile_is_an_object(make_record, facts):
    record = profile(make_record, [])
    record.points[-1].facts["profile"] = facts
    with pytest.raises(UserError, match=r"is not a perfexp record: Expected `object`"):
        Record.from_json(record.to_json())


def test_a_link_that_the_user_types_is_followed(tmp_path, capsys):
    (tmp_path / "text").write_text(SECRET)
    (tmp_path / "link.csv").symlink_to(tmp_path / "text")
    assert commands.run(["roofline", str(tmp_path / "link.csv")]) == 2
    assert "is not a table of ncu" in capsys.readouterr().err
    with pytest.raises(UserError, match="it is a link"):
        of_csv(tmp_path / "link.csv")


def test_sweep_file_cannot_redirect_runs_to_other_folders(tmp_path):
    root, command = tmp_path / "sweep", ["-m", "batch_size=1,2,3,4"]
    root.mkdir()
    outside = tmp_path / "outputs" / "stage" / "fake"
    named = ["../victim", "1_2", str(tmp_path / "victim"), "../outputs/stage/fake"]
    children = [
        SweepChild(job=number, name="run", directory=directory, status=Status.OK)
        for number, directory in [*enumerate(named), (2, "2_3")]
    ]
    sweep = Sweep(
        uid="s", name="batch_size", started="", command=command, children=children, jobs=4
    )
    (root / "sweep.json").write_bytes(sweep.to_json())
    sweep_run = SweepRun(
        folder=root, command=command, axes={"batch_size": []}, jobs=4, console=Console(quiet=True)
    )
    folders = [root / "0_1", root / "1_2", root / "2_3", outside]
    membership = [sweep_run.membership(number, {}, folder) for number, folder in enumerate(folders)]
    runs = [
        SimpleNamespace(number=number + 1, name="run", folder=folder, sweep=membership[number])
        for number, folder in enumerate(folders)
    ]
    sweep_run.expect(runs)
    elements = [
        element.Element(f"{root}:{number}", requeue=False, is_job=False) for number in range(4)
    ]
    assert [one.folder for one in elements] == folders
    assert [one.child.status for one in elements] == ["interrupted", "ok", "ok", "ok"]
