"""The Python interface: plans, records and tables."""

import contextlib
import doctest
import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import perfexp
from perfexp.errors import PerfexpError, UserError
from perfexp.measuring.procedure import Procedure
from perfexp.models.fake import FakeModel
from perfexp.records.record import Record, Status

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = {"gpu": "fake", "tracking": "none", "stopping": "fixed", "cold_start": False, "processes": 1}
NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "batch-sizes.ipynb"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_overrides_are_composed_as_on_the_command_line():
    plan = perfexp.compose(
        "model=swin_t", batch_size=[1, 8], stopping__max_seconds=3, precision="fp16", epochs=None
    )
    assert (plan.model_name, plan.batch_size, plan.stopping["max_seconds"]) == ("swin_t", [1, 8], 3)
    assert (plan.precision.name, plan.epochs) == ("fp16", None)


def test_the_interface_is_listed():
    listed = subprocess.run(
        [sys.executable, "-c", "import perfexp; print(dir(perfexp))"],
        capture_output=True,
        text=True,
    )
    assert {f"'{name}'" for name in perfexp.__all__} <= set(listed.stdout.strip("[]\n").split(", "))


@pytest.mark.parametrize("model", [3, None, ["resnet18"]])
def test_what_is_not_a_model_is_a_user_error(model, tmp_path):
    with pytest.raises(UserError, match="is not a model; pass a name"):
        perfexp.measure(model, gpu="cpu", tracking="none")
    assert not list(tmp_path.iterdir())


def test_a_wrong_override_is_a_user_error():
    with pytest.raises(UserError, match="Did you mean batch_size"):
        perfexp.compose(batchsize=8)


@pytest.mark.parametrize("model", ["fake", "perfexp.models.fake:FakeModel"])
def test_a_name_is_measured_in_a_fresh_process(model):
    record = perfexp.measure(model, **FAKE, output_dir="run", batch_size=[1, 2])
    assert record.status is Status.OK
    assert "in_process" not in record.environment
    assert [point.key.batch_size for point in record.points] == [1, 2]


def test_object_is_measured_in_process_and_the_record_says_so():
    record = perfexp.measure(
        FakeModel(), gpu="fake", tracking="none", stopping="fixed", output_dir="run"
    )
    assert record.status is Status.OK
    assert record.environment["in_process"] is True
    assert "in_process" in [diagnostic.code for diagnostic in record.doubts]
    with pytest.raises(UserError, match="results of an earlier object"):
        perfexp.measure(
            FakeModel(), gpu="fake", tracking="none", stopping="fixed", output_dir="run"
        )
    with pytest.raises(UserError, match="holds the run of another plan"):
        perfexp.measure(
            FakeModel(),
            gpu="fake",
            tracking="none",
            stopping="fixed",
            output_dir="run",
            batch_size=2,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), PerfexpError)],
)
def test_unfinished_api_measurement_keeps_finished_points(monkeypatch, failure, raised):
    measure, calls = Procedure.measure, []

    def second_fails(self, key):
        calls.append(key)
        if len(calls) == 2:
            raise failure
        return measure(self, key)

    monkeypatch.setattr(Procedure, "measure", second_fails)
    settings = {
        "gpu": "fake",
        "tracking": "none",
        "stopping": "fixed",
        "output_dir": "run",
        "batch_size": [1, 2],
    }
    with pytest.raises(raised):
        perfexp.measure(FakeModel(), **settings)
    finished = [point.key for point in Record.load(Path("run")).points if point.status is Status.OK]
    assert finished == calls[:1]
    assert list(Path("run").glob("*.csv"))


@pytest.mark.slow
def test_a_folder_without_a_result_is_measured_into(monkeypatch):
    settings = {"gpu": "fake", "tracking": "none", "stopping": "fixed", "output_dir": "run"}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Procedure, "measure", Mock(side_effect=KeyboardInterrupt))
        perfexp.measure(FakeModel(), **settings)
    assert perfexp.measure(FakeModel(), **settings).status is Status.OK


def test_an_object_is_measured_once():
    with pytest.raises(UserError, match="one process"):
        perfexp.measure(FakeModel(), gpu="fake", tracking="none", replicate=2)


