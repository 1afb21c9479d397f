"""experiment=segmentation_table: six lines in one command, and mp only where there are cards for it."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from perfexp.host import installation
from perfexp.main import main
from perfexp.orchestration import segmentation_table, worker_query
from perfexp.plan import config
from perfexp.records.sweep_record import Sweep

pytestmark = pytest.mark.usefixtures("quick_commands")

SMALL = (
    *("model=fake", "tracking=none", "stopping.measure=20", "input_size=64"),
    *("probes.work=false", "device_lock=fail", "quiet=true"),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, with a scripted card in a folder of one's own: it has a number of cards, as real ones do."""
    gpus = tmp_path / "own" / "gpu"
    gpus.mkdir(parents=True)
    for name in ("fake", "scripted"):
        (gpus / f"{name}_card.yaml").write_text(
            f"defaults:\n  - fake\n  - _self_\n\nname: {name}\ncount: 1\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def visible(monkeypatch):
    """A function that says how many cards there are."""

    def have(number):
        monkeypatch.setattr(worker_query, "visible_gpus", lambda: number)

    return have


def table(*arguments):
    return main(
        [
            "experiment=segmentation_table",
            "--config-dir=own",
            *SMALL,
            "output_dir=sweep",
            *arguments,
        ]
    )


@pytest.mark.parametrize(
    ("gpu", "number", "counts"),
    [
        ("auto", 0, "1"),
        ("auto", 1, "1"),
        ("auto", 2, "1,2"),
        ("h100", 8, "1,8"),
        ("cpu", 8, "1"),
        ("fake", 8, "1"),
    ],
)
def test_a_table_is_over_one_card_and_all_that_are_visible(gpu, number, counts, visible):
    visible(number)
    assert segmentation_table.counts(gpu) == counts


def test_the_experiment_is_the_seeds_six_lines():
    config.register()
    with initialize_config_dir(config_dir=str(installation.conf_dir()), version_base="1.3"):
        composed = compose(
            "config", ["experiment=segmentation_table", "hydra.mode=RUN"], return_hydra_config=True
        )
    params = composed.hydra.sweeper.params
    assert params["model"] == "fastscnn,ocrnet_hrnetw48,segformer_b0"
    assert list(params) == ["model", "gpu.count"]
    assert (composed.batch_size, composed.input_size, composed.precision.name) == (
        2,
        "512x1024",
        "fp32",
    )
    assert (composed.stopping.measure, composed.mode.name, composed.speed_dir) == (
        500,
        "train",
        ".",
    )
    assert not composed.probes.call_times


def test_with_one_gpu_mp_is_skipped_and_the_table_is_shown(here, visible, capsys):
    visible(1)
    assert table("gpu=scripted_card") == 0
    sweep = Sweep.load(here / "sweep")
    assert (sweep.jobs, len(sweep.children)) == (1, 1)
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("mp is skipped: one GPU is visible here.")
    assert "training of segmentation models" in out
    [line] = [
        line
        for line in out.splitlines()
        if "fake_sp_bs2_fp32_1_speed.json" in line and line.startswith("  fake ")
    ]
    assert line.split()[1:4] == ["1", "fp32", "2"]
    assert (here / "fake_sp_bs2_fp32_1_speed.json").is_file()


@pytest.mark.slow
def test_with_several_cards_there_is_a_run_for_one_and_for_all(here, visible, capsys):
    visible(3)
    table(
        "gpu=scripted_card", "model=fake,fastscnn", "percentiles=[0]"
    )  # is refused at once, whatever the model
    out = capsys.readouterr().out
    assert "4 of 4 runs ended, 4 failed" in out
    rows = [
        line.split()
        for line in out.splitlines()
        if line.startswith("    ") and line.endswith(" failed")
    ]
    assert rows == [
        ["0", "fake", "1", "failed"],
        ["1", "fake", "3", "failed"],
        ["2", "fastscnn", "1", "failed"],
        ["3", "fastscnn", "3", "failed"],
    ]
    assert "mp is skipped" not in out
    shown = [
        line.split()[:3]
        for line in out.splitlines()
        if line.startswith("  f") and "percentiles" in line
    ]
    assert shown == [[name, count, "failed:"] for name in ("fake", "fastscnn") for count in "13"]


@pytest.mark.slow
def test_what_the_user_says_of_cards_counts_more(here, visible, capsys):
    visible(1)
    table("gpu=scripted_card", "gpu.count=1,5", "percentiles=[0]")
    out = capsys.readouterr().out
    rows = [
        line.split()
        for line in out.splitlines()
        if line.startswith("    ") and line.endswith(" failed")
    ]
    assert rows == [["0", "1", "failed"], ["1", "5", "failed"]]
    assert "mp is skipped" not in out


def test_no_card_at_all_is_no_reason_to_ask(here, monkeypatch, capsys):
    monkeypatch.setattr(worker_query, "visible_gpus", lambda: pytest.fail("asked"))
    table("gpu=fake_card", "percentiles=[0]")
    assert "mp is skipped: gpu=fake is not a GPU." in capsys.readouterr().out


def test_measuring_no_training_says_why_there_is_no_table(capsys, tmp_path, monkeypatch):
    """An inference leaves no speed file, so the table has no line."""
    callback = segmentation_table.SegmentationTable(register=lambda *_, **__: None)
    monkeypatch.setattr(
        "perfexp.records.sweep_record.Sweep.load",
        lambda folder: SimpleNamespace(records=lambda folder: []),
    )
    monkeypatch.setattr("perfexp.orchestration.segmentation_table.trainings", lambda *_: None)
    monkeypatch.setattr(segmentation_table.SweepRun, "folder", tmp_path)
    config = SimpleNamespace(
        quiet=True, hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path)))
    )
    callback.on_multirun_end(config)
    printed = capsys.readouterr()
    assert "no training was measured (mode=train)" in printed.out + printed.err
