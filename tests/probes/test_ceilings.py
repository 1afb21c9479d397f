"""Ceilings: rates by definition, on a device whose clock is a script, and kept for the next time."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from perfexp.devices.cpu import CpuDevice
from perfexp.host.cache import JsonCache
from perfexp.probes import ceilings as module
from perfexp.probes.ceilings import ceilings
from perfexp.probes.work_rates import add_work_metrics
from perfexp.records.number_formats import Formats
from perfexp.records.record import Key, Point, Series, Status
from perfexp.work import Geometry, Row, Work

BF16 = Formats("bf16", "bf16")


@pytest.fixture
def scripted(monkeypatch):
    """Sizes that are small, and calls of which each takes a millisecond by the clock; the products that were made."""
    monkeypatch.setattr(module, "_SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(module, "_COPIED_BYTES", {"cpu": 1000})
    made = []

    def product(mm, a, b, out):
        made.append((a.shape, a.dtype))
        return partial(mm, a, b, out=out)

    monkeypatch.setattr(module, "partial", product)
    clock = iter(range(0, 10**15, 10**6))
    monkeypatch.setattr(CpuDevice, "now_ns", lambda self: next(clock))
    return made


def test_ceilings_are_the_fastest_product_and_copy_and_cached(scripted, tmp_path):
    kept = JsonCache(tmp_path, {"device": "a"})
    found = ceilings(CpuDevice(), BF16, cache=kept)
    assert found == {"bf16": pytest.approx(2e3 * 16**3), "bytes_per_second": pytest.approx(2e6)}
    assert scripted == [((8, 8), torch.bfloat16), ((16, 16), torch.bfloat16)]
    assert ceilings(CpuDevice(), BF16, cache=JsonCache(tmp_path, {"device": "a"})) == found
    assert len(scripted) == 2
    ceilings(CpuDevice(), Formats("fp32", "tf32"), cache=kept)
    assert scripted[2:] == [((8, 8), torch.float32), ((16, 16), torch.float32)] * 2


def test_a_slow_product_is_the_last(scripted, tmp_path, monkeypatch):
    clock = iter(range(0, 10**15, 10**9))
    monkeypatch.setattr(CpuDevice, "now_ns", lambda self: next(clock))
    found = ceilings(CpuDevice(), BF16, cache=JsonCache(tmp_path, {}))
    assert found == {"bf16": 2 * 8**3, "bytes_per_second": 2000}
    assert len(scripted) == 1


def test_another_device_has_ceilings_of_its_own(monkeypatch):
    here = module._identity(CpuDevice())
    assert here == module._identity(CpuDevice())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert here != module._identity(CpuDevice())


def test_a_ceiling_is_that_of_a_settled_clock(scripted, tmp_path, monkeypatch):
    """Calls take 1 ms in the first second of each product and copy, and then 2 ms."""
    settled, seconds = 1.0, [0.0, 0.0]

    def now(_):
        seconds[0] += 1e-3 if seconds[1] < settled else 2e-3
        seconds[1] += 1e-3
        return round(seconds[0] * 1e9)

    begin = module._sustained

    def sustained(call, device):
        seconds[1] = 0.0
        return begin(call, device)

    monkeypatch.setattr(CpuDevice, "now_ns", now)
    monkeypatch.setattr(module, "_sustained", sustained)
    found = ceilings(CpuDevice(), BF16, cache=JsonCache(tmp_path, {}))
    assert found == {"bf16": pytest.approx(1e3 * 16**3), "bytes_per_second": pytest.approx(1e6)}


@pytest.mark.parametrize(
    "limit", ["power_limit_watts", "max_sm_clock_hertz", "application_clock_hertz"]
)
def test_another_limit_of_a_board_has_ceilings_of_its_own(monkeypatch, limit):
    known = []
    for value in (700.0, 400.0):
        monkeypatch.setattr(CpuDevice, "facts", lambda self, value=value: {limit: value})
        known.append(module._identity(CpuDevice()))
    assert known[0] != known[1]


WORK = Work(
    rows=(
        Row(
            path="", call=0, operation=None, kind="x", macs=1000, flops=2500, input_gradient_flops=None,
            weight_gradient_flops=None, bytes_min=1, activation_bytes=1, parameters=0, inputs=(), outputs=(),
        ),
    ),
    parameters=0, backward=False, uncounted=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "tf32", "codes"),
    [("fp32", 7e6, ["tf32_ceiling"]), ("tf32", 7e6, []), ("fp32", 1e6, [])],
)
def test_a_ceiling_of_tf32_that_is_much_higher_is_a_note_on_fp32(precision, tf32, codes):
    point = Point(
        key=Key(phase="inference", input_size=(8, 8), batch_size=1, precision=precision),
        status=Status.OK,
    )
    add_work_metrics(point, WORK, Formats(precision, precision), {"fp32": 1e6, "tf32": tf32})
    assert [doubt.code for doubt in point.doubts] == codes
    assert all("7.0 times" in doubt.message and doubt.is_note for doubt in point.doubts)


@pytest.mark.parametrize(("ceiling", "doubts"), [(1e6, []), (1e3, ["above_the_ceiling"])])
def test_more_work_than_the_device_can_do_is_doubted(ceiling, doubts):
    key = Key(phase="inference", input_size=(8, 8), batch_size=1, precision="fp32")
    point = Point(key=key, status=Status.OK, series=[Series(name="latency", samples=[1.0] * 9)])
    add_work_metrics(
        point, WORK, Formats("fp32", "fp32"), {}, {"fp32": ceiling, "bytes_per_second": 5.0}
    )
    assert point.metric("mfu_of_ceiling").value == 2000 / ceiling
    assert point.metric("ceiling/bytes_per_second").value == 5
    assert [doubt.code for doubt in point.doubts] == doubts


@pytest.mark.parametrize(("convolutions", "codes"), [(1500, []), (500, ["tf32_ceiling"])])
def test_products_and_convolutions_have_peaks_of_their_formats(convolutions, codes):
    """By torch's flags: 2,000 FLOPs, at a peak of 1 MFLOP/s for products and 2 MFLOP/s for convolutions."""
    geometry = Geometry(
        in_channels=1, out_channels=1, kernel=(1,), stride=(1,), padding=(0,), dilation=(1,)
    )
    rows = (
        replace(WORK.rows[0], macs=macs, convolution=each)
        for macs, each in ((1000 - convolutions // 2, None), (convolutions // 2, geometry))
    )
    point = Point(
        key=Key(phase="inference", input_size=(8, 8), batch_size=1, precision="torch"),
        status=Status.OK,
        series=[Series(name="latency", samples=[1.0] * 9)],
    )
    peaks = {"fp32": 1e6, "tf32": 2e6}
    add_work_metrics(
        point,
        replace(WORK, rows=tuple(rows)),
        Formats("fp32", "tf32"),
        peaks,
        {**peaks, "bytes_per_second": 5.0},
    )
    seconds = (2000 - convolutions) / 1e6 + convolutions / 2e6
    assert point.metric("mfu").value == pytest.approx(seconds)
    assert point.metric("mfu_of_ceiling").value == pytest.approx(seconds)
    assert point.metric("ceiling/flops_per_second").value == pytest.approx(2000 / seconds)
    assert [doubt.code for doubt in point.doubts] == codes
