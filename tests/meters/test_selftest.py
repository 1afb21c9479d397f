"""The self-test of meters: what it sees of scripted ones, and what it says about that."""

import json

import pytest

from perfexp.devices.fake import FakeDevice
from perfexp.diagnosis import Verdict
from perfexp.diagnosis.meter_selftest import findings, try_meters
from perfexp.meters import Found, PowerKind, none_because
from perfexp.records.diagnostics import make
from tests.meters.clock import Clock
from tests.support.scripted_meter import FakeMeter, steady


def tried(**script):
    clock = Clock()
    meter = FakeMeter(clock.now, steady(76.0), spend=clock.go_on, **script)
    return try_meters(Found(meters=(meter,)), now=clock.now, sleep=clock.go_on)


def said(facts):
    return {finding.check: (finding.verdict, finding.found) for finding in findings(facts)}


def test_good_meter_shows_tick_query_time_and_idle_power():
    facts = tried(query_seconds=4e-3)
    [meter] = facts["meters"]
    assert meter["tick_seconds"] == pytest.approx(0.1, rel=0.02)
    assert meter["query_seconds"] == pytest.approx(4e-3)
    assert meter["counter_watts"] == pytest.approx(76.0, rel=0.02)
    lines = said(facts)
    assert {verdict for verdict, _ in lines.values()} == {Verdict.ok}
    assert "4.0 ms" in lines["query fake"][1]
    assert "76.0 W at rest, instantaneous" in lines["power fake"][1]
    assert json.loads(json.dumps(facts)) == facts


def test_a_counter_that_stands_still_is_missing():
    verdict, found = said(tried(stuck_seconds=0.0))["energy counter fake"]
    assert verdict is Verdict.missing
    assert "stood still" in found


def test_a_power_that_is_an_average_says_so():
    _, found = said(tried(power_kind=PowerKind.average))["power fake"]
    assert "average over about a second" in found


def test_a_slow_query_is_a_warning():
    verdict, _ = said(tried(query_seconds=0.02))["query fake"]
    assert verdict is Verdict.warn


def test_a_kind_that_nobody_has_tried_says_so():
    verdict, _ = said(tried(found_doubts=[make("untested", what="the meter fake")]))["energy"]
    assert verdict is Verdict.untested


def test_without_a_meter_there_is_one_line_that_says_why():
    [finding] = findings(try_meters(none_because("RAPL is hidden")))
    assert (finding.verdict, finding.found) == (Verdict.missing, "no meter: RAPL is hidden")


def test_devices_without_meters_say_so():
    found = FakeDevice().meters()
    assert found.meters == ()
    assert found.reason.startswith("no meter: ")
