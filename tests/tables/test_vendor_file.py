"""benchmark_VENDOR_TIME.json: figures in their units, and a record that reads back."""

import json

import pytest

from perfexp import commands
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.records.record import Epoch, Record
from perfexp.records.summary import rows
from perfexp.summaries.analysis import Analysis
from perfexp.tables import vendor_file

pytestmark = pytest.mark.usefixtures("quick_commands")

QUICK = [
    "model=fake",
    "gpu=fake",
    "tracking=none",
    "stopping=coarse",
    "percentiles=[50]",
    "quiet=true",
]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measure into folders of their own; returns the folders."""
    monkeypatch.chdir(tmp_path)

    def measure(*names, **more):
        for name in names:
            assert (
                main(
                    [
                        *QUICK,
                        *(f"{key}={value}" for key, value in more.items()),
                        f"output_dir={name}",
                    ]
                )
                == 0
            )
        return [tmp_path / name for name in names]

    return measure


def test_vendor_file_has_figures_in_named_units_and_the_record(measured):
    [folder] = measured(
        "run",
        **{
            "export.vendor_json": "true",
            "mode": "train_inference",
            "batch_size": 4,
            "cold_start": "true",
        },
    )
    [file] = folder.glob("benchmark_*.json")
    record = Record.load(folder)
    assert (
        file.name
        == f"benchmark_fake_{record.started[:19].replace('-', '').replace(':', '').replace('T', '-')}.json"
    )
    written = json.loads(file.read_bytes())
    [training], [inference] = written["training"], written["inference"]
    by_phase = {row.key.phase: row for row in rows(record)}
    rate = by_phase["inference"].samples_per_second
    assert inference["predictions_per_second"]["value"] == rate.value
    per_prediction = inference["milliseconds_per_prediction"]
    assert per_prediction["value"] == pytest.approx(1e3 / rate.value)
    assert per_prediction["low"] < per_prediction["value"] < per_prediction["high"]
    latency = by_phase["inference"].times["latency"].median.value
    assert inference["p50_milliseconds"]["value"] == pytest.approx(latency * 1e3)
    assert 1 < inference["ttfp_milliseconds"]["value"] < 1e5
    assert training["samples_per_second"]["value"] == by_phase["train"].samples_per_second.value
    assert (training["training_seconds"], training["epoch_seconds"]) == (None, [])
    assert (vendor_file.load(file).uid, vendor_file.load(file).points) == (
        record.uid,
        record.points,
    )


def test_without_the_key_there_is_no_file(measured):
    [folder] = measured("run")
    assert not list(folder.glob("benchmark_*"))


@pytest.mark.slow
def test_a_side_of_a_comparison_may_be_a_vendor_file(measured, capsys):
    one, two = measured("one", "two", **{"export.vendor_json": "true", "processes": 3})
    files = [str(next(folder.glob("benchmark_*.json"))) for folder in (one, two)]
    printed = []
    capsys.readouterr()
    for sides in ([str(one), str(two)], files):
        assert commands.run(["compare", *sides, "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out)["pairs"])
    assert printed[0] == printed[1] != []


@pytest.mark.parametrize(
    ("device", "vendor"),
    [
        ({"kind": "cuda", "cuda": "13.0", "rocm": None}, "nvidia"),
        ({"kind": "cuda", "cuda": None, "rocm": "7.1"}, "amd"),
        ({"kind": "mps"}, "apple"),
        ({"kind": "cpu"}, "cpu"),
        (None, "unknown"),
    ],
)
def test_the_name_has_vendor_and_start(device, vendor, make_record):
    record = make_record(environment={"device": device})
    assert vendor_file.name(record) == f"benchmark_{vendor}_20260301-100000.json"


def test_epochs_add_up_to_the_training(make_record):
    record = make_record(phases=("train",))
    record.points[0].epochs = [
        Epoch(number=number, seconds=seconds, samples_per_second=100.0, accuracy=0.1 * number)
        for number, seconds in ((1, 3.0), (2, 2.0))
    ]
    [training] = json.loads(vendor_file.to_json(Analysis.of(record)))["training"]
    assert (training["training_seconds"], training["epoch_seconds"], training["accuracy"]) == (
        5.0,
        [3.0, 2.0],
        0.2,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a file of export.vendor_json=true"),
        (b'{"format": 1', "is not a file of export.vendor_json=true"),
        (b'{"format": 1}', "missing required field `record`"),
        (b'{"format": 99, "record": {}}', "has format 99; this perfexp reads up to 1"),
        (b'{"format": 1, "record": {"schema_version": 1}}', "is not a perfexp record"),
        (b'{"format": 1, "record": []}', "is not a perfexp record"),
    ],
)
def test_what_is_not_such_a_file_is_refused(content, said, tmp_path, capsys):
    files = [tmp_path / f"benchmark_amd_{number}.json" for number in range(2)]
    for file in files:
        file.write_bytes(content)
    with pytest.raises(UserError, match="benchmark_amd_0"):
        vendor_file.load(files[0])
    assert commands.run(["compare", *map(str, files)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
