from __future__ import annotations

import gc
import json
import logging
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfexp.cost.trial import why_refused
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError, Waits
from perfexp.models import Batch, Execution, Precision, torch_settings
from perfexp.models.cuda_graphs import _make_capturable, captures
from perfexp.models.kinds import Classification, Segmentation, VideoClassification
from perfexp.models.session import TorchSession
from perfexp.models.torch_settings import unchanged_settings
from perfexp.models.trainer import begin_momentum

FP32 = Precision(name="fp32")


class Pooled(torch.nn.Module):
    """A small classifier of pictures or clips, with the normalisation and the outputs that a test asks for."""

    def __init__(self, *, dims: int = 2, head: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = (torch.nn.Conv2d if dims == 2 else torch.nn.Conv3d)(3, 4, 3)
        self.norm = (torch.nn.BatchNorm2d if dims == 2 else torch.nn.BatchNorm3d)(4)
        self.fc = torch.nn.Linear(4, 5)
        self.head = head

    def forward(self, inputs: torch.Tensor) -> Any:
        features = self.norm(self.conv(inputs)).relu()
        scores = self.fc(features.flatten(2).mean(2))
        return self.head(scores) if self.head else scores


class WithoutBfloat16(CpuDevice):
    """A device whose kernels refuse bfloat16; torch's own message."""

    def synchronize(self) -> None:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'BFloat16'\nmore lines")


def open_session(
    module: torch.nn.Module | None = None,
    *,
    kind: Any = None,
    precision: Precision = FP32,
    device: CpuDevice | None = None,
    **execution: Any,
) -> TorchSession:
    return TorchSession(
        module or Pooled(),
        kind=kind or Classification(5),
        name="pooled",
        device=device or CpuDevice(),
        precision=precision,
        execution=Execution(**execution),
        facts={"weights": "random"},
        doubts=[],
    )


def train(session: TorchSession, batch: Batch, steps: int = 1, **settings: Any) -> list[float]:
    update = session.optimizer({"name": "sgd", "lr": 0.1, **settings})
    losses = []
    with session.training():
        session.first_forward(batch)
        for _ in range(steps):
            loss = session.loss(session.forward(batch.inputs), batch.targets)
            session.backward(loss)
            update()
            losses.append(session.number(loss))
    return losses


def test_random_batches_follow_the_seed_and_are_never_zeros() -> None:
    session = open_session()
    first, again, other = (session.random_batch((8, 10), 2, seed) for seed in (1, 1, 2))
    assert first.inputs.shape == (2, 3, 8, 10)
    assert first.targets.shape == (2,)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert first.inputs.count_nonzero() == first.inputs.numel()


@pytest.mark.parametrize(
    ("kind", "inputs", "targets"),
    [
        (Classification(5), (2, 3, 8, 10), (2,)),
        (Segmentation(5), (2, 3, 8, 10), (2, 8, 10)),
        (VideoClassification(5, frames=4), (2, 3, 4, 8, 10), (2,)),
    ],
)
def test_a_batch_has_the_shape_of_its_kind(
    kind: Any, inputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    batch = open_session(kind=kind).random_batch((8, 10), 2, 0)
    assert (batch.inputs.shape, batch.targets.shape) == (inputs, targets)


def test_training_lowers_the_loss_and_clears_the_gradients() -> None:
    module = Pooled()
    session = open_session(module)
    losses = train(session, session.random_batch((8, 8), 4, 0), steps=20)
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_reset_forgets_all_training() -> None:
    session = open_session()
    before = {name: tensor.clone() for name, tensor in session.module.state_dict().items()}
    batch = session.random_batch((8, 8), 4, 0)
    update = session.optimizer({"name": "sgd", "lr": 0.5})
    with session.training():
        session.backward(session.loss(session.forward(batch.inputs), batch.targets))
        update()
    assert not all(
        torch.equal(before[name], tensor) for name, tensor in session.module.state_dict().items()
    )
    session.reset()
    for name, tensor in session.module.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert all(parameter.grad is None for parameter in session.module.parameters())


def test_the_optimizer_and_its_state_end_with_the_training() -> None:
    session = open_session()
    batch = session.random_batch((8, 8), 4, 0)
    update = session.optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
    before = optimizers()
    with session.training():
        session.backward(session.loss(session.forward(batch.inputs), batch.targets))
        update()
    del update
    gc.collect()
    assert len(optimizers()) == len(before) - 1


def optimizers() -> list[int]:
    return [id(each) for each in gc.get_objects() if type(each) is torch.optim.SGD]


def test_every_training_begins_with_the_same_loss() -> None:
    session, losses = open_session(), []
    batch = session.random_batch((8, 8), 4, 0)
    for _ in range(2):
        session.reset()
        update = session.optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
        with session.training():
            for _ in range(3):
                loss = session.loss(session.forward(batch.inputs), batch.targets)
                session.backward(loss)
                update()
        losses.append(session.number(loss))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_each_optimizer_trains(name: str) -> None:
    session = open_session()
    losses = train(session, session.random_batch((8, 8), 4, 0), steps=10, name=name, lr=0.05)
    assert losses[-1] < losses[0]


def test_inference_runs_without_autograd_and_restores_training() -> None:
    module = Pooled()
    session = open_session(module)
    batch = session.random_batch((8, 8), 2, 0)
    with session.training():
        with session.inferring():
            assert not module.training
            assert session.forward(batch.inputs).is_inference()
        assert module.training
        assert session.forward(batch.inputs).requires_grad
    assert not module.training


def test_an_evaluation_does_without_the_compiler() -> None:
    session = open_session()
    compiled: list[Any] = []
    session._run = session._trained = lambda inputs: compiled.append(
        inputs
    )  # stands for what a compiler returns
    batch = session.random_batch((8, 8), 2, 0)
    with session.training(), session.evaluating():
        outputs = session.forward(batch.inputs)
        assert not session.module.training and torch.is_inference_mode_enabled()
    assert len(outputs) == 2 and not compiled


def test_training_is_left_when_a_call_fails() -> None:
    module = Pooled()
    session = open_session(module)
    with pytest.raises(KeyError), session.training():
        raise KeyError
    assert not module.training


@pytest.mark.parametrize(
    ("precision", "outputs"),
    [
        (Precision(name="fp16", storage="float16"), torch.float16),
        (Precision(name="bf16", storage="bfloat16"), torch.bfloat16),
        (Precision(name="amp_fp16", autocast="float16"), torch.float16),
        (Precision(name="amp_bf16", autocast="bfloat16"), torch.bfloat16),
    ],
)
def test_a_precision_is_what_the_model_computes_in(
    precision: Precision, outputs: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "_has_fast_float16", lambda: True)
    session = open_session(precision=precision)
    if session.doubts():
        pytest.skip(session.doubts()[0].message)
    batch = session.random_batch((8, 8), 2, 0)
    assert batch.inputs.dtype is getattr(torch, precision.storage)
    assert batch.targets.dtype is torch.int64
    with session.inferring():
        assert session.forward(batch.inputs).dtype is outputs
    assert session.facts()["precision"] == precision.name
    assert train(session, batch, steps=2)[-1] < 10


def test_fp16_autocast_scales_loss_and_unscales_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_settings, "_has_fast_float16", lambda: True)
    weights, gradients = [], []
    for autocast in ("float16", "bfloat16"):
        module = Pooled()
        session = open_session(module, precision=Precision(name="amp", autocast=autocast))
        if session.doubts():
            pytest.skip(session.doubts()[0].message)
        batch = session.random_batch((8, 8), 4, 0)
        update = session.optimizer({"name": "sgd", "lr": 0.1})
        with session.training():
            session.backward(session.loss(session.forward(batch.inputs), batch.targets))
            gradients.append(module.fc.bias.grad.abs().max().item())
            update()
        weights.append(module.fc.bias.detach().clone())
    assert gradients[0] > 1000 * gradients[1]
    torch.testing.assert_close(weights[0], weights[1], atol=1e-2, rtol=0)


@pytest.mark.parametrize("precision", [{"storage": "float16"}, {"autocast": "float16"}])
def test_a_cpu_without_fast_float16_runs_as_fp32_with_a_doubt(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "_has_fast_float16", lambda: False)
    session = open_session(precision=Precision(name="half", **precision))
    (doubt,) = session.doubts()
    assert doubt.code == "precision_unavailable"
    assert "half was requested, but fp32 was measured" in doubt.message
    assert "torch has no fast float16 on" in doubt.message


def test_tf32_on_a_cpu_runs_as_fp32_with_a_doubt() -> None:
    session = open_session(precision=Precision(name="tf32", tf32=True))
    (doubt,) = session.doubts()
    assert doubt.code == "precision_unavailable"
    assert "tf32 was requested, but fp32 was measured" in doubt.message
    facts = session.facts()
    assert (facts["precision"], facts["matmul_allow_tf32"], facts["cudnn_allow_tf32"]) == (
        "fp32",
        False,
        False,
    )


def test_refused_data_type_runs_as_fp32_with_torchs_reason() -> None:
    session = open_session(
        precision=Precision(name="bf16", storage="bfloat16"), device=WithoutBfloat16()
    )
    (doubt,) = session.doubts()
    assert doubt.code == "precision_unavailable"
    assert doubt.message.endswith("not implemented for 'BFloat16'")
    assert session.random_batch((8, 8), 2, 0).inputs.dtype is torch.float32


def test_fp32_turns_off_the_tf32_that_torch_allows_by_default() -> None:
    torch.backends.cudnn.allow_tf32 = True
    facts = open_session().facts()
    assert (facts["matmul_allow_tf32"], facts["cudnn_allow_tf32"]) == (False, False)


def test_facts_count_the_parameters_and_are_json() -> None:
    module = Pooled()
    facts = open_session(module, precision=Precision(name="bf16", storage="bfloat16")).facts()
    count = sum(parameter.numel() for parameter in module.parameters())
    assert (facts["parameters"], facts["architecture"], facts["weights"]) == (
        count,
        "Pooled",
        "random",
    )
    assert facts["parameter_bytes"] == count * (2 if facts["precision"] == "bf16" else 4)
    assert facts["torch"] == torch.__version__
    json.dumps(facts)


def test_threads_and_flags_are_set_and_reported() -> None:
    with unchanged_settings():
        facts = open_session(threads=1, cudnn_benchmark=True, deterministic=True).facts()
        assert (facts["threads"], facts["cudnn_benchmark"], facts["deterministic"]) == (
            1,
            True,
            True,
        )
        later = open_session().facts()  # what the process has set, as a program does, stays
        assert (later["cudnn_benchmark"], later["deterministic"]) == (True, True)
    facts = open_session().facts()
    assert (facts["cudnn_benchmark"], facts["deterministic"]) == (False, False)


def test_threads_that_torch_no_longer_changes_are_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("cannot set number of interop threads after parallel work has started")

    monkeypatch.setattr(torch, "set_num_interop_threads", refuse)
    (doubt,) = open_session(interop_threads=torch.get_num_interop_threads() + 1).doubts()
    assert doubt.code == "settings_changed"


@pytest.mark.parametrize(
    ("dims", "kind", "layout"),
    [
        (2, Classification(5), torch.channels_last),
        (3, VideoClassification(5, frames=4), torch.channels_last_3d),
    ],
)
def test_channels_last_reaches_parameters_inputs_and_outputs(
    dims: int, kind: Any, layout: torch.memory_format
) -> None:
    module = Pooled(dims=dims)
    session = open_session(module, kind=kind, channels_last=True)
    batch = session.random_batch((8, 8), 2, 0)
    assert batch.inputs.is_contiguous(memory_format=layout)
    assert module.conv.weight.is_contiguous(memory_format=layout)
    assert module.conv(batch.inputs).is_contiguous(memory_format=layout)


@pytest.mark.parametrize("training", [False, True])
def test_a_size_that_the_model_cannot_take_is_unsupported(
    training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session = open_session()
    batch = session.random_batch((2, 2), 2, 0)
    with (
        session.training() if training else session.inferring(),
        caplog.at_level(logging.ERROR),
        pytest.raises(
            Unsupported, match=r"^pooled can't take 2 × 3 × 2 × 2: .*[Kk]ernel size.*[^.]\.$"
        ),
    ):
        session.first_forward(batch)
    assert not caplog.records


def test_batch_norm_of_one_value_says_which_batch_will_do() -> None:
    session = open_session()
    with session.training(), pytest.raises(Unsupported, match="use batch_size=2 or more"):
        session.first_forward(session.random_batch((3, 3), 1, 0))


def test_the_trial_of_a_size_leaves_the_module_as_it_was() -> None:
    module = Pooled().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert why_refused(module, torch.ones(2, 3, 8, 8)) is None
    assert why_refused(module, torch.ones(1, 3, 3, 3)) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_an_error_that_the_size_does_not_explain_is_passed_on() -> None:
    class Broken(Pooled):
        def forward(self, inputs: torch.Tensor) -> Any:
            if type(inputs) is torch.Tensor:  # what runs, not the trial
                raise RuntimeError("device-side assert")
            return super().forward(inputs)

    session = open_session(Broken())
    with session.inferring(), pytest.raises(RuntimeError, match="device-side assert"):
        session.first_forward(session.random_batch((8, 8), 2, 0))


def test_running_out_of_memory_is_not_taken_for_a_bad_size() -> None:
    class Greedy(Pooled):
        def forward(self, inputs: torch.Tensor) -> Any:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
            )

    session = open_session(Greedy())
    with session.inferring(), pytest.raises(RuntimeError, match="can't allocate"):
        session.first_forward(session.random_batch((2, 2), 2, 0))


def test_a_model_whose_shapes_depend_on_values_is_not_judged() -> None:
    class Dynamic(Pooled):
        def forward(self, inputs: torch.Tensor) -> Any:
            chosen = inputs[inputs > 0]
            return chosen.reshape(7, -1, 11, 13) if len(chosen) else inputs

    session = open_session(Dynamic())
    with session.inferring(), pytest.raises(RuntimeError, match="shape"):
        session.first_forward(session.random_batch((8, 8), 2, 0))


Inception = namedtuple("Inception", ["logits", "aux_logits"])
GoogLeNet = namedtuple("GoogLeNet", ["logits", "aux_logits2", "aux_logits1"])


@pytest.mark.parametrize(
    ("head", "factor"),
    [
        (None, 1.0),
        (lambda scores: Inception(scores, scores), 1.3),
        (lambda scores: GoogLeNet(scores, scores, scores), 1.6),
        (lambda scores: Inception(scores, None), 1.0),
        (lambda scores: {"out": scores}, 1.0),
        (lambda scores: {"out": scores, "aux": scores}, 1.5),
    ],
)
def test_auxiliary_outputs_count_with_their_weights(head: Any, factor: float) -> None:
    session = open_session(Pooled(head=head))
    batch = session.random_batch((8, 8), 4, 0)
    with session.inferring():
        outputs = session.forward(batch.inputs)
        plain = (
            outputs
            if head is None
            else outputs["out"]
            if isinstance(outputs, dict)
            else outputs.logits
        )
        expected = torch.nn.functional.cross_entropy(plain, batch.targets)
        torch.testing.assert_close(session.loss(outputs, batch.targets), factor * expected)
        assert session.correct(outputs, batch.targets) == (
            int((plain.argmax(1) == batch.targets).sum()),
            4,
        )


def test_outputs_without_scores_are_explained() -> None:
    session = open_session(Pooled(head=lambda scores: [scores]))
    batch = session.random_batch((8, 8), 2, 0)
    with (
        session.inferring(),
        pytest.raises(UserError, match=r"returns a list; .*loss\(outputs, targets\)"),
    ):
        session.loss(session.forward(batch.inputs), batch.targets)


def test_void_pixels_are_neither_counted_nor_learnt() -> None:
    session = open_session(kind=Segmentation(2))
    outputs = torch.tensor([[[[5.0, 5.0]], [[0.0, 0.0]]]])
    targets = torch.tensor([[[0, 255]]])
    assert session.correct(outputs, targets) == (1, 1)
    torch.testing.assert_close(
        session.loss(outputs, targets), session.loss(outputs[..., :1], targets[..., :1])
    )


def test_class_255_of_pictures_is_a_class() -> None:
    outputs = torch.nn.functional.one_hot(torch.tensor([255, 3]), 300).float()
    assert open_session(kind=Classification(300)).correct(outputs, torch.tensor([255, 4])) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "shapes", "what"),
    [
        (Classification(5), ((2, 3, 4, 8, 8), (2,)), "inputs of 4 dimensions, the data gives 5"),
        (Segmentation(5), ((2, 3, 8, 8), (2,)), "targets of 3 dimensions, the data gives 1"),
    ],
)
def test_data_of_another_kind_is_refused(kind: Any, shapes: Any, what: str) -> None:
    inputs, targets = torch.ones(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64)
    with pytest.raises(UserError, match=what):
        open_session(kind=kind).place(Batch(inputs=inputs, targets=targets))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamv"}, "Did you mean adam"),
        ({"name": "sgd", "lr": -1.0}, "does not take these settings: Invalid learning rate"),
        ({"name": "sgd", "learning_rate": 1.0}, "does not take these settings"),
    ],
)
def test_a_wrong_optimizer_is_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_session().optimizer(settings)


