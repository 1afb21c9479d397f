"""NVML's answers and refusals, scripted at the functions of nvidia-ml-py itself."""

import ctypes

import pynvml
import pytest

from perfexp.devices.meters import PowerKind, boards


class Driver:
    """Boards by UUID; every question that a test does not answer is refused."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        for name in dir(pynvml):
            if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")):
                self.answer(name, self.refuse)
        self.answer("nvmlInit", lambda: None)
        self.boards = {"GPU-aa": 0, "GPU-bb": 1, "MIG-cc": 2}
        self.answer("nvmlDeviceGetHandleByUUID", lambda uuid: self._look_up(uuid))
        self.answer("nvmlDeviceGetName", lambda handle: f"NVIDIA H200 number {handle}")
        self.asked = []

    def answer(self, name, function):
        self._monkeypatch.setattr(pynvml, name, function)

    def refuse(self, *arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def count_energy(self):
        self.answer("nvmlDeviceGetTotalEnergyConsumption", lambda handle: 1_000_000 + handle)

    def tell_power(self, milliwatts=420_000, capability=(9, 0)):
        self.answer("nvmlDeviceGetPowerUsage", lambda handle: milliwatts)
        self.answer("nvmlDeviceGetCudaComputeCapability", lambda handle: capability)

    def tell_field(self, milliwatts=421_000, code=pynvml.NVML_SUCCESS):
        def fields(handle, wanted):
            self.asked += wanted
            values = (pynvml.c_nvmlFieldValue_t * 1)()
            values[0].nvmlReturn = code
            values[0].value.uiVal = ctypes.c_uint(milliwatts)
            return values

        self.answer("nvmlDeviceGetFieldValues", fields)

    def _look_up(self, uuid):
        if uuid not in self.boards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.boards[uuid]


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def codes(doubts):
    return [doubt.code for doubt in doubts]


def test_board_is_found_by_its_uuid_whatever_its_index(driver):
    driver.count_energy()
    for uuid in ("bb", "GPU-bb"):
        [meter] = boards.find_nvidia(uuid).meters
        assert meter.energy_joules().value == pytest.approx(1000.001)
        assert "number 1" in meter.covers


def test_millijoules_become_joules_and_milliwatts_watts(driver):
    driver.count_energy()
    driver.tell_field()
    [meter] = boards.find_nvidia("aa").meters
    assert meter.energy_joules().value == pytest.approx(1000.0)
    assert meter.power_watts().value == pytest.approx(421.0)
    assert meter.power_kind is PowerKind.instantaneous
    assert driver.asked[0] == pynvml.NVML_FI_DEV_POWER_INSTANT
    assert meter.wrap_joules == pytest.approx(2**64 / 1000)
    assert meter.doubts() == []


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        ((7, 0), PowerKind.instantaneous),
        ((8, 0), PowerKind.instantaneous),  # GA100
        ((8, 6), PowerKind.average),
        ((8, 9), PowerKind.average),
        ((9, 0), PowerKind.average),
    ],
)
def test_power_without_the_instantaneous_field_states_its_kind(driver, capability, kind):
    driver.count_energy()
    driver.tell_power(capability=capability)
    driver.tell_field(code=pynvml.NVML_ERROR_NOT_SUPPORTED)
    [meter] = boards.find_nvidia("aa").meters
    assert meter.power_watts().value == pytest.approx(420.0)
    assert meter.power_kind is kind
    assert codes(meter.doubts()) == ([] if kind is PowerKind.instantaneous else ["meter_limited"])


def test_unknown_compute_capability_means_average_power(driver):
    driver.tell_power()
    driver.answer("nvmlDeviceGetCudaComputeCapability", driver.refuse)
    [meter] = boards.find_nvidia("aa").meters
    assert meter.power_kind is PowerKind.average


def test_an_nvidia_ml_py_without_the_field_uses_the_usage(driver, monkeypatch):
    driver.tell_power()
    driver.tell_field()
    monkeypatch.delattr(pynvml, "NVML_FI_DEV_POWER_INSTANT")
    [meter] = boards.find_nvidia("aa").meters
    assert meter.power_watts().value == pytest.approx(420.0)


def test_a_board_without_a_counter_keeps_its_power(driver):
    driver.tell_field()
    [meter] = boards.find_nvidia("aa").meters
    reading = meter.energy_joules()
    assert reading.value is None
    assert "Not Supported" in reading.reason
    assert "Volta" in reading.reason


def test_a_board_that_tells_nothing_is_no_meter(driver):
    found = boards.find_nvidia("aa")
    assert found.meters == ()
    assert found.reason.startswith("no meter: ")
    assert "nor has it a power sensor" in found.reason


def test_what_the_driver_refuses_later_is_a_reason_and_no_error(driver):
    driver.count_energy()
    driver.tell_field()
    [meter] = boards.find_nvidia("aa").meters

    def lost(handle, *_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    driver.answer("nvmlDeviceGetTotalEnergyConsumption", lost)
    driver.answer("nvmlDeviceGetFieldValues", lost)
    assert "GPU is lost" in meter.energy_joules().reason
    assert "GPU is lost" in meter.power_watts().reason


@pytest.mark.parametrize("uuid", ["cc", "MIG-cc"])
def test_a_slice_has_no_energy_of_its_own(driver, uuid):
    driver.count_energy()
    found = boards.find_nvidia(uuid)
    assert found.meters == ()
    assert "all of its MIG slices" in found.reason


@pytest.mark.parametrize(("mode", "meters"), [([1, 1], 0), ([0, 1], 1), ([0, 0], 1)])
def test_a_board_on_which_mig_is_on_has_none_either(driver, mode, meters):
    driver.count_energy()
    driver.answer("nvmlDeviceGetMigMode", lambda handle: mode)
    assert len(boards.find_nvidia("aa").meters) == meters


def test_other_processes_on_the_board_are_told(driver):
    driver.count_energy()
    driver.tell_field()
    [meter] = boards.find_nvidia("aa").meters
    for processes, found in (([], []), (["own"], []), (["own", "another"], ["meter_shared"])):
        driver.answer(
            "nvmlDeviceGetComputeRunningProcesses", lambda handle, listed=processes: listed
        )
        assert codes(meter.doubts()) == found


def test_a_uuid_that_nobody_knows_says_where_to_look(driver):
    found = boards.find_nvidia("dd")
    assert found.meters == ()
    assert "Not Found" in found.reason
    assert "nvidia-smi -L" in found.reason


def test_without_a_driver_there_is_no_meter(monkeypatch):
    def no_library():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    assert "NVML Shared Library Not Found" in boards.find_nvidia("aa").reason
