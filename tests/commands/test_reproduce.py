"""`perfexp reproduce`: the outcome of an equal, a slower and a noisy run, and folders that were changed."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from perfexp import commands
from perfexp.plan import plan_file
from perfexp.records.record import Record

pytestmark = pytest.mark.usefixtures("quick_commands")

GIVEN = (
    "model=fake",
    "gpu=fake",
    "tracking=none",
    "stopping=brisk",
    "processes=3",
    "device_lock=wait",
)
AGAIN = ("reproduce", "x", "tracking=none", "device_lock=wait")
#: What somebody else's record has to be typed with.
MEASURED = ("model=fake", "gpu=fake", "stopping=brisk")
#: Found only while nothing has been measured.
RESULTS = "outputs"


@pytest.fixture
def run(run, capsys, monkeypatch):
    """Runs of a command of `perfexp COMMAND`, in a folder with a finished run `x`: exit code and printed text."""
    run.shared(*GIVEN, "output_dir=x")

    def command(*arguments):
        code = commands.run(arguments)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return command


def change(folder, name, function):
    """Change a file of JSON or YAML in place, as a text editor would."""
    file = Path(folder, name)
    read, write = (
        (json.loads, json.dumps) if file.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    )
    content = read(file.read_text())
    function(content)
    file.write_text(write(content))


@pytest.mark.slow
@pytest.mark.always("README: perfexp reproduce")
def test_same_code_reproduces_in_five_processes_in_a_new_folder(run):
    code, printed = run(*AGAIN)
    assert code == 0, printed
    assert "REPRODUCED: device, latency, throughput of 1 point within ±1 %" in printed
    [new] = [Record.load(file) for file in Path(RESULTS).rglob("record.json")]
    assert {point.key.replicate for point in new.points} == set(range(5))
    assert new.plan_hash != Record.load(Path("x")).plan_hash  # the number of processes is another
    assert len(Record.load(Path("x")).points) == 3


@pytest.mark.slow
def test_a_slower_model_differs_and_scripts_read_by_how_much(run, slower_device):
    slower_device(1.08)
    code, printed = run(*AGAIN, "output_dir=y", "--json")
    assert code == 1
    answer = json.loads(printed[printed.index("{\n") : printed.rindex("}\n") + 1])
    assert answer["outcome"] == "differs"
    assert Path(answer["folder"]) == Path("y").absolute()
    [ratio] = [
        pair["ratio"] for pair in answer["comparison"]["pairs"] if pair["measure"] == "device"
    ]
    assert ratio == pytest.approx(1.08, rel=0.01)
    assert any("device of 224 · batch 1: " in line and "by +" in line for line in answer["reasons"])

    before = Path(
        "y/details/points.jsonl"
    ).read_bytes()  # the same command with the folder measures nothing twice
    slower_device(1.0)
    assert run(*AGAIN, "output_dir=y")[0] == 1
    assert Path("y/details/points.jsonl").read_bytes() == before


@pytest.mark.slow
def test_difference_near_the_margin_is_undecided_with_a_reason(run, slower_device):
    slower_device(1.01)
    code, printed = run(*AGAIN)
    assert code == 2
    assert "UNDECIDED: device of 224 · batch 1: " in printed
    assert "; the interval is neither within nor beyond ±1 %" in printed


@pytest.mark.slow
def test_a_point_that_fails_now_differs(run, slower_device):
    code, printed = run(*AGAIN, "model.faults.fail=1")
    assert code == 1
    assert "DIFFERS: no point was measured again (failed)" in printed


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"perfexp": "0.0.1"}, "perfexp: 0.0.1 → "),
        ({"device": {"kind": "cpu", "name": "Another CPU"}}, "device: Another CPU"),
        (
            {"device": {"kind": "cuda", "name": "Another GPU", "uuid": "GPU-1"}},
            "device: Another GPU",
        ),
    ],
)
def test_another_machine_is_not_comparable_nothing_is_measured(run, changed, reason):
    change("x", "record.json", lambda record: record["environment"].update(changed))
    code, printed = run(*AGAIN)
    assert code == 2
    assert f"NOT COMPARABLE because {reason}" in printed
    assert not Path(RESULTS).exists()


def set_base(plan):
    plan["model"]["base_seconds"] = 0.5


def set_base_and_hash(record):
    set_base(record["plan"])
    record["plan_hash"] = plan_file.plan_hash(record["plan"])


@pytest.mark.parametrize(
    ("name", "function", "refusal"),
    [
        (
            "details/plan.yaml",
            set_base,
            "x: you did not begin it, or did with another home. Nothing was run.",
        ),
        ("record.json", lambda record: set_base(record["plan"]), "the plan in it does not match"),
        ("record.json", set_base_and_hash, "model.base_seconds: 0.5 → 0.001"),
        (
            "record.json",
            lambda record: record["command"].append("seed=1"),
            "stopping=brisk seed=1 tracking=none",
        ),
        ("record.json", lambda record: record["points"].clear(), "no timed point to compare"),
        (
            "record.json",
            lambda record: record["environment"].update(device="x", perfexp="0"),
            "perfexp: 0 → ",
        ),
    ],
)
def test_a_record_that_was_changed_is_refused_and_runs_nothing(run, name, function, refusal):
    change("x", name, function)
    code, printed = run(*AGAIN)
    assert code == 2
    assert refusal in printed
    assert not Path(RESULTS).exists()


@pytest.mark.parametrize(
    "hostile",
    [
        ("model._target_=os.system",),
        ("--config-dir=evil",),
        ("hydra.searchpath=[x]",),
        ("model.weights=$(touch x)", "data.root='a b'"),
    ],
)
def test_command_of_a_foreign_record_is_shown_and_not_run(run, hostile):
    change("x", "record.json", lambda record: record["command"].extend(hostile))
    code, printed = run(*AGAIN)
    assert code == 2
    shown = next(line for line in printed.splitlines() if line.startswith("perfexp reproduce x "))
    words = shlex.split(shown)
    assert set(hostile) <= set(words)
    assert "model=fake" in words
    assert not Path(RESULTS).exists()


def test_foreign_record_is_reproduced_by_its_typed_command(run, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("another-user")))
    code, printed = run(*AGAIN, "--dry-run")
    assert code == 2
    shown = next(line for line in printed.splitlines() if line.startswith("perfexp reproduce x "))
    assert run(*shlex.split(shown)[1:], "--dry-run")[0] == 0
    assert run(*AGAIN, "model=fake", "--dry-run")[0] == 2, "a part of the command is not enough"
    assert not Path(RESULTS).exists()


@pytest.mark.parametrize(
    "text", ["model.name=\x1b[2J", "model.name=a\nb", "model.name=" + "x" * 60_000]
)
def test_a_command_that_would_not_show_as_it_is_is_not_shown(run, text):
    change("x", "record.json", lambda record: record["command"].append(text))
    code, printed = run(*AGAIN)
    assert code == 2
    assert "can't be shown" in printed
    assert "perfexp reproduce" not in printed


def test_reproduce_drops_profilers_and_stores_typed_values_win(run):
    further = [
        "profiler=nsys",
        "profiler.tool=/bin/sh",
        "tracking=mlflow",
        "tracking.uri=http://evil.invalid",
    ]
    change("x", "record.json", lambda record: record["command"].extend(further))
    code, printed = run(*AGAIN, *MEASURED, "model.base_seconds=0.5", "--dry-run")
    assert code == 0
    assert "nsys" not in printed
    assert not Path(RESULTS).exists()


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["x", "output_dir=x"], "is the record's own folder"),
        (["sweep"], "is a sweep; name the folder of one of its runs"),
        (["x", "processes=3"], "'processes' is set by --processes"),
        (["nowhere"], "No record can be read"),
        (["x", "--image=--privileged", "--engine=true"], "an option of the engine"),
        (
            ["x", "--image=perfexp", "--engine=no-such-engine"],
            "No container engine found (no-such-engine)",
        ),
        (["x", "--image=perfexp", "--engine=false"], "Pull or build the image first"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_with_a_remedy(run, arguments, refusal):
    Path("sweep").mkdir()
    Path("sweep/sweep.json").write_text("{}")
    code, printed = run("reproduce", *arguments)
    assert code == 2
    assert refusal in printed


#: A container engine that runs perfexp here: it answers as docker does, and writes down its arguments.
ENGINE = """#!{python}
import json, os, sys
if sys.argv[1:3] == ["image", "inspect"]:
    sys.exit(print("sha256:" + "ab" * 32))
