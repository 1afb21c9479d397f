"""Values, lists and sweeps beyond any sense: a plan or one line with code 2, before anything is expanded."""

import cProfile
import io
import json
import pstats
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import yaml

from perfexp import commands
from perfexp.cli.flags import joined_flags
from perfexp.cli.overrides import axes_of, max_jobs, parsed, refuse_many
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.records.sweep_record import Sweep
from tests.support.verdicts import record

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none")
HUGE = "1" + 30 * "0"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command that is refused; the one line that says why."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        code = main([*FAKE, *arguments, "output_dir=x"])
        printed = capsys.readouterr()
        [line] = printed.err.splitlines()
        assert code == 2, line
        assert line.startswith("error: ")
        assert len(line) < 500
        assert not (tmp_path / "x").exists()
        return line

    return go


@pytest.mark.parametrize(
    "argument",
    [
        *(f"timeout_seconds={value}" for value in ("nan", "1e300", "-inf", "0", "-1", HUGE)),
        *(
            f"input_size={value}"
            for value in ("null", "1e9", HUGE, f"{HUGE}x1", "1000000000", "[]", "[nan]")
        ),
        *(
            f"batch_size={value}"
            for value in ("null", "1e9", HUGE, "1000000000", "[inf]", f"-{HUGE}", "true")
        ),
        *(f"seed={value}" for value in ("nan", "-1", HUGE, "18446744073709551615", f"-{HUGE}")),
        *(f"execution.threads={value}" for value in ("1000000000", HUGE, "-1", "nan")),
        *(f"execution.interop_threads={value}" for value in ("1000000000", HUGE, "0")),
        *(f"processes={value}" for value in (HUGE, "100001", "0", "-1", "inf")),
        *(
            f"percentiles={value}"
            for value in ("[nan]", "[inf]", "[-50,95]", "[1e-300]", "[99.99999999]")
        ),
        *(f"probes.energy_seconds={value}" for value in ("inf", "nan", "1e300", "0", "-1")),
        f"input_size=[{','.join(map(str, range(1, 500)))}] batch_size=[{','.join(map(str, range(1, 500)))}]",
        *(f"epochs={value} mode=train" for value in ("nan", HUGE, "0", "-1", "inf")),
        *(f"sweep=sizes sweep.num_sizes={value}" for value in (HUGE, "0", "nan")),
        "sweep=sizes sweep.num_sizes=1000000000 sweep.max_size=1000000000000",
        "sweep=sizes sweep.num_sizes=3 batch_size=null",
        "sweep=batch sweep.batch_sizes=[1000000000000]",
        "sweep=batch input_size=null",
        "stopping=null",
        "algorithm=null",
        "stopping=2",
        "precision=[1]",
        "~sweep=-1",
    ],
)
def test_a_value_that_can_not_be_measured_is_refused_in_one_line(refused, argument):
    refused(*argument.split(), "stopping=fixed")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300", HUGE])
@pytest.mark.parametrize(
    "key",
    [
        "stopping=normal stopping.target",
        "stopping=normal stopping.max_seconds",
        "stopping=normal stopping.max_calls",
        "stopping=normal stopping.min_calls",
        "stopping=normal stopping.warmup_calls",
        "stopping=normal stopping.warmup_seconds",
        "stopping=normal stopping.min_effective",
        "stopping=fixed stopping.warmup",
        "stopping=fixed stopping.measure",
        "tracking=mlflow tracking.request_timeout_seconds",
        "model=resnet18 gpu=h200 gpu.count",
        "model=resnet18 gpu=h200 gpu.index",
        "model=resnet18 gpu=h200 gpu.count=2 gpu.port",
    ],
)
def test_every_number_of_a_group_has_limits(refused, key, value):
    name = key.split()[-1]
    assert name in refused(*f"{key}={value}".split())


def test_no_time_limit_can_be_written_as_inf(tmp_path):
    assert (
        main([*FAKE, "stopping=fixed", "timeout_seconds=inf", f"output_dir={tmp_path / 'x'}"]) == 0
    )
    assert "timeout_seconds: null" in (tmp_path / "x" / "details" / "plan.yaml").read_text()


