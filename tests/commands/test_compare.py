"""`perfexp compare`: what is printed and written, confounders, and what is refused."""

import csv
import io
import json
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from perfexp import commands
from perfexp.commands.compare import print_comparison
from perfexp.comparison import comparability, comparison_table, judging
from perfexp.comparison.document import Comparison, SideFacts, Verdict
from perfexp.comparison.pairing import Side
from perfexp.records import diagnostics
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Record, Status, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.report.console import Console
from perfexp.report.plots import pages
from perfexp.report.tracking import mlflow_sink
from perfexp.report.tracking.mlflow_sink import MlflowSink
from perfexp.report.tracking.store import TrackingFailed
from tests.support.builders import ALIKE
from tests.support.verdicts import record, seconds

pytestmark = pytest.mark.usefixtures("quick_commands")

FLAT = [1.0, 1.001, 0.999]
ENVIRONMENT = {
    "perfexp": "1.0",
    "host": "node1",
    "cpu": {"name": "AMD EPYC", "governors": ["performance"]},
    "packages": {"torch": "2.11.0"},
    "device": {
        "kind": "cuda",
        "name": "NVIDIA H200",
        "power_limit_watts": 700.0,
        "application_clock_changed": False,
        "ecc": True,
        "mig": False,
    },
    "session": {
        "threads": 8,
        "interop_threads": 8,
        "cudnn_allow_tf32": False,
        "cudnn_benchmark": False,
        "deterministic": False,
    },
}
PLAN = {
    "model": {"name": "resnet18"},
    "algorithm": {"name": "default"},
    "precision": {"name": "fp32"},
    "execution": {"threads": None, "cudnn_benchmark": False, "deterministic": False},
    "data": {"_target_": "perfexp.data.synthetic.Synthetic"},
    "cache": "warm",
}


def made(points=(FLAT,), *, plan=None, environment=None, seed=0):
    """A record of an H200, with other values at dotted places of its plan and its environment."""
    found = record(f"run {seed}", points, np.random.default_rng(seed))
    found.priors = ALIKE
    found.plan, found.environment = (
        json.loads(json.dumps(PLAN)),
        json.loads(json.dumps(ENVIRONMENT)),
    )
    for tree, changes in ((found.plan, plan), (found.environment, environment)):
        for place, value in (changes or {}).items():
            *folders, name = place.split(".")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[name] = value
    return found


@pytest.fixture
def saved(tmp_path):
    """Save records in folders of their own; returns the folders' paths."""

    def save(*records):
        paths = []
        for number, one in enumerate(records):
            (tmp_path / f"run{number}").mkdir(exist_ok=True)
            (tmp_path / f"run{number}" / "record.json").write_bytes(one.to_json())
            paths.append(str(tmp_path / f"run{number}"))
        return paths

    return save


