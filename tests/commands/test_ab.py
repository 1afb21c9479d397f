"""`perfexp ab`: processes in turn until a verdict, which `compare` of the folder repeats; continuing; wrong input."""

import json
import re
import shlex

import msgspec
import pytest

from perfexp import commands, main
from perfexp.commands import sides
from perfexp.commands.ab import AbRun
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, Status, read_points
from perfexp.records.sweep_record import Sweep
from perfexp.statistics import sequential

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = (
    "model=fake",
    "gpu=fake",
    "input_size=64",
    "stopping=brisk",
    "tracking=none",
    "output_dir=x",
)
A, B = "model.base_seconds=1e-3", "model.base_seconds=1.1e-3"
#: Factors on the device's times of the replicates 0, 1, …, alternately of two runs.
FACTORS = (1.0, 1.06, 0.95, 1.03, 0.98, 1.05, 0.96, 1.02)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def processes_that_differ(slower_device):
    """Workers on a device that is slower by the factor of their replicate."""
    slower_device(*FACTORS)


def measured(capsys, *arguments):
    """The exit code, stdout and stderr of `perfexp ab` on the scripted device."""
    code = commands.run(["ab", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def compared(capsys, *places):
    assert commands.run(["compare", *places, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def folders(here):
    return sorted(path.parent.parent for path in (here / "x").glob("*/details/plan.yaml"))


@pytest.mark.slow
@pytest.mark.always("README: perfexp ab")
def test_ab_decides_by_alternating_processes_compare_agrees(here, capsys):
    code, out, _ = measured(capsys, A, B, *FAKE)
    assert code == 0
    assert (
        "two variants in turn\n  A  model.base_seconds=1e-3\n  B  model.base_seconds=1.1e-3\n"
        in out
    )
    assert "2 processes of each: device B/A 1.0" in out
    assert (
        out.count("▼ SLOWER") >= 3
    )  # of the look, in the table of the sweep, and of the comparison
    one, two = folders(here)
    points = [
        (point.started, folder.name[0])
        for folder in (one, two)
        for point in read_points(folder / "details" / "points.jsonl")
    ]
    assert "".join(name for _, name in sorted(points)) == "0110"
    for folder in (one, two):
        record = Record.load(folder)
        assert (record.status, record.plan["processes"]) == (Status.OK, 2)
        assert record.sweep.level == sequential.level(2)
        assert {point.key.phase for point in record.points} == {"inference"}  # no cold starts
    assert re.fullmatch(
        r"B is 1\.\d+× slower than A \(± .+, GPU time\)(; .+)?", out.splitlines()[-1]
    )
    found = compared(capsys, "x")
    assert found["sides"][1]["level"] == sequential.level(2)
    assert {pair["word"] for pair in found["pairs"] if pair["measure"] == "device"} == {"SLOWER"}
    assert compared(capsys, str(one), str(two))["pairs"] == found["pairs"]

    before = [(folder / "details" / "points.jsonl").read_bytes() for folder in (one, two)]
    assert measured(capsys, A, B, *FAKE)[0] == 0
    assert [(folder / "details" / "points.jsonl").read_bytes() for folder in (one, two)] == before
    assert Sweep.load(here / "x").jobs == 2

    assert main.main(["resume=x"]) == 2
    again = shlex.join(["perfexp", "ab", A, B, *FAKE])
    assert (
        f"to continue it, repeat its command if you trust it: {again}\n" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_ab_out_of_time_is_undecided_and_the_command_continues(
    processes_that_differ, here, capsys, monkeypatch
):
    identical = ("", "", *FAKE)
    options = ("--margin", "0.1%", "--metric", "device")
    code, out, _ = measured(capsys, *identical, *options, "--max-seconds", "0")
    assert code == 0
    assert "no intervals before 2 processes of each side" in out
    assert [Record.load(folder).sweep.level for folder in folders(here)] == [0.0, 0.0]
    monkeypatch.setattr(sequential, "MOST", 4)
    for other, keys in (
        ((), "--margin, --metric"),
        (("--margin=0.2%", "--metric=device"), "--margin"),
        (("--margin=0.1%", "--metric=latency"), "--metric"),
        ((*options, "--fdr=1%"), "--fdr"),
        ((*options, "--allow=cache"), "--allow"),
    ):
        code, out, err = measured(capsys, *identical, *other)
        assert (code, err.count("\n")) == (2, 1)
        assert f"continue it; yours differs in {keys}." in err
        assert "x holds another sweep: perfexp ab" in err and "--margin=0.1% --metric=device" in err
    code, out, _ = measured(capsys, *identical, "--margin", "0.10%", "--metric", "device")
    assert code == 0
    assert (
        "3 processes of each: device B/A 1.0" in out
        and "4 processes of each: device B/A 1.0" in out
    )
    assert "? UNDECIDED" in out
    assert "UNDECIDED after 4 processes of each side, the most" in out
    assert [side.facts.decided_by for side in sides.load(["x"], None)] == [("device",)] * 2
    assert [Record.load(folder).plan["processes"] for folder in folders(here)] == [4, 4]
    assert [len(read_points(folder / "details" / "points.jsonl")) for folder in folders(here)] == [
        4,
        4,
    ]


@pytest.mark.slow
def test_interrupted_ab_run_is_continued_by_the_same_command(here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(AbRun, "_is_over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        code, _, err = measured(capsys, A, B, *FAKE)
    assert code == 130
    assert shlex.join(["perfexp", "ab", A, B, *FAKE]) in err
    assert [Record.load(folder).status for folder in folders(here)] == [Status.OK] * 2
    assert [len(read_points(folder / "details" / "points.jsonl")) for folder in folders(here)] == [
        1,
        1,
    ]
    (folders(here)[0] / "record.json").unlink()  # as a SIGKILL would
    assert commands.run(["show", str(folders(here)[0])]) == 2
    again = shlex.join(["perfexp", "ab", A, B, *FAKE[:-1], f"output_dir={here / 'x'}"])
    assert f"1 point finished: {again} measures the rest" in capsys.readouterr().err
    code, out, _ = measured(capsys, A, B, *FAKE)
    assert code == 0
    assert "▼ SLOWER" in out
    assert [len(read_points(folder / "details" / "points.jsonl")) for folder in folders(here)] == [
        2,
        2,
    ]


def test_what_can_not_be_compared_ends_after_one_pair(here, capsys):
    code, out, _ = measured(capsys, "", "cache=flush", *FAKE)
    assert code == 0
    assert "✕ NOT COMPARABLE" in out
    assert "cache: warm → flush" in out
    assert [len(read_points(folder / "details" / "points.jsonl")) for folder in folders(here)] == [
        1,
        1,
    ]


def test_a_variant_that_fails_ends_it_with_1(here, capsys):
    code, out, err = measured(capsys, "", "+model.faults={oom:100}", *FAKE)
    assert code == 1
    assert "oom" in out
    assert "no timed point" in err or "No points can be paired" in err


@pytest.mark.slow
def test_more_processes_continue_a_run(here, capsys):
    plain = [text for text in FAKE if text != "output_dir=x"] + ["output_dir=r"]
    for count in (1, 3):
        assert main.main([*plain, f"processes={count}"]) == 0
    assert [
        point.key.replicate for point in read_points(here / "r" / "details" / "points.jsonl")
    ] == [0, 1, 2]
    first = read_points(here / "r" / "details" / "points.jsonl")[0]
    assert Record.load(here / "r").points[0].started == first.started
    (here / "r" / "details" / "points.jsonl").unlink()  # the record has them
    assert main.main([*plain, "processes=4"]) == 0
    assert msgspec.to_builtins(Record.load(here / "r").points[0].series) == msgspec.to_builtins(
        first.series
    )
    assert len(Record.load(here / "r").points) == 4
    capsys.readouterr()
    assert main.main([*plain, "processes=2"]) == 2
    assert "processes: 4 → 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fft", "", *FAKE), "'fft' is not an override"),
        (("'algorithm=fft", "", *FAKE), "quote the overrides as one argument"),
        (("output_dir=a", "", *FAKE), "'output_dir' is set by COMMON"),
        (("", "processes=4", *FAKE), "'processes' is set by the command"),
        (("", "", *FAKE, "processes=4"), "'processes' is set by the command"),
        (("batch_size=1", "batch_size=2", *FAKE), "A and B measure different points"),
        (("batch_size=1,2", "", *FAKE), "batch_size"),
        (("", "algorithm=nonsense", *FAKE), "nonsense"),
        (("", "", *FAKE, "--margin", "x"), "--margin x: give a percentage"),
    ],
)
def test_invalid_ab_arguments_are_refused_before_measuring(arguments, message, here, capsys):
    code, _, err = measured(capsys, *arguments)
    assert code == 2
    assert message in err
    assert not list((here / "x").glob("*/details/points.jsonl"))


@pytest.mark.slow
def test_a_folder_of_another_comparison_is_refused(here, capsys):
    assert measured(capsys, A, B, *FAKE, "--max-seconds", "0")[0] == 0
    code, _, err = measured(capsys, A, "", *FAKE)
    assert code == 2
    assert "holds another sweep: perfexp ab " in err
    (link := here / "y").mkdir()
    RunPaths(link / "0-base_seconds-1e-3").root.symlink_to(here)
    code, _, err = measured(capsys, A, B, *FAKE[:-1], "output_dir=y")
    assert code == 2
    assert "is a link" in err
