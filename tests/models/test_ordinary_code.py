"""What authors of modules write, and what perfexp must not trip over or time silently."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from perfexp import api
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported
from perfexp.host import forked
from perfexp.models import Batch, Execution, Precision
from perfexp.models.kinds import ByOutput
from perfexp.models.module import adapt, live_model
from perfexp.models.torch_settings import unchanged_settings
from perfexp.records.record import Status
from perfexp.work.count import count
from perfexp.work.tensors import tensors_in
from perfexp.work.trial import Inconclusive
from tests.models.test_as_written import measured


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def opened(module, **precision):
    return adapt(module, "mine").open(
        device=CpuDevice(),
        precision=Precision(**{"name": "fp32"} | precision),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )


class Frozen(Small):
    """Keeps its norms in evaluation mode, as backbones do, and does not return itself."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()


class SilentEval(Small):
    evaluated = 0

    def eval(self):
        self.evaluated += 1
        super().eval()


class Fit(Small):
    fitted = 0

    def train(self, epochs=10, lr=0.1):
        self.fitted += epochs


class TrainFlag(Small):
    def __init__(self):
        super().__init__()
        self.train = False


class NestedFlag(Small):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(TrainFlag().conv)
        self.conv.train = None


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize(
    "kind", [Frozen, SilentEval, Fit, TrainFlag, NestedFlag], ids=lambda kind: kind.__name__
)
def test_modes_are_set_as_far_as_the_author_lets_them(kind, phase):
    module, modes = kind(), []
    module.head.register_forward_pre_hook(
        lambda *_: modes.append((module.training, module.norm.training))
    )
    point = measured(module, phase)
    assert point.status is Status.OK, point.error
    trains = phase == "train"
    assert set(modes) == {(trains, trains and kind is not Frozen)}
    assert getattr(module, "fitted", 0) == 0
    assert getattr(module, "evaluated", 1 + trains) == 1 + trains


class Rotary(Small):
    def __init__(self):
        super().__init__()
        angles = torch.linspace(0, 1, 4)
        self.register_buffer("turn", torch.polar(torch.ones(4), angles))
        self.phase = nn.Parameter(torch.polar(torch.ones(4), angles))

    def forward(self, x):
        features = self.conv(x).mean((2, 3))
        turned = torch.view_as_real(features.float().to(torch.complex64) * self.turn * self.phase)
        return self.head(turned.sum(-1).to(features.dtype))


class Precise(Small):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4).double()

    def forward(self, x):
        features = self.conv(x).mean((2, 3))
        return self.head(self.scale(features.double()).to(features.dtype))


@pytest.mark.parametrize("kind", [Rotary, Precise])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_only_numbers_of_the_common_type_are_converted(kind, name):
    module, inputs = kind().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        truth = module(inputs)
        session = opened(module, storage=name)
        assert module.conv.weight.dtype is getattr(torch, name)
        batch = session.place(Batch(inputs=inputs, targets=None))
        torch.testing.assert_close(
            session.forward(batch.inputs).float(), truth, rtol=1e-5, atol=1e-5
        )


def test_a_module_of_another_type_is_converted_as_a_whole():
    assert {tensor.dtype for tensor in opened(Small().double()).module.parameters()} == {
        torch.float32
    }


class Lazy:
    class Generator(Small):
        def forward(self, x):
            yield super().forward(x)

    class Function(Small):
        def forward(self, x):
            return lambda: super().forward(x)

    class Map(Small):
        def forward(self, x):
            return {"out": map(super().forward, [x])}

    class Coroutine(Small):
        async def forward(self, x):
            return super().forward(x)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Lazy.Generator, "generator"),
        (Lazy.Function, "function"),
        (Lazy.Map, "map"),
        (Lazy.Coroutine, "coroutine"),
    ],
)
def test_a_call_that_computes_nothing_is_refused(kind, name):
    point = measured(kind(), "inference")
    assert (point.status, point.series) == (Status.UNSUPPORTED, [])
    assert f"mine returns a {name}" in point.error


class Halving(Small):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Clipping(Small):
    def forward(self, x):
        return super().forward(nn.functional.relu_(x))


class ByData(Small):
    def forward(self, x):
        x.data /= 2
        return super().forward(x)


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("kind", [Halving, Clipping, ByData])
def test_every_call_finds_the_inputs_as_they_were(kind, phase):
    module, seen = kind(), []
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    point = measured(module, phase)
    assert point.status is Status.OK, point.error
    assert "inputs_changed" in [doubt.code for doubt in point.doubts]
    assert len(seen) > 4
    assert all(torch.equal(inputs, seen[0]) for inputs in seen)


