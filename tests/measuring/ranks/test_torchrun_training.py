"""The benchmark of a plain script under torchrun and perfexp in turns, on two processes of a CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "studies" / "torchrun_training.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks talk through pipes"),
]


def test_both_train_in_turns_and_are_compared():
    words = "--device cpu --gpus 2 --model squeezenet1_1 --precision fp32 --batch-size 2 --size 64 --rounds 2 --steps 2"
    command = [sys.executable, str(SCRIPT), *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rounds = re.findall(r"^\| (\d+) \|" + r" ([\d.]+) \|" * 4 + "$", ended.stdout, re.MULTILINE)
    assert [number for number, *_ in rounds] == ["1", "2"]
    rows = re.findall(
        r"^\| ([a-z ]+) \| [\d.]+ \([\d.]+ … [\d.]+\) \| (\d.*)? \|$", ended.stdout, re.MULTILINE
    )
    assert [clock for clock, _ in rows] == ["torchrun", "perfexp", "without messages", "one alone"]
    assert [bool(ratio) for _, ratio in rows] == [False, True, True, False]
    messages = re.search(r"Control messages: ([\d.]+) µs of a step of ([\d.]+) ms", ended.stdout)
    assert 0 < float(messages[1]) * 1e-3 < float(messages[2])
