"""Whether a forced call takes cuDNN's own plan where that launches the same kernels, and only there."""

import dataclasses

import pytest
import torch

from perfexp.algorithms import plan as plan_module
from perfexp.algorithms.captured import CaptureError, Node
from perfexp.algorithms.codes import Math
from perfexp.algorithms.passes import Pass
from perfexp.algorithms.plan import Plan, Shape
from perfexp.algorithms.shortcut import _MOST_PACKS, _Way

FALLBACK, INSTANT = 2, 3
KERNELS = {0: ("implicit",), 2: ("gemm",)}
HERE = torch.device("cpu")


@pytest.fixture
def plan_of(scripted, monkeypatch):
    """A function that makes a plan of a cuDNN with such engines, and that cuDNN."""

    def make(engines, heuristics=None, algorithm="gemm", groups=1, dtype=torch.float32, last=False, which=Pass.forward):
        made = scripted(engines=engines, heuristics=heuristics, workspace=lambda name, code: 512 if code == 2 else 0)
        made.kernels = lambda which, code: KERNELS[code]

        def nodes_of(enqueue, device):
            made.launched.clear()
            enqueue()
            return sorted(Node(0, hash(kernel)) for kernel in made.launched)

        monkeypatch.setattr(plan_module, "nodes_of", nodes_of)
        shape = Shape((2, 4, 6, 5), (6, 4 // groups, 3, 3), (1, 2), (1, 0), (1, 1), groups, dtype, last, Math.fma, 0)
        return Plan(which, algorithm, shape), made

    return make


def tensors(plan, dtype=torch.float32, last=False):
    layout = torch.channels_last if last else torch.contiguous_format
    shape = plan._shape
    return [torch.randn(size).to(dtype, memory_format=layout) for size in (shape.inputs, shape.weight)]


@pytest.mark.parametrize(("groups", "last"), [(1, False), (2, False), (1, True)])
def test_a_plan_with_the_same_kernels_computes_the_same(plan_of, groups, last):
    plan, cudnn = plan_of({2: (KERNELS[2], 512)}, groups=groups, last=last)
    inputs, weight = tensors(plan, last=last)
    named = plan(inputs, weight)
    assert plan.shorten(HERE)
    cudnn.executed.clear()
    short = plan(inputs, weight)
    assert cudnn.executed == [(2, 1)]
    assert torch.equal(named, short)
    assert short.stride() == named.stride()
    reference = torch.nn.functional.conv2d(inputs, weight, None, (1, 2), (1, 0), 1, groups)
    assert torch.allclose(short, reference, atol=1e-5)


def test_a_plan_with_other_kernels_is_not_taken(plan_of):
    plan, cudnn = plan_of({2: (("another",), 512), 0: (("implicit",), 0)}, {FALLBACK: [0], INSTANT: [2]})
    assert not plan.shorten(HERE)
    cudnn.executed.clear()
    plan(*tensors(plan))
    assert cudnn.executed == []
    assert cudnn.calls[-1][:2] == ("Forward", 2)


def test_the_engine_that_a_heuristic_names_is_tried(plan_of):
    plan, cudnn = plan_of({2: (("other",), 0), 28: (KERNELS[2], 0)}, {FALLBACK: [77, 28]})
    assert plan.shorten(HERE)
    cudnn.executed.clear()
    plan(*tensors(plan))
    assert cudnn.executed == [(28, 1)]


def test_settings_of_the_usual_engines_knobs_are_tried(plan_of):
    plan, cudnn = plan_of({2: (("other",), 0), (2, (21, 1)): (KERNELS[2], 0)})
    assert plan.shorten(HERE)
    cudnn.executed.clear()
    plan(*tensors(plan))
    assert cudnn.executed == [((2, (21, 1)), 1)]


@pytest.mark.parametrize("way", ["heuristic", "knobs"])
def test_what_fitted_a_layer_is_tried_first_at_another_size(plan_of, way):
    """Of all that is tried until something fits, the next size of the same layer tries nothing else."""
    fits = {28: (KERNELS[2], 0)} if way == "heuristic" else {(2, (21, 1)): (KERNELS[2], 0)}
    plan, cudnn = plan_of({2: (("other",), 0), **fits}, {FALLBACK: [77, 28] if way == "heuristic" else [77]})
    assert plan.shorten(HERE)
    [found] = set(cudnn.executed[-1:])
    cudnn.executed.clear()
    larger = Plan(plan.which, plan.algorithm, dataclasses.replace(plan._shape, inputs=(2, 4, 12, 10)))
    assert larger.shorten(HERE)
    assert cudnn.executed == [found]
    cudnn.executed.clear()
    other = Plan(plan.which, plan.algorithm, dataclasses.replace(plan._shape, weight=(6, 4, 5, 5)))
    assert other.shorten(HERE)
    assert cudnn.executed == [found], "so does another layer"


def test_what_was_in_vain_is_not_tried_at_another_size(plan_of):
    """But what has fitted another layer since then is."""
    plan, cudnn = plan_of({2: (("other",), 0), (2, (21, 1)): (("another",), 0)}, {FALLBACK: [2]})
    assert not plan.shorten(HERE)
    assert cudnn.executed
    cudnn.executed.clear()
    larger = Plan(plan.which, plan.algorithm, dataclasses.replace(plan._shape, inputs=(2, 4, 12, 10)))
    assert not larger.shorten(HERE)
    assert cudnn.executed == []
    plan._cudnn.fitted["gemm", "another layer"] = _Way(2, settings=((21, 1),))
    largest = Plan(plan.which, plan.algorithm, dataclasses.replace(plan._shape, inputs=(2, 4, 16, 10)))
    assert not largest.shorten(HERE)
    assert cudnn.executed == [((2, (21, 1)), 1)]


def test_a_plan_that_needs_more_memory_is_not_taken(plan_of):
    assert not plan_of({2: (KERNELS[2], 513)})[0].shorten(HERE)


def test_it_is_looked_for_once(plan_of, monkeypatch):
    plan, _ = plan_of({})
    assert not plan.shorten(HERE)
    monkeypatch.setattr(plan_module, "nodes_of", None)
    assert not plan.shorten(HERE)


def test_it_is_not_looked_for_while_a_graph_is_captured(plan_of, monkeypatch):
    plan, _ = plan_of({2: (KERNELS[2], 0)})
    monkeypatch.setattr(plan_module, "capturing", lambda: True)
    assert not plan.shorten(HERE)
    monkeypatch.setattr(plan_module, "capturing", lambda: False)
    assert plan.shorten(HERE)


def test_a_driver_that_captures_nothing_leaves_the_named_call(plan_of, monkeypatch):
    plan, cudnn = plan_of({2: (KERNELS[2], 0)})

    def refuses(enqueue, device):
        raise CaptureError("NOT_SUPPORTED")

    monkeypatch.setattr(plan_module, "nodes_of", refuses)
    assert not plan.shorten(HERE)
    plan(*tensors(plan))
    assert cudnn.executed == []


def test_work_that_enqueues_nothing_proves_nothing(plan_of):
    plan, cudnn = plan_of({2: ((), 0)})
    cudnn.kernels = lambda which, code: ()
    assert not plan.shorten(HERE)


def test_the_same_addresses_are_handed_over_once(plan_of):
    plan, cudnn = plan_of({0: (KERNELS[0], 0)}, algorithm="implicit_gemm")
    assert plan.shorten(HERE)
    packs = plan._shortcut._packs
    packs.clear()
    inputs, weight, out = *tensors(plan), torch.empty(plan._shape.outputs)
    addresses = [each.data_ptr() for each in (inputs, weight, out)]
    for _ in range(3):
        plan._enqueue(*addresses, 0)
    assert len(packs) == 1
    store = torch.empty(_MOST_PACKS + 1, *plan._shape.outputs)
    for place in range(_MOST_PACKS + 1):
        plan._enqueue(*addresses[:2], store[place].data_ptr(), 0)
    assert 0 < len(packs) <= _MOST_PACKS
    assert len(cudnn.destroyed) == _MOST_PACKS


def test_addresses_that_are_not_aligned_go_by_the_name(plan_of):
    plan, cudnn = plan_of({0: (KERNELS[0], 0)}, algorithm="implicit_gemm")
    assert plan.shorten(HERE)
    cudnn.executed.clear()
    inputs, weight = tensors(plan)
    shifted = torch.empty(inputs.numel() + 1)[1:].view_as(inputs).copy_(inputs)
    assert torch.allclose(plan(shifted, weight), plan(inputs, weight))
    assert len(cudnn.executed) == 1
    assert cudnn.calls[-1][:2] == ("Forward", 0)


def test_another_threads_handle_goes_by_the_name(plan_of, monkeypatch):
    plan, cudnn = plan_of({0: (KERNELS[0], 0)}, algorithm="implicit_gemm")
    assert plan.shorten(HERE)
    cudnn.executed.clear()
    monkeypatch.setattr(type(plan._cudnn), "handle", lambda self, device: 99)
    plan(*tensors(plan))
    assert cudnn.executed == []
    assert cudnn.calls[-1][3] == 99


@pytest.mark.parametrize(("which", "dtype"), [(Pass.backward_data, torch.float32), (Pass.forward, torch.float64)])
def test_only_forward_passes_in_single_and_half_precision_have_one(plan_of, which, dtype):
    algorithm = "gemm" if which is Pass.forward else "algo_0"
    assert not plan_of({2: (KERNELS[2], 0)}, algorithm=algorithm, which=which, dtype=dtype)[0].shorten(HERE)


def test_a_cudnn_without_graphs_is_called_by_name(plan_of):
    plan, cudnn = plan_of(None)
    assert not plan.shorten(HERE)
    plan(*tensors(plan))
    assert cudnn.calls[-1][:2] == ("Forward", 2)
