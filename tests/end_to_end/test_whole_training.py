"""Whole trainings as commands: what is refused before they start, what they leave, and how they are continued."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfexp import commands
from perfexp.errors import UserError
from perfexp.measuring.modes.train import Train
from perfexp.models import Schedule
from perfexp.records.analysis import Analysis
from perfexp.records.paths import RunPaths
from perfexp.records.record import Epoch, Metric, Status
from perfexp.report.markdown import markdown
from perfexp.report.tables import csv_tables, flat, vendor_file
from perfexp.report.tables.flat import charted, point_runs
from perfexp.worker.workbench import Workbench
from tests.data import cifar_folders

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "mode=train", "output_dir=x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "mode.train.schedule=cosine",
            "mode.train.schedule=cosine is for whole epochs: set epochs=N",
        ),
        ("mode.train.warmup_steps=5", "mode.train.warmup_steps=5 is for whole epochs"),
        ("mode.train.warmup_epochs=5", "mode.train.warmup_epochs=5 is for whole epochs"),
        ("epochs=2 mode.train.warmup_steps=3 mode.train.warmup_epochs=1", "use one of them"),
        ("mode.train.patience=2", "mode.train.patience=2 is for whole epochs"),
        ("mode.train.target_accuracy=0.9", "mode.train.target_accuracy=0.9 is for whole epochs"),
        (
            "epochs=2 mode.train.target_accuracy=94",
            "mode.train.target_accuracy=94.0: set a share above 0, up to 1, such as 0.94",
        ),
        (
            "epochs=2 mode.train.target_accuracy=0.9 mode.train.resume_from=y.pt",
            "leave out mode.train.resume_from",
        ),
        ("epochs=2 mode.train.target_acuracy=0.9", "target_accuracy"),
        ("mode.train.checkpoints=true", "mode.train.checkpoints=true is for whole epochs"),
        ("mode.train.resume_from=y.pt", "mode.train.resume_from=y.pt is for whole epochs"),
        (
            "epochs=2 mode.train.checkpoints=true batch_size=[1,2]",
            "is for one training, and this plan has 2",
        ),
        (
            "epochs=2 mode.train.checkpoints=true processes=2",
            "is for one training, and this plan has 2",
        ),
        ("epochs=2 mode.train.save_every=1", "save_every=1 needs mode.train.checkpoints=true"),
        ("epochs=2 mode.train.schedule=cosin", "cosine"),
        ("epochs=2 mode.train.warm_up=3", "warm_up"),
        ("mode.train.label_smoothing=nan", "mode.train.label_smoothing=nan: set a number"),
        ("mode.train.ema=2", "mode.train.ema=2.0: set a decay"),
        ("mode.train.clip_grad_norm=inf", "mode.train.clip_grad_norm=inf: set a positive number"),
        ("mode.train.optimizer.lr=nan", "mode.train.optimizer.lr=nan: set a number of 0 or more"),
        ("mode.train.optimizer.lr=fast", "mode.train.optimizer.lr=fast: set a number"),
    ],
)
def test_what_no_training_can_do_is_refused_before_it_starts(run, arguments, message):
    code, printed, records = run(*FAKE, "data.num_samples=8", *arguments.split())
    assert (code, records) == (2, [])
    assert message in printed
    assert not Path("x").exists()


def test_epochs_of_warmup_are_their_steps():
    rates = Train(optimizer={}, schedule=Schedule.cosine, warmup_epochs=2).rates(10, 7)
    assert [rates.factor(step) for step in (0, 6, 13, 14)] == pytest.approx(
        [1 / 14, 7 / 14, 1.0, 1.0]
    )


def test_a_model_without_a_state_has_no_checkpoints(run):
    code, printed, _ = run(*FAKE, "data.num_samples=8", "epochs=2", "mode.train.checkpoints=true")
    assert code == 2
    assert "mode.train.checkpoints=true: the model trains by its own settings" in printed


def test_epochs_appear_in_console_table_and_mlflow_steps(run):
    code, printed, [record] = run(*FAKE, "epochs=3", "data.num_samples=640", "batch_size=64")
    assert code == 0
    assert [f"epoch {number} of 3" in printed for number in (1, 2, 3)] == [True] * 3
    epochs = record.points[0].epochs
    assert [epoch.number for epoch in epochs] == [1, 2, 3]
    with Path("x/fake_default_epochs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["seconds"]) for line in lines] == [epoch.seconds for epoch in epochs]
    [part] = point_runs(Analysis.of(record))
    sent = [(each.name, each.step, each.value) for each in charted(part) if each.group == "epoch"]
    assert [one for one in sent if one[0] == "samples_per_second"] == [
        ("samples_per_second", epoch.number, epoch.samples_per_second) for epoch in epochs
    ]


def test_custom_metrics_of_an_epoch_are_columns_and_entries(make_record):
    record = make_record(phases=("train",))
    record.points[0].epochs = [
        Epoch(number=1, seconds=1.0, samples_per_second=1.0),
        Epoch(
            number=2,
            seconds=1.0,
            samples_per_second=1.0,
            metrics=[Metric(name="custom/f1", value=0.5, unit="1")],
        ),
    ]
    lines = list(
        csv.DictReader(csv_tables.to_csv(flat.epochs(Analysis.of(record))).decode().splitlines())
    )
    assert [line["custom/f1"] for line in lines] == ["", "0.5"]
    report = markdown(Analysis.of(record))
    assert "## Epochs" in report
    assert "| 2 | 1.00 s |" in report
    assert "0.5000 |" in report
    [training] = json.loads(vendor_file.to_json(Analysis.of(record)))["training"]
    assert training["epoch_metrics"] == [{}, {"custom/f1": 0.5}]


def test_epochs_of_a_record_are_read_back(finished_record):
    epoch = Epoch(number=2, seconds=1.5, samples_per_second=10.0, accuracy=0.5, learning_rate=0.1)
    record = finished_record
    record.points[0].epochs = [epoch]
    assert type(record).from_json(record.to_json()).points[0].epochs == [epoch]


@pytest.fixture
def finished_record(run):
    return run.shared("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=x")[
        2
    ][0]


TINY = """
import torch

