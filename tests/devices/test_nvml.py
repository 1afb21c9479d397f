"""What NVML answers and refuses, scripted at its own functions."""

import ctypes

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


def field_value(code):
    values = (pynvml.c_nvmlFieldValue_t * 1)()
    values[0].nvmlReturn = code
    values[0].value.uiVal = ctypes.c_uint(76_000)
    return lambda handle, fields: values


def test_a_board_that_refuses_everything_is_listed_with_what_it_refuses(driver):
    [board] = nvml.all_boards()["boards"]
    assert (board["uuid"], board["name"]) == ("GPU-1", "NVIDIA H200")
    assert set(board["meters"].values()) == {"Not Supported"}
    assert {*board["facts"].values(), *board["state"].values()} == {None}


def test_meters_that_answer_are_there_and_a_refused_field_is_not(driver):
    driver.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 123)
    driver.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 76_000)
    driver.setattr(pynvml, "nvmlDeviceGetFieldValues", field_value(pynvml.NVML_SUCCESS))
    [board] = nvml.all_boards()["boards"]
    assert board["meters"] == {"energy_counter": None, "power": None, "instantaneous_power": None}
    driver.setattr(pynvml, "nvmlDeviceGetFieldValues", field_value(pynvml.NVML_ERROR_NOT_SUPPORTED))
    [board] = nvml.all_boards()["boards"]
    assert board["meters"]["instantaneous_power"] == "Not Supported"