def test_inputs_that_change_in_a_later_call_are_an_error():
    class Later(Small):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x.add_(1) if self.calls == 4 else x)

    point = measured(Later(), "inference")
    assert point.status is Status.FAILED
    assert "changes its inputs" in point.error


def test_a_result_without_memory_is_an_error():
    class Meta(Small):
        def forward(self, x):
            return super().forward(x).to("meta")

    point = measured(Meta(), "inference")
    assert point.status is Status.FAILED
    assert "without memory" in point.error


def test_more_work_than_the_machine_can_do_is_an_error():
    class Skipping(Small):
        """Computes only where nothing is timed."""

        def forward(self, x):
            if type(x) is torch.Tensor:
                return x.mean((2, 3))
            much = x.new_empty(100_000, 100_000)  # without memory
            return super().forward(x) + (much @ much)[0, 0]

    point = measured(Skipping(), "inference")
    assert point.status is Status.FAILED
    assert "did not do the model's work" in point.error


class Named(Small):
    """Attributes and methods with the names of ours that mean something else."""

    num_classes = (2, 3)
    sample_shape = (3, 16, 16)

    def __init__(self):
        super().__init__()
        self.loss, self.session, self.example_inputs = 0.25, None, 3

    def open(self, *, gate):
        raise AssertionError(gate)


@pytest.mark.parametrize("phase", ["inference", "train"])
def test_names_that_are_ours_are_free(phase):
    module = Named()
    point = measured(module, phase)
    assert point.status is Status.OK, point.error
    assert live_model(Named, "mine").open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )
    del module.loss
    module.loss = nn.L1Loss()
    assert ByOutput(module).loss(torch.ones(2, 5), torch.tensor([0, 1])).ndim == 0


def test_methods_of_the_class_that_are_ours_are_meant():
    class Own(Small):
        num_classes = 5

        def sample_shape(self, size):
            return (3, 8, 8)

        def loss(self, outputs, targets):
            return outputs.square().mean()

    for module in (Own(), torch.compile(Own(), backend="eager")):
        kind = ByOutput(module)
        assert (kind.num_classes, kind.sample_shape((5, 5))) == (5, (3, 8, 8))
        assert kind.loss(torch.full((2, 5), 2.0), None) == 4


class Branching(Small):
    def forward(self, x):
        return super().forward(x if x.sum() > -1e9 else -x)


def scripted():
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(Small())


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("make", [Branching, scripted, lambda: nn.DataParallel(Small())])
def test_what_stand_ins_cannot_follow_is_measured_all_the_same(make, phase):
    point = measured(make(), phase)
    assert point.status is Status.OK, point.error
    assert point.find_series("latency").measured


def test_an_error_in_the_count_is_a_reason():
    class Careful(Small):
        def forward(self, x):
            if type(x) is not torch.Tensor:
                raise TypeError("only real images")
            return super().forward(x)

    with pytest.raises(Inconclusive, match="TypeError: only real images"):
        count(Careful(), torch.ones(2, 3, 8, 8))
    point = measured(Careful(), "train")
    assert point.status is Status.OK
    assert "only real images" in point.metric("work/flops").reason


def test_a_crash_of_the_count_is_a_reason():
    class Crashing(Small):
        def forward(self, x):
            if type(x) is not torch.Tensor:
                os.abort()
            return super().forward(x)

    with pytest.raises(Inconclusive, match="SIGABRT"):
        count(Crashing(), torch.ones(2, 3, 8, 8))
    assert measured(Crashing(), "inference").status is Status.OK


@torch.compile(backend="eager")
def scaled(x):
    return x * 2


class CompiledHelper(Small):
    def forward(self, x):
        return super().forward(scaled(x))


class CompilesItself(Small):
    def __init__(self):
        super().__init__()
        self.compile(backend="eager")


