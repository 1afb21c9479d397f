"""What computed each convolution, in the table and in sentences."""

import pytest

from perfexp.records.paths import RunPaths
from perfexp.records.record import Metric
from perfexp.records.summary import rows
from perfexp.reports import markdown, run_files
from perfexp.summaries import sweep_summary, wording
from perfexp.summaries.analysis import Analysis
from perfexp.tables import convolutions
from perfexp.tables.csv_tables import to_csv


def layer(name, selected, status="ok", seconds=None, **more):
    each = {
        "which": "forward",
        "selected": selected,
        "ran": None,
        "status": status,
        "reason": None,
        "flops": 10,
        "workspace_bytes": 4096,
        "seconds": seconds or {},
        "errors": dict.fromkeys(seconds or {}, 1e-7),
        "kernels": ["a", "b"],
        **more,
    }
    return {
        "name": name,
        "requested": "fastest",
        "input_shape": [1, 3, 8, 8],
        "dtype": "float32",
        "math": "fma",
        "passes": [each],
    }


@pytest.fixture
def record(build):
    def make(*points):
        return build.record(
            *(
                build.point(size=size, facts={"algorithm": {"name": "fastest", "layers": layers}})
                for size, *layers in points
            )
        )

    return make


TIMES = {"default": 2e-3, "benchmark": 1.9e-3, "cudnn.gemm": 1e-3}


def test_there_is_a_line_for_each_layer_and_pass(record):
    layers = layer("conv1", "cudnn.gemm", seconds=TIMES), layer("conv2", "default", "fallback")
    first, second = convolutions.lines(Analysis.of(record((8, *layers))))
    assert (first["layer"], first["selected"], first["selected_ms"], first["benchmark_ms"]) == (
        "conv1",
        "cudnn.gemm",
        1.0,
        1.9,
    )
    assert first["input_shape"] == "1×3×8×8"
    assert first["kernels"] == "a; b"
    assert second["status"] == "fallback"
    assert "selected_ms" not in second
    text = to_csv([first, second]).decode()
    assert text.splitlines()[0].startswith("model,algorithm,phase,input_size")
    assert len(text.splitlines()) == 3


def test_lines_of_several_processes_name_their_process(build):
    facts = {"algorithm": {"name": "fastest", "layers": [layer("conv1", "default")]}}
    points = [build.point(replicate=replicate, facts=facts) for replicate in range(2)]
    made = convolutions.lines(Analysis.of(build.record(*points)))
    assert [(line["layer"], line["replicate"]) for line in made] == [("conv1", 0), ("conv1", 1)]


def test_a_record_without_an_algorithm_has_no_lines(build):
    assert convolutions.lines(Analysis.of(build.record(build.point()))) == []
    assert convolutions.sentences(build.record(build.point())) == []


def test_a_sentence_says_what_the_choice_is_worth(record):
    layers = [
        layer("a", "cudnn.gemm", seconds=TIMES),
        layer("b", "default", seconds=TIMES),
        layer("c", "default"),
    ]
    assert convolutions.sentences(record((8, *layers))) == [
        "forward: 1 cudnn.gemm, 1 default; sum of the layers alone: chosen 3.00 ms, default 4.00 ms, benchmark 3.80 ms"
    ]
    several = convolutions.sentences(record((8, *layers), (16, *layers)))
    assert [text.split(":")[0] for text in several] == ["8", "16"]


def test_torchs_own_choice_is_no_proof_of_what_fastest_chose(record):
    unverified = layer("b", "cudnn.gemm", "requested", flops=30)
    chosen = record(
        (8, layer("a", "default"), unverified),
        (16, layer("a", "benchmark"), layer("b", "torch.fft")),
    )
    assert convolutions.coverage(chosen) == [
        "coverage of the FLOPs: 0 … 75 % by cudnn.gemm (not verified; algorithm.verify=true), "
        "25 … 50 % by torch's own choice, of an algorithm that was not observed, 0 … 50 % by torch.fft (proven)"
    ]
    chosen.points[0].metrics += [
        Metric(name=f"algorithm/{name}_share", value=value, unit="1")
        for name, value in (("flops", 1), ("proven", 0.25))
    ]
    text = " ".join(markdown.markdown(Analysis.of(chosen)).replace("\\", "").split())
    assert "100 %, 25 % not observed, 75 % not verified" in text
    assert "coverage of the FLOPs: 0 … 75 % by cudnn.gemm" in text


