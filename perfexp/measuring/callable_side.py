"""Process of one side of a comparison of two callables: calls, times and stores what it returns.

The judge (`run.callable_judge`) sends requests. Which results are checked is decided after their
calls. Another process, which never imports the right side, computes the left side again and
compares (`verify`).
"""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # replaces functions of torch when it is imported
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

from perfexp.cost.tensors import distinct_bytes, region_of, tensors_in
from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.cuda import CudaDevice
from perfexp.errors import PerfexpError, UserError
from perfexp.host import lifeline
from perfexp.measuring.user_functions import load
from perfexp.timing import collecting

#: Modules whose functions a callable must not replace, besides those of perfexp.
_WATCHED = (
    *("builtins", "gc", "json", "numpy", "numpy.random", "os", "random", "secrets", "time"),
    *("torch", "torch.cuda", "torch.cuda.streams", "torch.nn.functional", "torch.testing"),
)
#: Largest relative error of a correct result, as a multiple of the left side's own error, and at
#: least: sums in another order are within, half precision is not.
_ERROR_FACTOR = 10.0
_LEAST_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
#: Wait of the device while a call is enqueued: a factor on the host time of the last call, a
#: constant, and the longest.
_HOLD_FACTOR, _HOLD_SECONDS, _LONGEST_HOLD_SECONDS = 2.0, 2e-4, 0.02
#: Bytes are copied this often to find the fastest copy.
_COPIES = 20
#: An output does not follow an argument if this share of the argument's effect is wrong. Rounding,
#: which may be `_ERROR_FACTOR` times the left side's, must not explain it.
_MISSED_SHARE = 0.7
#: Largest error of the left side for which its results in float64 are those of the same function.
_MOST_ERROR = 0.05

#: A seed of all arguments; or two, and which argument is of the second one.
Seed = int | Sequence[int]


