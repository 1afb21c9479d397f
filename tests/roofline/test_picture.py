"""The picture at its size, its names apart from one another; table and page."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pandas as pd
import pytest

from perfexp.plots import roofline_files as sink
from perfexp.plots.roofline_labels import Box, Spot, place
from perfexp.plots.roofline_plot import compose
from perfexp.roofline import Peaks, Roofline
from perfexp.roofline.assemble import of_listing, recorded
from perfexp.roofline.counters import wanted
from perfexp.roofline.listing import parse
from tests.roofline.listings import DRAM, SM, TIME, Kernel, counted, long_form, many

H100 = Peaks(
    flops_per_second={"fp32": 67e12, "tf32": 494e12, "fp16": 989e12, "bf16": 989e12, "fp64": 67e12},
    dram_bytes_per_second=3.35e12,
    ceilings={"fp32": 50e12, "dram": 2.9e12},
    sources=("a data sheet",),
)


def roofline(kernels: list[Kernel], title: str = "test") -> Roofline:
    listing = parse(long_form(kernels), "ncu.csv", wanted)
    return of_listing(listing, H100.or_else(recorded(listing)[0]), title)


def size_of(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("l2_roof", [False, True])
@pytest.mark.parametrize("count", [1, 2, 12, 60, 600])
def test_names_never_overlap_and_stay_inside(count: int, l2_roof: bool) -> None:
    drawn = compose(roofline(many(count, l2_roof=l2_roof)))
    boxes = [*drawn.labels, *drawn.others]
    assert 1 <= len(drawn.labels) <= 17
    for number, one in enumerate(drawn.labels):
        assert one.within(Box(0, 0, 1200, 800))
        assert not any(one.overlaps(other) for other in boxes[:number] + boxes[number + 1 :])


@pytest.mark.parametrize("count", [1, 60, 600])
def test_the_picture_has_its_size_and_is_always_the_same(count: int) -> None:
    found = roofline(many(count))
    png = sink.draw(found)
    assert size_of(png) == (1200, 800)
    assert b"tEXt" not in png
    assert png == sink.draw(found)
    svg = sink.to_svg(found)
    assert svg.startswith(b"<?xml")
    assert svg == sink.to_svg(found)


def test_many_kernels_on_one_spot_are_named_apart_or_not_at_all() -> None:
    drawn = compose(roofline([counted(f"a_kernel_with_quite_a_long_name_{number}") for number in range(40)]))
    assert 5 <= len(drawn.labels) <= 12
    assert not any(one.overlaps(two) for one in drawn.labels for two in drawn.labels if one is not two)


def test_the_roofs_are_named_with_their_heights_and_equal_ones_are_one() -> None:
    svg_words = {text.get_text() for text in compose(roofline(many(8, l2_roof=True))).figure.texts}
    told = " ".join(svg_words)
    for name in ("FP32 67 TFLOP/s", "TF32 tensor 494 TFLOP/s", "FP16 tensor = BF16 tensor 989 TFLOP/s"):
        assert name in svg_words
    for name in ("DRAM 3.35 TB/s", "L2 5.", "as seen"):
        assert name in told
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
    assert size_of(sink.draw(found)) == (1200, 800)
    assert size_of(sink.draw(roofline([kernel]))) == (1200, 800)


def test_work_that_has_no_place_is_told() -> None:
    found = roofline([counted("copy", fmas=0, us=30), counted("gemm", us=10)])
    assert any("75% of the time is in kernels without a FLOP" in note for note in found.notes)


def test_the_table_has_everything_with_units_in_its_columns() -> None:
    found = roofline([*many(5), counted("=cmd()", us=10, fmas=5 * 10**8, mbytes=10, stack=("step",))])
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
    counted(f"void at::native::a_kernel_with_a_name_that_is_far_too_long<float, (int){size}>(T1 *)", us=50 - size)
    for size in (1, 2)
]


def test_kernels_of_one_name_are_told_apart_in_the_table_the_picture_and_the_csv() -> None:
    found = roofline(ALIKE)
    cells = sink.grid(found).columns[0].cells
    assert [cell[-6:] for cell in cells[1:]] == ["<…, 1>", "<…, 2>"]
    assert {len(cell) for cell in cells[1:]} == {44}
    named = [name.rpartition(" ")[0] for name in compose(found).names]
    assert sorted(name[-6:] for name in named) == ["<…, 1>", "<…, 2>"]
    table = pd.read_csv(io.BytesIO(sink.to_csv(found)))
    kernels = table[table["level"] == "kernel"]
    assert kernels["label"].nunique() == 2
    assert set(table[table["level"] == "launch"]["label"]) == set(kernels["label"])


def test_the_table_marks_estimates_and_nothing_else() -> None:
    share = Kernel(metrics={TIME: ("us", "10"), SM: ("%", "50"), DRAM: ("%", "20")})
    listing = parse(long_form([share]), "ncu.csv", wanted)
    for listed, marked in (
        (listing, {"work", "moved", "FLOP/B", "rate"}),
        (parse(long_form([counted()]), "x", wanted), set()),
    ):
        grid = sink.grid(of_listing(listed, H100, "test"))
        assert {column.title for column in grid.columns if column.cells[0].startswith("≈")} == marked


def test_the_console_shows_the_slowest_and_says_how_many_more() -> None:
    grid = sink.grid(roofline(many(60)))
    assert len(grid.lines) == 1 + 4 + 10
    assert "50 more kernels" in grid.notes[0]


def test_the_page_is_whole_in_itself_and_shows_names_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    found = roofline([*many(5), counted("evil<script>alert(1)</script>")], title="</title><script>alert(2)</script>")
    page = sink.to_html(found)
    assert page is not None
    assert page == sink.to_html(found)
    assert b"<script>alert" not in page
    assert b'src="http' not in page
    assert b"each launch" in page


def test_without_plotly_there_is_no_page_and_the_rest_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = sink.write(roofline([counted()]), sink.files(tmp_path / "a.b"))
    assert [path.name for path in written] == ["a.b.png", "a.b.svg", "a.b.csv"]


def test_a_label_without_room_is_left_out() -> None:
    spot, within = Spot(50, 50, 3), Box(0, 0, 100, 100)
    assert place([(spot, 200, 10)], within=within, taken=[], avoided=[]) == [None]
    first, second = place([(spot, 40, 10), (spot, 40, 10)], within=within, taken=[], avoided=[])
    assert first is not None
    assert second is not None
    assert not first.overlaps(second)
    assert place([(spot, 40, 10)], within=within, taken=[within], avoided=[]) == [None]
