"""perfexp predict: memory without a GPU, times from records, and how good they are."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import msgspec
import pytest

from perfexp import commands
from perfexp.cli.composition import compose
from perfexp.commands.predict import answer_text
from perfexp.cost.allocations import Peak
from perfexp.devices import lock
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import DeviceMismatch, Unsupported, UserError
from perfexp.measuring.layers import Key as LayerKey
from perfexp.measuring.layers import Pass
from perfexp.measuring.layers.table import Line, Spread
from perfexp.measuring.probes import workspaces
from perfexp.plan import config
from perfexp.prediction.lookup import Answer
from perfexp.prediction.predictions import MEASURED, Predicted
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, Point, Record, Status, layers_key
from perfexp.statistics.estimators import Interval
from perfexp.worker import answers
from perfexp.worker.peak_memory import (
    CONTEXT_BYTES,
    LEAST_CONTEXT_BYTES,
    MemoryGuard,
    MemoryTrace,
    forked_trace,
)

pytestmark = pytest.mark.usefixtures("quick_commands")

SPARSE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "stopping.measure=8", "quiet=true",
          "sweep=sparse", "model.stairs=0.02", "output_dir=out")  # fmt: skip
FAKE = ("model=fake", "gpu=fake", "model.stairs=0.02", "--no-memory")


@pytest.fixture
def predict(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        code = commands.run(["predict", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture(scope="session")
def small():
    """A traced ResNet of small images."""
    return MemoryTrace(
        config.typed(
            compose(["model=resnet18", "mode=train_inference", "gpu=h100", "input_size=64"])
        )
    )


@pytest.mark.slow
@pytest.mark.always("README: sweep=sparse predicts sizes")
def test_times_are_measured_interpolated_or_refused_and_named_so(predict, finished):
    folder = finished(*SPARSE).root
    code, printed, _ = predict(*FAKE, "input_size=[224,226,600]", "--corpus", folder)
    assert code == 0
    lines = [line for line in printed.splitlines() if ": time" in line]
    assert "measured" in lines[0]
    assert "interpolated, nearest measured 224 · batch 1" in lines[1]
    assert "90 %" in lines[1]
    assert lines[2].endswith("time refused: outside the measured range")
    assert "(corpus_unfit)" in printed


@pytest.mark.slow
def test_a_record_without_its_lines_of_points_is_done(finished, tmp_path, capsys):
    folder = shutil.copytree(finished(*SPARSE).root, tmp_path / "copy")
    for lines in folder.rglob("points.jsonl"):
        lines.unlink()
    assert commands.run(["status", str(folder)]) == 0
    assert "missing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.05239, 0.05242, "52.400 ms (52.390 ms to 52.420 ms, 90 %)"),
        (0.0521, 0.0529, "52.4 ms (52.1 ms to 52.9 ms, 90 %)"),
        (None, None, "52.4 ms"),
    ],
)
def test_the_digits_show_the_interval(low, high, shown):
    pair = ((224, 224), 1)
    value = Interval(value=0.0524, low=low, high=high)
    curve = SimpleNamespace(
        about=SimpleNamespace(device="NVIDIA H100"), folder="out", quantity="time", kind="device"
    )
    predicted = Predicted(pair=pair, source=MEASURED, value=value, nearest=pair)
    text = answer_text(Answer(predicted=predicted, curve=curve, diagnostics=()), "seconds")
    assert text == f"device {shown}, measured (NVIDIA H100, out)"


@pytest.mark.slow
def test_other_plans_have_no_time_here(predict, finished):
    folder = finished(*SPARSE).root
    for other in ("precision=fp16", "algorithm=gemm", "execution.channels_last=true", "model.name=other",
                  "model.stairs=0.03", "data.num_samples=10", "cache=flush"):  # fmt: skip
        _, printed, _ = predict(*FAKE, "input_size=224", other, "--corpus", folder)
        assert "refused: no record" in printed, other


def test_settings_without_an_effect_on_the_time_are_not_compared(predict, finished):
    _, printed, _ = predict(
        *FAKE, "input_size=224", "algorithm.cache_dir=here", "--corpus", finished(*SPARSE).root
    )
    assert "measured (" in printed


@pytest.mark.parametrize(
    ("kind", "product", "ranks", "asked", "is_found"),
    [
        ("cuda", "NVIDIA H200", 1, "gpu=h200", True),
        ("cuda", "NVIDIA H200", 1, "gpu=auto", True),
        ("cuda", "NVIDIA H200", 2, "gpu=h200", False),
        ("cuda", "NVIDIA H200", 2, "gpu=h200 gpu.count=2", True),
        ("cuda", "NVIDIA H200", 1, "gpu=h100", False),
        ("cuda", "NVIDIA H200", 1, "gpu=cpu", False),
        ("cpu", "AMD EPYC", 1, "gpu=cpu", True),
        ("cpu", "AMD EPYC", 1, "gpu=fake", False),
    ],
)
def test_records_of_other_devices_have_no_time_here(
    predict, finished, tmp_path, kind, product, ranks, asked, is_found
):
    folder = finished(*SPARSE).copied(tmp_path / "copy").root
    record = json.loads((folder / "out" / "record.json").read_text())
    record["environment"]["device"] |= {"kind": kind, "name": product}
    record["environment"]["ranks"] = {"devices": [{}] * ranks} if ranks > 1 else None
    (folder / "out" / "record.json").write_text(json.dumps(record))
    words = "model=fake", "model.stairs=0.02", *asked.split(), "input_size=224", "--no-memory"
    _, printed, _ = predict(*words, "--corpus", folder)
    refused = [line for line in printed.splitlines() if "refused: no record" in line]
    assert any("batch 1: time" in line for line in refused) != is_found
    together = "time, energy of a call in the loop, memory refused: no record"
    assert (together in printed) != is_found


def test_a_point_that_ran_out_of_memory_is_refused(predict, finished, tmp_path):
    folder = finished(*SPARSE).copied(tmp_path / "copy").root
    record = json.loads((folder / "out" / "record.json").read_text())
    place = len(record["points"]) // 2
    key = record["points"][place]["key"]
    record["points"][place] |= {"status": "oom", "series": [], "metrics": []}
    (folder / "out" / "record.json").write_text(json.dumps(record))
    _, printed, _ = predict(*FAKE, f"input_size={key['input_size'][0]}", "--corpus", folder)
    assert "time refused: a point of at most this size ran out of memory" in printed
    assert "(corpus_unfit)" not in printed


def test_records_of_another_driver_or_torch_are_stale(predict, finished, tmp_path):
    folder = finished(*SPARSE).copied(tmp_path / "copy").root
    record = json.loads((folder / "out" / "record.json").read_text())
    record["environment"]["packages"] = {"torch": "1.0"}
    (folder / "out" / "record.json").write_text(json.dumps(record))
    _, printed, _ = predict(*FAKE, "input_size=224", "--corpus", folder)
    assert "torch 1.0, now" in printed
    assert "(corpus_unfit)" in printed


def test_everything_as_json(predict, finished):
    folder = finished(*SPARSE).root
    _, printed, _ = predict(*FAKE, "input_size=226", "--corpus", folder, "--json")
    [point] = json.loads(printed)["points"]
    assert point["time"]["source"] == "interpolated"
    assert point["time"]["low"] < point["time"]["value"] < point["time"]["high"]
    assert point["energy"]["source"] == "refused"


def test_predicted_memory_is_a_recorded_peak_or_interpolated(predict, finished, tmp_path):
    folder = finished(*SPARSE).copied(tmp_path / "copy").root
    record = json.loads((folder / "out" / "record.json").read_text())
    for point in record["points"]:
        height, width = point["key"]["input_size"]
        others = [metric for metric in point["metrics"] if metric["name"] != "memory/peak_bytes"]
        peak = {
            "name": "memory/peak_bytes",
            "unit": "bytes",
            "reason": None,
            "value": 2**27 + 500.0 * height * width,
        }
        point["metrics"] = [*others, peak]
    (folder / "out" / "record.json").write_text(json.dumps(record))
    _, printed, _ = predict(*FAKE, "input_size=[224,301]", "--corpus", folder, "--json")
    measured, between = [point["memory"] for point in json.loads(printed)["points"]]
    assert (measured["source"], measured["value"]) == ("measured", 2**27 + 500 * 224**2)
    assert (between["source"], between["unit"]) == ("interpolated", "bytes")
    assert between["low"] < 2**27 + 500 * 301**2 < between["high"] < 1.2 * between["low"]
    assert (
        "224 · batch 1: memory 152 MiB, measured"
        in predict(*FAKE, "input_size=224", "--corpus", folder)[1]
    )


def test_predictions_are_checked_on_the_records_of_the_user(predict, finished):
    code, printed, _ = predict("check", finished(*SPARSE).root)
    assert code == 0
    for method in (
        "gaussian process",
        "nearest",
        "linear in pixels",
        "log interpolation",
        "scaling model",
    ):
        assert method in printed
    assert "fake · default · inference · torch · time" in printed
    _, printed, _ = predict("check", finished(*SPARSE).root, "--json")
    assert 0 <= json.loads(printed)["time"]["methods"]["gaussian process"]["coverage"] <= 1


@pytest.mark.slow
def test_curves_of_other_devices_are_listed_but_do_not_calibrate(predict, finished, tmp_path):
    folder = finished(*SPARSE).copied(tmp_path / "copy").root
    alone = json.loads(predict("check", folder, "--json")[1])["time"]
    record = json.loads((folder / "out" / "record.json").read_text())
    for name in ("gpu 1", "gpu 2"):
        record["uid"], record["plan"]["model"]["name"] = (
            name.replace("gpu ", "0" * 31),
            "fake" if name == "gpu 1" else "other",
        )
        record["environment"]["device"]["name"] = name
        (folder / name).mkdir()
        (folder / name / "record.json").write_text(json.dumps(record))
    together = json.loads(predict("check", folder, "--json")[1])["time"]
    assert (
        len({(curve["name"], curve["device"], curve["folder"]) for curve in together["curves"]})
        == 3
    )
    assert together["curves"][0]["interval_score"] == alone["curves"][0]["interval_score"]
    assert "gpu 1" in predict("check", folder)[1]


@pytest.mark.slow
def test_layers_lie_on_lines_between_measured_sizes(predict, finished, tmp_path):
    shutil.copytree(finished(*SPARSE).root / "out", tmp_path / "corpus")
    record = Record.load(tmp_path / "corpus")
    keys = sorted({one.key for one in record.points if not one.key.replicate and one.key.is_timed},
                  key=lambda key: key.pixels)  # fmt: skip
    refused = predict(*FAKE, "input_size=300", "--corpus", "corpus", "--layers")
    assert "has layers at 0 sizes" in refused[2]
    three = keys[0], keys[len(keys) // 2], keys[-1]
    for key, surplus in zip(three, (1.0, 1.1, 1.0), strict=True):
        lines = []
        for name, scale in (("first", 1e-9), ("second", 2e-9), ("empty", 0.0)):
            seconds = surplus * scale * key.pixels
            spread = Spread(mean=seconds, median=seconds, low=None, high=None)
            layer_key = LayerKey(
                path=name, call=0, operation=None, kind="Conv2d", which=Pass.forward
            )
            line = Line(key=layer_key, kind="Conv2d", seconds=spread, gap_seconds=spread, share=0.5)
            lines.append(msgspec.to_builtins(line))
        layers = {"method": "queue", "call_seconds": [1.0], "lines": lines}
        point = Point(key=layers_key(key), status=Status.OK, facts={"layers": layers})
        record.points.append(point)
    (tmp_path / "corpus" / "record.json").write_bytes(record.to_json())
    words = (*FAKE, f"input_size={keys[0].input_size[0]}", "--corpus", "corpus", "--layers")
    [point] = json.loads(predict(*words, "--json")[1])["points"]
    assert [one["layer"] for one in point["layers"]] == ["second", "first"]
    second = point["layers"][0]["seconds"]
    assert second["value"] == pytest.approx(2e-9 * keys[0].pixels)
    assert second["high"] == pytest.approx(1.1 * second["value"])
    assert second["low"] == pytest.approx(second["value"] / 1.1)
    assert f": second forward {second['value'] * 1e6:.3g} µs (" in predict(*words)[1]
    outside = predict(*FAKE, "input_size=600", "--corpus", "corpus", "--layers")
    assert "3 sizes around its own" in outside[2]


def test_wrong_words_are_refused_with_advice(predict, tmp_path):
    assert predict("resnet18")[0] == 2
    assert "not a folder" in predict("check", "nowhere")[2]
    assert "enough sizes" in predict("check", tmp_path)[2]
    assert "not a folder" in predict(*FAKE, "--corpus", "nowhere")[2]
    assert "resnet51" in predict("model=resnet51", "--no-memory")[2]


def test_a_foreign_record_is_no_reason_to_fail(predict, finished, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(finished(*SPARSE).root, folder)
    (folder / "junk").mkdir()
    (folder / "junk" / "record.json").write_text("{")
    (folder / "loop").symlink_to(folder)
    code, printed, _ = predict(*FAKE, "input_size=224", "--corpus", folder)
    assert code == 0
    assert "measured" in printed


def point(phase, batch_size):
    return Key(phase=phase, input_size=(64, 64), batch_size=batch_size, precision="fp32")


@pytest.mark.parametrize(
    ("gpu", "expected"), [("cpu", 0), ("h100", 64 << 20), ("a10", 16640 << 10)]
)
def test_workspaces_of_cublas_depend_on_the_device(gpu, expected):
    trace = MemoryTrace(config.typed(compose(["model=resnet18", f"gpu={gpu}"])))
    assert trace.workspace_bytes(SimpleNamespace(multiplying_threads=2)) == expected


@pytest.mark.slow
def test_memory_is_traced_by_category_without_a_gpu(small):
    trained, report = small.peak(point("train", 8)), small.report(point("inference", 8))
    weights = 11_689_512 * 4
    assert trained.categories["parameters"] == pytest.approx(weights, rel=0.002)
    assert (
        trained.categories["optimizer"] >= weights
    )  # momentum, and the decayed gradients of all parameters
    assert report["peak_bytes"] == sum(report["categories"].values()) < trained.total_bytes
    assert set(report["categories"]) == {
        "parameters",
        "buffers",
        "inputs",
        "activations",
        "workspace of cuBLAS",
    }
    assert report["peak_without_workspaces_bytes"] == report["peak_bytes"]
    assert report["workspaces"] is None
    limit = report["capacity_bytes"] - CONTEXT_BYTES - report["categories"]["workspace of cuBLAS"]
    fits, fails = (
        small.peak(point("inference", report["largest_batch"] + more)).total_bytes
        for more in (0, 1)
    )
    assert fits <= limit < fails


@pytest.mark.parametrize(
    ("free_bytes", "largest"),
    [(10**9, 96), (50 * 10**6, 1), (26 * 10**6, None), (45 * 10**6, None)],
)
def test_largest_batch_search_ends_at_the_last_peak_that_fits(
    small, monkeypatch, free_bytes, largest
):
    """Peaks are 40 MB and 10 MB a sample; one sample cannot be traced where less than 50 MB are free."""

    def peak(trace, key):
        if key.batch_size == 1 and free_bytes < 50 * 10**6:
            raise Unsupported("one sample has no variance")
        return Peak(total_bytes=10**7 * (4 + key.batch_size), categories={})

    monkeypatch.setattr(MemoryTrace, "peak", peak)
    key = point("inference", 8)
    assert small.largest_batch(key, free_bytes + CONTEXT_BYTES) == largest


def test_points_that_exceed_the_memory_are_not_tried(small, monkeypatch):
    monkeypatch.setattr("perfexp.worker.peak_memory.MemoryTrace", lambda plan: small)
    key = Key(phase="train", input_size=(64, 64), batch_size=8, precision="fp32")
    trace = forked_trace(None)
    roomy, tight = (MemoryGuard(trace, LEAST_CONTEXT_BYTES + size) for size in (10**9, 10**8))
    assert roomy.refuse(key, []) is None
    refused = tight.refuse(key, [])
    assert refused.status is Status.OOM_PREDICTED
    assert "sweep.skip_oom" in refused.error
    assert tight.refuse(key, [Point(key=key, status=Status.OK)]) is None
    trace.close()
    assert tight.refuse(key, []) is None  # nothing is known any more


@pytest.mark.parametrize("wrong", ["execution.compile=default", "gpu.count=2", "model=fake"])
def test_plans_whose_memory_is_not_traced_are_named(wrong):
    plan = config.typed(
        compose(["model=resnet18", "gpu=fake" if wrong == "model=fake" else "gpu=h100", wrong])
    )
    with pytest.raises(UserError, match=wrong.replace("default", "")):
        MemoryTrace(plan)


LOCK = f"test-predict-{os.getpid()}"


class Gpu(CpuDevice):
    """The CPU under the name of a GPU, in place of a device that is present."""

    def __init__(self):
        super().__init__(name="NVIDIA H100 80GB HBM3")
        self.kind, self.lock_name, self.memory_bytes = "cuda", LOCK, 85 * 10**9


@pytest.fixture
def present(monkeypatch, tmp_path):
    """The worker in this process, on a machine with an H100 until `leave` is called; the measured `calls`."""
    calls, is_present = [], [True]

    def opened(**_):
        if not is_present:
            raise DeviceMismatch("none here")
        return Gpu()

    def workspace_bytes(call, device):
        calls.append(call)
        assert lock.holder(device.lock_name)
        batch = call.arguments[0].shape[0]
        if call.arguments[0].shape[1] == 1024:
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return batch * 2**24 if call.operator == "convolution" else 512

    def query(plain, what, *, waiting):
        assert what == "memory"
        plan = config.typed(plain)
        return json.loads(json.dumps(answers.memory(plan, RunPaths(tmp_path), Events(None))))

    for kind in ("auto", "cuda"):
        monkeypatch.setattr(f"perfexp.devices.{kind}.open_device", opened)
    monkeypatch.setattr(workspaces, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr("perfexp.commands.predict.query", query)
    yield SimpleNamespace(calls=calls, leave=is_present.clear)
    lock.lock_path(LOCK).unlink(missing_ok=True)


CONVOLUTIONAL = """
import torch

