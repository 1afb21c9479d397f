"""What NVML answers and refuses, scripted at its own functions."""

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


def test_a_board_that_refuses_everything_is_listed_with_what_it_refuses(driver):
    [board] = nvml.all_boards()["boards"]
    assert (board["uuid"], board["name"]) == ("GPU-1", "NVIDIA H200")
    assert {*board["facts"].values(), *board["state"].values()} == {None}
