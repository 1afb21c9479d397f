"""Numbers in any locale, units in any spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.roofline.numbers import decimal_mark, factor, number

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
    ("cells", "mark"),
    [
        (["1,234.5"], "."),
        (["1.234,5"], ","),
        (["27.90", "3"], "."),
        (["27,90", "1.234"], ","),
        (["1.234.567"], ","),
        (["1,234,567"], "."),
        (["0.123"], "."),
        (["0,123"], ","),
        (["1234,567"], ","),
        (["1 234,5"], ","),
        (["1.5e3"], "."),
        (["1,234"], "."),
        (["n/a", ""], "."),
        (["1.5", "1,5"], None),
    ],
)
def test_all_numbers_of_a_file_say_together_what_the_decimal_mark_is(
    cells: list[str], mark: str | None
) -> None:
    assert decimal_mark(cells) == mark


@pytest.mark.parametrize("text", ["n/a", "", "(1, 2, 3)", "Tesla T4", "nan", "-", "1e"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None


@given(
    st.decimals(min_value=0, max_value=10**12, places=2),
    st.sampled_from([(",", "."), (".", ","), ("\u202f", ",")]),
)
def test_a_number_survives_its_grouping(value: object, signs: tuple[str, str]) -> None:
    group, mark = signs
    text = f"{value:,.2f}".replace(",", "_").replace(".", mark).replace("_", group)
    assert decimal_mark([text]) == mark
    assert number(text, mark) == pytest.approx(float(str(value)))


@given(st.sampled_from(sorted(UNITS)), st.sampled_from(sorted(UNITS)))
def test_a_rate_is_its_parts(above: str, below: str) -> None:
    if "/" not in above + below and below:
        assert factor(f"{above}/{below}") == pytest.approx(UNITS[above] / UNITS[below])
