"""Exceptions that nothing accounts for: one line, and the traceback in a file."""

import pytest

from perfexp import commands
from perfexp.host import crash_report
from perfexp.main import main
from perfexp.records.record import Status
from perfexp.records.sweep_record import Sweep

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "quiet=true")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "perfexp" / "tracebacks"


def fail(*arguments, **settings):
    raise TypeError("a mistake\n  of two lines")


def line_of(capsys):
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: unexpected TypeError: a mistake of two lines; the traceback is in "
    )
    return line


@pytest.mark.parametrize(
    "place",
    [
        "perfexp.run.supervisor.measure",
        "perfexp.report.run_files.write",
        "perfexp.run.job.counted_points",
    ],
)
def test_in_a_run_the_traceback_goes_to_its_log(cache, tmp_path, monkeypatch, capsys, place):
    monkeypatch.setattr(place, fail)
    assert main([*FAKE, "output_dir=x"]) == 1
    log = tmp_path / "x" / "details" / "run.log"
    assert line_of(capsys).endswith(str(log))
    assert log.read_text().count("TypeError: a mistake") == 1
    assert not cache.exists()


@pytest.mark.parametrize(
    "place",
    ["perfexp.main.with_resumed", "perfexp.plan.config.typed", "perfexp.plan.naming.run_folder"],
)
def test_traceback_without_an_output_folder_goes_to_the_cache(cache, monkeypatch, capsys, place):
    monkeypatch.setattr(place, fail)
    assert main([*FAKE, "output_dir=x"]) == 1
    [file] = cache.iterdir()
    assert line_of(capsys).endswith(str(file))
    assert "in fail" in file.read_text()


def test_in_a_command_likewise(cache, monkeypatch, capsys):
    monkeypatch.setattr("perfexp.doctor.environment.collect", fail)
    assert commands.run(["env"]) == 2
    [file] = cache.iterdir()
    assert line_of(capsys).endswith(str(file))


def test_where_nothing_can_be_written_the_line_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (
        str(crash_report.failure(TypeError("x")))
        == "unexpected TypeError: x; the traceback could not be written"
    )


@pytest.mark.parametrize(
    "place", ["perfexp.run.job.counted_points", "perfexp.plan.naming.child_folder"]
)
def test_the_other_runs_of_a_sweep_are_measured(cache, tmp_path, monkeypatch, capsys, place):
    import importlib

    module, name = place.rsplit(".", 1)
    real, calls = getattr(importlib.import_module(module), name), []

    def fail_once(*arguments):
        calls.append(arguments)
        return fail() if len(calls) == 1 else real(*arguments)

    monkeypatch.setattr(place, fail_once)
    assert main([*FAKE, "-m", "batch_size=1,2", "output_dir=s"]) == 1
    line_of(capsys)
    failed, measured = [child.status for child in Sweep.load(tmp_path / "s").children]
    assert measured is Status.OK
    # while a run is announced, its worker measures: it may have all results by then
    may_end = {Status.FAILED, Status.OK} if "job" in place else {Status.FAILED}
    assert failed in may_end


def test_replicates_of_a_sweep_likewise(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("perfexp.run.supervisor.measure", fail)
    assert main([*FAKE, "-m", "batch_size=1,2", "processes=2", "output_dir=s"]) == 1
    line_of(capsys)


def test_what_sums_a_sweep_up_is_caught_too(cache, monkeypatch, capsys):
    monkeypatch.setattr("perfexp.report.run_files.write_sweep", fail)
    assert main([*FAKE, "-m", "batch_size=1,2", "output_dir=s"]) == 1
    line_of(capsys)


def test_unexpected_error_at_program_start_is_one_line(cache, monkeypatch, capsys):
    from perfexp import __main__

    monkeypatch.setattr("perfexp.__main__.install_streams", lambda: None)
    ignored = []
    monkeypatch.setattr("perfexp.__main__.interrupts.ignore", lambda: ignored.append(1))
    monkeypatch.setattr("perfexp.main.main", fail)
    monkeypatch.setattr("sys.argv", ["perfexp", "model=fake"])
    assert __main__.main() == 1
    assert ignored == [1]
    line_of(capsys)
