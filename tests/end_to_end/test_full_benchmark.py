"""The full benchmark: batch sizes by phase, inference with the trained weights, one file, and two files compared."""

import json
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir

from perfexp import commands
from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Verdict
from perfexp.errors import PerfexpError, UserError
from perfexp.host import installation
from perfexp.models.weights import load_weights
from perfexp.plan import config, validation
from perfexp.records.analysis import Analysis
from perfexp.records.record import Metric, Record, Status
from perfexp.report.tables import vendor_file
from perfexp.run import supervisor
from tests.models.test_clip_gesture import opened

pytestmark = pytest.mark.usefixtures("quick_commands")

SMALL = (
    "mode.train.batch_size=9",
    "mode.inference.batch_size=[1,8]",
    "epochs=2",
    "stopping=fixed",
    "processes=1",
)
SMALL = (
    *SMALL,
    "stopping.measure=4",
    "stopping.warmup=1",
    "gpu=cpu",
    "tracking=none",
    "execution.threads=1",
)


def typed(*overrides):
    config.register()
    with initialize_config_dir(config_dir=str(installation.conf_dir()), version_base="1.3"):
        composed = compose(
            config_name="config", overrides=["experiment=full_benchmark", *overrides]
        )
    return config.typed(config.plan_of(composed, {}))


def keys(typed_plan):
    return [(key.phase, key.batch_size, key.replicate) for key in typed_plan.timed_keys()]


def test_each_phase_has_its_own_batch_sizes():
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    assert keys(typed("processes=1")) == [
        ("train", 64, 0),
        *(("inference", size, 0) for size in sizes),
    ]
    assert keys(typed("mode.inference.batch_size=8", "mode.train.batch_size=8", "processes=1")) == [
        ("train", 8, 0),
        ("inference", 8, 0),
    ]
    assert keys(typed("mode.inference.batch_size=null", "batch_size=4"))[1:2] == [
        ("inference", 4, 0)
    ]
    assert keys(typed("model=ocrnet"))[:2] == [("train", 2, 0), ("inference", 1, 0)]
    assert [(key.batch_size, key.replicate) for key in typed().first_prediction_keys()] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_one_process_trains_and_comes_first():
    typed_plan = typed("mode.inference.batch_size=[1,2]")
    trained = [key for key in keys(typed_plan) if key[0] == "train"]
    assert trained == [("train", 64, 0)]
    assert len(keys(typed_plan)) == 1 + 3 * 2
    assert supervisor.replicates(typed_plan.timed_keys()) == [0, 1, 2]


def test_a_phase_that_is_not_measured_needs_no_settings():
    typed_plan = typed("mode=inference", "epochs=null", "mode.inference.trained=false")
    validation.check(typed_plan)
    assert typed_plan.mode.train is None
    assert {phase for phase, _, _ in keys(typed_plan)} == {"inference"}
    assert {phase for phase, _, _ in keys(typed("mode=train"))} == {"train"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size=4"], r"batch_size=\[4\] would be used by no phase"),
        (["mode.inference=x"], r"set mode\.inference\.KEY=VALUE"),
        (
            ["mode=inference", "epochs=null"],
            "mode.inference.trained=true needs the weights of a training",
        ),
        (["mode.train.checkpoints=false"], "mode.inference.trained=true needs the weights"),
        (["mode.train.batch_size=[8,16]"], "is for one training, and this plan has 2"),
        (
            ["model=fastscnn", "model.optimizer=own"],
            "schedule=cosine: model.optimizer=own trains by the model's own",
        ),
        (["mode.inference.batch_size=0"], "batch_size=0 is not a batch size"),
    ],
)
def test_what_can_not_be_measured_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        validation.check(typed(*overrides))


def test_adopted_weights_last_until_the_next_reset(tmp_path):
    session, other = opened(), opened()
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.add_(1.0)
    torch.save(other.module.state_dict(), tmp_path / "x.pt")
    before = [parameter.clone() for parameter in session.module.parameters()]
    session.adopt(tmp_path / "x.pt")
    assert all(map(torch.equal, session.module.parameters(), other.module.parameters()))
    session.reset()
    assert all(map(torch.equal, session.module.parameters(), before))
    with pytest.raises(
        PerfexpError, match=r"there are no weights y\.pt: the training of this run did not end"
    ):
        session.adopt(tmp_path / "y.pt")


