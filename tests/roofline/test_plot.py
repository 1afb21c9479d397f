"""The plot at its size, its numbers apart from one another and those of the table; table and page."""

from __future__ import annotations

import html
import io
import re
import struct
from typing import Any

import pandas as pd
import pytest

from perfexp.report.plots import canvas, pages
from perfexp.report.plots import roofline_files as sink
from perfexp.report.plots.roofline_plot import compose
from perfexp.report.plots.roofline_table import console_grid
from perfexp.roofline import Peaks, Roofline, of_listing, recorded
from perfexp.roofline.counters import wanted
from perfexp.roofline.listing import parse
from tests.roofline.listings import DRAM, SM, TIME, Kernel, counted, long_form, many

H100 = Peaks(
    flops_per_second={"fp32": 67e12, "tf32": 494e12, "fp16": 989e12, "bf16": 989e12, "fp64": 67e12},
    dram_bytes_per_second=3.35e12,
    measured={"fp32": 50e12, "dram": 2.9e12},
    sources=("a data sheet",),
)


def roofline(kernels: list[Kernel], title: str = "test") -> Roofline:
    listing = parse(long_form(kernels), "ncu.csv", wanted)
    return of_listing(listing, H100.or_else(recorded(listing)[0]), title)


def draw(found: Roofline, form: str = "png") -> bytes:
    return canvas.save(compose(found), form)


def page_of(found: Roofline) -> str:
    return pages.of_roofline(found, draw(found, "svg")).decode()


def size_of(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def numbers_of(figure: Any, found: Roofline) -> list[tuple[list[str], Any]]:
    """The numbers in a plot that stand together, with the box of their text."""
    known = {row.number for row in (*found.ranges, *found.parts)}
    split = [
        (text.get_text().split(", "), text.get_window_extent()) for text in figure.axes[0].texts
    ]
    return [(numbers, box) for numbers, box in split if set(numbers) <= known]


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.mark.parametrize("l2_ceiling", [False, True])
@pytest.mark.parametrize("count", [1, 2, 12, 60, 600])
def test_plot_numbers_never_overlap_and_are_in_the_legend(count: int, l2_ceiling: bool) -> None:
    found = roofline(many(count, l2_roof=l2_ceiling))
    figure = compose(found)
    texts = numbers_of(figure, found)
    numbers = [number for together, _ in texts for number in together]
    assert 1 <= len(numbers) <= 8
    assert len(set(numbers)) == len(numbers)
    for together, box in texts:
        assert 0 <= box.x0 < box.x1 <= 1200
        assert 0 <= box.y0 < box.y1 <= 800
        assert not box.count_overlaps([other for others, other in texts if others != together])
    names = {row.number: row.name.rsplit("/", 1)[-1] if row.level == "range" else row.label
             for row in (*found.ranges, *found.parts)}  # fmt: skip
    entries = {line.split()[0]: line for line in legend_of(figure)}
    for number in numbers:
        assert entries[number].endswith(names[number])
    box = figure.axes[0].get_legend().get_window_extent()
    assert box.x0 > figure.axes[0].get_window_extent().x1
    assert box.x1 <= 1200
    assert box.y0 >= 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 60, 600])
def test_the_plot_has_its_size_and_is_always_the_same(count: int) -> None:
    found = roofline(many(count))
    png = draw(found)
    assert size_of(png) == (1200, 800)
    assert b"tEXt" not in png
    assert png == draw(found)
    svg = draw(found, "svg")
    assert svg.startswith(b"<?xml")
    assert svg == draw(found, "svg")


def test_all_texts_of_the_svg_are_inside() -> None:
    drawn = draw(roofline(many(12)), "svg").decode()
    svg = re.sub(r"(?s)<defs>.*?</defs>|<!--.*?-->|<title>.*?</title>", "", drawn)
    places = re.findall(r"[ML] (\S+) (\S+)", svg)
    assert len(places) > 200
    assert all(
        0 <= float(x) <= 864 and 0 <= float(y) <= 576 for x, y in places
    )  # 12 × 8 inches in points


def test_numbers_of_kernels_on_one_spot_stand_together() -> None:
    found = roofline([counted(f"a_kernel_with_quite_a_long_name_{number}") for number in range(40)])
    [(numbers, _)] = numbers_of(compose(found), found)
    assert sorted(numbers) == ["1", "2", "3", "4", "5"]


def test_ceilings_have_names_and_heights_and_equal_ones_merge() -> None:
    figure = compose(roofline(many(8, l2_roof=True)))
    words = [text.get_text() for text in figure.axes[0].texts]
    told = " ".join(words)
    for name in (
        "FP32 67 TFLOP/s",
        "TF32 tensor 494 TFLOP/s",
        "FP16 tensor = BF16 tensor 989 TFLOP/s",
    ):
        assert name in words
    for name in ("DRAM 3.35 TB/s", "L2 5."):
        assert name in told
    assert {"measured: FP32 50 TFLOP/s", "measured: DRAM 2.9 TB/s"} <= set(legend_of(figure))
    assert "FP64" not in told


@pytest.mark.parametrize(
    "kernel",
    [
        counted(fmas=0),
        counted(mbytes=0),
        counted("$\\frac$ 模型 <b>&", fmas=1, mbytes=1e6),
        counted(us=1e-3, fmas=10**14, mbytes=1e-6),
    ],
    ids=["no FLOPs", "no bytes", "odd name, tiny intensity", "far above all roofs"],
)
def test_odd_kernels_are_drawn(kernel: Kernel) -> None:
    found = roofline([kernel, counted("other")], title="$x$ <title> & more")
    assert size_of(draw(found)) == (1200, 800)
    assert size_of(draw(roofline([kernel]))) == (1200, 800)