class Tiny(torch.nn.Sequential):
    num_classes = 10

    def __init__(self):
        pool, flat = torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
        super().__init__(pool, flat, torch.nn.Linear(12, 10))
"""


@pytest.mark.slow
@pytest.mark.always("time to accuracy over seeds")
def test_each_process_trains_with_a_seed_to_the_target(run, monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("tiny_net.py").write_text(TINY)
    cifar_folders.write(Path("data"), cifar_folders.BINARY)
    code, printed, [record] = run(
        *("model=tiny_net:Tiny", "mode=train", "data=cifar10", "data.root=data", "gpu=cpu"),
        *("data.pipeline=device", "batch_size=10", "epochs=4", "processes=2", "seed=5"),
        *("mode.train.target_accuracy=0.01", "tracking=none", "output_dir=x", "probes.work=false"),
    )
    assert code == 0
    seeds = [point for point in record.points if point.key.phase == "train"]
    assert [seed.facts["seed"] for seed in seeds] == [5, 6]
    assert len({seed.epochs[0].loss for seed in seeds}) == 2
    reached = []
    for seed in seeds:
        *earlier, last = [epoch.accuracy for epoch in seed.epochs]
        assert earlier == [0.0] * len(earlier)
        seconds = None
        if last:
            seconds = sum(epoch.seconds for epoch in seed.epochs)
            reached.append(seconds)
        assert seed.metric("time_to_accuracy_seconds").value == seconds
        assert seed.metric("accuracy").value == last
    row = Analysis.of(record).rows[0]
    assert row.value("train/reached_share") == len(reached) / 2
    assert "time to 1 % accuracy: " in printed
    assert "  accuracy: " in printed


@pytest.mark.slow
def test_target_accuracy_without_labels_is_refused(run):
    code, printed, _ = run(
        *("model=torchvision", "model.name=squeezenet1_1", "mode=train", "gpu=cpu", "epochs=1"),
        *("data=synthetic", "data.num_samples=2", "input_size=32", "tracking=none", "output_dir=x"),
        "mode.train.target_accuracy=0.5",
    )
    assert code == 2
    assert "mode.train.target_accuracy needs labels of the data: the model has 1000" in printed


@pytest.mark.slow
@pytest.mark.always("training on data with checkpoints")
def test_whole_training_resumes_measures_deletes_checkpoints(run, photographs):
    small = (
        "model=torchvision",
        "model.name=squeezenet1_1",
        "data=images",
        f"data.root={photographs}",
    )
    small = (
        *small,
        "data.workers=0",
        "input_size=32",
        "batch_size=4",
        "gpu=cpu",
        "tracking=none",
        "stopping=fixed",
    )
    small = (*small, "probes.work=false", "execution.deterministic=true")
    train = (*small, "mode=train", "mode.train.checkpoints=true", "mode.train.save_every=1")
    code, _, [record] = run(*train, "epochs=2", "output_dir=a")
    assert code == 0
    names = [
        f"squeezenet1_1_images_{name}.pt"
        for name in ("best", "epoch_1", "epoch_2", "final_weights")
    ]
    assert sorted(path.name for path in Path("a/checkpoints").iterdir()) == names
    assert record.points[0].metric("train/checkpoint_seconds").value > 0

    resumed = f"mode.train.resume_from=a/checkpoints/{names[1]}"
    code, printed, records = run(*train, "epochs=2", "output_dir=b", resumed)
    assert code == 0
    assert [epoch.number for epoch in records[-1].points[0].epochs] == [2]

    other = tuple(text.replace("squeezenet1_1", "resnet18") for text in train)
    code, printed, _ = run(*other, "epochs=2", "output_dir=c", resumed)
    assert code == 2
    assert "do not fit the ResNet" in printed
    assert not Path("c").exists()

    for name in ("best", "final_weights"):
        weights = f"model.weights=a/checkpoints/squeezenet1_1_images_{name}.pt"
        code, _, records = run(*small, "mode=inference", f"output_dir={name}", weights)
        assert code == 0

    shutil.rmtree("b")
    assert commands.run(["clean", "a", "--kind", "pt", "--yes"]) == 0
    assert not list(Path("a/checkpoints").iterdir())
    assert [point.status for point in record.points] == [Status.OK]


def test_checkpoints_are_replaced_with_the_results(tmp_path):
    paths = RunPaths(tmp_path / "x")
    for one, name in ((paths, "best"), (paths.replacement(), "final_weights")):
        one.create()
        checkpoint = one.checkpoint("net", "images", name)
        checkpoint.parent.mkdir()
        one.claim(checkpoint)
        checkpoint.write_text(name)
    (paths.root / "checkpoints" / "mine.pt").write_text("mine")
    paths.replacement().record.write_text("{}")
    paths.put_in_place()
    assert sorted(path.name for path in paths.root.glob("checkpoints/*")) == [
        "mine.pt",
        "net_images_final_weights.pt",
    ]
    assert not paths.replacement().root.exists()


def test_what_a_crash_left_of_a_checkpoint_is_removed(tmp_path):
    paths = RunPaths(tmp_path / "x")
    paths.create()
    checkpoint = paths.checkpoint("net", "images", "best")
    checkpoint.parent.mkdir()
    paths.claim(checkpoint)
    for name in (".net_images_best.pt.abcdefgh", ".other_best.pt.abcdefgh"):
        (checkpoint.parent / name).write_text("half")
    paths.remove_leftovers()
    assert [path.name for path in checkpoint.parent.iterdir()] == [".other_best.pt.abcdefgh"]


def test_checkpoint_folder_that_is_a_link_is_not_written_to(tmp_path):
    bench = Workbench(
        SimpleNamespace(choices={"data": "images"}, model_name="net"),
        RunPaths(tmp_path),
        lambda *_: None,
    )
    (tmp_path / "checkpoints").symlink_to("/tmp")
    with pytest.raises(UserError, match="checkpoints is a link"):
        bench._checkpoint("best")
