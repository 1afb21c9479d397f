"""Figures and words that would mislead: digits, zeros, orders, and what is left out."""

from types import SimpleNamespace

import pytest

from perfexp import api
from perfexp.comparison import sweep_verdicts
from perfexp.devices import auto
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.records.sizes import parse_batch_sizes
from perfexp.records.wording import percent, with_width
from perfexp.statistics.estimators import Interval

pytestmark = pytest.mark.usefixtures("quick_commands")


def test_an_interval_is_never_shown_as_zero():
    assert with_width(Interval(value=2.0, low=2.0, high=2.0), "2 s") == "2 s ± 0.01 %"
    assert with_width(Interval(value=2.0, low=1.99, high=2.01), "2 s") == "2 s ± 0.5 %"
    assert with_width(Interval(value=2.0, low=0.01, high=400.0), "2 s", "0.01 … 400 s") == "≈ 2 s"


def test_shares_of_zero_and_bounds_read_as_words():
    assert (percent(0.0), percent(0.00001)) == ("0 %", "< 0.01 %")


def test_ratios_keep_their_digits():
    pair = SimpleNamespace(measure="latency", baseline=1.0, other=1.5, low=1.4985, high=1.5015)
    assert sweep_verdicts.ratio_of_times(pair) == "1.500 ± 0.1 %"
    pair.low = pair.high = None
    assert sweep_verdicts.ratio_of_times(pair) == "1.50"


def test_progress_counts_what_is_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "batch_size=[1,2,4,8]"]
    assert main([*words, "output_dir=x", "seed=3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.partition("]")[0] for line in lines] == ["[1/4", "[2/4", "[3/4", "[4/4"]


def test_a_batch_size_may_come_as_text(monkeypatch):
    monkeypatch.setenv("BS", "8")
    assert api.compose("model=fake", "batch_size=${oc.env:BS,4}").batch_size == [8]
    monkeypatch.delenv("BS")
    assert api.compose("model=fake", "batch_size=${oc.env:BS,4}").batch_size == [4]
    assert parse_batch_sizes([" 2 ", 4]) == [2, 4]


def test_data_of_one_size_choose_the_input_size():
    cifar = ("model=resnet18", "data=cifar10", "data.root=x")
    assert api.compose(*cifar).input_size == [(32, 32)]
    assert api.compose(*cifar, "input_size=64").input_size == [(64, 64)]
    assert api.compose("model=clip_gesture", "data=skeletons", "data.root=x").input_size == [
        (20, 75)
    ]


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_a_device_that_is_one_has_no_index(name):
    with pytest.raises(UserError, match="chooses among GPUs"):
        api.compose("model=fake", f"gpu={name}", "gpu.index=3")


def test_a_gpu_that_is_not_there_is_no_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auto, "predicted_name", lambda index=0: None)
    assert (
        main(["model=resnet18", "gpu.index=3", "input_size=32", "tracking=none", "stopping=fixed"])
        == 2
    )
    assert "gpu.index=3 does not exist: torch finds no GPU" in capsys.readouterr().err
