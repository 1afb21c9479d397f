"""Process of one side of a comparison of two callables: calls, times and stores what it returns.

The judge (`run.callable_judge`) sends requests. Which results are checked is decided after their
calls. Another process, which never imports the right side, computes the left side again and
compares (`verify`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # replaces functions of torch when it is imported

from perfexp.cost.tensors import distinct_bytes, region_of, tensors_in
from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.cuda import CudaDevice
from perfexp.errors import PerfexpError, UserError, did_you_mean
from perfexp.host import lifeline
from perfexp.timing import collecting

#: Modules and classes whose functions a callable must not replace, besides those of perfexp.
_WATCHED = (
    *("builtins", "gc", "json", "numpy", "numpy.random", "os", "random", "secrets", "time"),
    *("torch", "torch.cuda", "torch.nn.functional", "torch.testing"),
)
_CLASSES = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream)
#: Largest relative error of a correct result, as a multiple of the left side's own error, and at
#: least: sums in another order are within, half precision is not.
_ERROR_FACTOR = 10.0
_LEAST_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
#: Wait before a result is read a second time, in seconds.
_LATE_SECONDS = 0.1
#: Wait of the device while a call is enqueued: a factor on the host time of the last call, a
#: constant, and the longest.
_HOLD_FACTOR, _HOLD_SECONDS, _LONGEST_HOLD_SECONDS = 2.0, 2e-4, 0.02
#: Bytes are copied this often to find the fastest copy.
_COPIES = 20


class Side:
    """One callable, its inputs and its timer.

    Args:
        function: callable, as `FILE.py:NAME` or `MODULE:NAME`.
        maker: function that returns inputs for a seed, and for a shape if its module has `shapes`.
        folder: folder for stored results.
    """

    def __init__(self, function: str, maker: str, folder: str) -> None:
        self._folder = Path(folder)
        self._maker, module = _load(maker)
        self._shapes = list(getattr(module, "shapes", [])) or [None]
        self._inputs: tuple[Any, ...] = ()
        self._outputs: Any = None
        self._device = _device_of(self._make(0, 0))
        self._device.start()
        self._tails: list[float] = []
        self._hold_seconds = _HOLD_SECONDS
        self._watched = module, self, self._device
        self._functions = _functions(self._watched)
        self._function, _ = _load(function)

    def describe(self) -> dict[str, Any]:
        """Return the number of shapes, where the function is defined, and loaded files."""
        code = getattr(self._function, "__code__", None)
        origin = f"{code.co_filename}:{code.co_qualname}" if code else repr(self._function)
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        return {
            "shapes": len(self._shapes),
            "origin": origin,
            "files": [os.path.realpath(file) for file in files if file],
            "device": self._device.name,
        }

    def calls(self, seeds: Sequence[int], shape: int, *, check: bool) -> dict[str, Any]:
        """Time a call for each seed and store some results, chosen after the call.

        Args:
            check: store all results, on memory that torch fills with NaN when it is allocated.
                Inputs then have one address with new contents for each call.

        Returns:
            `seconds` of the calls, `stored` seeds with files, `changed` functions, and `tails`:
            seconds of work after a call, on other streams or until its outputs can be read.
        """
        torch.use_deterministic_algorithms(check, warn_only=True)
        seconds, stored = list[float](), list[tuple[int, str]]()
        self._tails = []
        with collecting.undisturbed():
            for seed in seeds:
                inputs = self._make(seed, shape)
                if check and _overwritten(self._inputs, inputs):
                    inputs = self._inputs
                self._inputs = inputs
                seconds.append(self._seconds(self._call))
                if not self._device.asynchronous:
                    first, second = self._reading_seconds(), self._reading_seconds()
                    self._tails.append(first - second)
                if check or os.urandom(1)[0] * len(seeds) < 256:
                    stored.append((seed, self._store(late=check)))
                self._outputs = None
        self._inputs = ()
        torch.use_deterministic_algorithms(False)
        return {
            "seconds": seconds,
            "stored": stored,
            "changed": self._changed(),
            "tails": self._tails,
        }

    def verify(
        self,
        stored: Sequence[tuple[int, str]],
        shape: int,
        *,
        rtol: float | None,
        atol: float | None,
    ) -> str | None:
        """Return why stored results differ from this side's; None if they do not."""
        torch.set_num_threads(1)  # other processes use the cores
        earlier: list[list[torch.Tensor]] = []
        try:
            for seed, file in stored:
                result = torch.load(file, weights_only=True)
                native, exact, inputs = self._reference(seed, shape)
                differs = partial(_difference, exact=exact, rtol=rtol, atol=atol)
                if reason := differs(result["outputs"], native):
                    if result["late"] and not differs(result["late"], native):
                        return "its outputs are completed after it has returned"
                    if any(_difference(result["outputs"], outputs) is None for outputs in earlier):
                        return "it returns the outputs of an earlier call for new inputs (a cache)"
                    return reason
                if reason := _difference(result["inputs"], inputs, None, rtol, atol):
                    return f"it changes its inputs in place ({reason})"
                earlier.append(native)
        finally:
            for _, file in stored:
                Path(file).unlink()
        return None

    def ceiling(self, shape: int) -> float:
        """Return the seconds to copy as many bytes as a call reads and writes at least."""
        self._inputs = self._make(0, shape)
        self._call()
        tensors = [*tensors_in(self._inputs), *tensors_in(self._outputs)]
        count = distinct_bytes(map(region_of, tensors)) // 2
        source = torch.ones(max(count, 1), dtype=torch.uint8, device=self._device.identifier)
        copy = partial(torch.empty_like(source).copy_, source)
        self._inputs, self._outputs = (), None
        return min(self._seconds(copy) for _ in range(_COPIES))

    def _make(self, seed: int, shape: int) -> tuple[Any, ...]:
        """Return a call's inputs, from the user's function that makes them.

        Args:
            shape: index into the shapes that the user named.
        """
        torch.manual_seed(seed)
        chosen = self._shapes[shape]
        result = self._maker(seed) if chosen is None else self._maker(seed, chosen)
        inputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        torch.manual_seed(seed)  # functions that draw random numbers draw the same on both sides
        return inputs

    def _call(self) -> None:
        """Call the user's function with the current inputs, and keep its outputs."""
        self._outputs = self._function(*self._inputs)

    def _seconds(self, call: collecting.Call) -> float:
        """Time one call: by the host's clock, or by events behind a wait that the host overtakes.

        On an asynchronous device the time is of the current stream. What other streams still do
        after it goes to the tail.
        """
        device = self._device
        if not device.asynchronous:
            return float(collecting.HostChain(call, device)(1)[0])
        start, end = device.new_event(), device.new_event()
        device.synchronize()
        # while calls are checked, a wait would hide the work of other streams
        if not torch.are_deterministic_algorithms_enabled():
            device.hold(self._hold_seconds)
        device.record(start)
        begun_ns = device.now_ns()
        call()
        hold_seconds = _HOLD_FACTOR * (device.now_ns() - begun_ns) * 1e-9 + _HOLD_SECONDS
        self._hold_seconds = min(hold_seconds, _LONGEST_HOLD_SECONDS)
        device.record(end)
        while not device.passed(end):
            pass
        ended_ns = device.now_ns()
        device.synchronize()
        self._tails.append((device.now_ns() - ended_ns) * 1e-9)
        return device.elapsed_seconds(start, end)

    def _reading_seconds(self) -> float:
        """Return the time to read the outputs, which waits for work that goes on after the call."""
        begun_ns = self._device.now_ns()
        for output in tensors_in(self._outputs):
            torch.count_nonzero(output)
        return (self._device.now_ns() - begun_ns) * 1e-9

    def _changed(self) -> list[str]:
        """Return the names of functions that were replaced since the callable was imported."""
        now = _functions(self._watched)
        return [name for name, value in self._functions.items() if now.get(name) != value]

    def _store(self, *, late: bool) -> str:
        """Write outputs and inputs after a call to a new file, and return its path.

        Args:
            late: whether to store the outputs again after a while, because other streams may still
                write to them.
        """
        result = {"outputs": _leaves(self._outputs), "inputs": _leaves(self._inputs), "late": []}
        if late:
            time.sleep(_LATE_SECONDS)
            result["late"] = _leaves(self._outputs)
        file = str(self._folder / f"{secrets.token_hex(8)}.pt")
        torch.save(result, file)
        return file

    def _reference(
        self, seed: int, shape: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor]]:
        """Return outputs, outputs in float64 if possible, and the inputs after the call."""
        inputs = self._make(seed, shape)
        native, exact = _leaves(self._function(*inputs)), None
        with suppress(Exception):  # such as a kernel for float32 alone
            exact = _leaves(self._function(*map(_double, self._make(seed, shape))))
        return native, exact, _leaves(inputs)