class Side:
    """One callable, its inputs and its timer.

    Args:
        function: callable, as `FILE.py:NAME` or `MODULE:NAME`.
        maker: function that returns inputs for a seed, and for a shape if its module has `shapes`.
        folder: folder for stored results.
    """

    def __init__(self, function: str, maker: str, folder: str) -> None:
        self._folder = Path(folder)
        self._maker, self._module = load(maker)
        self._shapes = list(getattr(self._module, "shapes", [])) or [None]
        self._inputs: tuple[Any, ...] = ()
        self._outputs: Any = None
        try:
            made = self._make(0, 0)
        except Exception as error:
            given = "a seed" if self._shapes == [None] else "a seed and a shape"
            raise UserError(
                f"{maker} failed when called with {given}: {type(error).__name__}: {error}"
            ) from error
        self._device = _device_of(made)
        self._device.start()
        self._hold_seconds = _HOLD_SECONDS
        self._functions = self._watched_functions()
        self._function, _ = load(function)
        gc.disable()  # `changed` collects

    def describe(self) -> dict[str, Any]:
        """Return the numbers of shapes and arguments, where the function is, and loaded files."""
        code = getattr(unwrap(self._function), "__code__", None)
        origin = f"{code.co_filename}:{code.co_qualname}" if code else repr(self._function)
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        return {
            "shapes": len(self._shapes),
            "arguments": len(self._make(0, 0)),
            "origin": origin,
            "files": [os.path.realpath(file) for file in files if file],
            "device": self._device.name,
        }

    def calls(
        self, seeds: Sequence[Seed], shape: int, *, hold_seconds: float | None = None
    ) -> dict[str, Any]:
        """Time a call for each seed and store some results, chosen after the call.

        Seeds with an argument of another one are always stored, with the seed before them.

        Args:
            hold_seconds: how long the device waits while a call is enqueued; by default as the last
                call needs.

        Returns:
            `seconds` of the calls, `stored` seeds with files, `hold_seconds` that the last call
            needs, and `tails`: seconds of work after a call, on other streams or until its outputs
            can be read.
        """
        times, stored = list[tuple[float, float]](), list[tuple[Seed, str]]()
        for number, seed in enumerate(seeds):
            self._inputs = self._make(seed, shape)
            times.append(self._timed(self._call, hold_seconds))
            is_of_pair = not all(isinstance(one, int) for one in seeds[number : number + 2])
            if is_of_pair or os.urandom(1)[0] * len(seeds) < 256:
                stored.append((seed, self._store(_results(self._outputs))))
            self._outputs = None
        self._inputs = ()
        seconds, tails = zip(*times, strict=True)
        needed = self._hold_seconds
        return {"seconds": seconds, "stored": stored, "tails": tails, "hold_seconds": needed}

    def checked_calls(self, seeds: Sequence[Seed], shape: int) -> dict[str, Any]:
        """Call for each seed, untimed, and store all results as `stored`.

        Torch fills memory with NaN when it is allocated. Inputs have one address with new contents
        for each call, and outputs are copied at once. On an asynchronous device the current stream
        waits while both are enqueued: work that another stream does without waiting reads old
        inputs, or is copied before it is done.
        """
        torch.use_deterministic_algorithms(True, warn_only=True)
        stored = list[tuple[Seed, str]]()
        for seed in seeds:
            made = self._make(seed, shape)
            self._device.synchronize()
            self._device.hold(_LONGEST_HOLD_SECONDS)
            if self._inputs:
                made = tuple(map(_overwritten, self._inputs, made))
            self._inputs = made
            self._call()
            outputs = _results(self._outputs)
            self._device.synchronize()
            stored.append((seed, self._store(outputs)))
            self._outputs = None
        self._inputs = ()
        torch.use_deterministic_algorithms(False)
        return {"stored": stored}

    def changed(self) -> dict[str, Any]:
        """Return the `names` of functions that were replaced since the callable was imported.

        The search, like a collection of garbage, takes longer in a process with more modules. It is
        therefore outside of `calls`, whose time the judge compares between the sides.
        """
        gc.collect()
        now = self._watched_functions()
        return {
            "names": [name for name, value in self._functions.items() if now.get(name) != value]
        }

    def verify(
        self, stored: Sequence[tuple[Seed, str]], shape: int, tolerance: float | None
    ) -> dict[str, Any]:
        """Return the `reason` why stored results differ from this side's; None if they do not.

        A seed with an argument of another one follows its first seed.
        """
        torch.set_num_threads(1)  # other processes use the cores
        before: list[Sequence[torch.Tensor]] = []
        for seed, file in stored:
            result = torch.load(file, weights_only=True)
            Path(file).unlink()
            native, exact, inputs = self._reference(seed, shape)
            reason = _difference(result["outputs"], native, exact, tolerance)
            if changed := _difference(result["inputs"], inputs, None, tolerance):
                reason = reason or f"it changes its inputs in place ({changed})"
            after = [result["outputs"], native, exact or native]
            if isinstance(seed, int):
                before = after
            elif reason is None and tolerance is None and _misses(before, after):
                reason = f"outputs do not follow argument {seed[2] + 1} as they should"
            if reason:
                return {"reason": reason}
        return {"reason": None}

    def ceiling(self, shape: int) -> dict[str, Any]:
        """Return the `seconds` to copy as many bytes as a call reads and writes at least."""
        self._inputs = self._make(0, shape)
        self._call()
        tensors = [*tensors_in(self._inputs), *tensors_in(self._outputs)]
        count = distinct_bytes(map(region_of, tensors)) // 2
        source = torch.ones(max(count, 1), dtype=torch.uint8, device=self._device.identifier)
        copy = partial(torch.empty_like(source).copy_, source)
        self._inputs, self._outputs = (), None
        return {"seconds": min(self._timed(copy) for _ in range(_COPIES))[0]}

    def _make(self, seed: Seed, shape: int) -> tuple[Any, ...]:
        if not isinstance(seed, int):
            first, second, number = seed
            other = self._make(second, shape)
            made = self._make(first, shape)
            return (*made[:number], other[number], *made[number + 1 :])
        torch.manual_seed(seed)
        chosen = self._shapes[shape]
        made = self._maker(seed) if chosen is None else self._maker(seed, chosen)
        inputs = tuple(made) if isinstance(made, tuple | list) else (made,)
        torch.manual_seed(seed)  # functions that draw random numbers draw the same on both sides
        return inputs

    def _call(self) -> None:
        self._outputs = self._function(*self._inputs)

    def _timed(
        self, call: collecting.Call, hold_seconds: float | None = None
    ) -> tuple[float, float]:
        """Return the seconds of one call, and of work after it.

        The host's clock times the call, or events behind a wait that the host overtakes. On an
        asynchronous device the time is of the current stream, and the rest is what other streams
        still do. Otherwise the rest is the wait until the outputs can be read.
        """
        device = self._device
        if not device.asynchronous:
            seconds = float(collecting.HostChain(call, device)(1)[0])
            return seconds, self._reading_seconds() - self._reading_seconds()
        start, end = device.new_event(), device.new_event()
        device.synchronize()
        device.hold(hold_seconds or self._hold_seconds)
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
        tail_seconds = (device.now_ns() - ended_ns) * 1e-9
        return device.elapsed_seconds(start, end), tail_seconds

    def _reading_seconds(self) -> float:
        """Return the time to read the outputs, which waits for work that goes on after the call."""
        begun_ns = self._device.now_ns()
        for output in tensors_in(self._outputs):
            torch.count_nonzero(output)
        return (self._device.now_ns() - begun_ns) * 1e-9

    def _watched_functions(self) -> dict[str, Any]:
        """Return the functions that a callable must leave alone, by name, with their code."""
        watched: dict[str, Any] = {"maker": self._module, "side": self, "device": self._device}
        for name, module in list(sys.modules.items()):
            if name in _WATCHED or name.partition(".")[0] in ("perfexp", "__main__"):
                watched[name] = module
        found: dict[str, Any] = {
            "sys.setprofile": sys.getprofile(),
            "sys.settrace": sys.gettrace(),
            "torch function modes": torch._C._len_torch_function_stack(),
            "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        }
        while watched:
            place, owner = watched.popitem()
            # dir() of a module names what it would import first
            for name in list(vars(owner)) if isinstance(owner, ModuleType) else dir(owner):
                value = getattr(owner, name, None)
                if callable(value):
                    found[f"{place}.{name}"] = value, getattr(value, "__code__", None)
                if isinstance(value, type) and value.__module__ == place:
                    watched[f"{place}.{name}"] = value
        return found

    def _store(self, outputs: Sequence[torch.Tensor]) -> str:
        file = str(self._folder / f"{secrets.token_hex(8)}.pt")
        torch.save({"outputs": outputs, "inputs": _leaves(self._inputs)}, file)
        return file

    def _reference(
        self, seed: Seed, shape: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor]]:
        """Return outputs, outputs in float64 if possible, and the inputs after the call."""
        inputs = self._make(seed, shape)
        native, exact = _leaves(self._function(*inputs)), None
        with suppress(Exception):  # such as a kernel for float32 alone
            doubled = tree_map_only(torch.Tensor, _double, self._make(seed, shape))
            exact = _leaves(self._function(*doubled))
        return native, exact, _leaves(inputs)


