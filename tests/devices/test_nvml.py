"""What NVML answers and refuses, scripted at its own functions."""

from types import SimpleNamespace

import pynvml
import pytest

from perfexp.devices import nvml


@pytest.fixture
def driver(monkeypatch):
    """A driver with one board that refuses every question which a test does not answer."""

    def refuse(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")):
            monkeypatch.setattr(pynvml, name, refuse)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: 0,
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


def test_board_that_refuses_all_queries_is_listed_without_values(driver):
    [board] = nvml.all_boards()["boards"]
    assert (board["uuid"], board["name"]) == ("GPU-1", "NVIDIA H200")
    assert {*board["facts"].values(), *board["state"].values()} == {None}


@pytest.fixture
def boards(driver):
    """A driver with an H100 and two A100s, none of which is sliced."""
    names = ["NVIDIA H100", "NVIDIA A100", "NVIDIA A100"]
    driver.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(names))
    driver.setattr(pynvml, "nvmlDeviceGetName", lambda handle: names[handle])
    driver.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}abc")
    driver.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    driver.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ["NVIDIA A100", "NVIDIA H100"]),
        ("GPU-0", ["NVIDIA H100"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["NVIDIA H100"]),
    ],
)
def test_boards_are_those_that_the_environment_shows_to_cuda(boards, visible, names):
    boards.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.visible_names() == names


def test_all_boards_are_visible_in_driver_order_by_default(boards):
    assert nvml.visible_names() == ["NVIDIA H100", "NVIDIA A100", "NVIDIA A100"]


def test_names_of_unlike_or_sliced_boards_are_left_to_cuda(boards):
    boards.delenv("CUDA_DEVICE_ORDER")
    assert nvml.visible_names() is None
    boards.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    assert nvml.visible_names() == ["NVIDIA H100"]
    boards.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: (1, 1))
    assert nvml.visible_names() is None


def test_throttling_counters_replace_momentary_reasons(driver):
    driver.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: 61)
    driver.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0x04 | 0x01)
    board = nvml.Board("1")
    assert board.conditions() == (None, ["power cap"], 61)
    counted = {
        pynvml.NVML_FI_DEV_PERF_POLICY_POWER: 7_000,
        pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL: 0,
    }

    def field_values(handle, fields):
        return [
            SimpleNamespace(
                nvmlReturn=pynvml.NVML_SUCCESS if field in counted else 3,
                value=SimpleNamespace(ullVal=counted.get(field, 0)),
            )
            for field in fields
        ]

    driver.setattr(pynvml, "nvmlDeviceGetFieldValues", field_values)
    assert board.conditions() == ({"power cap": 7_000, "thermal": 0}, None, 61)
    counted.clear()
    assert board.conditions() == (None, ["power cap"], 61)


def test_loaded_board_reports_clock_and_instantaneous_power(driver):
    assert nvml.Board("1").load_queries() == {}
    driver.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: 1755)
    driver.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 690_000)
    answers = {"loaded_sm_clock_hertz": 1.755e9}
    for capability in (
        (9, 0),
        (8, 0),
    ):  # Hopper's plain power is an average over a second, GA100's is not
        driver.setattr(
            pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle, found=capability: found
        )
        assert {name: query() for name, query in nvml.Board("1").load_queries().items()} == answers
        answers["loaded_power_watts"] = 690.0


@pytest.mark.parametrize(("clock", "changed"), [(1980, False), (1500, True)])
def test_facts_name_what_limits_the_clock_and_where_the_board_is(driver, tmp_path, clock, changed):
    answers = {
        "nvmlDeviceGetApplicationsClock": lambda handle, kind: clock,
        "nvmlDeviceGetDefaultApplicationsClock": lambda handle, kind: 1980,
        "nvmlDeviceGetPersistenceMode": lambda handle: 0,
        "nvmlDeviceGetVbiosVersion": lambda handle: "96.00.A5.00.1A",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId="00000000:1B:00.0"),
    }
    for name, answer in answers.items():
        driver.setattr(pynvml, name, answer)
    facts = nvml.Board("1").facts()
    assert (facts["application_clock_hertz"], facts["application_clock_changed"]) == (
        clock * 1e6,
        changed,
    )
    limits = nvml.Board("1").limits()
    assert limits.items() < facts.items()
    assert {"driver", "power_limit_watts", "max_sm_clock_hertz", "application_clock_hertz"} < set(
        limits
    )
    assert (facts["persistence"], facts["vbios"], facts["auto_boost"]) == (
        False,
        "96.00.A5.00.1A",
        None,
    )
    (tmp_path / "0000:1b:00.0").mkdir()
    for text, node in (("1\n", 1), ("-1\n", None)):
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
        assert nvml._numa_node(b"00000000:1B:00.0", tmp_path) == node
    assert nvml._numa_node("00000000:1C:00.0", tmp_path) is None
