"""The command line from end to end: runs that are repeated and resumed."""

import json
import re
from pathlib import Path

import pytest
import yaml

from perfexp.cli.resume import with_resumed
from perfexp.main import main
from perfexp.plan import plan_fields, plan_file
from perfexp.records.record import Status
from tests.support import typed

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")
FIRST = ("model=fake", "gpu=fake", "tracking=none", "cold_start=true", "stopping=fixed")


def test_repeating_the_command_measures_only_what_is_missing(run):
    run.shared(*FAKE, "batch_size=[1,2]", "output_dir=x")
    lines = Path("x/details/points.jsonl").read_bytes().splitlines(keepends=True)
    Path("x/details/points.jsonl").write_bytes(lines[0])
    code, _, [record] = run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    assert code == 0
    assert Path("x/details/points.jsonl").read_bytes().splitlines(keepends=True)[0] == lines[0]
    assert len(record.points) == 2


def test_record_keeps_its_identity_when_the_command_is_repeated(run):
    _, _, [before] = run.shared(*FAKE, "output_dir=x")
    _, _, [after] = run(*FAKE, "output_dir=x")
    assert before.uid == after.uid


def test_other_plan_in_the_same_folder_is_refused_with_its_diff(run):
    run.shared(*FAKE, "output_dir=x")
    code, printed, [record] = run(*FAKE, "output_dir=x", "batch_size=8")
    assert code == 2
    assert "batch_size: 1 → 8" in printed
    assert record.plan["batch_size"] == 1


def test_a_plan_that_was_changed_on_disk_is_not_run(tmp_path):
    from perfexp.worker.entry import main as worker

    plan = tmp_path / "details" / "plan.yaml"
    plan.parent.mkdir()
    plan.write_text(yaml.safe_dump({"model": {"_target_": "os.system"}}))
    assert worker([str(tmp_path), "--plan-sha256", "0" * 64]) == 2