with open("argv.json", "w") as file:
    json.dump(sys.argv[1:], file)
number = next(i for i, word in enumerate(sys.argv) if word.startswith("sha256:"))
pairs = [word[6:].partition("=") for word in sys.argv[:number] if word.startswith("--env=PERFEXP")]
os.environ.update({{name: value for name, _, value in pairs}})
os.execv(sys.executable, [sys.executable, "-m", "perfexp", *sys.argv[number + 1 :]])
"""


@pytest.mark.slow
def test_image_runs_without_network_and_its_digest_is_recorded(run, monkeypatch):
    engine = Path("docker").absolute()
    engine.write_text(ENGINE.format(python=sys.executable))
    engine.chmod(0o755)
    Path("data").mkdir()
    place = Path("data").absolute()
    given = (
        "--image=perfexp:1",
        f"--engine={engine}",
        "--processes=1",
        f"speed_dir={place}",
        "output_dir=y",
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(commands.__file__).parents[2]))
    assert run("reproduce", "x", "device_lock=wait", *given, "--dry-run")[0] == 0
    assert not Path("y").exists()
    code, printed = run("reproduce", "x", "device_lock=wait", *given)
    assert code in (0, 2), printed
    argv = json.loads(Path("argv.json").read_text())
    assert argv[:3] == ["run", "--rm", "--network=none"]
    target = Path("y").absolute()
    assert f"--mount=type=bind,source={target},target={target}" in argv
    assert f"--mount=type=bind,source={place},target={place},readonly" in argv
    assert "--gpus=all" not in argv
    assert argv[-1] == "tracking=none"
    image = Record.load(Path("y")).environment["image"]
    assert image["reference"] == f"perfexp:1@sha256:{'ab' * 32}"


def test_a_record_chooses_no_thousand_processes(run):
    record = Record.load(Path("x"))
    timed = next(point for point in record.points if point.key.is_timed)
    for number in range(101):
        key = msgspec.structs.replace(timed.key, replicate=number)
        if number:
            record.points.append(msgspec.structs.replace(timed, key=key))
    record.points[:] = {point.key: point for point in record.points}.values()
    Path("x/record.json").write_bytes(record.to_json())
    code, printed = run(*AGAIN, "--dry-run")
    assert code == 2
    assert "The record is of 101 processes: set --processes=N." in printed
    assert run(*AGAIN, "--dry-run", "--processes=7")[0] == 0


def test_a_sweeps_run_is_reproduced_without_its_sweep(run):
    record = Record.load(Path("x"))
    shutil.copytree("x", "z")
    for name in ("details/plan.yaml", "details/manifest.json"):
        Path("z", name).unlink()
    Path("z/record.json").write_bytes(
        msgspec.structs.replace(record, command=record.command[:-1]).to_json()
    )
    assert run("reproduce", "z", "processes=2")[0] == 2
    assert run("reproduce", "z", *MEASURED, "--dry-run")[0] == 0
