"""Names of runs in MLflow's lists."""

import msgspec
import pytest

from perfexp.errors import UserError
from perfexp.records.analysis import Analysis
from perfexp.records.record import Status, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.report.tracking import descriptions, run_names
from perfexp.report.tracking.mlflow_sink import MlflowSink


def plan(model="vgg16", algorithm="default", mode="inference", precision="torch", **more):
    nodes = {"model": model, "algorithm": algorithm, "mode": mode, "precision": precision}
    return {**{group: {"name": name} for group, name in nodes.items()}, **more}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"plan": plan(algorithm="winograd"), "batches": (8,)}, "vgg16 winograd 224 b8"),
        ({"plan": plan(), "batches": (8,)}, "vgg16 224 b8 inf"),
        (
            {"plan": plan(mode="train", precision="fp16"), "phases": ("train",)},
            "vgg16 train fp16 224 b1",
        ),
        ({"plan": plan(), "sizes": (224, 320, 256), "batches": (1, 64)}, "vgg16 224-320 b1-64 inf"),
        ({"plan": plan("mobilenet_v3_large", "implicit_precomp_gemm")}, "mobil…large impl… 224 b1"),
        ({"plan": plan("deeplabv3plus_r101_cityscapes")}, "deeplabv…tyscapes 224 b1"),
        (
            {"plan": plan("wide_resnet50_2", mode="train", precision="fp16")},
            "wid…_2 train fp16 224 b1",
        ),
        (
            {"plan": plan("vgg16", "fastest", precision="fp16"), "batches": (8,)},
            "vgg16 faste… fp16 224 b8",
        ),
        (
            {"plan": plan("wide_resnet50_2", "fastest", precision="fp16")},
            "wid…_2 fast… fp16 224 b1",
        ),
        (
            {"plan": plan("resnet18", mode="train_inference"), "batches": (1, 8)},
            "resnet18 tr+inf 224 b1-8",
        ),
        ({"plan": plan("wide_resnet50_2", "fastest")}, "wide_…t50_2 fast… 224 b1"),
        (
            {
                "plan": plan("vgg16", "winograd", precision="fp16"),
                "sizes": (224, 320),
                "batches": (1, 64),
            },
            "vgg16 fp16 224-320 b1-64",
        ),
        ({"plan": plan(execution={"compile": "default"})}, "vgg16 compile 224 b1 inf"),
        ({"plan": plan(execution={"compile": "max-autotune"})}, "vgg16 autotune 224 b1"),
        ({"plan": plan(execution={"compile": None, "cuda_graph": True})}, "vgg16 graph 224 b1 inf"),
        (
            {"plan": plan(execution={"cuda_graph": True, "channels_last": True})},
            "vgg16 nhwc+graph 224 b1",
        ),
        (
            {"plan": plan("vgg16", "winograd", precision="fp16", execution={"cuda_graph": True})},
            "vgg16 fp16 graph 224 b1",
        ),
        (
            {"plan": plan(tracking={"run_name": "the one that I show to my boss"})},
            "the one that I show to my boss",
        ),
    ],
)
def test_a_name_has_the_words_that_fit(fields, name, make_record):
    assert run_names.of_run(make_record(**fields)) == name


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"algorithm": "default"}, "default vgg16 224 b1 inf"),
        ({"batch_size": "1", "stopping.max_seconds": "5"}, "b1 max_s…nds=5 vgg16 224"),
        ({"gpu": "h100", "model.name": "vgg16"}, "h100 vgg16 224 b1 inf"),
        ({"execution": "eager"}, "eager vgg16 224 b1 inf"),
        ({"execution.cuda_graph": "false"}, "eager vgg16 224 b1 inf"),
        ({"execution.ddp.bucket_cap_mb": "50"}, "bucke…mb=50 vgg16 224 b1"),
    ],
)
def test_a_run_of_a_sweep_begins_with_its_axes(axes, name, make_record):
    membership = SweepMembership(uid="s", job=0, jobs=2, axes=axes)
    assert (
        run_names.of_run(make_record(plan=plan(tracking={"run_name": "whole"}), sweep=membership))
        == name
    )


def test_algorithms_of_a_sweep_remain_distinct(make_record):
    names = set()
    for job, algorithm in enumerate(
        ("implicit_gemm", "implicit_precomp_gemm", "winograd", "winograd_nonfused")
    ):
        membership = SweepMembership(uid="s", job=job, jobs=4, axes={"algorithm": algorithm})
        for model, precision in (("vgg16", "fp32"), ("vgg16", "fp16"), ("wide_resnet50_2", "fp16")):
            name = run_names.of_run(
                make_record(plan=plan(model, algorithm, precision=precision), sweep=membership)
            )
            assert name.startswith(algorithm[:5])
            assert name.endswith(" fp16 224 b1" if precision == "fp16" else " 224 b1")
            names.add((model, name))
    assert len(names) == 12


