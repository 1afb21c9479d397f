"""The speed JSON itself, and that of a run's record."""

import json

import pytest

from perfexp.records.record import Key, Point, Series, Status
from perfexp.speed import Mode, Speed, of_record
from perfexp.statistics.estimators import mean_interval
from tests.conftest import timed_point

KEYS = [
    "log_file",
    "model_name",
    "mission_name",
    "direction_id",
    "run_mode",
    "index",
    "gpu_num",
    "FINAL_RESULT",
]
KEYS += ["JOB_FAIL_FLAG", "UNIT"]


def trained(
    seconds,
    *,
    batch=2,
    size=(512, 1024),
    status=Status.OK,
    series="throughput",
    replicate=0,
    **fields,
):
    return Point(
        key=Key(
            phase="train",
            input_size=size,
            batch_size=batch,
            precision="amp_fp16",
            replicate=replicate,
        ),
        status=status,
        series=[Series(name=series, samples=[9.0, *[seconds] * 9], warmup=1)],
        **fields,
    )


def test_the_json_has_these_keys_in_this_order():
    speed = Speed(
        log_file="/logs/fastscnn_sp_bs2_fp32_1",
        model="fastscnn",
        mode=Mode.sp,
        num_gpus=1,
        batch_size=2,
        precision="fp32",
        images_per_second=7.514,
    )
    text = speed.to_json().decode("utf-8")
    assert text == (
        '{\n"log_file": "/logs/fastscnn_sp_bs2_fp32_1",\n"model_name": "fastscnn",\n"mission_name": "图像分割",\n'
        '"direction_id": 0,\n"run_mode": "sp",\n"index": 1,\n"gpu_num": 1,\n"FINAL_RESULT": 7.514,\n'
        '"JOB_FAIL_FLAG": 0,\n"UNIT": "images/s"\n}\n'
    )
    assert list(json.loads(text)) == KEYS
    assert speed.file_name == "fastscnn_sp_bs2_fp32_1_speed.json"


@pytest.mark.parametrize(
    ("rate", "failed"), [(0.0, False), (1.0, True), (float("nan"), True), (float("inf"), False)]
)
def test_a_figure_that_contradicts_its_flag_is_never_made(rate, failed):
    with pytest.raises(ValueError, match="images/s"):
        Speed(
            log_file="",
            model="m",
            mode=Mode.sp,
            num_gpus=1,
            batch_size=1,
            precision="p",
            images_per_second=rate,
            failed=failed,
        )


def test_a_name_that_no_file_can_have_is_made_one():
    speed = Speed(
        log_file="\udcff",
        model="../a b" + "x" * 300,
        mode=Mode.mp,
        num_gpus=8,
        batch_size=2,
        precision="a/b",
        failed=True,
    )
    assert "/" not in speed.file_name
    assert len(speed.file_name) < 255
    assert json.loads(speed.to_json())["model_name"].startswith("../a b")


def test_a_record_gives_one_for_each_point_that_was_trained(make_record, tmp_path):
    record = make_record(phases=("inference",))
    assert of_record(record, tmp_path) == []
    record.points += [trained(0.25), trained(0.5, batch=4)]
    first, second = of_record(record, tmp_path)
    assert first.document() == {
        "log_file": str(tmp_path / "details" / "run.log"),
        "model_name": "resnet50",
        "mission_name": "图像分割",
        "direction_id": 0,
        "run_mode": "sp",
        "index": 1,
        "gpu_num": 1,
        "FINAL_RESULT": 8.0,
        "JOB_FAIL_FLAG": 0,
        "UNIT": "images/s",
    }
    assert (first.file_name, second.file_name) == (
        "resnet50_sp_bs2_amp_fp16_1_speed.json",
        "resnet50_sp_bs4_amp_fp16_1_speed.json",
    )


