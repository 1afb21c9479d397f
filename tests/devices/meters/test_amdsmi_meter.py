"""AMD SMI's answers, scripted as amdsmi 7.0.2 gives them."""

import sys
from types import ModuleType

import pytest

from perfexp.devices.meters import PowerKind, boards

BUS = "0000:c1:00.0"


class AmdSmiException(Exception):
    pass


def power(current, average):
    """What `amdsmi_get_power_info` gives: watts, `N/A` where there is none."""
    return {
        "socket_power": current,
        "current_socket_power": current,
        "average_socket_power": average,
    }


@pytest.fixture
def smi(monkeypatch):
    """The module, with one MI300X."""
    module = ModuleType("amdsmi")
    module.AmdSmiException = AmdSmiException
    module.amdsmi_init = lambda: None
    module.amdsmi_get_processor_handle_from_bdf = lambda bdf: f"handle of {bdf}"
    module.amdsmi_get_gpu_asic_info = lambda handle: {"market_name": "AMD Instinct MI300X"}
    energy = {"energy_accumulator": 2_000_000_000, "counter_resolution": 15.3, "timestamp": 1}
    module.amdsmi_get_energy_count = lambda handle: energy
    module.amdsmi_get_power_info = lambda handle: power(717, "N/A")
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def found():
    return boards.find_amd(BUS)


def raising(error):
    def question(*_):
        raise error

    return question


def test_the_accumulator_counts_in_units_of_its_resolution(smi):
    [meter] = found().meters
    assert meter.energy_joules().value == pytest.approx(2_000_000_000 * 15.3e-6)
    assert meter.wrap_joules == pytest.approx(2**64 * 15.3e-6)
    assert "MI300X" in meter.covers
    assert BUS in meter.name


@pytest.mark.parametrize(
    ("answer", "watts", "kind"),
    [
        (power(717, "N/A"), 717.0, PowerKind.instantaneous),
        (power("N/A", 94), 94.0, PowerKind.average),
        (power("N/A", "N/A"), None, PowerKind.absent),
        (power(0, 0), None, PowerKind.absent),  # the second die of an MI250
        (power(0xFFFF, 0xFFFF), None, PowerKind.absent),
    ],
)
def test_the_power_is_the_one_that_the_board_tells(smi, answer, watts, kind):
    smi.amdsmi_get_power_info = lambda handle: answer
    [meter] = found().meters
    assert meter.power_watts().value == watts
    assert meter.power_kind is kind
    assert ("meter_limited" in [doubt.code for doubt in meter.doubts()]) == (
        kind is PowerKind.average
    )


def test_it_says_that_nobody_has_tried_it(smi):
    [meter] = found().meters
    assert [doubt.code for doubt in meter.doubts()] == ["untested"]


def test_a_package_of_two_dies_is_shared(smi):
    smi.amdsmi_get_gpu_asic_info = lambda handle: {"market_name": "AMD Instinct MI250X"}
    [meter] = found().meters
    assert "both dies" in meter.covers
    assert "meter_shared" in [doubt.code for doubt in meter.doubts()]


def test_the_second_die_of_a_package_has_no_meter(smi):
    smi.amdsmi_get_energy_count = lambda handle: {
        "energy_accumulator": 0,
        "counter_resolution": 15.3,
    }
    smi.amdsmi_get_power_info = lambda handle: power(0, "N/A")
    assert found().meters == ()
    assert "other die" in found().reason


def test_what_the_library_refuses_is_a_reason(smi):
    [meter] = found().meters
    refused = AmdSmiException(
        "Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
    )
    smi.amdsmi_get_energy_count = raising(refused)
    smi.amdsmi_get_power_info = raising(refused)
    assert "Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED" in meter.energy_joules().reason
    assert "AMDSMI_STATUS_NOT_SUPPORTED" in meter.power_watts().reason
    assert meter.wrap_joules is None


def test_a_library_that_does_not_start_says_what_to_install(smi):
    smi.amdsmi_init = raising(AmdSmiException("no driver"))
    assert "no driver" in found().reason
    assert "amdsmi package of your ROCm" in found().reason


def test_without_the_package_there_is_no_meter(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert "amdsmi can't be imported" in found().reason


def test_without_a_bus_id_no_board_is_guessed(smi):
    assert "PCI bus id" in boards.find_amd(None).reason
