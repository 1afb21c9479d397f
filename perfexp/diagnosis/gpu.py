"""Judge the state of the requested CUDA device: driver, clocks, heat, power, neighbors, slices, meters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.devices.nvml import is_used, neighbours
from perfexp.diagnosis import Facts, Finding, fail, missing, ok, part, warn
from perfexp.diagnosis.devices import Chosen, board_of
from perfexp.records import units

#: Tolerated difference between the measured clock and the driver's, which are not simultaneous.
_CLOCK_TOLERANCE = 0.05
#: A power limit below this share of the data sheet's power gives a warning.
_POWER_SHARE = 0.98


def findings(facts: Facts, chosen: Chosen) -> Iterator[Finding]:
    """A line per check of a CUDA device."""
    device = chosen.device or {}
    if part(facts, "torch").get("rocm"):
        yield from _clocks(part(facts, "clocks"), {})
        return
    board = board_of(facts, device)
    yield _driver(facts, board)
    yield from _clocks(part(facts, "clocks"), board or {})
    if board is None:
        yield _no_board(facts)
        return
    yield from _heat(part(facts, "clocks"), board["state"])
    yield _power(board, facts["gpu_files"].get(chosen.file, {}))
    yield _neighbours(board["state"])
    yield _slices(board["facts"])
    yield _error_correction(board["facts"])
    yield ok("NVML", "answers")


def _driver(facts: Facts, board: Mapping[str, Any] | None) -> Finding:
    torch = part(facts, "torch")
    driver = (board or {}).get("facts", {}).get("driver") or "unknown"
    observation = f"driver {driver}, CUDA {torch['cuda']}"
    if not torch["cudnn"]:
        return warn("CUDA", f"{observation}, no cuDNN", "convolutions are slow without it: install torch with cuDNN")
    return ok("CUDA", f"{observation}, cuDNN {_cudnn_version(torch['cudnn'])}")


def _clocks(clocks: Mapping[str, Any], board: Mapping[str, Any]) -> Iterator[Finding]:
    """Events and calibration kernel, the first kernels on the device."""
    if not clocks:  # the survey's own line says why
        return
    if error := clocks.get("error"):
        remedy = "try nvidia-smi; a build of torch for this compute capability: https://pytorch.org/get-started/locally"
        yield fail("kernels", f"the device runs none: {error}", remedy)
        return
    if reason := clocks.get("not_tried"):
        yield warn("kernels", f"not tried: {reason}", "repeat when the device is free")
        return
    tick, record = (units.format_seconds(clocks[name], 2) for name in ("event_tick_seconds", "record_seconds"))
    yield ok("event clock", f"tick {tick}, a record costs {record}")
    yield _canary(clocks, board)


def _canary(clocks: Mapping[str, Any], board: Mapping[str, Any]) -> Finding:
    spin, reported = clocks["canary_hertz"], clocks["busy"].get("sm_clock_hertz")
    if reported is None:
        return ok("clock canary", f"{_megahertz(spin)}; no clock of the driver's to compare with")
    highest = board.get("facts", {}).get("max_sm_clock_hertz")
    observation = f"{_megahertz(spin)}, the driver reports {_megahertz(reported)}"
    observation += f" of at most {_megahertz(highest)}" if highest else ""
    if abs(spin / reported - 1) > _CLOCK_TOLERANCE:
        return warn("clock canary", observation, "the clock varies: repeat when the device is idle and cool")
    return ok("clock canary", observation)


def _no_board(facts: Facts) -> Finding:
    boards = part(facts, "boards")
    if error := boards.get("error"):
        return missing("NVML", f"does not answer: {error}", "pip install nvidia-ml-py, and the driver's libnvidia-ml")
    sliced = any(board["facts"].get("mig") for board in boards.get("boards", ()))
    why = "; MIG is on, and slices have identities of their own" if sliced else ""
    remedy = "state, power and energy stay unknown; measure on a whole board" if sliced else "check nvidia-smi -L"
    return warn("NVML", f"shows no board with this UUID{why}", remedy)


def _heat(clocks: Mapping[str, Any], idle: Mapping[str, Any]) -> Iterator[Finding]:
    # throttling only shows under load
    state = clocks.get("busy") or idle
    reasons = state.get("throttling")
    if reasons is None:
        yield missing("throttling", "not reported by the driver", "a newer driver may")
    elif reasons:
        remedy = "let it cool, check its power limit (nvidia-smi -q -d PERFORMANCE), then repeat"
        yield warn("throttling", f"slowed down by: {', '.join(reasons)}", remedy)
    else:
        yield ok("throttling", "none")
    celsius = state.get("temperature_celsius")
    if celsius is None:
        yield missing("temperature", "not reported by the driver", "a newer driver may")
    else:
        yield ok("temperature", f"{celsius} °C")


def _power(board: Mapping[str, Any], sheet: Mapping[str, Any]) -> Finding:
    watts, limit = board["state"].get("power_watts"), board["facts"].get("power_limit_watts")
    sold = sheet.get("power_watts")
    if limit is None:
        return missing("power limit", "not reported by the driver", "a newer driver may")
    observation = f"{limit:.0f} W" + (f"; {watts:.0f} W now" if watts is not None else "")
    if sold and limit < _POWER_SHARE * sold:
        return warn("power limit", f"{observation}; the data sheet has {sold:.0f} W", "figures are those of this limit")
    return ok("power limit", observation)


def _neighbours(state: Mapping[str, Any]) -> Finding:
    """Other users, read before the survey's own process used the device."""
    seen = neighbours(state)
    if not seen:
        return missing("neighbours", "the driver does not report who uses the device", "run nvidia-smi as root")
    if is_used(state):
        return warn("neighbours", ", ".join(seen), "measure when nobody else uses the device (nvidia-smi shows who)")
    return ok("neighbours", ", ".join(seen))


def _slices(facts: Mapping[str, Any]) -> Finding:
    if facts.get("mig"):
        remedy = "measure on a whole board, or read the figures as those of the slice and its neighbours"
        return warn("MIG", "on: slices share the board's power and clocks", remedy)
    return ok("MIG", "off" if facts.get("mig") is False else "this board has none")


def _error_correction(facts: Mapping[str, Any]) -> Finding:
    return ok("ECC", {True: "on", False: "off", None: "this board has none"}[facts.get("ecc")])


def _cudnn_version(number: int) -> str:
    """Version of a number: 90100 is 9.1.0, 8902 is 8.9.2."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _megahertz(hertz: float) -> str:
    return f"{hertz * 1e-6:.0f} MHz"
