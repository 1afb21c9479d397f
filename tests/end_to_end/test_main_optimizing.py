"""The command line with sweepers that choose each run by the figures of earlier ones, and with other launchers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.records.sweep_record import Sweep as SweepRecord

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "input_size=64", "processes=1")


class Search(Sweeper):
    """Starts runs as hydra-optuna-sweeper does, and adds what they return to `figures`."""

    figures: list[object]

    def __init__(self, direction, batches):
        self.batches = batches

    def setup(self, *, hydra_context, task_function, config):
        self.folder = Path(config.hydra.sweep.dir)
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        fixed = [text for text in arguments if not text.startswith("batch_size=")]
        returns = self.launcher.launch(
            [[*fixed, f"batch_size={size}"] for size in self.batches], initial_job_idx=0
        )
        for run in returns:
            try:
                Search.figures.append(run.return_value)
            except Exception as error:
                Search.figures.append(error)
        if any(isinstance(figure, Exception) for figure in Search.figures):
            raise next(figure for figure in Search.figures if isinstance(figure, Exception))
        (self.folder / "optimization_results.yaml").write_text("best_value: 1\n")


Search.__module__ = "hydra_plugins.search"


@pytest.fixture
def search(run, tmp_path, monkeypatch):
    """A function that runs a sweep with `Search`; it returns the exit code, the output and the records."""
    monkeypatch.setattr(Search, "figures", [], raising=False)
    monkeypatch.setitem(sys.modules, Search.__module__, SimpleNamespace(Search=Search))
    Plugins.instance().register(Search)

    def started(*arguments, direction="minimize", batches=(1, 2)):
        folder = tmp_path / "own" / "hydra" / "sweeper"
        folder.mkdir(parents=True)
        node = {
            "_target_": "hydra_plugins.search.Search",
            "direction": direction,
            "batches": list(batches),
        }
        (folder / "search.yaml").write_text(f"# @package hydra.sweeper\n{yaml.safe_dump(node)}")
        axis = f"batch_size=choice({','.join(map(str, batches))})"
        return run(
            *FAKE,
            f"--config-dir={tmp_path / 'own'}",
            "-m",
            "hydra/sweeper=search",
            axis,
            *arguments,
        )

    return started


def test_a_sweeper_that_optimizes_gets_the_seconds_of_a_call(search, tmp_path):
    code, printed, records = search("output_dir=s")
    assert (code, len(records)) == (0, 2), printed
    sweep = SweepRecord.load(tmp_path / "s")
    assert [child.axes for child in sweep.children] == [{"batch_size": "1"}, {"batch_size": "2"}]
    of_runs = [Record.load(tmp_path / "s" / child.directory) for child in sweep.children]
    assert Search.figures == [
        pytest.approx(rows(record)[0].time.median.value) for record in of_runs
    ]
    assert (tmp_path / "s" / "optimization_results.yaml").read_text() == "best_value: 1\n"
    assert (
        "hydra_plugins.search.Search" in (tmp_path / "s" / "details" / "multirun.yaml").read_text()
    )


def test_maximize_uses_samples_per_second_and_minimize_a_time(search):
    code, printed, records = search(direction=["minimize", "maximize"], batches=[2])
    assert code == 0, printed
    [row] = rows(records[0])
    assert Search.figures == [
        [pytest.approx(row.time.median.value), pytest.approx(row.samples_per_second.value)]
    ]


def test_run_error_reaches_the_sweeper_and_is_printed_once(search):
    code, printed, _ = search(batches=[0, 0])
    assert code == 2
    assert len(Search.figures) == 2
    assert all("not a batch size" in str(error) for error in Search.figures)
    assert printed.count("error: batch_size=0") == 2


def test_a_run_without_a_time_is_an_error_for_the_sweeper(search):
    code, _, _ = search("model.faults.oom=1", batches=[1])
    assert code == 1
    assert "no figure to optimize" in str(Search.figures[0])


def test_a_search_whose_runs_are_all_refused_leaves_nothing(search, tmp_path):
    code, printed, records = search("output_dir=s", batches=(0,))
    assert (code, records) == (2, [])
    assert "batch_size=0 is not a batch size" in printed
    assert not (tmp_path / "s").exists()


def test_another_study_is_not_mixed_with_that_of_a_folder(search, tmp_path):
    assert search("output_dir=s", batches=(1,))[0] == 0
    before = (tmp_path / "s" / "sweep.json").read_bytes()
    (tmp_path / "own" / "hydra" / "sweeper" / "search.yaml").unlink()
    (tmp_path / "own" / "hydra" / "sweeper").rmdir()
    code, printed, _ = search("output_dir=s", batches=(2,))
    assert (code, printed.count("has a study, which can't go on")) == (2, 1)
    assert (tmp_path / "s" / "sweep.json").read_bytes() == before


@pytest.mark.parametrize("flag", ["--dry-run", "hydra/launcher=local"])
def test_sweeper_that_needs_figures_refuses_runs_without_them(search, flag, tmp_path):
    given = [flag, "hydra.launcher.gpus=2"] if "launcher" in flag else [flag]
    code, printed, _ = search(*given, "output_dir=s")
    assert code == 2
    [line] = printed.splitlines()
    assert line.startswith("error: hydra/sweeper=search ")
    assert line.endswith(f"leave out {flag.partition('=')[0]}.")
    assert not (tmp_path / "s").exists()


def test_foreign_launcher_is_refused_by_name_before_measuring(run, tmp_path):
    folder = tmp_path / "own" / "hydra" / "launcher"
    folder.mkdir(parents=True)
    (folder / "joblib.yaml").write_text(
        "# @package hydra.launcher\n_target_: hydra_plugins.other.Launcher\n"
    )
    arguments = (
        f"--config-dir={tmp_path / 'own'}",
        "hydra/launcher=joblib",
        "output_dir=s",
        "batch_size=1,2",
    )
    code, printed, _ = run(*FAKE, "-m", *arguments)
    assert code == 2
    [line] = printed.splitlines()
    assert line.startswith("error: hydra/launcher=joblib can't measure")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "argument", ["model=range(1,3)", "model=resnet18,3", "precision=interval(1,2)"]
)
def test_numbers_are_not_names_of_options(run, argument):
    code, printed, _ = run("gpu=fake", "tracking=none", "-m", argument)
    assert code == 2
    assert (
        printed == f"error: '{argument}' is not an option: set {argument.partition('=')[0]}=NAME.\n"
    )
