"""Modules that keep what they compute, one for each way of keeping it; all map images of 3 channels to such images."""

import collections
import contextvars
import dataclasses
import functools
import itertools
import queue
import random
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn

#: Every real call of a piece: its class, the type and shape of its inputs, its mode, and whether gradients are on.
calls = []
#: State outside of modules.
by_size, in_class = {}, {}
local, context = threading.local(), contextvars.ContextVar("kept")
by_module = weakref.WeakKeyDictionary()


class Piece(nn.Module):
    """Notes its calls."""

    def forward(self, x):
        calls.append(
            (type(self).__name__, type(x), tuple(x.shape), self.training, torch.is_grad_enabled())
        )
        return self.compute(x)


def ramp(x):
    return torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)


class Attribute(Piece):
    pos = None

    def compute(self, x):
        if self.pos is None:
            self.pos = ramp(x)
        return x + self.pos


class LateBuffer(Piece):
    def compute(self, x):
        if not hasattr(self, "pos"):
            self.register_buffer("pos", ramp(x), persistent=False)
        return x + self.pos


class Dictionary(Piece):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def compute(self, x):
        return x + self.cache.setdefault(tuple(x.shape), ramp(x))


class NestedDictionary(Piece):
    def __init__(self):
        super().__init__()
        self.cache = {"a": [{"b": ()}]}

    def compute(self, x):
        inner = self.cache["a"][0]
        inner["b"] = inner["b"] or (ramp(x),)
        return x + inner["b"][0]


class CachedMethod(Piece):
    @functools.lru_cache  # noqa: B019
    def table(self, size):
        return torch.linspace(-1, 1, size)

    def compute(self, x):
        return x + self.table(x.shape[-1])


@functools.cache
def table_of(size):
    return torch.linspace(-1, 1, size)


class CachedFunction(Piece):
    def compute(self, x):
        return x + table_of(x.shape[-1])


class ModuleGlobal(Piece):
    def compute(self, x):
        return x + by_size.setdefault(x.shape[-1], ramp(x))


class ClassLevel(Piece):
    def compute(self, x):
        return x + in_class.setdefault((type(self), x.shape[-1]), ramp(x))


class FunctionAttribute(Piece):
    def compute(self, x):
        ramp.kept = (
            getattr(ramp, "kept", None) if getattr(ramp, "size", None) == x.shape[-1] else None
        )
        if ramp.kept is None:
            ramp.kept, ramp.size = ramp(x), x.shape[-1]
        return x + ramp.kept


class Local(Piece):
    def compute(self, x):
        if getattr(local, "size", None) != x.shape[-1]:
            local.size, local.pos = x.shape[-1], ramp(x)
        return x + local.pos


class Context(Piece):
    def compute(self, x):
        kept = context.get(None)
        if kept is None or kept.shape[-1] != x.shape[-1]:
            context.set(kept := ramp(x))
        return x + kept


class Weak(Piece):
    def compute(self, x):
        return x + by_module.setdefault(self, ramp(x))


class Hidden(Piece):
    state = None

    def compute(self, x):
        self.state = torch.zeros_like(x) if self.state is None else self.state
        self.state = (0.5 * self.state + 0.5 * x).detach()
        return x + self.state


class Counter(Piece):
    count = 0

    def compute(self, x):
        self.count += 1
        return x + 1 / self.count


class Iterating(Piece):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def compute(self, x):
        return x * (1 + 1 / next(self.numbers))


class Yielding(Piece):
    def __init__(self):
        super().__init__()
        self.steps = (1 / n for n in itertools.count(1))

    def compute(self, x):
        return x + next(self.steps)


class Appending(Piece):
    def __init__(self):
        super().__init__()
        self.seen = []

    def compute(self, x):
        self.seen.append(x.mean().detach())
        return x + self.seen[-1]


class Rolling(Piece):
    def __init__(self):
        super().__init__()
        self.seen = collections.deque(maxlen=3)

    def compute(self, x):
        self.seen.append(x.detach())
        return x + sum(self.seen) / len(self.seen)


class Queued(Piece):
    def __init__(self):
        super().__init__()
        self.seen = queue.Queue()

    def compute(self, x):
        last = x.detach() if self.seen.empty() else self.seen.get()
        self.seen.put(x.detach())
        return x + last


class RecentlyUsed(Piece):
    def __init__(self):
        super().__init__()
        self.cache = collections.OrderedDict()

    def compute(self, x):
        self.cache.setdefault(x.shape[-1], ramp(x))
        self.cache.move_to_end(x.shape[-1])
        return x + self.cache[x.shape[-1]]


class Growing(Piece):
    """A cache of keys, as in decoding."""

    cache = None

    def compute(self, x):
        new = x.mean((0, 2, 3)).detach()[None]
        self.cache = new if self.cache is None else torch.cat([self.cache, new])[-8:]
        return x + self.cache.mean()


class Helper:
    def __init__(self):
        self.pos = None


class HelperObject(Piece):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def compute(self, x):
        if self.helper.pos is None:
            self.helper.pos = ramp(x)
        return x + self.helper.pos