@pytest.mark.parametrize(
    ("layers", "recorded", "text"),
    [
        ([layer("a", "default")], 1.0, "100 %, not observed"),
        ([layer("a", "default")], 0.0, "100 %, not observed"),
        (
            [layer("a", "benchmark", flops=42), layer("b", "torch.fft", flops=58)],
            1.0,
            "100 %, 42 % not observed",
        ),
        (
            [layer("a", "benchmark", flops=42), layer("b", "torch.fft", flops=58)],
            0.58,
            "100 %, 42 % not observed",
        ),
        ([layer("a", "torch.gemm"), layer("b", "torch.fft")], 1.0, "100 %, proven"),
        ([layer("a", "cudnn.gemm", "requested")], 0.0, "100 %, not verified"),
    ],
)
def test_proven_share_excludes_torch_choices_even_in_old_records(record, layers, recorded, text):
    made = record((8, *layers))
    made.points[0].metrics += [
        Metric(name=f"algorithm/{name}_share", value=value, unit="1")
        for name, value in (("flops", 1.0), ("proven", recorded))
    ]
    assert wording.coverage_text(rows(made)[0]) == text
    assert sweep_summary.coverage(rows(made)) == text


def test_coverage_of_a_requested_algorithm_names_no_engines(record):
    asked = record((8, {**layer("a", "cudnn.gemm", "requested"), "requested": "gemm"}))
    assert convolutions.coverage(asked) == []


def raced(selected, half_width=0.01, **more):
    """A layer whose engines raced captured and eager, each time with an interval of 1 % to either side."""
    speedup = {"speedup": 1.0, "speedup_low": 0.99, "speedup_high": 1.01}

    def ends(seconds):
        low, high = (1 - half_width) * seconds, (1 + half_width) * seconds
        return {"seconds": seconds, "seconds_low": low, "seconds_high": high, **speedup}

    races = {
        "captured": {name: ends(seconds) for name, seconds in TIMES.items()},
        "eager": {name: ends(2 * seconds) for name, seconds in TIMES.items()},
    }
    return layer("a", selected, seconds=TIMES, launching="captured", races=races, **more)


def test_race_times_and_their_sum_have_intervals(record):
    one, other = raced("cudnn.gemm"), raced("default", not_cached="throttled")
    [line, _] = convolutions.lines(Analysis.of(record((8, one, other))))
    assert [line[name] for name in ("launching", "selected_speedup", "selected_speedup_high")] == [
        "captured",
        1,
        1.01,
    ]
    assert [line[f"selected{end}_ms"] for end in ("", "_low", "_high")] == pytest.approx(
        [1, 0.99, 1.01]
    )
    assert [line[f"benchmark_eager{end}_ms"] for end in ("", "_low", "_high")] == pytest.approx(
        [3.8, 3.762, 3.838]
    )
    # √(1 % · 1 ms)² + (1 % · 2 ms)² of 3 ms, and √2 · 1 % · 2 ms of 4 ms
    assert convolutions.sentences(record((8, one, other))) == [
        "forward: 1 cudnn.gemm, 1 default; sum of the layers alone: chosen 3.000 ms ± 0.7 %, default 4.000 ms ± 0.7 %, "
        "benchmark 3.800 ms ± 0.7 %; all captured; not cached: throttled"
    ]


@pytest.mark.parametrize(
    ("kind", "tf32", "is_named"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)],
)
def test_float32_without_tf32_is_not_what_a_user_of_torch_has(record, kind, tf32, is_named):
    made = record((8, layer("a", "cudnn.gemm", seconds=TIMES)))
    flags = {"matmul_allow_tf32": tf32, "cudnn_allow_tf32": tf32}
    made.environment = {**made.environment, "device": {"kind": kind}, "session": flags}
    [text] = convolutions.sentences(made)
    assert (
        "without TF32, which PyTorch allows for convolutions by default (precision=torch)" in text
    ) == is_named


def test_the_table_is_a_file_and_the_sentence_in_the_report(record, tmp_path):
    chosen = record((8, layer("conv1", "cudnn.gemm", seconds=TIMES)))
    (paths := RunPaths(tmp_path)).create()
    artifacts = {each.path for each in run_files.write(Analysis.of(chosen), paths)}
    [table] = [name for name in artifacts if name.endswith("_convolutions.csv")]
    assert "conv1" in (tmp_path / table).read_text()
    assert "## Convolutions" in markdown.markdown(Analysis.of(chosen))


def test_times_of_an_earlier_process_are_told_with_their_date(record):
    fresh = layer("conv1", "cudnn.gemm", seconds=TIMES)
    kept = layer("conv1", "cudnn.gemm", seconds=TIMES, kept_since="2026-01-02T03:04:05+00:00")
    assert not any("earlier process" in text for text in convolutions.sentences(record((8, fresh))))
    [text] = convolutions.sentences(record((8, kept)))
    assert "cached on 2026-01-02T03:04:05+00:00 (algorithm.reuse=false measures again)" in text
