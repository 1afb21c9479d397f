"""Two callables: equal results pass, tricks are refused with their reason, and the verdict keeps its level."""

import math
import random
import re

import pytest

from perfexp import commands
from perfexp.comparison.document import Verdict
from perfexp.devices.fake import FakeDevice
from perfexp.doctor import environment
from perfexp.errors import UserError
from perfexp.measuring import callable_side
from perfexp.run import callable_judge
from perfexp.run.callable_judge import compare_callables
from perfexp.statistics import sequential

INPUTS = """
import torch

def make(seed):
    return torch.randn(64, 256), torch.randn(256)
"""
OLD = """
import torch

def fn(x, w):
    y = x * w
    return torch.softmax(y - y.mean(-1, keepdim=True), -1)
"""
#: Right sides that compute the same.
HONEST = {
    "less work": "def fn(x, w): return torch.softmax(x * w, -1)",
    "other order": "def fn(x, w):\n    e = (x * w).exp()\n    return e / (e @ torch.ones(256, 1))",
    "lazy set-up": """
state = {}
def fn(x, w):
    if not state:
        state["buffer"] = torch.empty(64, 256)
    return torch.softmax(torch.mul(x, w, out=state["buffer"]), -1)
""",
    "scripted": "@torch.jit.script\ndef fn(x, w):\n    return torch.softmax(x * w, -1)",
    "inference mode": "@torch.inference_mode()\ndef fn(x, w): return torch.softmax(x * w, -1)",
    "idle helper": """
import subprocess, sys
helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"])
def fn(x, w): return torch.softmax(x * w, -1)
""",
    "own pool": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
def fn(x, w):
    return torch.cat(list(pool.map(lambda part: torch.softmax(part * w, -1), x.chunk(2))))
""",
}
#: Right sides with a trick, and a part of the reason.
TRICKS = {
    "low precision": (
        "def fn(x, w): return torch.softmax((x.half() * w.half()).float(), -1)",
        "relative error",
    ),
    "busy helper": (
        """
import subprocess, sys
helper = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
def fn(x, w): return torch.softmax(x * w, -1)
""",
        "keeps other processes busy",
    ),
    "other type": ("def fn(x, w): return torch.softmax(x * w, -1).half()", "torch.float16"),
    "cache by address": (
        """
cache = {}
def fn(x, w):
    if x.data_ptr() not in cache:
        cache[x.data_ptr()] = torch.softmax(x * w, -1)
    return cache[x.data_ptr()]
""",
        "outputs of an earlier call",
    ),
    "unwritten": (
        """
def fn(x, w):
    out = torch.empty_like(x)
    out[:60] = torch.softmax(x[:60] * w, -1)
    return out
""",
        "never written",
    ),
    "in place": ("def fn(x, w): return torch.softmax(x.mul_(w), -1)", "inputs in place"),
    "after return": (
        """
import threading, time
def fn(x, w):
    out = torch.zeros_like(x)
    def work():
        time.sleep(0.02)
        out.copy_(torch.softmax(x * w, -1))
    threading.Thread(target=work).start()
    return out
""",
        "work after the return",
    ),
    "lazy": (
        """
class Lazy(torch.Tensor):
    pass
def fn(x, w): return x.as_subclass(Lazy)
""",
        "returns a Lazy",
    ),
    "clock": (
        "import time\ntime.perf_counter_ns = lambda: 0\ndef fn(x, w): return x",
        "replaces time.perf_counter_ns",
    ),
    "method of perfexp, later": (
        """
from perfexp.devices.cpu import CpuDevice
def fn(x, w):
    CpuDevice.now_ns = lambda self: 0
    return torch.softmax(x * w, -1)
""",
        "replaces perfexp.devices.cpu.CpuDevice.now_ns",
    ),
    "maker": (
        """
import inputs
old = inputs.make
inputs.make = lambda seed: old(seed)
def fn(x, w): return torch.softmax(x * w, -1)
""",
        "make",
    ),
    "after the check": (
        """
calls = 0
def fn(x, w):
    global calls
    calls += 1
    return torch.softmax(x * w, -1) if calls <= 4 else torch.zeros_like(x)
""",
        "relative error of 1",
    ),
    "other name": ("from old import fn", "under another name"),
    "error": ("def fn(x, w): raise ValueError('no')", "ValueError: no"),
    "exit": ("import os\ndef fn(x, w): os._exit(3)", "ended its process"),
}


#: Cases that run without `--all`.
FAST = ("less work", "low precision", "cache by address", "in place", "after return", "clock")


def cases(names):
    return [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in names]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the maker of inputs and the left side."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs.py").write_text(INPUTS)
    (tmp_path / "old.py").write_text(OLD)
    return tmp_path


@pytest.fixture
def compare(here, monkeypatch):
    """Compare the left side with code, in one short pair of processes."""
    monkeypatch.setattr(callable_judge, "_BLOCKS", 8)
    monkeypatch.setattr(callable_judge, "_MOST_INPUTS", 4)

    def compared(code):
        (here / "new.py").write_text(f"import torch\n{code}")
        return compare_callables("old.py:fn", "new.py:fn", "inputs.py:make", max_seconds=0)

    return compared


@pytest.mark.parametrize("name", cases(HONEST))
def test_right_sides_that_compute_the_same_pass(compare, name):
    compared = compare(HONEST[name])
    assert compared.reason is None
    assert compared.pairs == 1


@pytest.mark.parametrize("name", cases(TRICKS))
def test_right_sides_with_a_trick_are_refused(compare, name):
    code, reason = TRICKS[name]
    compared = compare(code)
    assert compared.verdict is Verdict.NOT_COMPARABLE
    assert reason in compared.reason


def test_results_cached_by_contents_are_refused(compare):
    code = """
import time
cache = {}
def fn(x, w):
    key = float(x[0, 0]), float(w[0])
    if key not in cache:
        time.sleep(0.001)
        cache[key] = torch.softmax(x * w, -1)
    return cache[key]
"""
    assert "caches results" in compare(code).reason


def test_arguments_that_are_no_tensors_and_equal_decorators_pass(here):
    (here / "scaled.py").write_text(
        """
import torch

def make(seed):
    return torch.randn(64, 64), seed % 7

@torch.inference_mode()
def left(x, number):
    return {"a": x * number, "b": number}

@torch.inference_mode()
def right(x, number):
    return {"b": number, "a": number * x}
"""
    )
    places = (f"scaled.py:{name}" for name in ("left", "right", "make"))
    compared = compare_callables(*places, max_seconds=0)
    assert compared.reason is None
    assert compared.pairs == 1


def test_an_effect_below_the_tolerance_must_not_be_left_out(here):
    (here / "branch.py").write_text(
        """
def left(x, w): return x + 1e-6 * (x @ w)
def right(x, w): return x + 1e-6 * (x[:, :8] @ w[:8])
def other_order(x, w): return x + (x * 1e-6) @ w
def make(seed):
    import torch
    return torch.rand(64, 256), torch.randn(256, 256)
"""
    )
    right, other_order = (
        compare_callables("branch.py:left", f"branch.py:{name}", "branch.py:make", max_seconds=0)
        for name in ("right", "other_order")
    )
    assert right.reason == "right: outputs do not follow argument 2 as they should"
    assert other_order.reason is None


def test_arguments_whose_sizes_depend_on_the_seed_pass(here):
    (here / "sized.py").write_text(
        """
def left(x, w): return x @ w
def right(x, w): return (w.mT @ x.mT).mT
def make(seed):
    import torch
    size = 32 + seed % 64
    return torch.randn(16, size), torch.randn(size, 8)
"""
    )
    places = (f"sized.py:{name}" for name in ("left", "right", "make"))
    assert compare_callables(*places, max_seconds=0).reason is None


def test_every_shape_of_the_maker_is_checked(here):
    maker = (
        "shapes = [8, 9]\ndef make(seed, shape):\n    import torch\n    return torch.randn(shape)"
    )
    (here / "sizes.py").write_text(maker)
    (here / "one.py").write_text(
        "import torch\ndef fn(x): return torch.sigmoid(x) if len(x) == 8 else x"
    )
    compared = compare_callables("torch:sigmoid", "one.py:fn", "sizes.py:make", max_seconds=0)
    assert "relative error" in compared.reason


def test_a_typed_tolerance_replaces_the_errors_of_the_left_side(here):
    (here / "new.py").write_text("import old\ndef fn(x, w): return old.fn(x, w) * 1.001")
    places = "old.py:fn", "new.py:fn", "inputs.py:make"
    assert "relative error" in compare_callables(*places, max_seconds=0).reason
    compared = compare_callables(*places, max_seconds=0, tolerance=0.01)
    assert compared.reason is None
    assert compared.notes[0] == "right imports old.py, the left side's file"


def test_a_time_without_reading_all_inputs_is_noted(judged):
    """As a lookup takes beside a product with one-hot rows."""
    judged._note_ceiling(4e-3, {"left": [2e-4], "right": [1e-4]})
    judged._note_ceiling(4e-3, {"left": [2e-3], "right": [1.5e-3]})
    assert not judged._notes
    judged._note_ceiling(4e-3, {"left": [2e-3], "right": [1e-4]})
    [note] = judged._notes
    assert "does not read them all" in note


WRONG = """
import torch

def make(seed): return torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
def order(x, w): return (x @ w).argsort(-1)
def other_order(x, w): return (x @ w).argsort(-1).flip(-1)
def noisy(x, w): return x + torch.randn_like(x)
def silent(x, w): return x + w * 0
def nothing(x, w): return None
"""


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ("order", "other_order", "wrong results"),
        ("noisy", "silent", "wrong results"),
        ("nothing", "nothing", "it returns no tensor"),
    ],
)
def test_results_that_float64_cannot_confirm_must_equal_left(left, right, reason, here):
    (here / "wrong.py").write_text(WRONG)
    places = (f"wrong.py:{name}" for name in (left, right, "make"))
    assert reason in compare_callables(*places, max_seconds=0).reason


def test_expanded_inputs_and_equal_random_numbers_pass(here):
    (here / "noise.py").write_text(
        """
import torch
def make(seed): return torch.randn(1, 256).expand(64, 256)
def left(x): return x + torch.randn(64, 256)
def right(x): return torch.randn(64, 256).add_(x)
"""
    )
    places = (f"noise.py:{name}" for name in ("left", "right", "make"))
    assert compare_callables(*places, max_seconds=0).reason is None


def test_an_effect_left_out_of_timed_calls_alone_is_found(here, monkeypatch):
    monkeypatch.setattr(callable_judge.random, "choice", lambda parameters: parameters[-1])
    (here / "timed.py").write_text(
        """
import torch
def make(seed): return torch.rand(64, 256), torch.randn(256, 256)
def left(x, w): return x + 1e-6 * (x @ w)
def right(x, w):
    if torch.are_deterministic_algorithms_enabled():
        return left(x, w)
    return x + 1e-6 * (x[:, :8] @ w[:8])
"""
    )
    places = (f"timed.py:{name}" for name in ("left", "right", "make"))
    assert "do not follow argument" in compare_callables(*places, max_seconds=0).reason


def test_a_maker_that_takes_no_seed_is_an_error(here):
    (here / "seedless.py").write_text("def make(): pass")
    with pytest.raises(UserError, match="failed when called with a seed"):
        compare_callables("old.py:fn", "old.py:fn", "seedless.py:make")


def test_both_sides_wait_equally_long_before_a_call(monkeypatch, tmp_path):
    """Otherwise the wait would look like time that a side hides."""
    device, held = FakeDevice(enqueue_seconds=20e-6), []
    monkeypatch.setattr(callable_side, "_device_of", lambda inputs: device)
    monkeypatch.setattr(device, "hold", held.append)
    monkeypatch.setattr(callable_side.Side, "_watched_functions", lambda side: {})
    monkeypatch.setattr(callable_side.gc, "disable", int)
    (tmp_path / "waits.py").write_text("def make(seed): return seed\ndef fn(x): return x")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    side = callable_side.Side("waits.py:fn", "waits.py:make", str(tmp_path))
    needed = side.calls([1, 2], 0)["hold_seconds"]
    assert held[1:] == [needed]
    side.calls([1, 2, 3], 0, hold_seconds=0.01)
    assert held[2:] == [0.01] * 3


def _verdict(shuffler, ratio, scatter):
    pairs = []
    for _ in range(sequential.MOST):
        pairs.append({"left": 1.0, "right": ratio * math.exp(shuffler.gauss(0, scatter))})
    for count in range(callable_judge._LEAST_PAIRS, sequential.MOST + 1):
        verdict, _ = callable_judge._judged(pairs[:count], 0.01)
        if verdict is not Verdict.UNDECIDED:
            break
    return verdict


@pytest.fixture
def judged(here):
    """A judge with six blocks of each side: 10 calls of 10 ms each on the left, of 5 ms on the right."""
    judge = callable_judge._Judge(("old.py:fn", "old.py:fn", "inputs.py:make"), str(here))
    for side, call_seconds in (("left", 0.01), ("right", 0.005)):
        for untimed_seconds in (0.02, 0.021, 0.02, 0.019, 0.05, 0.02):
            block = {
                "seconds": [call_seconds] * 10,
                "tails": [1e-4] * 10,
                "elapsed": 10 * call_seconds + untimed_seconds,
            }
            judge._blocks[side].append(block)
    return judge


def test_a_faster_side_with_as_much_time_around_calls_passes(judged):
    judged._check_times()


def test_a_faster_side_whose_clock_hides_time_is_refused(judged):
    for block in judged._blocks["right"]:
        block["elapsed"] += 0.02

    with pytest.raises(callable_judge._Refused, match="changes times"):
        judged._check_times()


def test_a_faster_side_whose_outputs_come_late_is_refused(judged):
    for block in judged._blocks["right"]:
        block["tails"] = [0.005] * 10

    with pytest.raises(callable_judge._Refused, match="works after it has returned"):
        judged._check_times()


def test_equal_sides_are_rarely_faster_or_slower():
    shuffler = random.Random(0)
    verdicts = [
        _verdict(shuffler, 1.0, scatter) for scatter in (0.003, 0.01, 0.1) for _ in range(200)
    ]
    assert sum(one in (Verdict.BETTER, Verdict.WORSE) for one in verdicts) <= 6
    assert [_verdict(shuffler, 0.9, 0.01) for _ in range(20)] == [Verdict.BETTER] * 20
    assert [_verdict(shuffler, 1.1, 0.01) for _ in range(20)] == [Verdict.WORSE] * 20
    assert [_verdict(shuffler, 1.0, 0.001) for _ in range(20)] == [Verdict.SAME] * 20


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("old.py", "does not name a function"),
        ("odl.py:fn", "Did you mean old.py?"),
        ("old.py:fnn", "Did you mean fn?"),
        ("nowhere:fn", "nowhere cannot be imported"),
    ],
)
def test_a_place_without_a_function_is_an_error(place, message):
    with pytest.raises(UserError) as error:
        compare_callables(place, "old.py:fn", "inputs.py:make")
    assert message in str(error.value)


def test_command_prints_the_verdict_and_exits_with_1_if_refused(here, capsys):
    options = ["--left", "old.py:fn", "--inputs", "inputs.py:make", "--max-seconds", "0"]
    assert commands.run(["ab", *options, "--right", "old.py:fn"]) == 0
    printed = capsys.readouterr().out
    assert "right is UNDECIDED" in printed
    assert re.search(r"left   old.py:fn  [\d.]+ .?s\n", printed)
    assert "note: both sides are the same function" in printed
    (here / "new.py").write_text("def fn(x, w): return x")
    assert commands.run(["ab", *options, "--right", "new.py:fn", "--json"]) == 1
    assert '"verdict": "not comparable"' in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--left", "old.py:fn"], ["--json", "", ""], ["one"]])
def test_command_with_missing_sides_is_an_error(words, capsys):
    assert commands.run(["ab", *words]) == 2


def test_a_busy_host_is_noted(tmp_path):
    judge = callable_judge._Judge(("a", "b", "c"), str(tmp_path))
    cores = environment.cores()
    judge._note_host(0.05 * cores)
    assert judge._notes == []
    judge._note_host(0.5 * cores)
    assert judge._notes[0].startswith(f"other processes used {0.5 * cores:.1f} of {cores} CPU")