def test_a_module_that_a_fresh_process_cannot_import_is_refused():
    with pytest.raises(UserError, match="not found by another process"):
        perfexp.measure("__main__:TinyNet")


def test_a_name_that_a_module_lacks_is_named():
    with pytest.raises(PerfexpError) as raised:
        perfexp.measure("perfexp.models.fake:FakeMdel", **FAKE)
    assert "module perfexp.models.fake has no FakeMdel. Did you mean FakeModel" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_record_is_printed_as_the_table_of_show():
    record = perfexp.measure("fake", **FAKE, output_dir="run")
    lines = str(record).splitlines()
    assert lines[0].startswith("fake · inference · ")
    assert any(line.startswith(("  latency ", "  GPU time ")) for line in lines)
    assert max(map(len, lines)) <= 120
    assert "Record(" not in str(record)
    assert repr(record).startswith("Record(")


def test_a_module_that_is_not_supported_is_one_line(capfd):
    class Mlp(torch.nn.Linear):
        def __init__(self):
            super().__init__(8, 4)

    record = perfexp.measure(
        Mlp(), gpu="cpu", tracking="none", stopping="fixed", input_size=32, output_dir="run"
    )
    assert record.status is Status.UNSUPPORTED
    [line] = [
        line for line in capfd.readouterr().err.splitlines() if "waiting for the device" not in line
    ]
    assert line.startswith("warning: inference · 32 · batch 1")
    assert "sample_shape(input_size)" in line
    assert "RuntimeError" in Path("run", "details", "run.log").read_text()


def failing_in(call_number, error):
    """A function that fails once."""
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) == call_number:
            raise error
        return x

    return function


def test_an_error_in_the_first_call_has_its_line():
    def refuses(x):
        raise ValueError("no images")

    [point] = perfexp.measure(refuses, **{**FAKE, "gpu": "cpu"}).points
    assert re.search(r"no images \(test_api.py:\d+\)\.", point.error)


@pytest.mark.parametrize("call_number", [2, 8, 25])
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("mine"), "failed"), (MemoryError("mine"), "oom")]
)
def test_an_error_in_any_call_is_the_result(call_number, error, status):
    record = perfexp.measure(failing_in(call_number, error), **{**FAKE, "gpu": "cpu"})
    [point] = record.points
    assert point.status == status
    assert point.error.startswith(f"{type(error).__name__}: mine")
    assert ("mine (test_api.py:" in point.error) == (status == "failed")
    assert "throughput" not in repr(record), "a failed point has no line of figures"


def test_ctrl_c_during_a_series_ends_the_measurement():
    with pytest.raises(KeyboardInterrupt):
        perfexp.measure(failing_in(25, KeyboardInterrupt()), **{**FAKE, "gpu": "cpu"})


def test_runs_are_loaded_as_tables():
    perfexp.measure("fake", **FAKE, output_dir="runs/a")
    perfexp.measure("fake", **FAKE, output_dir="runs/b", batch_size=2)
    points = perfexp.load("runs")
    assert sorted(points.batch_size) == [1, 2]
    assert len(perfexp.load("runs", what="samples")) > 2
    with pytest.raises(UserError, match="Possible: layers, points, samples"):
        perfexp.load("runs", what="x")


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, perfexp; sys.exit(bool({'torch', 'hydra', 'pandas', 'typer'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.always("README: documentation, the notebook")
def test_the_notebook_runs(capsys):
    """Each code cell in order, in one namespace, as Jupyter runs them."""
    os.environ.setdefault("MPLBACKEND", "agg")
    space = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), space)
            assert bool(out.getvalue()) == bool(cell["outputs"])
    assert list(space["points"].status) == ["ok"] * 3


@pytest.mark.parametrize("name", perfexp.__all__[1:])
def test_examples_in_public_docstrings_run(name):
    function = getattr(perfexp, name)
    [test] = doctest.DocTestFinder(recurse=False).find(function, name)
    assert test.examples
    runner = doctest.DocTestRunner(verbose=False)
    test.globs.update(vars(import_module(function.__module__)))
    assert runner.run(test).failed == 0