def test_a_part_of_a_run_begins_with_its_batch_size_and_phase(make_record):
    membership = SweepMembership(uid="s", job=0, jobs=2, axes={"algorithm": "default"})
    record = make_record(
        plan=plan(), batches=(1, 8), phases=("train", "inference"), sweep=membership
    )
    names = [
        run_names.of_part(record, [point.key]) for point in record.points if point.key.is_timed
    ]
    assert names == [
        "b1 train default 224",
        "b1 inf default vgg16 224",
        "b8 train default 224",
        "b8 inf default vgg16 224",
    ]


def swept(make_record, seconds, axis="algorithm", **fields):
    """A sweep over an axis, whose runs take these times: its summary and records."""
    sweep = Sweep(uid="s", name=axis, started="2026-03-01T10:00:00+00:00", jobs=len(seconds))
    records = []
    for job, (value, factor) in enumerate(seconds.items()):
        axes = {axis: value}
        record = make_record(
            uid=value,
            plan=plan(**axes),
            sweep=SweepMembership(uid="s", job=job, axes=axes),
            **fields,
        )
        for point in record.points:
            point.series = [
                msgspec.structs.replace(one, samples=[factor * sample for sample in one.samples])
                for one in point.series
            ]
        records.append(record)
        sweep.children.append(
            SweepChild(job=job, name=value, directory=value, status=Status.OK, axes=axes)
        )
    return sweep, records


def test_a_sweep_is_named_by_what_it_measures(make_record):
    sweep, records = swept(make_record, {"default": 1.0, "winograd": 0.5, "direct": 2.0})
    assert run_names.of_sweep(sweep, records) == "3 algorithms vgg16 224"
    assert run_names.of_unfinished_sweep(records[0]) == "algorithms vgg16 224 b1"
    for child in sweep.children:
        child.axes["batch_size"] = str(1 + child.job)
    assert run_names.of_sweep(sweep, records) == "3 algorithms × 3 batches"
    for child in sweep.children:
        del child.axes["batch_size"]
    sweep.jobs = 4
    assert run_names.of_sweep(sweep, records) == "algorithms vgg16 224 b1"
    records[0].plan["tracking"] = {"run_name": "whole"}
    assert run_names.of_sweep(sweep, records) == "whole"


def test_the_parameters_of_a_sweep_have_all_values_of_its_axes(make_record):
    sweep, records = swept(make_record, {"default": 1.0, "winograd": 0.5})
    sweep.children.append(
        SweepChild(
            job=2, name="fft", directory="x", status=Status.FAILED, axes={"algorithm": "fft"}
        )
    )
    params = descriptions.params_of_sweep(sweep, records)
    assert params["algorithm"] == "default, winograd, fft"
    assert params["model"] == "vgg16"


def test_axes_are_parameters_however_many_others_there_are(make_record):
    axes = {"optimizer.lr": "0.1", "weight_decay": "0.01"}
    membership = SweepMembership(uid="u", job=0, axes=axes)
    command = [f"custom.key{number}={number}" for number in range(30)]
    record = make_record(command=command, sweep=membership)
    of_run = descriptions.params_of_run(record)
    sweep = Sweep(
        uid="u",
        name="x",
        started="",
        children=[SweepChild(job=0, name="x", directory="x", status=Status.OK, axes=axes)],
    )
    assert len(of_run) == descriptions.MOST_PARAMS
    assert axes.items() <= of_run.items()
    assert axes.items() <= descriptions.params_of_sweep(sweep, [record]).items()


@pytest.mark.parametrize("name", ["mlflow.user", "perfexp.kind", "gpu", "a/b", "é"])
def test_a_tag_that_is_taken_is_refused_and_never_sent(name):
    assert descriptions.tag_fault(name)
    assert descriptions.own_tags({"tracking": {"tags": {name: "x", "team": "vision"}}}) == {
        "team": "vision"
    }


@pytest.mark.parametrize("tags", ["team", {"gpu": "mine"}])
def test_invalid_tags_are_refused_before_measuring(tags, tmp_path):
    with pytest.raises(UserError, match=r"tracking\.tags"):
        MlflowSink(uri=f"sqlite:///{tmp_path}/mlflow.db", tags=tags)


def test_a_users_description_stands_above_the_results(make_record):
    record = make_record(plan={"tracking": {"description": "a *first* <b>try</b>"}})
    note = descriptions.of_run(Analysis.of(record), {})
    assert note.startswith("a \\*first\\* &lt;b&gt;try&lt;/b&gt;\n\nresnet50 · inference · 224")
