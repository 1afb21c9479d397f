"""RAPL's zones as Linux shows them, in a folder of the test's own."""

import pytest

from perfexp.meters import rapl


def zone(powercap, folder, name, microjoules=1_000_000, wrap=262_143_328_850):
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    if wrap is not None:
        (path / "max_energy_range_uj").write_text(f"{wrap}\n")
    return path


@pytest.fixture
def server(tmp_path):
    """Two packages with memory of their own and parts that they hold, and a zone for all of it."""
    for index in range(2):
        zone(tmp_path, f"intel-rapl:{index}", f"package-{index}", 5_000_000 + index)
        zone(tmp_path, f"intel-rapl:{index}:0", "core", 3_000_000)
        zone(tmp_path, f"intel-rapl:{index}:1", "uncore", 1_000_000)
        zone(tmp_path, f"intel-rapl:{index}:2", "dram", 700_000, wrap=65_712_999_613)
    zone(tmp_path, "intel-rapl:2", "psys", 9_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def test_packages_and_their_memory_are_counted_and_nothing_twice(server):
    found = rapl.find(server)
    names = [meter.name for meter in found.meters]
    assert names == [f"rapl intel-rapl:{part}" for part in ("0", "0:2", "1", "1:2")]
    joules = [meter.energy_joules().value for meter in found.meters]
    assert joules == pytest.approx([5.0, 0.7, 5.000001, 0.7])
    assert "core" not in " ".join(meter.covers for meter in found.meters)


def test_each_zone_has_its_own_range(server):
    ranges = [meter.wrap_joules for meter in rapl.find(server).meters]
    assert ranges == pytest.approx([262_143.328850, 65_712.999613] * 2)


def test_package_listed_by_registers_and_memory_counts_once(tmp_path):
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1)
    assert [meter.name for meter in rapl.find(tmp_path).meters] == ["rapl intel-rapl-mmio:0"]
    zone(tmp_path, "intel-rapl:0", "package-0", 2)
    assert [meter.name for meter in rapl.find(tmp_path).meters] == ["rapl intel-rapl:0"]


def test_client_with_package_and_platform_zones_has_one_meter(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0")
    zone(tmp_path, "intel-rapl:0:0", "core")
    zone(tmp_path, "intel-rapl:1", "psys")
    [meter] = rapl.find(tmp_path).meters
    assert meter.covers == "package-0 with everything that runs on it"


def test_names_of_another_maker_are_found(tmp_path):
    zone(tmp_path, "amd-rapl:0", "package-0")
    assert [meter.name for meter in rapl.find(tmp_path).meters] == ["rapl amd-rapl:0"]


def test_more_than_ten_packages_keep_their_memory_apart(tmp_path):
    for index in (1, 10):
        zone(tmp_path, f"intel-rapl:{index}", f"package-{index}")
        zone(tmp_path, f"intel-rapl:{index}:0", "dram")
    names = [meter.name for meter in rapl.find(tmp_path).meters]
    assert names == [f"rapl intel-rapl:{part}" for part in ("1", "1:0", "10", "10:0")]


def test_unreadable_meter_has_a_reason_with_a_remedy(server, monkeypatch):
    """Root may read whatever the mode of a file is, so the refusal is the system's own, scripted."""
    read = rapl.Path.read_text

    def refuse(path, *arguments, **options):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(rapl.Path, "read_text", refuse)
    found = rapl.find(server)
    assert found.meters == ()
    assert found.reason.startswith("no meter: ")
    assert "chmod a+r" in found.reason
    assert str(server / "intel-rapl:0" / "energy_uj") in found.reason


def test_one_unreadable_memory_zone_leaves_no_meter_at_all(server):
    (server / "intel-rapl:1:2" / "energy_uj").unlink()
    found = rapl.find(server)
    assert found.meters == ()
    assert "intel-rapl:1:2" in found.reason


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_where_there_is_no_zone_the_reason_says_why_that_may_be(tmp_path, kind):
    folder = tmp_path / "powercap"
    if kind == "empty":
        folder.mkdir()
    found = rapl.find(folder)
    assert found.meters == ()
    assert "virtual machines" in found.reason
    assert "containers" in found.reason


@pytest.mark.parametrize("text", ["", "nonsense"])
def test_a_counter_that_is_no_number_is_no_reading(tmp_path, text):
    path = zone(tmp_path, "intel-rapl:0", "package-0")
    [meter] = rapl.find(tmp_path).meters
    (path / "energy_uj").write_text(text)
    reading = meter.energy_joules()
    assert reading.value is None
    assert "can't be read" in reading.reason


def test_a_zone_without_a_range_does_not_invent_one(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", wrap=None)
    [meter] = rapl.find(tmp_path).meters
    assert meter.wrap_joules is None
    assert meter.power_watts().value is None
    assert meter.power_watts().reason