def test_speed_without_pipelined_calls_uses_single_call_latency(make_record, tmp_path):
    (speed,) = of_record(make_record(phases=("train",), batches=(2,)), tmp_path)
    point = timed_point(224, 2, "train")
    measured = point.series[0].measured
    assert speed.images_per_second == pytest.approx(2 * len(measured) / sum(measured), rel=1e-3)
    (through,) = of_record(
        make_record(phases=("train",), batches=(2,)), tmp_path / "elsewhere" / ".."
    )
    assert through.log_file == speed.log_file


def test_cards_are_those_of_the_point_then_those_of_the_plan(make_record, tmp_path):
    record = make_record(plan={"gpu": {"name": "h200", "count": 8}})
    record.points = [trained(0.25, facts={"world_size": 2}), trained(0.25, batch=4)]
    first, second = of_record(record, tmp_path)
    assert (first.num_gpus, first.mode, first.images_per_second) == (2, "mp", pytest.approx(16))
    assert (second.num_gpus, second.images_per_second) == (8, pytest.approx(128))
    assert second.file_name == "resnet50_mp_bs4_amp_fp16_8_speed.json"


@pytest.mark.parametrize("value", [None, 0, -1, True, "2", 2.5])
def test_a_number_of_cards_that_is_none_is_one(value, make_record, tmp_path):
    record = make_record(plan={"gpu": {"count": value}})
    record.points = [trained(0.25, facts={"world_size": value})]
    assert of_record(record, tmp_path)[0].num_gpus == 1


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_point_that_did_not_end_well_is_a_failure(status, make_record, tmp_path):
    record = make_record()
    record.points = [trained(0.25, status=status, error="CUDA out of memory")]
    (speed,) = of_record(record, tmp_path)
    assert (speed.images_per_second, speed.failed, speed.remark) == (
        0,
        True,
        f"{status}: CUDA out of memory",
    )


@pytest.mark.parametrize("point", [trained(0.0), trained(0.25, series="other"), trained(5e-324)])
def test_so_is_one_without_a_usable_time(point, make_record, tmp_path):
    record = make_record()
    record.points = [point]
    assert of_record(record, tmp_path)[0].document()["JOB_FAIL_FLAG"] == 1


def test_points_differing_by_size_or_process_have_own_files(make_record, tmp_path):
    record = make_record()
    record.points = [
        trained(0.25, size=(256, 256)),
        trained(0.5),
        trained(0.5, replicate=1),
        trained(0.5, batch=8),
    ]
    together = [speed.file_name for speed in of_record(record, tmp_path)]
    assert together == [
        f"resnet50_{size}_sp_bs2_amp_fp16_1_speed.json" for size in ("256", "512x1024")
    ] + ["resnet50_sp_bs8_amp_fp16_1_speed.json"]
    record.plan["processes"] = 2
    found = of_record(record, tmp_path)
    assert [speed.file_name for speed in found] == [
        "resnet50_256_replicate0_sp_bs2_amp_fp16_1_speed.json",
        "resnet50_512x1024_replicate0_sp_bs2_amp_fp16_1_speed.json",
        "resnet50_512x1024_replicate1_sp_bs2_amp_fp16_1_speed.json",
        "resnet50_sp_bs8_amp_fp16_1_speed.json",
    ]
    assert {speed.model for speed in found} == {"resnet50"}


def test_speed_interval_is_the_inverted_interval_of_the_mean(make_record, tmp_path):
    (speed,) = of_record(make_record(phases=("train",), batches=(2,)), tmp_path)
    point = timed_point(224, 2, "train")
    time = mean_interval(point.series[0].measured)
    assert (speed.interval.low, speed.interval.high) == pytest.approx(
        (2 / time.high, 2 / time.low), rel=1e-5
    )
    assert speed.interval.value == speed.images_per_second


def test_few_steps_have_a_figure_and_no_interval(make_record, tmp_path):
    record = make_record()
    record.points = [trained(0.25), trained(0.25, batch=4, status=Status.OOM)]
    record.points[0].series[0].samples = [9.0, 0.25, 0.25]
    found, failed = of_record(record, tmp_path)
    assert (found.images_per_second, found.interval.low, found.interval.high) == (8.0, None, None)
    assert failed.interval is None