class Namespace(Piece):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(pos=None)

    def compute(self, x):
        self.state.pos = ramp(x) if self.state.pos is None else self.state.pos
        return x + self.state.pos


@dataclasses.dataclass
class Kept:
    pos: object = None


class DataClass(Piece):
    def __init__(self):
        super().__init__()
        self.state = Kept()

    def compute(self, x):
        self.state = (
            dataclasses.replace(self.state, pos=ramp(x)) if self.state.pos is None else self.state
        )
        return x + self.state.pos


class Closure(Piece):
    def __init__(self):
        super().__init__()
        kept = None

        def pos(x):
            nonlocal kept
            kept = ramp(x) if kept is None else kept
            return kept

        self.pos = pos

    def compute(self, x):
        return x + self.pos(x)


class ActNorm(Piece):
    """Initialized by the data of its first call; stand-ins cannot follow the value of its buffer."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 3, 1, 1))
        self.register_buffer("initialized", torch.tensor(False))

    def compute(self, x):
        if not self.initialized.item():
            with torch.no_grad():
                self.shift.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.initialized.fill_(True)
        return x + self.shift


class FlaggedNorm(Piece):
    def __init__(self):
        super().__init__()
        self.scale, self.initialized = nn.Parameter(torch.ones(1, 3, 1, 1)), False

    def compute(self, x):
        if not self.initialized:
            self.scale.data = 1 / (x.detach().std((0, 2, 3), keepdim=True) + 1)
            self.initialized = True
        return x * self.scale


class Average(Piece):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def compute(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return x - self.mean[:, None, None]


class Normalized(Piece):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def compute(self, x):
        return self.norm(x)


class Spectral(Piece):
    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 3, 1))

    def compute(self, x):
        return self.conv(x)


class LastOutput(Piece):
    last = None

    def compute(self, x):
        self.last = x * 2
        return self.last


class LateLayer(Piece):
    def compute(self, x):
        if not hasattr(self, "mix"):
            self.mix = nn.Conv2d(3, 3, 1)
        return self.mix(x)


class HookedStore(Piece):
    def __init__(self):
        super().__init__()
        self.conv, self.store = nn.Conv2d(3, 3, 1), {}
        self.conv.register_forward_hook(
            lambda module, given, returned: self.store.update(last=returned)
        )

    def compute(self, x):
        return self.conv(x)


class BoundRandom(Piece):
    def compute(self, x):
        return x * (1 + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * np.random.rand())


class OwnGenerator(Piece):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def compute(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


class Annotated(Piece):
    """Keeps it at its inputs."""

    def compute(self, x):
        if not hasattr(x, "pos"):
            x.pos = ramp(x)
        return x + x.pos


class Doubled(Piece):
    """Two names of the same weights."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Conv2d(3, 3, 1)
        self.kept = None

    def compute(self, x):
        self.kept = [self.first.weight.detach().clone()] if self.kept is None else self.kept
        return self.first(x) + self.second(x) + self.kept[0].mean()


PIECES = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Piece)
]
PIECES.remove(Piece)


class Net(nn.Module):
    """A sequence of pieces between two layers; (batch, 3, height, width) to (batch, 5)."""

    def __init__(self, *pieces):
        super().__init__()
        self.stem, self.pieces, self.head = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.ModuleList(pieces),
            nn.Linear(3, 5),
        )

    def forward(self, x):
        for piece in [*self.pieces, self.stem]:
            x = piece(x)
        return self.head(x.mean((2, 3)))


def make(*kinds):
    """Return a net of new pieces, with fixed weights and random numbers, and nothing kept from earlier."""
    calls.clear()
    by_size.clear()
    in_class.clear()
    table_of.cache_clear()
    CachedMethod.table.cache_clear()
    for kept in (vars(local), vars(ramp)):
        kept.clear()
    context.set(None)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return Net(*(kind() for kind in kinds))


def state_of(value, seen=None):
    """Return everything that is kept, as nested values of plain types that can be compared."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(value.shape), value.detach().tolist()
    if isinstance(value, (str, int, float, bool, type, type(None), itertools.count)):
        return repr(value)
    if id(value) in seen:
        return "…"
    seen.add(id(value))
    if isinstance(
        value, collections.OrderedDict | weakref.WeakKeyDictionary
    ):  # such as hooks by their number
        return state_of(list(value.values()), seen)
    if isinstance(value, dict):
        return [
            (key if isinstance(key, str | int) else "key", state_of(item, seen))
            for key, item in value.items()
        ]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [state_of(item, seen) for item in value]
    if isinstance(value, queue.Queue):
        return state_of(value.queue, seen)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, types.FunctionType):
        return [state_of(cell.cell_contents, seen) for cell in value.__closure__ or ()]
    return type(value).__name__, state_of(getattr(value, "__dict__", {}), seen)


def everything(net):
    """Return what a net and its surroundings keep."""
    outside = [
        by_size,
        in_class,
        vars(local),
        vars(ramp),
        context.get(None),
        by_module.get(net, None),
    ]
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    caches = [function.cache_info().currsize for function in (table_of, CachedMethod.table)]
    return state_of([net, outside, numbers, caches])