def test_the_limit_on_points_is_named(refused):
    assert "100,000 points" in refused("stopping=fixed", f"processes={HUGE}")


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ("batch_size=range(1,2000000000)", "1,999,999,999 runs"),
        ("batch_size=shuffle(range(1,2000000000))", "1,999,999,999 runs"),
        ("model.base_seconds=range(0,1,0.0000000001)", "10,000,000,000 runs"),
        ("model.base_seconds=range(0,1e300,0.5)", "runs"),
        (
            "batch_size=range(1,40) input_size=range(1,40)",
            "1,521 runs (batch_size: 39 × input_size: 39)",
        ),
        ("seed=1,2 batch_size=range(1,40) input_size=range(0,-40,-2) processes=1", "1,560 runs"),
        ("model=glob(*) gpu=glob(*) algorithm=glob(*)", "runs (model: "),
        ("experiment=all batch_size=range(1,600)", "1,198 runs (batch_size: 599 × mode: 2)"),
        ("batch_size=range(1,inf)", "is endless"),
        ("batch_size=range(1,10,0)", "is endless"),
        ("model.base_seconds=range(nan,1)", "is endless"),
        ("--max-jobs 1 batch_size=1,2", "2 runs (batch_size: 2): at most 1"),
        ("--max-jobs=0 batch_size=1,2", "--max-jobs 0: set an integer"),
        ("--max-jobs", "--max-jobs"),
    ],
)
def test_the_runs_of_a_sweep_are_counted_before_they_are_listed(refused, axes, told):
    assert told in refused("stopping=fixed", "-m", *axes.split())


def test_sweep_within_max_jobs_runs_and_its_command_has_no_limit(tmp_path):
    arguments = [
        *FAKE,
        "quiet=true",
        "stopping=fixed",
        "-m",
        "batch_size=1,2",
        f"output_dir={tmp_path / 's'}",
    ]
    assert main(["--max-jobs", "2", *arguments]) == 0
    assert Sweep.load(tmp_path / "s").command == arguments


def test_the_flag_is_read_wherever_it_stands():
    assert max_jobs(joined_flags(["-m", "--max-jobs", "7", "seed=1,2"])) == 7
    assert max_jobs(joined_flags(["seed=1,2", "--max-jobs=7"])) == 7
    assert max_jobs(["seed=1,2"]) == 1000


def test_the_limit_is_the_number_of_runs():
    arguments = ["seed=range(0,2000)", "batch_size=1"]
    refuse_many(arguments, 2000)
    with pytest.raises(UserError, match="at most 1,999"):
        refuse_many(arguments, 1999)


def test_the_last_override_of_a_key_counts_as_for_the_sweeper():
    assert axes_of(["seed=1,2", "model=a,b,c", "seed=3", "+hydra.x=1,2"]) == {"model": 3}
    assert axes_of(["seed=1,2", "seed=3,4,5"]) == {"seed": 3}
    assert axes_of(["seed=interval(0,1)"]) == {"seed": None}


@pytest.mark.parametrize(
    "text",
    ["range(1,4)", "range(4,1,-1)", "range(0,1,0.25)", "range(1,1)", "range(0,1,0.3)", "a,b"],
)
def test_arithmetic_and_list_have_the_same_length(text):
    [override] = parsed([f"seed={text}"])
    assert axes_of([f"seed={text}"]) == {"seed": len(list(override.sweep_iterator()))}


@pytest.mark.parametrize(
    "value",
    [
        "[" * 200_000,
        "{a:" * 20_000,
        "f(" * 500,
        "${" * 400,
        "9" * 5000,
        "a" * 200_000,
        "[" * 33 + "]" * 33,
    ],
)
@pytest.mark.parametrize("parse", ["refused", parsed])
def test_value_too_costly_to_parse_is_refused(refused, value, parse):
    if parse == "refused":
        refused(f"batch_size={value}")
    else:
        with pytest.raises(UserError):
            parse([f"batch_size={value}"])