@pytest.fixture
def compared(saved, capsys):
    """Compare records by the command; returns its JSON."""

    def run(one, two, *options):
        assert commands.run(["compare", *saved(one, two), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


#: For each confounder: what differs in the plan and in the environment.
CONFOUNDERS = {
    "power_limit": ({}, {"device.power_limit_watts": 500.0}),
    "clocks": ({}, {"device.application_clock_changed": True}),
    "ecc": ({}, {"device.ecc": False}),
    "mig": ({}, {"device.mig": True}),
    "tf32": ({}, {"session.cudnn_allow_tf32": True}),
    "cudnn_benchmark": ({}, {"session.cudnn_benchmark": True}),
    "deterministic": ({}, {"session.deterministic": True}),
    "threads": ({}, {"session.threads": 4}),
    "interop_threads": ({}, {"session.interop_threads": 4}),
    "data": ({"data.folder": "images"}, {}),
    "cache": ({"cache": "flush"}, {}),
    "perfexp": ({}, {"perfexp": "1.1"}),
}


@pytest.mark.parametrize("key", CONFOUNDERS)
def test_confounder_prevents_a_comparison_unless_allowed(key, compared, capsys, tmp_path):
    plan, environment = CONFOUNDERS[key]
    other = made([[0.5 * factor for factor in FLAT]], plan=plan, environment=environment, seed=1)
    found = compared(made(), other)
    assert [(pair["verdict"], pair["confounders"]) for pair in found["pairs"]] == [
        ("not comparable", [key])
    ]
    assert found["means"] == []
    paths = [str(tmp_path / f"run{number}") for number in range(2)]
    assert commands.run(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert "✕ NOT COMPARABLE" in text
    assert f"--allow {key}" in text
    assert commands.run(["compare", *paths, "--allow", key]) == 0
    text = capsys.readouterr().out
    assert "▲ FASTER" in text
    assert ", allowed" in text


def test_every_confounder_has_a_test():
    tested = {
        *CONFOUNDERS,
        "cpu",
        "target",  # tests/records/test_seeds.py
        "device_method",
        "rate_method",
        "process_start",
        "meter",
        "diagnostics",
    }
    assert tested == set(comparability.ALLOWABLE)


def with_latency(one):
    for point in one.points:
        point.series.append(msgspec.structs.replace(point.series[0], name="latency"))
    return one


def verdicts(found):
    return {pair["measure"]: pair["verdict"] for pair in found["pairs"]}


def test_another_cpu_concerns_the_times_of_the_host_only(compared):
    other = with_latency(made(environment={"cpu.name": "Intel Xeon"}, seed=1))
    found = verdicts(compared(with_latency(made()), other))
    assert found["device"] == "same"
    assert {found[name] for name in ("latency", "p95", "throughput")} == {"not comparable"}


def test_forked_and_spawned_processes_compare_device_times_only(compared):
    sides = with_latency(made()), with_latency(made(seed=1))
    for one, start in zip(sides, ("forked", "fresh"), strict=True):
        for point in one.points:
            point.facts["process_start"] = start
    found = verdicts(compared(*sides))
    assert found["device"] == "same"
    assert {found[name] for name in ("latency", "p95", "throughput")} == {"not comparable"}


def test_a_queue_is_not_compared_with_a_graph(compared):
    one, other = with_latency(made()), with_latency(made(seed=1))
    for side, method in ((one, "queue"), (other, "graph")):
        for point in side.points:
            point.facts["device_method"] = method
            point.series[0].name = "device" if method == "queue" else "device/graph"
            point.metrics.append(
                Metric(name="device/cycles_per_call", value=1e7, unit="1", estimated=True)
            )
    found = compared(one, other)
    assert verdicts(found) == {
        "cycles": "not comparable",
        **dict.fromkeys(("latency", "p95", "throughput"), "same"),
    }
    assert [(alone["side"], alone["measure"]) for alone in found["alone"]] == [
        ("A", "device"),
        ("B", "device/graph"),
    ]


def test_device_time_of_a_graph_is_not_compared_with_a_queue(compared):
    one, other = (
        with_latency(made()),
        with_latency(made([[0.5 * factor for factor in FLAT]], seed=1)),
    )
    for side, method in ((one, "queue"), (other, "graph")):
        for point in side.points:
            point.facts["device_method"] = method
    found = verdicts(compared(one, other))
    assert (found["device"], found["latency"]) == ("not comparable", "better")


@pytest.mark.parametrize(("kind", "verdict"), [("cuda", "not comparable"), ("cpu", "better")])
def test_pipelined_and_synchronized_rates_are_not_compared(compared, kind, verdict):
    one = with_latency(made(environment={"device.kind": kind}))
    other = with_latency(made([[0.5 * factor for factor in FLAT]], seed=1))
    for point in other.points:
        point.series.append(msgspec.structs.replace(point.series[0], name="throughput"))
    found = compared(one, other)
    assert (verdicts(found)["latency"], verdicts(found)["throughput"]) == ("better", verdict)
    differences = [
        difference
        for difference in found["sides"][1]["differences"]
        if difference["role"] == "confounder"
    ]
    if kind == "cpu":  # its latency is the pipelined loop
        assert differences == []
    else:
        [method] = differences
        assert (method["key"], method["measures"]) == ("rate_method", ["throughput"])
        assert (method["baseline"], method["other"]) == (
            "calls that each synchronize",
            "pipelined calls",
        )
        assert verdicts(compared(one, other, "--allow", "rate_method"))["throughput"] == "better"


@pytest.mark.parametrize(
    ("joules", "accuracy", "verdict"),
    [(1.0, 0.05, "not comparable"), (2.0, 0.05, "worse"), (2.0, None, "not comparable")],
)
def test_energy_of_another_board_includes_both_meter_errors(joules, accuracy, verdict, compared):
    sides = (
        made(environment={"device.uuid": "GPU-1"}),
        made(environment={"device.uuid": "GPU-2"}, seed=1),
    )
    for side, value in zip(sides, (1.0, joules), strict=True):
        ends = {"low": 0.99 * value, "high": 1.01 * value}
        side.points[0].metrics = [
            Metric(name="energy/per_image_joules", value=value, unit="joules", **ends)
        ]
        if accuracy:
            side.points[0].metrics.append(
                Metric(name="energy/meter_accuracy", value=accuracy, unit="1")
            )
    found = compared(*sides)
    assert verdicts(found) == {"device": "same", "energy": verdict}
    subjects = [one for one in found["sides"][1]["differences"] if one["role"] == "subject"]
    assert [(one["key"], one["baseline"], one["other"]) for one in subjects] == [
        ("board", "GPU-1", "GPU-2")
    ]


def test_times_of_graphs_are_compared(compared):
    one, other = made(), made([[0.5 * factor for factor in FLAT]], seed=1)
    for point in (*one.points, *other.points):
        point.series.append(msgspec.structs.replace(point.series[0], name="device/graph"))
    assert verdicts(compared(one, other)) == {"device": "better", "device/graph": "better"}


def test_a_figure_with_an_error_is_not_compared(compared):
    other = made(seed=1)
    other.points[1].doubts.append(
        diagnostics.make("precision_unavailable", precision="bf16", reason="too old")
    )
    assert compared(made(), other)["pairs"][0]["confounders"] == ["diagnostics"]


@pytest.mark.parametrize(
    ("plan", "environment"),
    [
        ({"algorithm.name": "fft"}, {}),
        ({"precision.name": "tf32"}, {"session.cudnn_allow_tf32": True}),
        ({"execution.threads": 4}, {"session.threads": 4}),
        ({"execution.cudnn_benchmark": True}, {"session.cudnn_benchmark": True}),
        ({}, {"packages.torch": "2.12.0"}),
        (
            {},
            {
                "device.name": "NVIDIA H100",
                "device.power_limit_watts": 350.0,
                "cpu.name": "Intel Xeon",
            },
        ),
        ({}, {"host": "node2"}),
        ({}, {"device.ecc": None}),
    ],
)
def test_the_subject_and_what_follows_from_it_is_no_confounder(plan, environment, compared):
    assert verdicts(compared(made(), made(plan=plan, environment=environment, seed=1))) == {
        "device": "same"
    }


def test_tf32_of_two_vendors_is_not_the_same_thing(compared):
    amd = {
        "device.name": "AMD Instinct MI300X",
        "device.rocm": "7.1",
        "session.cudnn_allow_tf32": True,
    }
    of_nvidia, of_amd = {"session.cudnn_allow_tf32": True}, made(environment=amd, seed=1)
    assert compared(made(environment=of_nvidia), of_amd)["pairs"][0]["confounders"] == ["tf32"]


def test_boards_of_two_vendors_are_compared_in_float32(compared):
    amd = {"device.name": "AMD Instinct MI300X", "device.rocm": "7.1"}
    assert verdicts(compared(made(), made(environment=amd, seed=1))) == {"device": "same"}


def test_a_setting_below_a_group_is_named(saved, capsys):
    one, two = (made(plan={"model.width": width}, seed=width) for width in (16, 32))
    assert commands.run(["compare", *saved(one, two)]) == 0
    assert "B against A: model width 16 → width 32" in capsys.readouterr().out


def test_a_second_setting_beside_the_subject_is_a_confounder(compared):
    other = made(
        plan={"algorithm.name": "fft", "execution.threads": 4},
        environment={"session.threads": 4},
        seed=1,
    )
    [pair] = compared(made(), other)["pairs"]
    assert pair["confounders"] == ["threads"]


def test_single_figures_are_compared_in_their_own_words(compared):
    one, other = made(), made(seed=1)
    for side, scale in ((one, 1.0), (other, 0.5)):
        side.points[0].metrics = [
            Metric(name="memory/peak_bytes", value=scale * 2**30, unit="bytes"),
            Metric(name="energy/per_image_joules", value=scale, unit="joules"),
            Metric(name="accuracy", value=None, unit="1"),
        ]
    found = {pair["measure"]: pair for pair in compared(one, other)["pairs"]}
    assert found.keys() == {"device", "memory", "energy"}
    assert found["memory"]["ratio"] == pytest.approx(0.5)
    assert (found["memory"]["word"], found["energy"]["word"]) == ("LESS", "UNDECIDED")
    assert found["energy"]["low"] is None


def with_accuracy(side, *values):
    for point, value in zip(side.points, values, strict=False):
        point.metrics = [Metric(name="accuracy", value=value, unit="1")]
    return side


@pytest.mark.parametrize(
    ("before", "after", "word", "ratio"),
    [
        (0.75, 0.76, "SAME", 0.76 / 0.75),  # 0.76 - 0.75 > 0.01 in floating point
        (0.76, 0.75, "SAME", 0.75 / 0.76),
        (0.75, 0.7601, "HIGHER", 0.7601 / 0.75),
        (0.8, 0.0, "LOWER", None),
        (0.0, 0.8, "HIGHER", None),
        (0.0, 0.0, "SAME", None),
    ],
)
def test_accuracies_are_compared_by_difference_even_at_0(before, after, word, ratio, compared):
    found = compared(
        with_accuracy(made(), before), with_accuracy(made(seed=1), after), "--metric", "accuracy"
    )
    [pair] = found["pairs"]
    assert (pair["word"], pair["baseline"], pair["other"]) == (
        word,
        pytest.approx(before),
        pytest.approx(after),
    )
    assert pair["ratio"] == (ratio and pytest.approx(ratio))
    assert found["alone"] == []


def test_an_accuracy_of_0_is_reported_without_a_ratio(saved, capsys, tmp_path):
    one, other = with_latency(made([FLAT] * 2)), with_latency(made([FLAT] * 2, seed=1))
    with_accuracy(one, *[0.8] * 6), with_accuracy(other, *[0.8] * 3, *[0.0] * 3)
    for side in (one, other):
        side.environment["device"]["name"] = side.name
    folder = tmp_path / "report"
    assert (
        commands.run(
            ["compare", *saved(one, other), "--output", str(folder), "--metric", "accuracy,device"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "undefined" in text
    assert "▼ LOWER" in text
    assert (
        "the ratio of accuracy is undefined where a figure is 0; so is the mean of such ratios"
        in text.replace("\n    ", " ")
    )
    found = json.loads((folder / "comparison.json").read_text())
    assert [pair["ratio"] for pair in found["pairs"] if pair["measure"] == "accuracy"] == [
        None,
        pytest.approx(1),
    ]
    assert {mean["measure"] for mean in found["means"]} == {"device"}
    assert found["devices"][0]["accuracy_difference"] == pytest.approx(-0.4)
    assert msgspec.json.decode(json.dumps(found), type=Comparison).pairs


# Output


@pytest.mark.parametrize(
    ("processes", "decided_by", "words"),
    [
        (1, (), "with 1 process of each side: intervals need 2"),
        (
            4,
            (),
            "perfexp ab ended when device was decided; for a verdict on another measure start a new perfexp ab",
        ),
        (4, ("latency",), "a longer --max-seconds, which goes on while latency is undecided; for"),
        (
            4,
            ("p95",),
            "which goes on while the measure that it decides by (--metric) is undecided; for",
        ),
        (
            4,
            None,
            "which goes on while the measure that it decides by (--metric) is undecided; for",
        ),
        (32, (), "UNDECIDED after 32 processes of each side"),
    ],
)
def test_undecided_processes_in_turn_say_what_would_decide(processes, decided_by, words):
    """A hint names only options that `perfexp ab` accepts for the folder that it continues."""
    key = Key(phase="inference", input_size=(32, 32), batch_size=1, precision="fp32")
    verdicts = {"device": Verdict.BETTER, "latency": Verdict.UNDECIDED, "memory": Verdict.SAME}
    pairs = [
        SimpleNamespace(
            side="B", key=key, measure=name, verdict=verdict, processes=(processes, processes)
        )
        for name, verdict in verdicts.items()
    ]
    side = SideFacts(name="B", source="b", runs=("b",), level=0.007, decided_by=decided_by)
    [note] = comparison_table.remedies(side, pairs)
    assert words in note
    assert "until another measure" not in note


def test_coverage_and_warnings_of_a_side_are_below_its_title(saved, capsys, tmp_path):
    one, other = made([FLAT] * 2), made([FLAT] * 2, seed=1)
    one.points[0].doubts += [
        diagnostics.make("drift", relative=0.05, changes="the median moved"),
        diagnostics.make("simulated"),
    ]
    for point in other.points:
        shares = {"flops": 0.37, "proven": 0.0}
        point.metrics += [
            Metric(name=f"algorithm/{name}_share", value=value, unit="1")
            for name, value in shares.items()
        ]
    folder = tmp_path / "report"
    assert commands.run(["compare", *saved(one, other), "--output", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("B against A"))
    coverage = "algorithm coverage, of the convolutions' FLOPs: B 37 %, not verified"
    [codes] = [line.strip() for line in lines if line.startswith("  errors and warnings: A ")]
    assert [line.strip() for line in lines[title + 1 : title + 3]] == [coverage, codes]
    assert "drift" in codes and codes.endswith("(perfexp show)")
    assert coverage in (folder / "comparison.md").read_text()
    facts = json.loads((folder / "comparison.json").read_text())["sides"][0]
    assert "drift" in facts["warnings"] and facts["coverage"] == ""
    for point in other.points:
        point.metrics = [
            Metric(name=f"algorithm/{name}_share", value=1.0, unit="1")
            for name in ("flops", "proven")
        ]
    assert commands.run(["compare", *saved(one, other)]) == 0
    assert "algorithm coverage" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([(3, 3), (3, 3)], "; 3 processes of each side; "),
        ([(1, 1), (1, 1)], "; 1 process of each side; "),
        ([(3, 4), (3, 4)], "; A 3, B 4 processes; "),
        ([(3, 3), (5, 5)], "; 3 to 5 processes of each side and point; "),
    ],
)
def test_the_numbers_of_processes_stand_beside_the_confidence(processes, words):
    found = judging.compare(
        [Side.of("A", "a", [Analysis.of(made())]), Side.of("B", "b", [Analysis.of(made(seed=1))])],
        judging.Settings(),
    )
    [pair] = [pair for pair in found.pairs if pair.measure == "device"]
    pairs = [msgspec.structs.replace(pair, processes=counts) for counts in processes]
    exact = msgspec.structs.replace(pair, measure="energy", processes=(1, 1))
    assert (
        words in comparison_table.header(msgspec.structs.replace(found, pairs=(*pairs, exact)))[-1]
    )
    assert (
        " process"
        not in comparison_table.header(msgspec.structs.replace(found, pairs=(exact,)))[-1]
    )


def many(seed, scale=1.0):
    """Six sizes, the layers of the first, and one that the other side has not."""
    found = made([[scale * factor for factor in FLAT]] * (6 if scale == 1 else 5), seed=seed)
    found.plan["algorithm"]["name"] = "default" if scale == 1 else "winograd_nonfused"
    kernel = "implicit_gemm" if scale == 1 else "winograd"
    lines = [
        {
            "key": {"path": path, "which": "forward"},
            "kind": "Conv2d",
            "seconds": dict.fromkeys(("mean", "median", "low", "high"), scale * seconds),
            "gap_seconds": dict.fromkeys(("mean", "median", "low", "high"), 0.0),
            **dict.fromkeys(
                ("macs", "flops", "bytes_min", "activation_bytes", "parameters", "convolution")
            ),
            **dict.fromkeys(("arithmetic_intensity", "flops_per_second")),
            "share": 0.5,
            "inputs": [],
            "outputs": [],
            "kernels": {f"void ns::{kernel}<float, 2>(int)": 1.0},
        }
        for path, seconds in (("layer1.conv1", 1e-3), ("layer1.conv2", 4e-3))
    ]
    key = Key(phase="inference_layers", input_size=(32, 32), batch_size=1, precision="fp32")
    facts = {"method": "clock", "call_seconds": [5e-3], "lines": lines}
    found.points.append(Point(key=key, status=Status.OK, facts={"layers": facts}))
    return with_latency_of_timed(found)


def with_latency_of_timed(found):
    for point in found.points:
        if point.series:
            point.series.append(msgspec.structs.replace(point.series[0], name="latency"))
    return found


def test_layers_that_disagree_with_the_call_are_not_compared(saved, tmp_path, capsys):
    one, two = many(0), many(1, 0.8)
    two.points[-1].doubts.append(Diagnostic(code="layers_disagree", message="", help=""))
    assert commands.run(["compare", *saved(one, two), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert (
        "layers are not compared: they are shares only, of a profiled call unlike the timed one"
        in printed
    )
    assert "layer1.conv2" not in printed + (tmp_path / "out" / "comparison.html").read_text()


def test_the_files_hold_the_whole_comparison(saved, tmp_path, capsys):
    paths, out = saved(many(0), many(1, 0.8)), tmp_path / "out"
    assert commands.run(["compare", *paths, "--output", str(out)]) == 0
    assert "comparison.html" in capsys.readouterr().out
    found = msgspec.json.decode((out / "comparison.json").read_bytes(), type=Comparison)
    assert found.schema_version == 1
    assert len(found.pairs) == 5 * 4
    assert [(one.layer, round(one.share, 6)) for one in found.layers] == [
        ("layer1.conv2", 0.8),
        ("layer1.conv1", 0.2),
    ]
    assert {one.baseline_kernels + one.other_kernels for one in found.layers} == {
        ("implicit_gemm", "winograd")
    }
    table = (out / "comparison.md").read_text()
    assert "kernels of A" in table and "kernels of B" in table
    assert "implicit\\_gemm" in table and "| winograd |" in table
    lines = list(csv.DictReader(io.StringIO((out / "comparison.csv").read_text())))
    assert [float(line["ratio"]) for line in lines] == [pair.ratio for pair in found.pairs]
    text = (out / "comparison.md").read_text()
    assert "all layers together explain 100 % of the difference of device" in text
    assert "winograd\\_nonfused" in text
    assert "| layer1.conv2 | forward | 32 |" in text
    assert text.count("| layer | pass | point |") == text.count("| layer |") == 2
    page = (out / "comparison.html").read_text()
    assert ">all layers together explain 100 % of the difference of device</p>" in page
    assert "<td class=prose>implicit_gemm</td><td class=prose>winograd</td>" in page
    assert page.count("<svg") == 1
    ratios = re.findall(r"<title>(\w+), .*?</title>", page.partition("<svg")[2])
    assert ratios == [pair.measure for pair in found.pairs], (
        "each pair has its marker with its tooltip"
    )
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)
    assert commands.run(["compare", *paths, "--output", str(out)]) == 2
    assert "--force" in capsys.readouterr().err


def test_the_plot_of_many_pairs_has_the_first_ones_and_says_so(saved):
    sides = [
        Side.of(name, name, [Analysis.of(many(seed, scale))])
        for seed, (name, scale) in enumerate((("A", 1.0), ("B", 0.8)))
    ]
    found = judging.compare(sides, judging.Settings())
    whole = pages.ratio_plot(found, found.sides[1])
    axes = whole.axes[0]
    assert len(axes.get_yticklabels()) == len(found.pairs)
    assert axes.get_xlim()[0] < 0.8 < 1 < axes.get_xlim()[1]
    longer = msgspec.structs.replace(found, pairs=found.pairs * 10)
    first = pages.ratio_plot(longer, longer.sides[1])
    shown = len(first.axes[0].get_yticklabels())
    assert shown < len(longer.pairs)
    words = [text.get_text() for text in first.texts]
    assert any(f"{shown} of {len(longer.pairs)}, the table has all" in one for one in words)
    assert pages.ratio_plot(msgspec.structs.replace(found, pairs=()), found.sides[1]) is None


def test_names_from_a_record_do_not_become_html(saved, tmp_path):
    paths = saved(made(), made(plan={"algorithm.name": "<script>alert(1)</script>"}, seed=1))
    assert commands.run(["compare", *paths, "--output", str(tmp_path / "out")]) == 0
    assert "<script>alert" not in (tmp_path / "out" / "comparison.html").read_text()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_fits_the_terminal(width, saved, capsys):
    paths = saved(many(0), many(1, 0.8))
    assert commands.run(["compare", *paths, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    out = io.StringIO()
    print_comparison(found, Console(out=out, err=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "▲ FASTER" in text
    assert "0.800" in text
    assert "only on one side" in text
    assert "algorithm default → winograd_nonfused" in " ".join(text.split())
    assert "not shown" not in text


def test_verdicts_have_colors_beside_their_symbols(saved, capsys):
    paths = saved(many(0), many(1, 0.8))
    assert commands.run(["compare", *paths, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    texts = []
    for no_color in ("", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("NO_COLOR", no_color)
            out = Terminal()
            print_comparison(found, Console(out=out, err=out, width=100))
            texts.append(out.getvalue())
    assert "\x1b[32m▲ FASTER" in texts[0]
    assert "\x1b[32m" not in texts[1]
    assert "▲ FASTER" in texts[1]


def test_a_clock_that_explains_a_difference_is_named(saved, capsys):
    one, two = made(), made([[0.9 * factor for factor in FLAT]], seed=1)
    for point in (*one.points, *two.points):
        point.metrics.append(
            Metric(name="device/cycles_per_call", value=1e7, unit="1", estimated=True)
        )
    assert commands.run(["compare", *saved(one, two)]) == 0
    text = capsys.readouterr().out
    assert (
        "time and cycles disagree\n  32 · batch 1: faster only because the clock was higher" in text
    )
    assert "time and cycles (≈ device time × clock) have the same verdict in 0 of 1 pairs" in text


def test_a_sweep_is_one_side(tmp_path, capsys):
    for name, scale in (("before", 1.0), ("after", 1.3)):
        children = []
        for number, model in enumerate(("resnet18", "vgg16")):
            one = made(
                [[scale * factor for factor in FLAT]],
                plan={"model.name": model},
                seed=number + int(10 * scale),
            )
            folder = tmp_path / name / str(number)
            folder.mkdir(parents=True)
            (folder / "record.json").write_bytes(one.to_json())
            children.append(
                SweepChild(job=number, name=model, directory=str(number), status=Status.OK)
            )
        sweep = Sweep(uid=name, name=name, started="2026-01-01T00:00:00+00:00", children=children)
        (tmp_path / name / "sweep.json").write_bytes(sweep.to_json())
    assert commands.run(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    text = capsys.readouterr().out
    assert text.count("▼ SLOWER") == 2
    assert "points of 2 models: device 1.3" in text


@pytest.fixture
def batches(tmp_path):
    """Write a sweep over models and batch sizes; a record of None is missing, a status is that of a failed point."""

    def write(models, sizes=(1, 8)):
        children = []
        for job, (model, (size, found)) in enumerate(
            (model, one)
            for model, of_model in models.items()
            for one in zip(sizes, of_model, strict=True)
        ):
            axes = ({"model": model} if len(models) > 1 else {}) | {"batch_size": str(size)}
            name = "-".join(axes.values())
            children.append(
                SweepChild(job=job, name=name, directory=name, status=Status.FAILED, axes=axes)
            )
            (folder := tmp_path / "sweep" / name).mkdir(parents=True)
            if found is None:
                continue
            is_timed = not isinstance(found, Status)
            scale = found if is_timed else 1.0
            one = made([[scale * factor for factor in FLAT]], plan={"model.name": model}, seed=job)
            one.name, one.sweep = name, SweepMembership(uid="s", job=job, axes=axes)
            for point in one.points:
                point.key = msgspec.structs.replace(point.key, batch_size=size)
                point.status = Status.OK if is_timed else found
            (folder / "record.json").write_bytes(one.to_json())
        sweep = Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=children)
        (tmp_path / "sweep" / "sweep.json").write_bytes(sweep.to_json())
        return tmp_path / "sweep"

    return write


def test_a_sweep_is_compared_within_itself_at_each_point(batches, capsys):
    folder = batches({"resnet18": [1.0, 4.0], "vgg16": [0.8, 6.0]})
    assert commands.run(["compare", str(folder), "--metric", "device", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(side["source"], side["runs"]) for side in found["sides"]] == [
        (f"{folder} model=resnet18 (2 runs)", ["resnet18-1", "resnet18-8"]),
        (f"{folder} model=vgg16 (2 runs)", ["vgg16-1", "vgg16-8"]),
    ]
    assert {pair["key"]["batch_size"]: pair["word"] for pair in found["pairs"]} == {
        1: "FASTER",
        8: "SLOWER",
    }
    assert commands.run(["compare", str(folder)]) == 0
    assert "B against A: model resnet18 → vgg16\n" in capsys.readouterr().out


def test_failed_runs_of_a_sweep_leave_the_other_points(batches, capsys):
    folder = batches({"resnet18": [1.0, 4.0, 9.0], "vgg16": [0.8, Status.OOM, None]}, (1, 8, 64))
    assert commands.run(["compare", str(folder), "--metric", "device"]) == 0
    text = capsys.readouterr().out
    assert f"B  {folder} model=vgg16 (2 runs)\n" in text
    assert text.count("▲ FASTER") == 1
    assert (
        "only on one side\n  A: " in text and "batch 8 (B: oom)\n" in text and "batch 64\n" in text
    )
    assert "runs without a record\n  B: vgg16-64 (failed)\n" in text


def test_a_side_of_a_sweep_without_a_timed_point_is_left_out(batches, capsys):
    folder = batches(
        {
            "alexnet": [None, Status.OOM],
            "resnet18": [1.0, 4.0],
            "vgg16": [0.8, 6.0],
            "unet": [None, None],
        }
    )
    assert commands.run(["compare", str(folder), "--metric", "device", "--json"]) == 0
    printed = capsys.readouterr()
    assert [side["source"] for side in json.loads(printed.out)["sides"]] == [
        f"{folder} model=resnet18 (2 runs)",
        f"{folder} model=vgg16 (2 runs)",
    ]
    assert printed.err.splitlines() == [
        f"left out, without a timed point: model={name} of {folder}" for name in ("alexnet", "unet")
    ]


def test_a_sweep_over_batch_sizes_alone_is_one_side(batches, capsys):
    folder = batches({"resnet18": [1.0, 4.0]})
    line = refused(capsys, folder)
    assert (
        f"{folder} is one side only: its runs differ in batch_size alone, and only equal points are"
        in line
    )
    assert "Sweep over something else as well, such as model=A,B" in line
    (folder / "8" / "record.json").rename(folder / "kept.json")
    assert "one side only" in refused(capsys, folder)


def test_phases_have_a_geometric_mean_each(compared):
    sides = (
        made([FLAT] * 4),
        made([[scale * factor for factor in FLAT] for scale in (1, 1, 2, 2)], seed=1),
    )
    for side in sides:
        for point in side.points:
            if point.key.input_size >= (34, 34):
                point.key = msgspec.structs.replace(point.key, phase="train")
    means = compared(*sides)["means"]
    assert [(one["phase"], round(one["ratio"], 1), one["pairs"]) for one in means] == [
        ("inference", 1.0, 2),
        ("train", 2.0, 2),
    ]


def test_no_record_is_read_twice(monkeypatch):
    """Two sweeps of ten records each, by the benchmark."""
    read, load = [], Record.load.__func__
    monkeypatch.setattr(
        Record, "load", classmethod(lambda cls, path: (read.append(path), load(cls, path))[1])
    )
    seconds(20)
    assert len(read) == len(set(read)) == 20


# Refusals


def refused(capsys, *arguments):
    assert commands.run(["compare", *map(str, arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_wrong_input_is_refused_in_one_line(saved, tmp_path, capsys):
    one, two = saved(made(), made(seed=1))
    (empty := tmp_path / "empty").mkdir()
    assert "one side only" in refused(capsys, one)
    assert "given twice" in refused(capsys, one, f"{one}/../run0")
    assert f"in {empty}" in refused(capsys, one, empty)
    assert "No record can be read" in refused(capsys, one, tmp_path / "missing")
    (no_record := tmp_path / "notes.json").write_text("{}")
    assert "is not a perfexp record" in refused(capsys, one, no_record)
    newer = json.loads((tmp_path / "run1" / "record.json").read_text()) | {"schema_version": 99}
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "record.json").write_text(json.dumps(newer))
    assert "schema version 99" in refused(capsys, one, tmp_path / "newer")
    (copy := tmp_path / "copy.json").write_bytes((tmp_path / "run0" / "record.json").read_bytes())
    assert "contain the same run" in refused(capsys, one, copy)
    assert "margin" in refused(capsys, one, two, "--margin=nothing")
    assert "at most 5%" in refused(capsys, one, two, "--fdr=6%")
    assert "Did you mean device" in refused(capsys, one, two, "--metric=devise")
    assert "Did you mean power_limit" in refused(capsys, one, two, "--allow=power")
    assert Record.load(tmp_path / "run0").name == "run 0"


def test_a_sweep_with_a_run_of_a_newer_version_is_refused(tmp_path, saved, capsys):
    [one, _] = saved(made(), made(seed=1))
    record_file = tmp_path / "run1" / "record.json"
    record_file.write_text(json.dumps(json.loads(record_file.read_text()) | {"schema_version": 99}))
    children = [SweepChild(job=0, name="x", directory="run1", status=Status.OK)]
    sweep = Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=children)
    (tmp_path / "sweep.json").write_bytes(sweep.to_json())
    assert "schema version 99" in refused(capsys, one, tmp_path)


# Runs of a tracking store


def _published(store, tmp_path, records, sweep=None):
    """Send records and their sweep to a store; returns the ids of their MLflow runs by `perfexp.kind`."""
    from mlflow import MlflowClient

    sink = MlflowSink(uri=store, experiment="compared")
    for number, one in enumerate(records):
        (tmp_path / "sent" / str(number)).mkdir(parents=True)
        (tmp_path / "sent" / str(number) / "record.json").write_bytes(one.to_json())
        sink.publish(Analysis.of(one), tmp_path / "sent" / str(number))
    if sweep:
        sink.publish_sweep(
            SweepAnalysis.of(sweep, sweep.records(tmp_path / "sent")), tmp_path / "sent"
        )
    client = MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("compared").experiment_id])
    return {run.data.tags["perfexp.kind"]: run.info.run_id for run in runs}


@pytest.mark.slow
@pytest.mark.always("README: perfexp compare")
def test_a_side_may_be_a_run_or_a_sweep_of_a_tracking_store(store, saved, tmp_path, capsys):
    [folder] = saved(made())
    children, records = [], []
    for number, model in enumerate(("resnet18", "vgg16")):
        one = made([[2.0 * factor for factor in FLAT]], plan={"model.name": model}, seed=number + 1)
        one.sweep = SweepMembership(uid="fetched", job=number, jobs=2)
        children.append(SweepChild(job=number, name=model, directory=str(number), status=Status.OK))
        records.append(one)
    [point] = {point.key for point in records[0].points if point.key.replicate == 0}
    other_batch = msgspec.structs.replace(point, batch_size=2)
    records[0].points.append(msgspec.structs.replace(records[0].points[0], key=other_batch))
    sweep = Sweep(
        uid="fetched", name="models", started="2026-01-01T00:00:00+00:00", children=children
    )
    ids = _published(store, tmp_path, records, sweep)
    assert ids.keys() == {"run", "point", "sweep"}
    for kind in ("point", "sweep"):
        assert (
            commands.run(["compare", folder, f"mlflow:{ids[kind]}", "--uri", store, "--json"]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        assert [(pair["word"], round(pair["ratio"], 1)) for pair in found["pairs"]] == [
            ("SLOWER", 2.0)
        ]
    assert len(found["sides"][1]["runs"]) == 2


def test_a_run_that_no_store_has_is_refused_in_one_line(
    store, saved, tmp_path, capsys, monkeypatch
):
    [folder] = saved(made())
    line = refused(capsys, folder, "mlflow:0123", "--uri", f"sqlite:///{tmp_path}/none.db")
    assert "There is no tracking store" in line
    _published(store, tmp_path, [made(seed=5)])
    line = refused(capsys, folder, "mlflow:0123", "--uri", store)
    assert "mlflow:0123 could not be read" in line
    assert "'0123'" in line or "0123 not found" in line

    def without_mlflow(request):
        raise TrackingFailed(
            "No module named 'mlflow' (pip install mlflow-skinny sqlalchemy alembic)"
        )

    monkeypatch.setattr(mlflow_sink, "deliver", without_mlflow)
    assert "pip install mlflow-skinny" in refused(capsys, folder, "mlflow:0123", "--uri", store)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("place", ["../../private", "{}/private", "linked/private"])
def test_run_outside_the_folder_counts_only_if_the_sweep_owns_it(
    tmp_path, saved, capsys, place, is_own
):
    [other] = saved(made(seed=2))
    (sweep := tmp_path / "given" / "sweep").mkdir(parents=True)
    (sweep / "linked").symlink_to(tmp_path)
    private = made()
    private.sweep = SweepMembership(uid="s", job=0, jobs=1, axes={}) if is_own else None
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "record.json").write_bytes(private.to_json())
    child = SweepChild(job=0, name="x", directory=place.format(tmp_path), status=Status.OK)
    (sweep / "sweep.json").write_bytes(
        Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=[child]).to_json()
    )
    assert commands.run(["compare", str(sweep), other, "--json"]) == (0 if is_own else 2)
    assert len(Sweep.load(sweep).records(sweep)) == is_own
    assert ("None of the runs" in capsys.readouterr().err) != is_own


def test_runs_of_a_sweep_without_a_record_are_listed(tmp_path, saved, capsys):
    member = made(seed=1)
    member.sweep = SweepMembership(uid="s", job=0, jobs=2, axes={})
    one, _ = saved(made(), member)
    children = [
        SweepChild(job=0, name="measured", directory="../run1", status=Status.OK),
        SweepChild(
            job=1,
            name="vgg16",
            directory="none",
            status=Status.FAILED,
            error="the weights are missing",
        ),
    ]
    (tmp_path / "sweep").mkdir()
    sweep = Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=children)
    (tmp_path / "sweep" / "sweep.json").write_bytes(sweep.to_json())
    assert commands.run(["compare", one, str(tmp_path / "sweep")]) == 0
    text = capsys.readouterr().out
    assert "runs without a record\n  B: vgg16 (failed): the weights are missing" in text


def test_comparison_is_sent_with_ratios_verdicts_and_files(saved, tmp_path, monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(
        mlflow_sink, "deliver", lambda delivery: sent.append(delivery.payload) or "the link"
    )
    half = made([[0.5 * factor for factor in FLAT]], seed=1)
    paths = saved(made(), half)
    store = f"sqlite:///{tmp_path / 'store.db'}"
    assert (
        commands.run(
            ["compare", *paths, "--log", "--uri", store, "--output", str(tmp_path / "out")]
        )
        == 0
    )
    assert capsys.readouterr().out.endswith("the link\n")
    [payload] = sent
    values = {(figure.name, figure.step): figure.value for figure in payload.figures}
    assert values["B/device_ratio", 0] == pytest.approx(0.5, rel=1e-3)
    assert values["B/better_count", 0] == 1
    assert payload.tags["perfexp.side.B"] == f"{half.name} ({half.uid})"
    assert sorted(upload.name for upload in payload.files) == [
        f"comparison.{kind}" for kind in ("csv", "html", "json", "md")
    ]
    assert "▲ FASTER" in payload.note
    assert commands.run(["compare", *paths, "--log", "--uri", store]) == 0  # without a folder
    assert (sent[1].identity, len(sent[1].files)) == (payload.identity, 4)
    assert commands.run(["compare", *reversed(paths), "--log", "--uri", store]) == 0
    assert sent[2].identity != payload.identity


def test_failed_upload_is_an_error_after_the_comparison_is_shown(saved, monkeypatch, capsys):
    def deliver(delivery):
        raise TrackingFailed("no such server")

    monkeypatch.setattr(mlflow_sink, "deliver", deliver)
    code = commands.run(
        ["compare", *saved(made(), made(seed=1)), "--log", "--uri", "sqlite:///store.db"]
    )
    printed = capsys.readouterr()
    assert code == TrackingFailed.exit_code
    assert "SAME" in printed.out
    assert "no such server. The comparison itself is complete" in printed.err


@pytest.mark.parametrize(
    ("phases", "is_subject"), [(("inference", "train"), True), (("inference",), False)]
)
def test_training_settings_matter_only_to_runs_with_training(make_record, phases, is_subject):
    sgd, adam = (
        make_record(phases=phases, plan={"mode": {"train": {"optimizer": name}}})
        for name in ("sgd", "adam")
    )
    found = [one.key for one in comparability.differences(sgd, adam)]
    assert ("training" in found) is is_subject