def build(channels=8, name="two"):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, channels, 3), torch.nn.Conv2d(channels, 8, 1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10),
    )
"""


@pytest.fixture
def convolutional(tmp_path, monkeypatch):
    """Overrides for a model of two convolutions."""
    (tmp_path / "convolutional.py").write_text(CONVOLUTIONAL)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "own" / "model"
    folder.mkdir(parents=True)
    (folder / "two.yaml").write_text("_target_: convolutional.build\nname: two\nchannels: 8\n")
    return ("--config-dir", tmp_path / "own", "model=two", "input_size=32", "mode=inference")


def test_present_device_workspaces_are_in_peak_not_in_limit(predict, present, convolutional):
    code, printed, _ = predict(*convolutional, "batch_size=4", "gpu=auto", "--json")
    assert code == 0
    [point] = json.loads(printed)["memory"]["points"]
    assert point["workspaces"] == {
        "device": "NVIDIA H100 80GB HBM3", "convolutions": 2, "known": 2, "reason": None,
    }  # fmt: skip
    assert point["categories"]["workspaces"] == 4 * 2**24
    assert point["peak_bytes"] == sum(point["categories"].values())
    assert 0 < point["peak_bytes"] - point["peak_without_workspaces_bytes"] <= 4 * 2**24
    assert (point["gpu"], point["capacity_bytes"]) == (
        "NVIDIA H100 80GB HBM3",
        85 * 10**9,
    )  # not the sheet's 80 GB
    assert point["categories"]["workspace of cuBLAS"] == 32 * 2**20
    share = (85 * 10**9 - CONTEXT_BYTES - 32 * 2**20) / 2**24
    assert point["largest_batch"] > share  # since without room for them cuDNN takes smaller ones
    assert {call.arguments[0].shape[0] for call in present.calls} == {4}
    _, printed, _ = predict(*convolutional, "batch_size=4", "gpu=auto")
    assert "with workspaces of cuDNN for all 2 convolutions, from NVIDIA H100 80GB HBM3" in printed
    assert (
        f"at most batch {point['largest_batch']} in 79.2 GiB of NVIDIA H100 80GB HBM3 "
        "(upper bound; found by trial with batch_size=max)" in printed
    )
    assert "without workspaces" not in printed
    assert "names no memory size" not in printed


@pytest.mark.slow
def test_workspaces_are_known_later_without_the_device(predict, present, convolutional):
    def traced():
        [point] = json.loads(predict(*settings, "--json")[1])["memory"]["points"]
        return point

    settings = (*convolutional, "batch_size=4", "gpu=h100", "precision=tf32")
    before = traced()
    number = len(present.calls)
    present.leave()
    after = traced()
    of_the_device = ("gpu", "capacity_bytes", "largest_batch")
    assert {**after, **{name: before[name] for name in of_the_device}} == before
    assert [after[name] for name in of_the_device[:2]] == ["h100", 80 * 10**9]
    for other in (
        "gpu=h200",
        "gpu=auto",
        "algorithm=gemm",
        "precision=fp32",
        "execution.cudnn_benchmark=true",
    ):
        words = predict(*settings, other)[1]
        assert (
            "without workspaces of cuDNN, which may be larger than all of it; records include them"
            in words
        ), other
        sheet = r"at most about batch \d+ in the \d+ GB of h\d00's data sheet \(drivers report up to 7 % more\) \(upper"
        assert re.search(sheet, words) or "gpu=auto" in other
        assert "with workspaces" not in words, other
    assert len(present.calls) == number


def test_workspaces_that_are_unknown_are_counted(predict, present, convolutional):
    _, printed, _ = predict(*convolutional, "batch_size=4", "gpu=h100", "model.channels=1024")
    words = " ".join(printed.split())
    assert "with workspaces of cuDNN for 1 of 2 convolutions, from NVIDIA H100 80GB HBM3" in words
    assert "without those of the others, the peak is a lower bound" in words
    assert "workspaces of 1 convolution not measured: CUDNN_STATUS_NOT_SUPPORTED" in words


def test_a_device_in_use_is_left_alone(predict, present, convolutional):
    with lock.held(LOCK, wait=False, purpose="another", waiting=lambda owner: None):
        _, printed, _ = predict(*convolutional, "batch_size=4", "gpu=auto", "device_lock=fail")
    words = " ".join(printed.split())
    assert "workspaces of 2 convolutions not measured: The device is in use" in words
    assert "without workspaces of cuDNN, which may be larger than all of it" in words
    assert not present.calls