class CompiledPart(Small):
    def __init__(self):
        super().__init__()
        self.conv = torch.compile(self.conv, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize(
    "make",
    [CompiledHelper, CompilesItself, CompiledPart, lambda: torch.compile(Small(), backend="eager")],
)
def test_what_its_author_compiled_is_measured_and_counted(make, phase):
    torch.compiler.reset()
    point = measured(make(), phase)
    assert point.status is Status.OK, point.error
    assert point.metric("work/flops").value > 0, point.metric("work/flops").reason
    torch.compiler.reset()


def test_a_size_that_does_not_fit_is_still_explained():
    session = opened(Small())
    with session.inferring(), pytest.raises(Unsupported, match="mine can't take 2 × 3 × 2 × 2: "):
        session.first_forward(session.random_batch((2, 2), 2, 0))


class Folding(Small):
    """Folds weights in `eval()` only, as adapters and re-parametrized networks do."""

    is_folded, folded_calls = False, ()

    def train(self, mode=True):
        self.is_folded = False
        return super().train(mode)

    def eval(self):
        super().eval()
        self.is_folded = True
        return self

    def forward(self, x):
        self.folded_calls += (self.is_folded,)
        return super().forward(x)


def test_every_inference_call_comes_after_the_authors_eval():
    module = Folding()
    assert measured(module, "inference").status is Status.OK
    assert set(module.folded_calls) == {True}


class SameValues(Small):
    def forward(self, x):
        return super().forward(x.clamp_(-100, 100))


class Reshaping(Small):
    def forward(self, x):
        return super().forward(x.unsqueeze_(0)[0])


class Transposing(Small):
    def forward(self, x):
        return super().forward(x.transpose_(2, 3))


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("kind", [SameValues, Reshaping, Transposing])
def test_every_call_finds_the_shape_of_the_inputs_as_it_was(kind, phase):
    module, seen = kind(), set()
    module.register_forward_pre_hook(lambda _, given: seen.add((given[0].shape, given[0].stride())))
    point = measured(module, phase)
    assert point.status is Status.OK, point.error
    assert "inputs_changed" in [doubt.code for doubt in point.doubts]
    assert len(seen) == 1


class Forces(Small):
    """Differentiates in its call, as models of energies and forces do."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0].mean((2, 3))


def test_a_model_that_differentiates_in_its_call_is_measured():
    point = measured(Forces(), "inference")
    assert point.status is Status.OK, point.error


class Fails(Small):
    calls = 0

    def forward(self, x):
        self.calls += 1
        raise RuntimeError("the module's own reason")


def test_a_call_that_fails_for_another_reason_is_not_repeated():
    module = Fails()
    point = measured(module, "inference")
    assert (module.calls, "own reason" in point.error) == (1, True)


class Positions(Small):
    """Keeps a table from its first call, which autograd may have to save for a later one."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.cos(torch.arange(4.0))
        return self.head(self.norm(self.conv(x)).mean((2, 3)) * self.table)


def test_tables_from_an_inference_can_be_trained_with():
    module = Positions()
    session = opened(module)
    session.keep_differentiable()
    with session.inferring():
        session.forward(torch.randn(2, 3, 8, 8))
    module.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    assert session.facts()["grad_mode"] == "no_grad"


def test_lazy_modules_are_measured_and_not_trained():
    def module():
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(5))

    assert measured(module(), "inference").status is Status.OK
    point = measured(module(), "train")
    assert (point.status, "lazy" in point.error) == (Status.UNSUPPORTED, True)


class LateHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), None

    def forward(self, x):
        features = self.conv(x).mean((2, 3))
        if self.head is None:
            self.head = nn.Linear(features.shape[1], 5)
        return self.head(features)


class Adapter(Small):
    def state_dict(self, *args, **kwargs):
        return {
            name: value
            for name, value in super().state_dict(*args, **kwargs).items()
            if name.startswith("head")
        }


class Extra(Small):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "at": Status.OK}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [LateHead, Adapter, Extra])
def test_weights_are_restored_whatever_the_state_dict_is(kind):
    module = kind()
    weights = module.conv.weight.detach().clone()
    session = opened(module)
    for _ in range(2):
        session.reset()
        assert torch.equal(module.conv.weight, weights)
        with session.training():
            update = session.optimizer({"lr": 0.1})
            batch = session.random_batch((8, 8), 2, 0)
            outputs = session.first_forward(batch)
            session.backward((outputs**2).sum())
            update()
        assert not torch.equal(module.conv.weight, weights)
    session.reset()
    assert getattr(module, "seen", 0) == 0


class OwnZeroGrad(Small):
    def zero_grad(self):
        raise AssertionError("of another use")


class ListOfParameters(Small):
    def parameters(self):
        return list(super().parameters())