def _device_of(inputs: Sequence[Any]) -> Device:
    """Return the device of the inputs.

    Raises:
        UserError: they are on a device that cannot be timed here.
    """
    place = next((one.device for one in tensors_in(inputs)), torch.device("cpu"))
    if place.type == "cuda":
        return CudaDevice(index=place.index or 0)
    if place.type != "cpu":
        raise UserError(f"The inputs are on {place.type}; make them on cpu or cuda.")
    return CpuDevice()


def _overwritten(old: Any, new: Any) -> Any:
    """Return a new argument: a tensor at the old address, unnoticed by version counters."""
    if (
        isinstance(old, torch.Tensor)
        and _kind(old) == _kind(new)
        and torch._debug_has_internal_overlap(old) == 0  # such as an expanded one
    ):
        old.data.copy_(new.data)
        return old
    return new


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _leaves(value: Any) -> list[torch.Tensor]:
    """Return copies of all tensors and numbers in nested tuples, lists and dictionaries.

    Raises:
        PerfexpError: something else was returned, which may compute later.
    """
    leaves = []
    for _, leaf in sorted(tree_leaves_with_path(value), key=lambda pair: keystr(pair[0])):
        if isinstance(leaf, bool | int | float):
            leaf = torch.tensor(leaf)
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            leaves.append(leaf.detach().clone())
        elif leaf is not None and not isinstance(leaf, str):
            kind = type(leaf).__name__
            raise PerfexpError(f"it returns a {kind} instead of a tensor, which may compute later")
    return leaves


