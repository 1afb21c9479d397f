"""A model whose code disturbs the process that measures it: an error of its points, and never a figure."""

import os
import subprocess
import sys
import threading

import pytest

from perfexp.records.record import (
    Key,
    Point,
    Record,
    Series,
    Status,
    point_to_line,
    points_from_lines,
)
from perfexp.worker import points

CODE = """
import os, sys, time
import torch

HOW = os.environ["HOW"]
WORKER = next((int(text.partition("=")[2]) for text in sys.orig_argv if text.startswith("--events-fd=")), None)
if HOW == "clock":
    time.perf_counter_ns = lambda: 0


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            if HOW == "fork":
                os.fork()
            elif HOW == "surrogate":
                raise RuntimeError("half a pair: \\ud800")
            elif HOW != "clock":
                os.write(WORKER, HOW.encode() + b"\\n")
        return super().forward(x)
"""
JUNK = (
    "junk",
    "5",
    '{"event": 3}',
    '{"event": "point", "key": 7}',
    '{"event": "block"}',
    '{"event": "done"}',
    "[" * 9999,
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "clock", "surrogate", *JUNK])
def test_a_model_that_disturbs_its_process_has_no_figures(tmp_path, how):
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "own.yaml").write_text("_target_: mine.Net\n")
    arguments = [
        "model=own",
        "gpu=cpu",
        "input_size=8",
        "cold_start=false",
        "stopping=fixed",
        "tracking=none",
        "output_dir=x",
    ]
    command = [
        sys.executable,
        "-m",
        "perfexp",
        "--config-dir=conf",
        *arguments,
        "batch_size=[1,2]",
        "timeout_seconds=60",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HOW": how},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr + done.stdout
    keys = [
        point.key
        for point in points_from_lines((tmp_path / "x" / "details" / "points.jsonl").read_bytes())
    ]
    assert len(keys) == len({*keys})
    record = Record.load(tmp_path / "x")
    assert record.points[0].status not in (Status.OK, Status.TIMEOUT)


def test_only_forks_that_may_return_count():
    points._forks.clear()
    for start in (
        lambda: subprocess.run(["true"], preexec_fn=lambda: None),
        _fork_with_multiprocessing,
    ):
        start()
        assert not points._forks
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert points._forks == [__name__]
    points._forks.clear()


def _fork_with_multiprocessing():
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=threading.active_count)
    process.start()
    process.join()


def test_lone_surrogate_in_an_error_becomes_a_question_mark():
    key = Key(phase="train", input_size=(8, 8), batch_size=1, precision="fp32")
    point = Point(key=key, status=Status.FAILED, error="a\ud800b", facts={"x": float("nan")})
    [read] = points_from_lines(point_to_line(point))
    assert (read.error, read.facts) == ("a?b", {"x": None})


@pytest.mark.parametrize(
    "series",
    [
        *({"samples": []}, {"samples": [1.0], "warmup": 1}),
        *(
            {"samples": [1.0], "unit": "ms"},
            {"samples": [1.0] * 4, "blocks": [2, 0]},
            {"samples": [1.0], "blocks": [1]},
        ),
    ],
)
def test_a_series_that_no_clock_can_have_measured_is_refused(series):
    with pytest.raises(ValueError, match=r"^series latency "):
        Series(name="latency", **series)