def _load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """Import a function.

    Raises:
        UserError: there is no such module or function.
    """
    module_name, _, name = target.rpartition(":")
    try:
        module = (
            _import_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
        )
    except Exception as error:
        raise UserError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(
            name, (candidate for candidate in vars(module) if callable(getattr(module, candidate)))
        )
        raise UserError(f"{module_name} has no function '{name}'. {near}".rstrip())
    return function, module


def _import(name: str) -> ModuleType:
    """Import a module that is installed or lies in the current folder."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """Import a file under its own name, or under another one if a module has the name."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name, spec = file.stem, importlib.util.find_spec(file.stem)
    if spec is None or spec.origin != str(file):
        name = f"{file.stem}_{file.parent.name}"
        spec = importlib.util.spec_from_file_location(name, file)
    if name not in sys.modules:
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _device_of(inputs: Sequence[Any]) -> Device:
    """Return the device of the inputs.

    Raises:
        UserError: they are on a device that cannot be timed here.
    """
    first_device = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
    if first_device.type == "cuda":
        return CudaDevice(index=first_device.index or 0)
    if first_device.type != "cpu":
        raise UserError(f"The inputs are on {first_device.type}; make them on cpu or cuda.")
    return CpuDevice()


def _functions(owners: Sequence[Any]) -> dict[str, Any]:
    """Return the functions that a callable must leave alone, by name, with their code.

    Args:
        owners: objects besides torch, perfexp and a few modules.
    """
    watched = {type(owner).__name__: owner for owner in owners}
    watched |= {kind.__name__: kind for kind in _CLASSES}
    for name, module in list(sys.modules.items()):
        if name in _WATCHED or name.partition(".")[0] in ("perfexp", "__main__"):
            watched[name] = module
    functions: dict[str, Any] = {
        "sys.setprofile": sys.getprofile(),
        "sys.settrace": sys.gettrace(),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
    while watched:
        prefix, owner = watched.popitem()
        for name in list(vars(owner)) if isinstance(owner, ModuleType) else dir(owner):
            value = getattr(owner, name, None)
            if callable(value):
                functions[f"{prefix}.{name}"] = value, getattr(value, "__code__", None)
            if isinstance(value, type) and value.__module__ == prefix:
                watched[f"{prefix}.{name}"] = value
    return functions


def _overwritten(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Copy new contents to old addresses, unnoticed by version counters, if all shapes agree."""
    pairs = list(zip(tensors_in(old), tensors_in(new), strict=False))
    matches = [
        target.shape == source.shape and target.dtype == source.dtype for target, source in pairs
    ]
    if len(old) != len(new) or not matches or not all(matches):
        return False
    for target, source in pairs:
        target.data.copy_(source.data)
    return True


def _double(value: Any) -> Any:
    """Return an input in double precision, with the same nesting and `requires_grad`."""
    if isinstance(value, tuple | list):
        return type(value)(map(_double, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def _leaves(value: Any) -> list[torch.Tensor]:
    """Return copies of all tensors and numbers in nested tuples, lists and mappings.

    Raises:
        PerfexpError: something else was returned, which may compute later.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return [value.detach().clone()]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, Mapping):
        return _leaves([value[key] for key in sorted(value)])
    if value is None or isinstance(value, str):
        return []
    if isinstance(value, bool | int | float):
        return [torch.tensor(value)]
    raise PerfexpError(
        f"it returns a {type(value).__name__} instead of a tensor, which may compute later"
    )


def _difference(
    results: Sequence[torch.Tensor],
    native: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """Return how tensors differ from the expected ones; None if they do not.

    Without a tolerance, errors against float64 may be a few times the errors of `native`.

    Args:
        native: expected tensors, computed in the precision of the inputs.
        exact: expected tensors, computed in float64; None if unknown.
    """
    if len(results) != len(native):
        return f"{len(results)} tensors instead of {len(native)}"
    for result, reference, exact_reference in zip(results, native, exact or native, strict=True):
        if (result.dtype, result.shape, result.device) != (
            reference.dtype,
            reference.shape,
            reference.device,
        ):
            return f"{_kind(result)} instead of {_kind(reference)}"
        if rtol is not None or atol is not None:
            bounds = {"rtol": rtol or 0.0, "atol": atol or 0.0}
            if not torch.allclose(result.double(), reference.double(), equal_nan=True, **bounds):
                return f"outputs differ by more than rtol {rtol or 0:g} and atol {atol or 0:g}"
            continue
        error = _error(reference, exact_reference)
        if not math.isfinite(error):  # such as an overflow in half precision alone
            error, exact_reference = 0.0, reference
        allowed = max(_ERROR_FACTOR * error, _LEAST_ERROR.get(result.dtype, 0.0))
        if (wrong := _error(result, exact_reference)) > allowed:
            if result.isnan().sum() > reference.isnan().sum():
                return "outputs are NaN where the left side's are not, such as memory never written"
            return f"outputs have a relative error of {wrong:.2g}; {allowed:.2g} is allowed"
    return None


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative L2 error, infinite if numbers that are not finite differ."""
    if result.is_complex():
        result, exact = torch.view_as_real(result), torch.view_as_real(exact)
    result, exact = result.double(), exact.double()
    equal = (result == exact) | (result.isnan() & exact.isnan())
    apart = float(torch.where(equal, 0.0, result - exact).norm())
    if apart == 0:
        return 0.0
    error = apart / float(torch.where(exact.isfinite(), exact, 0.0).norm())
    return error if math.isfinite(error) else math.inf


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def main() -> None:
    """Answer the judge's questions until it closes the connection."""
    *places, events, parent = sys.argv[1:]
    lifeline.die_with(int(parent.partition("=")[2]))
    connection = Connection(int(events.partition("=")[2]))
    side: Side | None = None
    while True:
        try:
            name, arguments = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            side = side or Side(*places)
            answer = {"answer": getattr(side, name)(**arguments)}
        except PerfexpError as error:
            answer = {"error": str(error), "exit_code": error.exit_code}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}", "exit_code": 1}
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