@pytest.fixture(scope="module")
def benchmark(finished, shared_folder):
    """A full benchmark of two subjects, one of whose files is damaged."""

    def make(folder):
        made = folder / "made"
        arguments = ["make-data", "skeletons", str(made), "--subjects", "2", "--repetitions", "2"]
        assert commands.run(arguments) == 0
        (made / "101_18_0_1_1_stand.txt").write_text("1,2,3\n")

    data = shared_folder("skeletons", make) / "made"
    settings = ("model=clip_gesture", "data=skeletons", f"data.root={data}", "output_dir=x")
    return finished("experiment=full_benchmark", *settings, *SMALL)


@pytest.mark.slow
@pytest.mark.always("README: mode=train_inference")
def test_training_and_inference_are_one_run_with_one_file(benchmark):
    assert benchmark.code == 0
    folder = benchmark.root / "x"
    record = Record.load(folder)
    [train, *infer] = [point for point in record.points if point.key.is_timed]
    assert [point.key.batch_size for point in infer] == [1, 8]
    assert {point.status for point in record.points} == {Status.OK}
    assert [epoch.number for epoch in train.epochs] == [1, 2]
    [file] = folder.glob("benchmark_cpu_*.json")
    written = json.loads(file.read_bytes())
    [training] = written["training"]
    seconds = [epoch.seconds for epoch in train.epochs]
    assert (training["epoch_seconds"], training["training_seconds"]) == (
        seconds,
        pytest.approx(sum(seconds)),
    )
    assert (
        written["total_runtime_seconds"]
        > training["total_runtime_seconds"]
        > training["training_seconds"]
    )
    assert all(
        training[name] is not None
        for name in ("data_loading_seconds", "memory_peak_bytes", "accuracy")
    )
    assert training["samples_per_second"]["value"] > 0
    for entry in written["inference"]:
        names = ["predictions_per_second", "milliseconds_per_prediction"]
        names += [f"p{number}_milliseconds" for number in (50, 95, 99)]
        assert all(entry[name]["value"] > 0 for name in names)
    assert written["inference"][0]["ttfp_milliseconds"]["value"] > 0
    assert written["parameters"] == pytest.approx(0.5e6, rel=0.1)


@pytest.mark.slow
def test_inference_has_the_accuracy_of_the_trained_weights(benchmark):
    points = [point for point in Record.load(benchmark.root / "x").points if point.key.is_timed]
    assert len({point.metric("accuracy").value for point in points}) == 1
    weights = benchmark.root / "x/checkpoints/clip_gesture_skeletons_final_weights.pt"
    load_weights(opened().module, weights)


@pytest.mark.slow
def test_a_damaged_file_is_a_line_and_a_warning(benchmark):
    line = "left out: 101_18_0_1_1_stand.txt: number of frames: 1, 2 or more are needed"
    assert line in benchmark.printed
    [warning] = [
        doubt
        for doubt in Record.load(benchmark.root / "x").doubts
        if doubt.code == "data_incomplete"
    ]
    assert "left out, since unusable: 1 file; the first: " in warning.message
    assert line in (benchmark.root / "x/details/run.log").read_text()


@pytest.mark.slow
def test_segmentation_models_have_the_full_benchmark_too(finished):
    pytest.importorskip("mmseg")
    size = (
        "mode.train.batch_size=2",
        "mode.inference.batch_size=[1]",
        "input_size=64x128",
        "data.num_samples=4",
    )
    ended = finished("experiment=full_benchmark", "model=fastscnn", "output_dir=x", *SMALL, *size)
    assert ended.code == 0, ended.printed
    record = Record.load(ended.root / "x")
    assert {point.status for point in record.points} == {Status.OK}
    [file] = (ended.root / "x").glob("benchmark_cpu_*.json")
    [training] = json.loads(file.read_bytes())["training"]
    assert len(training["epoch_seconds"]) == 2
    assert (ended.root / "x/checkpoints/fastscnn_synthetic_epoch_final_weights.pt").is_file()


