"""A cuDNN without a device: its functions, which compute on the processor what their descriptors say."""

from __future__ import annotations

import ctypes
from math import prod

import torch

from perfexp.convolution import backends, fastest, forced, replays
from perfexp.convolution import convolution_plan as plans
from perfexp.convolution import cudnn as library
from perfexp.convolution.replays import CaptureError

NOT_SUPPORTED, BAD_PARAM = 3000, 2000
TYPES = {0: torch.float32, 1: torch.float64, 2: torch.float16, 9: torch.bfloat16}


class ScriptedCudnn:
    """Functions as attributes, as a loaded library has them.

    Args:
        refuses: called with pass, code and descriptors; true where the algorithm is not supported.
        fails: likewise for what is refused only when it is called.
        workspace: bytes for a pass and a code.
        ranking: codes in the order of the heuristic, by pass.
    """

    def __init__(self, refuses=None, fails=None, workspace=None, ranking=None, lacks=()):
        self.refuses = refuses or (lambda *_: False)
        self.fails = fails or (lambda *_: False)
        self.workspace = workspace or (lambda *_: 0)
        self.ranking = ranking or {}
        self.calls, self.streams, self.handles = [], [], 0
        self.launched, self.kernels = [], lambda which, code: ()
        self._objects = {}
        functions = {
            "cudnnCreate": self._create_handle,
            "cudnnSetStream": lambda handle, stream: self.streams.append((handle, stream)) or 0,
            "cudnnGetErrorString": lambda status: {
                NOT_SUPPORTED: b"CUDNN_STATUS_NOT_SUPPORTED",
                BAD_PARAM: b"CUDNN_STATUS_BAD_PARAM",
            }[status],
            "cudnnSetTensor4dDescriptor": lambda d, layout, kind, *shape: self._set(
                d, layout, kind, shape
            ),
            "cudnnSetFilter4dDescriptor": lambda d, kind, layout, *shape: self._set(
                d, layout, kind, shape
            ),
            "cudnnSetConvolution2dDescriptor": self._set_convolution,
            "cudnnSetConvolutionMathType": lambda d, math: self._objects[d].update(math=math) or 0,
            "cudnnSetConvolutionGroupCount": lambda d, groups: (
                self._objects[d].update(groups=groups) or 0
            ),
        }
        for kind in ("Tensor", "Filter", "Convolution"):
            functions[f"cudnnCreate{kind}Descriptor"] = self._create
        for name in ("Forward", "BackwardData", "BackwardFilter"):
            functions[f"cudnnGetConvolution{name}WorkspaceSize"] = self._sizes(name)
            functions[f"cudnnGetConvolution{name}Algorithm_v7"] = self._ranks(name)
            functions[f"cudnnConvolution{name}"] = self._computes(name)
        for name, function in functions.items():
            if name not in lacks:
                setattr(self, name, _plain(function))

    def _create(self, where):
        where._obj.value = 1000 + len(self._objects)
        self._objects[where._obj.value] = {}
        return 0

    def _create_handle(self, where):
        self.handles += 1
        where._obj.value = self.handles
        return 0

    def _set(self, descriptor, layout, kind, shape):
        self._objects[descriptor].update(layout=layout, dtype=TYPES[kind], shape=shape)
        return 0

    def _set_convolution(self, descriptor, *values):
        names = ("pad_h", "pad_w", "u", "v", "dil_h", "dil_w", "mode", "compute")
        self._objects[descriptor].update(zip(names, values, strict=True))
        return 0

    def _sizes(self, name):
        def sizes(handle, first, second, how, out, code, size):
            if self.refuses(
                name, code, *(self._objects[each] for each in (first, second, how, out))
            ):
                return NOT_SUPPORTED
            size._obj.value = self.workspace(name, code)
            return 0

        return sizes

    def _ranks(self, name):
        def ranks(handle, first, second, how, out, wanted, count, address):
            class Choice(ctypes.Structure):
                _fields_ = (
                    ("algo", ctypes.c_int),
                    ("status", ctypes.c_int),
                    ("time", ctypes.c_float),
                    ("memory", ctypes.c_size_t),
                    ("rest", ctypes.c_int * 5),
                )

            ranked = (Choice * wanted).from_address(address)
            codes = self.ranking.get(name, [1, 0])
            for place, code in enumerate(codes):
                refused = self.refuses(
                    name, code, *(self._objects[each] for each in (first, second, how, out))
                )
                ranked[place].algo, ranked[place].status = code, NOT_SUPPORTED if refused else 0
                ranked[place].memory = self.workspace(name, code)
            count._obj.value = len(codes)
            return 0

        return ranks

    def _computes(self, name):
        def computes(handle, one, first, a, second, b, how, code, workspace, size, zero, out, c):
            descriptors = [self._objects[each] for each in (first, second, how, out)]
            if self.fails(name, code, *descriptors):
                return NOT_SUPPORTED
            if self.workspace(name, code) != size or (size and not workspace):
                return BAD_PARAM
            self.calls.append((name, code, descriptors[2]["math"], handle))
            self.launched.extend(self.kernels(name, code))
            x, y, z = (
                self._at(*each)
                for each in ((a, descriptors[0]), (b, descriptors[1]), (c, descriptors[3]))
            )
            how = descriptors[2]
            settings = (
                (how["u"], how["v"]),
                (how["pad_h"], how["pad_w"]),
                (how["dil_h"], how["dil_w"]),
            )
            if name == "Forward":
                z.copy_(torch.nn.functional.conv2d(x, y, None, *settings, how["groups"]))
                return 0
            both = {"BackwardData": (y, z, x, 0), "BackwardFilter": (y, x, z, 1)}[name]
            grad, inputs, weight, place = both
            mask = [place == 0, place == 1, False]
            gradients = torch.ops.aten.convolution_backward(
                grad, inputs, weight, None, *settings, False, [0, 0], how["groups"], mask
            )
            z.copy_(gradients[place])
            return 0

        return computes

    @staticmethod
    def _at(address, descriptor):
        shape, dtype = descriptor["shape"], descriptor["dtype"]
        size = prod(shape) * dtype.itemsize
        flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
        if descriptor["layout"] == 0:
            return flat.view(shape)
        n, c, h, w = shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)


def _plain(function):
    """A function that takes attributes, as those of ctypes do."""
    return lambda *arguments: function(*arguments)


def in_place(monkeypatch, **script):
    """Put a cuDNN of that script in torch's place; there is no driver that captures."""
    replays.forget()
    made = ScriptedCudnn(**script)
    loaded = library.Library(made)
    monkeypatch.setattr(plans, "library", lambda: loaded)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(replays, "GraphLaunch", _refuses)
    for module in (library, replays):
        monkeypatch.setattr(module, "current_stream", lambda device: 77)
    for module in (backends, fastest, forced):
        monkeypatch.setattr(module, "why_no_cudnn", lambda device: None)
    return made


def _refuses(enqueue, device):
    raise CaptureError("there is no driver")