def test_what_failed_is_measured_again_and_what_is_known_is_not(run, tmp_path):
    from perfexp.records.record import point_to_line, read_points

    run.shared(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    file = tmp_path / "x" / "details" / "points.jsonl"
    one, two, oom = sorted(read_points(file), key=lambda point: point.key.batch_size)
    one.status = Status.FAILED
    file.write_bytes(b"".join(map(point_to_line, (one, two, oom))))
    _, _, [record] = run(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    assert [point.status for point in record.points] == [Status.OK, Status.OK, Status.OOM]
    assert record.points[0].started != one.started
    assert record.points[1].started == two.started
    assert record.points[2].started == oom.started


def test_repeated_complete_run_measures_nothing_and_keeps_times(run):
    _, _, [before] = run.shared(*FAKE, "output_dir=x")
    code, printed, [after] = run(*FAKE, "output_dir=x")
    assert code == 0
    assert "Nothing is left to measure" in printed
    assert (after.started, after.ended) == (before.started, before.ended)


def test_points_of_another_environment_are_not_mixed_in(run, tmp_path):
    run.shared(*FAKE, "batch_size=[1,2]", "output_dir=x")
    lines = (tmp_path / "x/details/points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x/details/points.jsonl").write_bytes(lines[0])
    (tmp_path / "x/record.json").unlink()
    file = tmp_path / "x/details/environment.json"
    file.write_text(file.read_text().replace('"scripted device"', '"another device"'))
    code, printed, _ = run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    assert code == 2
    assert "another device → scripted device" in printed


def test_a_run_is_resumed_by_its_folder(run, tmp_path):
    run.shared(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    lines = (tmp_path / "x" / "details" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "details" / "points.jsonl").write_bytes(
        lines[0] + lines[1][:40]
    )  # killed while it wrote
    (tmp_path / "x" / "record.json").unlink()
    code, _, [record] = run("resume=x")
    assert code == 1
    assert (tmp_path / "x" / "details" / "points.jsonl").read_bytes().startswith(lines[0])
    assert [point.status for point in record.points] == [Status.OK, Status.OK, Status.OOM]


@pytest.mark.parametrize("content", ['{"schema_version": 99}', "{", '{"photos": []}'])
def test_a_record_that_cannot_be_read_is_not_overwritten(run, tmp_path, content):
    run.shared(*FAKE, "output_dir=x")
    (tmp_path / "x" / "record.json").write_text(content)
    (tmp_path / "x" / "details" / "points.jsonl").unlink()
    code = main(["resume=x"])
    assert code == 2
    assert (tmp_path / "x" / "record.json").read_text() == content


def test_results_left_only_in_the_record_are_not_remeasured(run, tmp_path):
    _, _, [before] = run(*FAKE, "batch_size=[1,2]", "probes.layers=true", "output_dir=x")
    points = tmp_path / "x" / "details" / "points.jsonl"
    points.write_bytes(points.read_bytes().splitlines(keepends=True)[0])
    code, printed, [after] = run("resume=x")
    assert code == 0
    assert "Nothing is left to measure" in printed
    assert after.points == before.points


@pytest.mark.slow
def test_relative_config_dir_is_found_only_in_the_first_folder(run, tmp_path, monkeypatch):
    (tmp_path / "mine" / "stopping").mkdir(parents=True)
    (tmp_path / "mine" / "stopping" / "quickly.yaml").write_text(
        "_target_: perfexp.timing.stopping.Fixed\nwarmup: 1\nmeasure: 6\n"
    )
    given = ("model=fake", "gpu=fake", "tracking=none", "stopping=quickly", "output_dir=x")
    assert run("--config-dir", "mine", *given)[0] == 0
    assert run("resume=x")[0] == 0
    assert run("--config-dir=mine", "resume=x")[0] == 0
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, printed, _ = run("resume=../x")
    assert code == 2
    assert f"begun in {tmp_path}" in printed
    assert run("resume=../x", f"--config-dir={tmp_path / 'mine'}")[0] == 0


@pytest.mark.parametrize("kind", ["another user", "unsigned", "damaged", "a plan that was changed"])
@pytest.mark.parametrize("is_sweep", [False, True])
def test_what_somebody_else_began_goes_on_by_its_command_alone(
    kind, is_sweep, run, tmp_path, monkeypatch
):
    if kind == "a plan that was changed" and is_sweep:
        pytest.skip("its command is in sweep.json")
    swept = (
        ("-m", "batch_size=1,2", "output_dir=x")
        if is_sweep
        else ("batch_size=[1,2]", "output_dir=x")
    )
    run.shared(*FAKE, *swept)
    signed = tmp_path / "x" / "details" / ("manifest.json" if is_sweep else "plan.yaml")
    text = signed.read_text()
    if kind == "another user":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    else:
        patterns = {
            "a plan that was changed": ("seed: ", "seed: 1"),
            "unsigned": ("signature", "anything"),
            "damaged": (r"(signature\W+)\w{8}", r"\g<1>00000000"),
        }
        signed.write_text(re.sub(*patterns[kind], text))
    code, printed, before = run("resume=x")
    assert code == 2
    shown = typed.shown(printed)
    assert shown[-1] == f"output_dir={tmp_path}/x"
    if kind != "a plan that was changed":
        assert run(*shown)[0] == 0
        assert [record.uid for record in run("resume=x")[2]] == [record.uid for record in before]
        assert run("resume=x")[0] == 0, "from there on it is this user's"


def test_without_a_key_runs_go_on_and_are_foreign_afterwards(run, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert run(*FAKE, "output_dir=x")[0] == 0
    code, printed, _ = run("resume=x")
    assert code == 2
    assert run(*typed.shown(printed))[0] == 0
    assert run("resume=x")[0] == 2


def test_a_sweep_with_another_identity_than_signed_is_foreign(run, tmp_path):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=x")
    summary = json.loads((tmp_path / "x" / "sweep.json").read_bytes())
    (tmp_path / "x" / "sweep.json").write_text(json.dumps({**summary, "uid": "another"}))
    code, printed, _ = run("resume=x")
    assert (code, "Nothing was run" in printed) == (2, True)


def test_a_moved_folder_stays_ones_own(run, tmp_path):
    run.shared(*FAKE, "output_dir=x")
    (tmp_path / "x").rename(tmp_path / "y")
    assert run("resume=y")[0] == 0


def test_sweep_with_a_changed_command_is_treated_as_foreign(run, tmp_path):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=x")
    summary = json.loads((tmp_path / "x" / "sweep.json").read_bytes())
    summary["command"].append(
        "profiler.tool=/bin/sh"
    )  # not a key of the measurement: the sweep is the same
    (tmp_path / "x" / "sweep.json").write_text(json.dumps(summary))
    code, printed, _ = run("resume=x")
    assert code == 2
    assert "profiler.tool=/bin/sh" in typed.shown(printed)
    assert run(*FAKE, "-m", "batch_size=1,2", "output_dir=x")[0] == 0
    summary = json.loads((tmp_path / "x" / "sweep.json").read_bytes())
    assert "profiler.tool=/bin/sh" not in summary["command"], "what is signed is what was typed"
    assert run("resume=x")[0] == 0


def test_resume_repeats_run_names_and_tags_but_no_store_address(tmp_path):
    texts = ["tracking.run_name=mine", "tracking.tags={team:vision}", "+tracking.tags.who=me"]
    content = {"format": plan_fields.FORMAT, "command": [*texts, "tracking.uri=http://elsewhere"]}
    (tmp_path / "details").mkdir()
    plan = plan_file.signed(yaml.safe_dump(content).encode())
    (tmp_path / "details" / "plan.yaml").write_bytes(plan)
    arguments = with_resumed([f"resume={tmp_path}"])
    assert [text for text in arguments if "tracking" in text] == texts


def test_doubts_of_an_earlier_worker_stay(run, tmp_path):
    run.shared(*FAKE, "batch_size=[1,2]", "output_dir=x")
    environment = json.loads((tmp_path / "x" / "details" / "environment.json").read_bytes())
    environment["doubts"].append({"code": "shared_device", "detail": "seen before", "remedy": ""})
    (tmp_path / "x" / "details" / "environment.json").write_text(json.dumps(environment))
    lines = (tmp_path / "x" / "details" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "details" / "points.jsonl").write_bytes(lines[0])
    _, _, [record] = run("resume=x")
    assert [doubt.code for doubt in record.doubts] == ["simulated", "shared_device"]


def test_resume_refuses_a_cold_start_in_another_environment(run, tmp_path):
    run.shared(*FIRST, "output_dir=x")
    environment = json.loads((tmp_path / "x" / "details" / "environment.json").read_bytes())
    environment["environment"]["device"]["name"] = "another device"
    (tmp_path / "x" / "details" / "environment.json").write_text(json.dumps(environment))
    lines = (tmp_path / "x" / "details" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "details" / "points.jsonl").write_bytes(lines[0])
    (tmp_path / "x" / "record.json").unlink()
    code, printed, _ = run("resume=x")
    assert code == 2
    assert "another environment (device.name: another device" in printed


@pytest.mark.slow
@pytest.mark.always("README: layers")
def test_layers_follow_the_times_in_their_process_and_resume(run, tmp_path):
    arguments = (*FAKE, "probes.layers=true", "input_size=[64,96]", "output_dir=x")
    code, _, [record] = run(*arguments)
    assert code == 0
    phases = [point.key.phase for point in record.points]
    assert phases == ["inference", "inference", "inference_layers", "inference_layers"]
    assert [point.metric("layers/closure").reason for point in record.points[:2]] == [
        "the model is scripted: it has no layers"
    ] * 2
    log, points = tmp_path / "x/details/run.log", tmp_path / "x/details/points.jsonl"
    assert (log.read_text().count("--what=timed"), log.read_text().count("--what=")) == (1, 1)
    lines = points.read_bytes().splitlines(keepends=True)
    points.write_bytes(b"".join(lines[:-1]))
    (tmp_path / "x/record.json").unlink()
    code, _, [record] = run(*arguments)
    assert (code, len(record.points)) == (0, 4)
    assert (log.read_text().count("--what=layers"), log.read_text().count("--what=")) == (1, 2)
    assert points.read_bytes().splitlines(keepends=True)[:-1] == lines[:-1]
    assert "Nothing is left" in run(*arguments)[1]


#: A model whose layers need more memory than is left in the process that timed it, or in any process.
TIGHT = """
import sys
import torch

class Tight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.has_timed = torch.nn.Linear(3, 2), not {fits}

    def forward(self, images):
        if "perfexp.measuring.layers_pass" not in sys.modules:
            self.has_timed = True
        elif self.has_timed:
            raise MemoryError("no room for layers")
        return self.fc(images.mean((2, 3)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fits", "status"), [(True, Status.OK), (False, Status.OOM)])
def test_layers_out_of_memory_are_left_to_a_fresh_process(run, tmp_path, fits, status):
    (tmp_path / "tight.py").write_text(TIGHT.format(fits=fits))
    arguments = ("model=tight.py:Tight", "gpu=cpu", "input_size=[32,64]", "probes.layers=true")
    _, printed, [record] = run(*arguments, "tracking=none", "stopping=fixed", "output_dir=x")
    assert [point.status for point in record.points] == [Status.OK, Status.OK, status, status]
    log = (tmp_path / "x/details/run.log").read_text()
    assert (log.count("--what=timed"), log.count("--what=layers")) == (1, 1)
    assert ("no room for layers" in printed) is not fits


@pytest.mark.slow
def test_layers_of_a_failed_point_are_not_tried_or_kept(run, tmp_path):
    arguments = (*FAKE, "probes.layers=true", "batch_size=[1,100]", "output_dir=x")
    _, _, [record] = run(*arguments, "model.faults.oom=1000000")
    assert [point.status for point in record.points] == [
        Status.OK,
        Status.OOM,
        Status.OK,
        Status.OK,
    ]
    assert "not tried" in record.points[3].metric("layers/closure").reason
    lines = (tmp_path / "x/details/points.jsonl").read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace('"status":"ok"', '"status":"failed"', 1)
    (tmp_path / "x/details/points.jsonl").write_text("".join(lines))
    before = [line for line in lines if "inference_layers" in line and '"batch_size":1,' in line]
    run(*arguments, "model.faults.oom=1000000")
    after = (tmp_path / "x/details/points.jsonl").read_text()
    assert len(before) == 1
    assert before[0] not in after


def test_what_is_resumed_has_its_folder_already(run):
    run.shared(*FAKE, "output_dir=x")
    code, printed, _ = run("resume=x", "output_dir=y")
    assert code == 2
    assert "leave output_dir out" in printed
    assert not Path("y").exists()