class Groups(Small):
    def parameters(self):
        return [{"params": self.conv.parameters()}, {"params": self.head.parameters(), "lr": 0.5}]


class OwnLoss(Small):
    def loss(self):
        return 0.0

    def sample_shape(self):
        return 8, 8


class Circular(Small):
    def forward(self, x):
        tree = {"scores": super().forward(x)}
        tree["parent"] = [tree["scores"]]
        tree["parent"].append(tree["parent"])
        return tree["scores"]


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("kind", [OwnZeroGrad, ListOfParameters, Groups, OwnLoss, Circular])
def test_methods_of_other_uses_are_left_alone(kind, phase):
    point = measured(kind(), phase)
    assert point.status is Status.OK, point.error


def test_outputs_that_contain_themselves_have_their_tensors():
    outputs = [torch.zeros(1)]
    outputs.append({"again": outputs, "more": torch.ones(1)})
    assert [float(one) for one in tensors_in(outputs)] == [0.0, 1.0]


class Moves(Small):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(4)

    def to(self, *args, **kwargs):
        super().to(*args, **kwargs)
        self.table = self.table.to(*args, **kwargs)
        return self

    def forward(self, x):
        return nn.functional.linear(self.conv(x).mean((2, 3)) * self.table, self.head.weight)


def test_a_to_of_the_authors_moves_what_it_knows_of():
    session = opened(Moves(), name="bf16", storage="bfloat16")
    assert session.module.table.dtype is torch.bfloat16


class Exits(Small):
    def forward(self, x):
        raise SystemExit(3)


def test_a_call_that_would_end_the_process_fails():
    point = measured(Exits(), "inference")
    assert (point.status, "sys.exit(3)" in point.error) == (Status.FAILED, True)


@dataclasses.dataclass
class Answer:
    scores: object


class LaterInside(Small):
    def forward(self, x):
        return Answer(super(LaterInside, self).forward(x) for _ in range(1))


def test_a_generator_inside_an_output_is_refused():
    point = measured(LaterInside(), "inference")
    assert (point.status, "generator" in point.error) == (Status.UNSUPPORTED, True)


class Cached(Small):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = super().forward(x)
        return self.kept


class Threads(Small):
    def forward(self, x):
        torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "code"), [(Cached, "work_uncounted"), (Threads, "settings_changed")]
)
def test_calls_that_are_not_what_they_seem_are_named(kind, code):
    with unchanged_settings():
        point = measured(kind(), "inference")
    assert point.status is Status.OK, point.error
    assert code in [doubt.code for doubt in point.doubts]


class Pooled(Small):
    """Computes in a thread, which a copy of the process does not have."""

    def __init__(self):
        super().__init__()
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def forward(self, x):
        return self.pool.submit(super().forward, x).result()


def test_a_copy_that_waits_for_a_thread_is_given_up(monkeypatch):
    monkeypatch.setattr(forked, "_IDLE_SECONDS", 1.0)
    module = Pooled()
    with pytest.raises(Inconclusive, match="thread"):
        count(module, torch.randn(2, 3, 8, 8))
    module.pool.shutdown()


class Loads(Small):
    """Takes batches of its own from processes, which belong to the process that started them."""

    def __init__(self):
        super().__init__()
        self.loader = iter(torch.utils.data.DataLoader(list(range(8)), num_workers=1))

    def forward(self, x):
        return super().forward(x) + next(self.loader)


@pytest.mark.slow
def test_a_copy_takes_nothing_from_processes_of_the_model():
    module, inputs = Loads().eval(), torch.randn(2, 3, 8, 8)
    first = [module(inputs) - Small.forward(module, inputs) for _ in range(2)]
    with pytest.raises((Inconclusive, RuntimeError, AssertionError)):
        count(module, inputs)
    rest = [module(inputs) - Small.forward(module, inputs) for _ in range(6)]
    assert [round(float(one.detach()[0, 0])) for one in [*first, *rest]] == list(range(8))


def test_loss_method_of_a_module_gets_targets_that_fit_outputs(tmp_path):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 10)

        def forward(self, images):
            return self.linear(images.mean((2, 3)))

        def loss(self, outputs, targets):
            return torch.nn.functional.cross_entropy(outputs, targets)

    record = api.measure(
        Own(),
        mode="train",
        input_size=8,
        batch_size=4,
        stopping="fixed",
        tracking="none",
        output_dir=tmp_path / "x",
    )
    assert [point.status.value for point in record.points if point.key.is_timed] == ["ok"]