def test_what_is_nested_a_little_is_read():
    assert parsed(["x=" + "[" * 20 + "1" + "]" * 20])


@pytest.fixture
def stored(tmp_path, finished):
    """A run's folder whose plan.yaml somebody has changed; `perfexp status` of it."""
    assert (
        finished(*FAKE, "stopping=fixed", "sweep=sizes", "quiet=true", "output_dir=x")
        .copied(tmp_path)
        .code
        == 0
    )

    def change(**settings):
        file = tmp_path / "x" / "details" / "plan.yaml"
        plan = yaml.safe_load(file.read_text())
        for key, value in settings.items():
            plan[key] = (
                {**plan[key], **value} if key == "sweep" and "_target_" not in value else value
            )
        file.write_text(yaml.safe_dump(plan))
        return commands.run(["status", str(tmp_path)])

    return change


@pytest.mark.parametrize(
    "settings",
    [
        {"processes": 10**30},
        {"sweep": {"num_sizes": 10**12, "max_size": 10**13}},
        {"percentiles": [-50, 95]},
        {"sweep": {"_target_": "perfexp.sweep.Point"}, "input_size": list(range(1, 100_002))},
        {"sweep": {"_target_": "perfexp.sweep.Point"}, "input_size": [[[]]]},
    ],
)
def test_status_counts_no_points_of_a_changed_plan(stored, capsys, settings):
    capsys.readouterr()
    assert stored(**settings) == 0
    assert "10/10 done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "{}", '{"keys": 5}', '{"keys": [{}]}', '{"keys": [[', "[" * 100_000, "\x00", "é"]
)
def test_invalid_expected_points_are_unreadable_to_status(stored, tmp_path, capsys, text):
    (tmp_path / "x" / "details" / "expected.json").write_text(text, encoding="latin-1")
    capsys.readouterr()
    assert stored() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("unreadable  ")
    assert "expected.json cannot be read" in line


@pytest.mark.parametrize(
    "text", ["a: [" + "1, " * 2_000_000 + "1]", "a: " + "9" * 5000, "[" * 5000, "a: \x00"]
)
def test_a_file_that_is_no_plan_is_unreadable_to_status(tmp_path, capsys, text):
    (tmp_path / "x" / "details").mkdir(parents=True)
    (tmp_path / "x" / "details" / "plan.yaml").write_text(text)
    assert commands.run(["status", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("unreadable  ")
    assert "Traceback" not in told
    assert len(told) < 2000


def test_a_stored_sweep_of_too_many_runs_is_not_listed(tmp_path, capsys):
    sweep = Sweep(
        uid="0" * 32,
        name="batch_size",
        started="2026-03-01T10:00:00+00:00",
        command=[*FAKE, "-m", "batch_size=range(1,2000000000)"],
        jobs=1_999_999_999,
    )
    (tmp_path / "sweep.json").write_bytes(sweep.to_json())
    assert json.loads((tmp_path / "sweep.json").read_bytes())
    assert commands.run(["status", str(tmp_path)]) == 1
    assert (
        "0 of 1999999999 runs have ended; those that have not begun are not counted"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("command", [["show"], ["compare"], ["check", "--against"]])
def test_four_times_the_sizes_take_about_four_times_the_calls(tmp_path, monkeypatch, command):
    """Calls of each function are counted: a search for each size takes sixteen times as many."""
    monkeypatch.chdir(tmp_path)
    counts = []
    for sizes in (40, 160):
        for number, name in enumerate(("a", "b")):
            made = record(
                name, [[float(size)] for size in range(1, sizes + 1)], np.random.default_rng(number)
            )
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "record.json").write_bytes(made.to_json())
        profile = cProfile.Profile()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            profile.runcall(
                commands.run,
                [command[0], "a", *command[1:], *(["b"] if command != ["show"] else [])],
            )
        functions = pstats.Stats(profile).stats.items()
        counts.append({place: calls for place, (calls, *_) in functions if "perfexp" in place[0]})
    few, many = counts
    assert {
        place: calls
        for place, calls in many.items()
        if calls > 1000 and calls > 6 * few.get(place, calls)
    } == {}