@pytest.mark.slow
def test_a_training_that_fails_is_one_line_and_leaves_no_figures(finished):
    """Skeletons of another width: the training is refused, and no inference is tried without its weights."""
    ended = finished(
        "experiment=full_benchmark",
        "model=clip_gesture",
        "input_size=5x9",
        "output_dir=x",
        "processes=1",
        *SMALL,
    )
    assert ended.code == 1
    reason = "a frame has 75 columns, set input_size=FRAMESx75"
    summary = ended.printed.partition("not measured")[2]
    assert (summary.count(reason), summary.count("the training failed")) == (1, 0)
    points = [
        point for point in Record.load(ended.root / "x").points if point.key.phase == "inference"
    ]
    assert len(points) == 2
    assert {point.error for point in points} == {"not tried: the training failed"}
    assert not list((ended.root / "x").glob("benchmark_*"))


def amd(record):
    """The record as an MI300X might have left it: twice as fast, with 80 % of the memory, two points more accurate."""
    made = Record.from_json(record.to_json())
    made.uid = "0" * 32
    made.environment["device"] |= {
        "kind": "cuda",
        "name": "AMD Instinct MI300X",
        "rocm": "7.1",
        "cuda": None,
    }
    for point in made.points:
        for series in point.series:
            series.samples = [seconds / 2 for seconds in series.samples]
        for metric in point.metrics:
            if metric.name == "memory/peak_bytes":
                metric.value *= 0.8
            if metric.name == "accuracy":
                metric.value += 0.02
    return made


def test_two_files_give_speedup_throughput_memory_and_accuracy(make_record, tmp_path, capsys):
    record = make_record(batches=(1, 8), phases=("train", "inference"))
    for point in record.points[:4]:
        point.metrics.append(Metric(name="accuracy", value=0.9, unit="1"))
    files = []
    for one in (record, amd(record)):
        files.append(tmp_path / vendor_file.name(one))
        files[-1].write_bytes(vendor_file.to_json(Analysis.of(one)))
    assert [file.name.split("_")[1] for file in files] == ["nvidia", "amd"]
    assert commands.run(["compare", *map(str, files), "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [one["phase"] for one in devices] == ["train", "inference"]
    for one in devices:
        figures = [
            one[name]
            for name in ("speedup", "throughput_ratio", "memory_efficiency", "accuracy_difference")
        ]
        assert figures == pytest.approx([2.0, 2.0, 2.5, 0.02])
    assert commands.run(["compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert [one["undecided"] for one in devices] == [[], []]
    assert "speedup 2.000, throughput ratio 2.000, memory efficiency" in " ".join(printed.split())
    assert "efficiency (samples/s per byte of peak memory) 2.500" in " ".join(printed.split())
    assert "accuracy +2.00 percentage points" in printed


def test_a_ratio_of_devices_is_decided_if_all_of_its_pairs_are():
    def pair(measure, ratio, verdict):
        key = SimpleNamespace(phase="train")
        return SimpleNamespace(side="B", key=key, measure=measure, ratio=ratio, verdict=verdict)

    side = SimpleNamespace(name="B", differences=[SimpleNamespace(key="device")])
    pairs = [pair("device", 0.5, Verdict.BETTER), pair("device", 0.5, Verdict.SAME)]
    pairs += [pair("throughput", 2.0, Verdict.BETTER), pair("memory", 0.8, Verdict.UNDECIDED)]
    [found] = judging.device_summaries([side], pairs)
    assert found.undecided == ("memory_efficiency",)
    words = (
        "train: speedup 2.000, throughput ratio 2.000, "
        "memory efficiency (samples/s per byte of peak memory) ≈ 2.500"
    )
    assert comparison_table.in_words(found) == words
    [found] = judging.device_summaries([side], [*pairs, pair("device", 0.5, Verdict.UNDECIDED)])
    assert found.undecided == ("speedup", "memory_efficiency")