def _results(value: Any) -> list[torch.Tensor]:
    """Return copies of all tensors and numbers that a function returned, at least one.

    Raises:
        PerfexpError: there is none, or something that may compute later.
    """
    if not (leaves := _leaves(value)):
        raise PerfexpError("it returns no tensor and no number")
    return leaves


def _difference(
    found: Sequence[torch.Tensor],
    native: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor] | None = None,
    tolerance: float | None = None,
) -> str | None:
    """Return how tensors differ from the expected ones; None if they do not.

    Without a tolerance, errors against float64 may be a few times the errors of `native`.

    Args:
        native: expected tensors, computed in the precision of the inputs.
        exact: expected tensors, computed in float64; None if unknown.
    """
    if len(found) != len(native):
        return f"{len(found)} tensors instead of {len(native)}"
    for one, own, true in zip(found, native, exact or native, strict=True):
        if _kind(one) != _kind(own):
            return f"{_kind(one)} instead of {_kind(own)}"
        error = _error(own, true)
        # such as an overflow in half alone, or random numbers, which float64 draws otherwise
        if tolerance is not None or not error <= _MOST_ERROR:
            error, true = 0.0, own
        allowed = max(_ERROR_FACTOR * error, _LEAST_ERROR.get(one.dtype, 0.0))
        if tolerance is not None:
            allowed = tolerance
        if (wrong := _error(one, true)) > allowed:
            if one.isnan().sum() > own.isnan().sum():
                return "outputs are NaN where the left side's are not, such as memory never written"
            return (
                f"outputs have a relative error of {wrong:.2g}; {allowed:.2g} is allowed: "
                "wrong results, low precision, outputs of an earlier call, or work after the return"
            )
    return None


def _misses(
    before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Return whether an output leaves out most of what a change of one argument does to it.

    An effect far below the outputs' own size would otherwise be within the allowed error.

    Args:
        before: found outputs, the left side's, and those in float64 if known.
        after: the same with the argument changed.
    """
    for old, new in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True):
        if not old[0].is_floating_point():
            continue
        change, own, true = (b.double() - a.double() for a, b in zip(old, new, strict=True))
        size = float(true.norm())
        rounding = torch.finfo(old[0].dtype).eps * float(new[1].double().norm())
        hidden = float((own - true).norm()) or rounding  # without float64 they are the same
        missed = float((change - true).norm())
        if _ERROR_FACTOR * hidden < _MISSED_SHARE * size < missed:
            return True
    return False


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the relative L2 error, infinite if numbers that are not finite differ."""
    found, true = found.to(torch.complex128), true.to(torch.complex128)
    equal = (found == true) | (found.isnan() & true.isnan())
    apart = float(torch.where(equal, 0.0, found - true).norm())
    if apart == 0:
        return 0.0
    error = apart / float(torch.where(true.isfinite(), true, 0.0).norm())
    return error if math.isfinite(error) else math.inf


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def main() -> None:
    """Answer the judge's questions until it ends this process."""
    *places, questions, events, parent = sys.argv[1:7]
    lifeline.die_with(int(parent.partition("=")[2]))
    side: Side | None = None
    with Path(questions).open() as asked, os.fdopen(int(events.partition("=")[2]), "w") as answers:
        for line in asked:
            name, given = json.loads(line)
            try:
                side = side or Side(*places)
                answer = {"event": "answer", **getattr(side, name)(**given)}
            except Exception as error:
                traceback.print_exc()
                known = isinstance(error, PerfexpError)
                answer = {
                    "event": "failed",
                    "message": str(error) if known else f"{type(error).__name__}: {error}",
                    "exit_code": getattr(error, "exit_code", 1),
                }
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
