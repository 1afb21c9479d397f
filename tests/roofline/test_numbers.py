"""Numbers with a decimal point, those of other locales, and units in any spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.roofline.numbers import factor, is_of_locale, number

UNITS = {
    "second": 1.0, "s": 1.0, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6, "µs": 1e-6, "nsecond": 1e-9,
    "ns": 1e-9, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "MB": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "KiB": 1024.0,
    "MiB": 1024.0**2, "Gbyte/s": 1e9, "Gbyte/second": 1e9, "byte/nsecond": 1e9, "byte/cycle": 1.0, "Ghz": 1e9,
    "hz": 1.0, "cycle/nsecond": 1e9, "inst": 1.0, "Kinst": 1e3, "inst/cycle": 1.0, "%": 0.01, "": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(("unit", "expected"), UNITS.items())
def test_units_become_si(unit: str, expected: float) -> None:
    assert factor(unit) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("unit", ["furlong", "xbyte", "byte/furlong", "Gsecond"])
def test_a_unit_that_is_not_known_is_not_guessed(unit: str) -> None:
    assert factor(unit) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", 1234.5),
        ("1,234,567", 1234567),
        ("1,234", 1234),
        ("27.90", 27.9),
        ("0.123", 0.123),
        (".5", 0.5),
        ("1.5e3", 1500),
        ("-1000", -1000),
        (" 3 ", 3),
    ],
)
def test_a_number_has_a_decimal_point_and_may_have_groups(text: str, value: float) -> None:
    assert number(text) == value
    assert not is_of_locale(text)


@pytest.mark.parametrize(
    "text",
    ["27,90", "0,123", "1.234,5", "1234,567", "1 234,5", "1 500 500", "1\u202f234", "1'234.5"],
)
def test_a_number_of_another_locale_is_not_guessed(text: str) -> None:
    assert number(text) is None
    assert is_of_locale(text)


@pytest.mark.parametrize("text", ["n/a", "", "(1, 2, 3)", "Tesla T4", "nan", "-", "1e"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None
    assert not is_of_locale(text)


@given(st.decimals(min_value=0, max_value=10**12, places=2))
def test_number_survives_grouping_and_other_locale_is_detected(
    value: object,
) -> None:
    text = f"{value:,.2f}"
    assert number(text) == pytest.approx(float(str(value)))
    assert is_of_locale(text.replace(",", "_").replace(".", ",").replace("_", "."))


@given(st.sampled_from(sorted(UNITS)), st.sampled_from(sorted(UNITS)))
def test_a_rate_is_its_parts(above: str, below: str) -> None:
    if "/" not in above + below and below:
        assert factor(f"{above}/{below}") == pytest.approx(UNITS[above] / UNITS[below])
