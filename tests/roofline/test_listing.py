"""CSVs of ncu in every form; and what is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perfexp.errors import UserError
from perfexp.roofline import listing, of_csv
from perfexp.roofline.listing import is_listing
from perfexp.roofline.peaks import by_hand
from tests.roofline.listings import (
    BYTES,
    FADD,
    FFMA,
    FMUL,
    TIME,
    Kernel,
    counted,
    long_form,
    wide_form,
)

FORMS = {"long": long_form, "wide": wide_form}
PEAKS = by_hand(10, 1000)


def both(text: str, tmp_path: Path, encoding: str = "utf-8") -> Path:
    path = tmp_path / "ncu.csv"
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_flops_bytes_and_time_are_those_that_were_counted(
    form: Callable[..., str], tmp_path: Path
) -> None:
    roofline = of_csv(
        both(form([counted(us=20, adds=3, muls=4, fmas=10**6, mbytes=0.5)]), tmp_path), PEAKS
    )
    load = roofline.total.load
    assert load.total_flops == 3 + 4 + 2 * 10**6
    assert load.dram_bytes == pytest.approx(5e5)
    assert load.seconds == pytest.approx(2e-5)
    assert load.intensity == pytest.approx(2000007 / 5e5)
    assert roofline.total.compute_share == pytest.approx(2000007 / 2e-5 / 1e13)
    assert roofline.total.memory_share == pytest.approx(5e5 / 2e-5 / 1e12)
    assert not roofline.estimated


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("units", "values"),
    [
        (("usecond", "Mbyte"), ("1,500.5", "1,234.5")),
        (("us", "MB"), ("1500.5", "1234.5")),
        (("msecond", "Gbyte"), ("1.5005", "1.2345")),
        (("nsecond", "byte"), ("1500500", "1234500000")),
        (("second", "Kbyte"), ("0.0015005", "1,234,500")),
    ],
)
def test_every_unit_says_the_same(
    form: Callable[..., str], units: tuple[str, str], values: tuple[str, str], tmp_path: Path
) -> None:
    metrics = {FADD: ("inst", "0"), FMUL: ("inst", "0"), FFMA: ("inst", "7")}
    kernel = Kernel(metrics={**metrics, TIME: (units[0], values[0]), BYTES: (units[1], values[1])})
    load = of_csv(both(form([kernel]), tmp_path), PEAKS).total.load
    assert load.seconds == pytest.approx(1.5005e-3)
    assert load.dram_bytes == pytest.approx(1.2345e9)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings_delimiters_and_surrounding_messages_are_read(
    encoding: str, tmp_path: Path
) -> None:
    before = '==PROF== Connected to process 4713\nepoch 1, loss 0.5\n==WARNING== "quoted, with commas"\n\n'
    for delimiter in (",", ";", "\t"):
        text = (
            before
            + long_form([counted()], delimiter=delimiter).replace("\n", "\r\n")
            + "==PROF== Disconnected\n"
        )
        path = both(text, tmp_path, encoding)
        assert is_listing(path)
        assert of_csv(path, PEAKS).total.load.total_flops == 2 * 10**9


def test_units_may_stand_in_the_header(tmp_path: Path) -> None:
    header, units, row = wide_form([counted(mbytes=3)]).splitlines()
    for name, unit in (
        (TIME, "usecond"),
        (BYTES, "Mbyte"),
        (FFMA, "inst"),
        (FADD, "inst"),
        (FMUL, "inst"),
    ):
        header = header.replace(name, f"{name} [{unit}]")
    assert units
    assert of_csv(
        both(f"{header}\n{row}\n", tmp_path), PEAKS
    ).total.load.dram_bytes == pytest.approx(3e6)


def test_the_page_of_details_is_read_by_its_labels(tmp_path: Path) -> None:
    metrics = {
        "Duration": ("us", "10"),
        "DRAM Throughput": ("%", "50"),
        "Compute (SM) Throughput": ("%", "25"),
    }
    roofline = of_csv(both(long_form([Kernel(metrics=metrics)]), tmp_path), PEAKS)
    assert roofline.total.load.total_flops == pytest.approx(0.25 * 1e13 * 1e-5)
    assert roofline.total.load.dram_bytes == pytest.approx(0.5 * 1e12 * 1e-5)


def test_thread_and_process_ranges_are_read_with_their_nesting(tmp_path: Path) -> None:
    kernels = [
        counted(stack=("step", "forward: a b", "conv")),
        counted(stack=("step", "forward: a b")),
        counted(stack=("step",), spans=("train_step", "backward")),
        counted(),
    ]
    roofline = of_csv(both(long_form(kernels), tmp_path), PEAKS)
    seen = {(row.name, row.where): row.load.launches for row in roofline.ranges}
    assert seen == {
        ("step", "of a thread"): 3,
        ("step/forward: a b", "of a thread"): 2,
        ("step/forward: a b/conv", "of a thread"): 1,
        ("train_step", "of the process"): 1,
        ("backward", "of the process"): 1,
    }


def test_units_may_stand_behind_labels_and_names(tmp_path: Path) -> None:
    header, units, row = wide_form([counted()]).splitlines()
    for name, shown in ((TIME, "Duration [ns]"), (BYTES, f"{BYTES} [Mbyte]")):
        header = header.replace(name, shown)
    assert units
    assert of_csv(both(f"{header}\n{row}\n", tmp_path), PEAKS).total.load.seconds == pytest.approx(
        10e-9
    )
    named = {f"{TIME} [nsecond]": ("", "10"), f"{BYTES} [Mbyte]": ("", "1"), FFMA: ("inst", "1")}
    load = of_csv(both(long_form([Kernel(metrics=named)]), tmp_path), PEAKS).total.load
    assert (load.seconds, load.dram_bytes) == (pytest.approx(10e-9), pytest.approx(1e6))


def _without_units(text: str) -> str:
    for unit in ("usecond", "Mbyte", "inst"):
        text = text.replace(f'"{unit}"', '""')
    return text


_WIDE = wide_form([counted(us=1_000_000)])
UNITLESS = {
    "empty cells": _without_units(long_form([counted(us=1_000_000)])),
    "empty cells, wide": _without_units(_WIDE),
    "no line of units": "\n".join([_WIDE.splitlines()[0], *_WIDE.splitlines()[2:]]),
    "no column": long_form([counted(us=1_000_000)]).replace("Metric Unit", "Unit"),
    "of a count": long_form([counted()]).replace('"usecond"', '"inst"'),
    "of a share": long_form([counted()]).replace('"usecond"', '"%"'),
    "of bytes": long_form([counted()]).replace('"usecond"', '"byte"'),
    "of time": long_form([counted()]).replace('"Mbyte"', '"us"'),
    "bytes only": long_form([counted()]).replace('"Mbyte"', '" "'),
}


@pytest.mark.parametrize("text", UNITLESS.values(), ids=UNITLESS)
def test_time_or_bytes_without_a_known_unit_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"({TIME}|{BYTES}) at line \d+ (has no unit|is in '.+', an unknown unit)"
    ) as error:
        of_csv(both(text, tmp_path), PEAKS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dram", "sm"), [("SOL FB", "SOL SM"), ("SOL DRAM", "SM [%]")])
def test_details_of_2019_and_2020_are_read_by_their_labels(
    dram: str, sm: str, tmp_path: Path
) -> None:
    metrics = {
        "Duration": ("usecond", "10"),
        dram: ("%", "50"),
        sm: ("%", "25"),
        "Memory [%]": ("%", "60"),
    }
    load = of_csv(both(long_form([Kernel(metrics=metrics)]), tmp_path), PEAKS).total.load
    assert load.total_flops == pytest.approx(0.25 * 1e13 * 1e-5)
    assert load.dram_bytes == pytest.approx(0.5 * 1e12 * 1e-5)


def test_a_chip_without_counters_of_dram_is_told_in_one_line(tmp_path: Path) -> None:
    metrics = {TIME: ("us", "10"), FFMA: ("inst", "1"), "lts__t_bytes.sum": ("byte", "64")}
    for more in ({}, {BYTES: ("", "n/a")}):
        with pytest.raises(
            UserError, match=r"lacks dram__bytes.*Integrated GPUs .* have no DRAM counters"
        ) as error:
            of_csv(both(long_form([Kernel(metrics=metrics | more)]), tmp_path), PEAKS)
        assert "\n" not in str(error.value)


SUMMARY = (
    '"Process ID","Process Name","Host Name","Kernel Name","Block Size","Grid Size","Device","CC","Invocations",'
    '"Section Name","Metric Name","Metric Unit","Minimum","Maximum","Average"\n'
    '"7","python","127.0.0.1","gemm","(256, 1, 1)","(64, 1, 1)","0","9.0","14","GPU Speed Of Light","Duration","us",'
    '"1","3","2"\n'
)
NSYS = (
    '"Time (%)","Total Time (ns)","Instances","Avg (ns)","Name"\n"50.0","1000","1","1000","gemm"\n'
)
BAD = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "of nsys": (NSYS, "nsys stats"),
    "of a summary": (SUMMARY, "is a summary of ncu (--print-summary)"),
    "a unit in a cell": (
        long_form([Kernel(metrics={TIME: ("us", "1.00 ms")})]),
        "is '1.00 ms', not a number",
    ),
    "messages only": (
        "==PROF== Connected\n==WARNING== No kernels were profiled.\n",
        "No kernels were profiled",
    ),
    "prose": ("hello, world\n", "not a table of ncu"),
    "header only": (long_form([]), "no kernel"),
    "wide, no kernel": ("\n".join(wide_form([counted()]).splitlines()[:2]), "no kernel"),
    "cut in a line": (long_form([counted(), counted()])[:-30], "cut off"),
    "cut in a number": (long_form([counted(), counted()])[:-3], "cut off"),
    "cut, wide": (wide_form([counted(), counted()])[:-20], "cut off"),
    "mixed locales": (
        long_form(
            [Kernel(metrics={TIME: ("us", "1.5"), BYTES: ("byte", "2,5"), FFMA: ("inst", "1")})]
        ),
        "decimal comma",
    ),
    "unit": (
        long_form([Kernel(metrics={TIME: ("furlong", "1.5")})]),
        f"{TIME} at line 2 is in 'furlong'",
    ),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_file_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = both(text, tmp_path)
    with pytest.raises(UserError, match=r"ncu\.csv") as error:
        of_csv(path, PEAKS)
    assert told in str(error.value)


def test_what_is_no_text_and_what_is_not_there_is_told(tmp_path: Path) -> None:
    for content in (b"\xff\xd8\xff\xe0 picture", b"a,b\0\1", "Prozeß,1".encode("latin-1")):
        path = tmp_path / "x.csv"
        path.write_bytes(content)
        assert not is_listing(path)
        with pytest.raises(UserError, match="text"):
            of_csv(path, PEAKS)
    with pytest.raises(UserError, match="No such file"):
        of_csv(tmp_path / "gone.csv", PEAKS)


@pytest.mark.parametrize("name", [TIME, BYTES])
def test_missing_ncu_metric_is_named_with_its_command(name: str, tmp_path: Path) -> None:
    kernel = counted()
    kernel.metrics = {key: value for key, value in kernel.metrics.items() if key != name}
    with pytest.raises(UserError, match=name) as error:
        of_csv(both(long_form([kernel]), tmp_path), PEAKS)
    assert "ncu --nvtx" in str(error.value)


def test_unrelated_and_unmeasured_ncu_metrics_are_reported(
    tmp_path: Path,
) -> None:
    other = Kernel(metrics={"launch__registers_per_thread": ("register/thread", "32")})
    with pytest.raises(
        UserError, match=r"lacks gpu__time_duration.*It has: launch__registers_per_thread"
    ):
        of_csv(both(long_form([other]), tmp_path), PEAKS)
    refused = Kernel(metrics={TIME: ("us", "10"), FFMA: ("inst", "1"), BYTES: ("", "n/a")})
    with pytest.raises(UserError, match=rf"could not measure {BYTES} \(n/a\)"):
        of_csv(both(long_form([refused]), tmp_path), PEAKS)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_table_whose_header_comes_again_is_read_on_and_told(
    form: Callable[..., str], tmp_path: Path
) -> None:
    first, second = form([counted(us=10), counted(us=10)]), form([counted("relu", us=20, fmas=0)])
    once = of_csv(both(first, tmp_path), PEAKS)
    roofline = of_csv(both(f"{first}==PROF== Connected\n{second}{second}", tmp_path), PEAKS)
    assert roofline.total.load.launches == 4
    assert roofline.total.load.seconds == pytest.approx(6e-5)
    assert not roofline.estimated
    assert roofline.notes[0].startswith("The file holds 3 tables")
    assert [note for note in roofline.notes if "lack metrics" in note or "estimates" in note] == []
    twice = of_csv(both(first * 2, tmp_path), PEAKS)
    assert twice.total.shares == once.total.shares
    assert not any("tables" in note for note in once.notes)


def test_second_header_with_other_columns_is_refused(tmp_path: Path) -> None:
    first = "==PROF== Connected\n" + wide_form([counted()]) + "==PROF== Disconnected\n"
    for second in (wide_form([Kernel(metrics={TIME: ("us", "10")})]), long_form([counted()])):
        with pytest.raises(
            UserError, match=r"another table begins at line 6, with other columns than the first"
        ):
            of_csv(both(first + second, tmp_path), PEAKS)


@pytest.mark.parametrize(("form", "line"), [(long_form, 11), (wide_form, 4)])
def test_a_value_below_zero_is_left_out_and_named_with_its_line(
    form: Callable[..., str], line: int, tmp_path: Path
) -> None:
    roofline = of_csv(both(form([counted(), counted(mbytes=-1000)]), tmp_path), PEAKS)
    assert roofline.total.load.launches == 1
    assert (
        f"left out, since no counter has one: {BYTES} at line {line} (-1000)." in roofline.notes[0]
    )
    with pytest.raises(UserError, match=rf"lacks dram__bytes.*{BYTES} at line"):
        of_csv(both(form([counted(mbytes=-1000)]), tmp_path), PEAKS)


def test_launch_that_lacks_metrics_is_left_out_with_a_note(tmp_path: Path) -> None:
    torn = counted()
    torn.metrics = dict(list(torn.metrics.items())[:2])
    roofline = of_csv(both(long_form([counted(), counted(), torn]), tmp_path), PEAKS)
    assert roofline.total.load.launches == 2
    assert any("1 of 3 launches" in note for note in roofline.notes)
    assert not (roofline.percentages or roofline.estimated)
    assert not any("estimate" in note for note in roofline.notes)


@pytest.mark.parametrize(
    ("column", "cell", "names"),
    [
        (
            "thread Domain:Push/Pop_Range:PL_Type",
            '4713  "<default domain>:step:a:b:c:d:e:f"  "<default domain>:loss:a:b:c:d:e:f"',
            ("step", "loss"),
        ),
        ("Id:Domain:Start/Stop_Range:PL_Type", "1:<default domain>:step:a:b:c:d:e:f", ("step",)),
        (
            "Id:Domain:Start/Stop_Range:PL_Type",
            '"12:<default domain>:layer1: conv:a:b:c:d:e:f"',
            ("layer1: conv",),
        ),
        ("Id:Domain:Start/Stop_Range:PL_Type", "", ()),
    ],
)
def test_ranges_are_told_by_their_names(column: str, cell: str, names: tuple[str, ...]) -> None:
    """Without the thread or the number before the domain, and without payload, colour and message behind the name."""
    kind = "Push/Pop_Range" if "Push" in column else "Start/Stop_Range"
    assert listing._ranges({column: cell}, kind) == names


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("time", "moved"), [("1.500,5", "1.234"), ("0,0015", "2"), ("1 500", "2"), ("15", "1,5")]
)
def test_numbers_of_another_locale_are_refused_with_their_line(
    form: Callable[..., str], time: str, moved: str, tmp_path: Path
) -> None:
    kernel = Kernel(metrics={FFMA: ("inst", "7"), TIME: ("us", time), BYTES: ("Mbyte", moved)})
    with pytest.raises(UserError, match=r"at line \d is '.+': a decimal comma.*LC_ALL=C") as error:
        of_csv(both(form([kernel]), tmp_path), PEAKS)
    assert "\n" not in str(error.value)


def test_other_locale_in_an_unneeded_metric_is_refused(tmp_path: Path) -> None:
    text = (
        '"ID","Kernel Name","launch__waves_per_multiprocessor","dram__bytes.sum","gpu__time_duration.sum","FADD",'
        '"FMUL","FFMA"\n"","","","byte","nsecond","inst","inst","inst"\n"0","add","1,19","3.145","4.512","262.144","0","0"\n'
    )
    for name, metric in (("FADD", FADD), ("FMUL", FMUL), ("FFMA", FFMA)):
        text = text.replace(f'"{name}"', f'"{metric}"')
    (tmp_path / "german.csv").write_text(text)
    with pytest.raises(UserError, match=r"launch__waves_per_multiprocessor at line 3 is '1,19'"):
        of_csv(tmp_path / "german.csv", PEAKS)