def test_work_that_has_no_place_is_told() -> None:
    found = roofline([counted("copy", fmas=0, us=30), counted("gemm", us=10)])
    assert any("75% of the time is in kernels without a FLOP" in note for note in found.notes)


def test_the_table_has_everything_with_units_in_its_columns() -> None:
    found = roofline(
        [*many(5), counted("=cmd()", us=10, fmas=5 * 10**8, mbytes=10, stack=("step",))]
    )
    table = pd.read_csv(io.BytesIO(sink.to_csv(found)))
    assert list(table["level"].value_counts().sort_index().items()) == [
        ("kernel", 6), ("launch", 6), ("range", 5), ("total", 1),
    ]  # fmt: skip
    line = table[(table["level"] == "kernel") & (table["name"] == "'=cmd()")].iloc[0]
    assert line["seconds"] == pytest.approx(1e-5)
    assert line["flops"] == line["flops_fp32"] == 10**9
    assert line["dram_bytes"] == 10**7
    assert line["intensity_flops_per_byte"] == pytest.approx(100)
    assert line["flops_per_second"] == pytest.approx(1e14)
    assert line["dram_bytes_per_second"] == pytest.approx(1e12)
    assert line["compute_roof_percent"] == pytest.approx(100 / 0.67)
    assert line["memory_roof_percent"] == pytest.approx(100 / 3.35)
    assert line["binding_roof"] == "FP32 = FP64" or line["binding_roof"] == "FP32"
    assert not line["estimated"]
    assert line["flops_basis"] == line["bytes_basis"] == "counted"
    assert line["label"] == "'=cmd"


ALIKE = [
    counted(
        f"void at::native::a_kernel_with_a_name_that_is_far_too_long<float, (int){size}>(T1 *)",
        us=50 - size,
    )
    for size in (1, 2)
]


def test_kernels_of_one_name_get_numbers_and_suffixes() -> None:
    found = roofline(ALIKE)
    numbers, names = (column.cells[1:] for column in console_grid(found).columns[:2])
    assert numbers == ("1", "2")
    assert [name[-3:] for name in names] == ["ong", " #2"]
    assert max(len(name) for name in names) == 44
    assert [(line.split()[0], line[-3:]) for line in legend_of(compose(found))[-2:]] == [
        ("1", "ong"), ("2", " #2"),
    ]  # fmt: skip
    table = pd.read_csv(io.BytesIO(sink.to_csv(found)))
    kernels = table[table["level"] == "kernel"]
    assert kernels["label"].nunique() == 2
    assert set(table[table["level"] == "launch"]["label"]) == set(kernels["label"])
    assert list(kernels["number"].astype(int)) == [1, 2]


def test_the_table_marks_estimates_and_nothing_else() -> None:
    share = Kernel(metrics={TIME: ("us", "10"), SM: ("%", "50"), DRAM: ("%", "20")})
    listing = parse(long_form([share]), "ncu.csv", wanted)
    for listed, marked in (
        (listing, {"work", "moved", "FLOP/B", "rate"}),
        (parse(long_form([counted()]), "x", wanted), set()),
    ):
        grid = console_grid(of_listing(listed, H100, "test"))
        assert {
            column.title for column in grid.columns if column.cells[0].startswith("≈")
        } == marked


def test_the_limit_is_a_ceiling_that_is_near() -> None:
    found = roofline([counted("near", us=10, fmas=3 * 10**8), counted("far", us=100, fmas=10**8)])
    [limits] = [column.cells for column in console_grid(found).columns if column.title == "limit"]
    assert limits == ("neither", "neither", "FP32")
    assert all(row.binds for row in found.parts)


def test_the_console_shows_the_slowest_and_says_how_many_more() -> None:
    grid = console_grid(roofline(many(60)))
    assert len(grid.lines) == 1 + 4 + 10
    assert grid.columns[0].cells == (
        "",
        *(f"R{number}" for number in range(1, 5)),
        *map(str, range(1, 11)),
    )
    assert "50 more kernels" in grid.notes[0]


def test_the_page_is_whole_in_itself_and_shows_names_as_they_are() -> None:
    found = roofline(
        [*many(5), counted("evil<script>alert(1)</script>")],
        title="</title><script>alert(2)</script>",
    )
    page = page_of(found)
    assert page == page_of(found)
    assert "<script>alert" not in page
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)
    cells = [re.findall(r"<td.*?>(.*?)</td>", line)[:2] for line in re.split("<tr.*?>", page)[2:]]
    assert cells == [[row.number, html.escape(f"range {row.name}" if row.level == "range" else row.label)]
                     for row in (found.total, *found.ranges, *found.parts)]  # fmt: skip


def test_plot_marker_shows_its_figures_and_links_to_its_row() -> None:
    found = roofline(many(5))
    page = page_of(found)
    targets = re.findall(r'xlink:href="#(R?\d+)"', page)
    placed = [row.number for row in (*found.ranges, *found.parts) if row.has_place]
    assert set(targets) <= set(placed) | {row.number for row in found.ranges}
    assert {row.number for row in found.parts if row.has_place} <= set(targets)
    assert all(page.count(f"<tr id='{target}'>") == 1 for target in targets)
    assert re.search(rf"<title>1 {found.parts[0].label}, .*launches 1, time .*</title>", page)