def test_a_frozen_model_cannot_train() -> None:
    with pytest.raises(UserError, match="no parameters that could be trained"):
        open_session(Pooled().requires_grad_(False)).optimizer({"name": "sgd"})


def test_a_trial_leaves_a_module_with_two_names_as_it_was() -> None:
    module = Pooled()
    module.again = module.conv
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert why_refused(module, torch.ones(2, 3, 2, 2)) is not None
    for name, tensor in module.state_dict().items():
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, weights[name])


def test_cuda_graphs_need_cuda() -> None:
    with pytest.raises(UserError, match="cuda_graph needs a CUDA device"):
        open_session(cuda_graph=True)
    with pytest.raises(Unsupported, match="has no CUDA graphs"):
        open_session().capture(lambda: None)


class Capturing:
    """CUDA's streams, graphs and random numbers, as far as a capture that fails needs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.states, self.pools, self.fails = (
            "before",
            ["marked by the capture"],
            [],
            True,
        )
        stream = SimpleNamespace(wait_stream=lambda _: None)
        generator = SimpleNamespace(
            clone_state=lambda: "afresh", graphsafe_set_state=self.states.append
        )
        for name, fake in {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph_pool_handle": object,
            "synchronize": lambda: None,
            "Stream": lambda: stream,
            "stream": self.on,
            "current_stream": lambda: SimpleNamespace(
                wait_stream=lambda _: None, name=self.current
            ),
            "graph": self.graph,
            "current_device": lambda: 0,
            "default_generators": [generator],
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, getattr(stream, "name", "of the capture")
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, stream: Any = None, pool: Any = None, **_: Any) -> Iterator[None]:
        before, self.current = self.current, "of the capture"
        self.pools.append(pool)
        yield
        if not self.fails:
            self.current = before
            return
        raise RuntimeError(
            "operation would make the legacy stream depend on a capturing blocking stream\nand more"
        )


def test_failed_capture_restores_stream_and_random_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, session = Capturing(monkeypatch), open_session()
    monkeypatch.setattr(session.device, "kind", "cuda")
    monkeypatch.setattr(session.device, "waits_inside", lambda _: False)
    with pytest.raises(
        Unsupported, match=r"can't be captured as a CUDA graph: operation would make .* stream$"
    ):
        session.capture(lambda: None)
    assert cuda.current == "before"
    assert cuda.states[-1] == "afresh"


def test_module_free_captures_share_memory_failure_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, streams = Capturing(monkeypatch), []
    capture = captures(CpuDevice(name="abacus"))
    with pytest.raises(
        Unsupported, match="can't be captured as a CUDA graph: operation would make"
    ):
        capture(lambda: streams.append(cuda.current))
    assert streams == ["before", "of the capture"], "first it runs once"
    assert (cuda.current, cuda.states[-1]) == ("before", "afresh")
    cuda.fails = False
    for _ in range(2):
        capture(lambda: None)()
    captures(CpuDevice(name="abacus"))(lambda: None)
    assert cuda.pools[0] is cuda.pools[1] is cuda.pools[2] is not cuda.pools[3]


@pytest.mark.parametrize(("name", "capturable"), [("adamw", True), ("sgd", None)])
def test_captured_optimizer_counts_steps_on_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, capturable: bool | None
) -> None:
    Capturing(monkeypatch)
    session = open_session()
    monkeypatch.setattr(session.device, "kind", "cuda")
    monkeypatch.setattr(session.device, "waits_inside", lambda _: False)
    update, seen = session.optimizer({"name": name, "lr": 0.1}), []
    for parameter in session.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update()
    optimizer = session._optimizer
    assert optimizer is not None
    with pytest.raises(Unsupported):
        session.capture(
            lambda: seen.extend(group.get("capturable") for group in optimizer.param_groups)
        )
    assert set(seen) == {capturable}


def test_a_call_that_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, session, streams = Capturing(monkeypatch), open_session(), []
    monkeypatch.setattr(session.device, "kind", "cuda")
    monkeypatch.setattr(session.device, "waits_inside", lambda call: call() or True)
    with pytest.raises(Waits):
        session.capture(lambda: streams.append(cuda.current))
    assert streams == ["of the capture"], (
        "it was only looked at: on the stream that everything of it has to belong to"
    )


def test_capture_moves_all_optimizer_state_to_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.NAdam([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "mu_product": torch.tensor(0.9),
        "note": 3,
    }
    _make_capturable(optimizer)
    state = optimizer.state[parameter]
    assert {name: str(kept.device) for name, kept in state.items() if name != "note"} == {
        "step": "meta",
        "mu_product": "meta",
    }
    assert state["note"] == 3


def test_a_copy_shares_nothing_and_takes_what_is_put_into_it() -> None:
    session = open_session()
    first, second = (session.random_batch((8, 8), 2, seed) for seed in (1, 2))
    kept = session.copy(first)
    inputs, targets = kept.inputs, kept.targets
    assert session.copy(second, into=kept) is kept
    torch.testing.assert_close(inputs, second.inputs)
    torch.testing.assert_close(targets, second.targets)
    assert not torch.equal(first.inputs, second.inputs)


def test_fused_sgd_momentum_survives_overflow_in_the_first_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    begin_momentum(optimizer, [parameter])
    for overflowed, gradient in ((1.0, float("inf")), (0.0, 1.0), (0.0, 1.0)):
        # how torch's scaler tells a fused optimiser that a gradient overflowed
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(overflowed)
        parameter.grad = torch.full((3,), gradient)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - 0.1 * 1 - 0.1 * 1.9))


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    device = CpuDevice(name="abacus")
    device.identifier = None
    with pytest.raises(UserError, match="torch does not know the device abacus"):
        open_session(device=device)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compiled_model_equals_the_eager_one_at_every_size() -> None:
    eager = open_session()
    compiled = open_session(compile="default")
    for size in (8, 9):
        batch = eager.random_batch((size, size), 2, 0)
        with eager.inferring(), compiled.inferring():
            torch.testing.assert_close(compiled.first_forward(batch), eager.first_forward(batch))
    with compiled.inferring(), pytest.raises(Unsupported, match=r"[Kk]ernel size"):
        compiled.first_forward(compiled.random_batch((2, 2), 2, 0))
