"""CLIP gesture classifier: tokens, positions, losses and sizes by formula; texts encoded once in evaluation."""

import math

import pytest
import torch

from perfexp.data import made
from perfexp.data.skeletons import Skeletons
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.models import Backbone, ClipSize, Execution, Precision, Schedule
from perfexp.models.clip_gesture import ClipGesture, Gesture
from perfexp.models.gestures import BEGIN, END, GESTURES, PAD, PROMPT, encode, padded
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.transformer import Block, TextEncoder, info_nce, sines
from perfexp.records.record import Key, Status
from perfexp.timing.stopping import Fixed

PARAMETERS = {
    "tiny": 0.5e6,
    "small": 1.5e6,
    "medium": 4e6,
    "large": 11e6,
    "xlarge": 20e6,
    "xxlarge": 35e6,
}


def opened(precision="fp32", num_classes=None, **settings):
    autocast = {"amp_bf16": "bfloat16"}.get(precision)
    return ClipGesture(**settings).open(
        device=CpuDevice(),
        precision=Precision(name=precision, autocast=autocast),
        execution=Execution(),
        num_classes=num_classes,
        seed=0,
    )


@pytest.fixture(scope="module")
def tiny():
    return opened(dropout=0.0)


def test_a_token_is_a_byte_between_the_beginning_and_the_end():
    assert encode("ab é") == [BEGIN, 97, 98, 32, 0xC3, 0xA9, END]
    for text in (*GESTURES, "", "Ellenbogen beugen, 手首"):
        assert bytes(encode(text)[1:-1]).decode() == text


def test_texts_are_padded_behind_their_ends():
    rows, ends = padded(["ab", "c"])
    assert rows == [[BEGIN, 97, 98, END], [BEGIN, 99, END, PAD]]
    assert ends == [3, 2]


def test_what_pads_a_text_does_not_change_it():
    encoder = TextEncoder(["tap", "shoulder flexion"], 16, 2, 2, 8).eval()
    alone = TextEncoder(["tap"], 16, 2, 2, 8).eval()
    alone.load_state_dict(encoder.state_dict())
    assert torch.allclose(encoder()[0], alone()[0], atol=1e-6)


def test_positions_are_sines_and_cosines():
    table = sines(50, 6)
    for position, pair in ((0, 0), (7, 1), (49, 2)):
        angle = position / 10_000 ** (2 * pair / 6)
        assert table[position, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(
            [math.sin(angle), math.cos(angle)], abs=1e-5
        )


def test_attention_of_a_block_is_that_of_torch():
    block = Block(8, 2, 0.0, is_causal=False).eval()
    reference = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    reference.in_proj_weight.data, reference.in_proj_bias.data = (
        block.query_key_value.weight.data,
        block.query_key_value.bias.data,
    )
    reference.out_proj.load_state_dict(block.output.state_dict())
    inputs = torch.randn(3, 5, 8)
    assert torch.allclose(block._attend(inputs), reference(inputs, inputs, inputs)[0], atol=1e-6)


def test_info_nce_is_the_mean_of_both_directions():
    scores = torch.tensor([[2.0, 0.5, -1.0], [0.3, 1.0, 0.2], [-0.4, 0.6, 0.9]])
    logits = scores.exp()
    rows = [-math.log(logits[i, i] / logits[i].sum()) for i in range(3)]
    columns = [-math.log(logits[i, i] / logits[:, i].sum()) for i in range(3)]
    assert info_nce(scores).item() == pytest.approx((sum(rows) + sum(columns)) / 6)


def test_the_loss_has_both_parts_with_their_weights():
    scores, labels = torch.randn(4, 5), torch.tensor([4, 1, 1, 0])
    pairs = torch.stack([scores[:, label] for label in labels], dim=1)  # input i, text of input j
    entropy = torch.nn.functional.cross_entropy(scores, labels)
    for share in (0.6, 0.0, 1.0):
        loss = Gesture(5, frames=None, contrastive_weight=share).loss(scores, labels)
        assert loss.item() == pytest.approx(
            (share * info_nce(pairs) + (1 - share) * entropy).item(), rel=1e-6
        )


def test_scores_are_cosines_over_the_temperature(tiny):
    batch = tiny.random_batch((20, 75), 3, 0)
    with tiny.inferring():
        scores = tiny.forward(batch.inputs)
        sequences, texts = tiny.module.inputs(batch.inputs), tiny.module.texts()
    cosines = torch.nn.functional.cosine_similarity(sequences[:, None], texts[None], dim=-1)
    assert torch.allclose(scores, cosines / 0.05, atol=1e-4)
    assert scores.shape == (3, len(GESTURES))


@pytest.mark.parametrize("size", list(ClipSize))
def test_a_size_has_its_parameters(size):
    with torch.device("meta"):
        module = ClipGesture(size=size)._build()
    assert sum(parameter.numel() for parameter in module.parameters()) == pytest.approx(
        PARAMETERS[size], rel=0.1
    )


def test_after_a_step_the_texts_of_inference_are_the_new_ones(tiny):
    batch, update = tiny.random_batch((10, 75), 4, 1), tiny.optimizer({"name": "adamw", "lr": 1e-2})
    with tiny.inferring():
        before = tiny.forward(batch.inputs).clone()
    buffer = tiny.module.text_features.data_ptr()
    with tiny.training():
        loss = tiny.loss(tiny.learn(batch), batch.targets)
        tiny.backward(loss)
        update()
        trained = tiny.forward(batch.inputs)
    with tiny.inferring():
        after = tiny.forward(batch.inputs)
    assert torch.allclose(
        after, trained, atol=1e-4
    )  # without dropout, training has the same scores
    assert not torch.allclose(after, before, atol=1e-2)
    assert tiny.module.text_features.data_ptr() == buffer  # a captured graph reads it
    tiny.reset()
    with tiny.inferring():
        assert torch.allclose(tiny.forward(batch.inputs), before, atol=1e-6)


def test_weights_have_no_entries_of_texts_or_positions(tiny):
    assert not [
        name
        for name in tiny.module.state_dict()
        if name.endswith(("tokens", "ends", "positions", "features"))
    ]


def test_the_scores_learn_under_autocast():
    session = opened(precision="amp_bf16")
    batch, update = (
        session.random_batch((20, 75), 6, 0),
        session.optimizer({"name": "adamw", "lr": 1e-3}),
    )
    losses = []
    with session.training():
        for _ in range(8):
            loss = session.loss(session.learn(batch), batch.targets)
            session.backward(loss)
            update()
            losses.append(session.number(loss))
    assert losses[-1] < losses[0]


def test_a_wrong_number_of_columns_names_the_right_one(tiny):
    batch = tiny.random_batch((20, 60), 2, 0)
    with tiny.inferring(), pytest.raises(Unsupported, match="set input_size=FRAMESx75"):
        tiny.first_forward(batch)


def test_the_work_of_training_has_that_of_the_texts_too(tiny):
    inputs = tiny.random_batch((20, 75), 2, 0).inputs
    infer, train = tiny.work(inputs, training=False), tiny.work(inputs, training=True)
    macs = [sum(row.macs for row in work.rows) for work in (infer, train)]
    assert macs[1] > macs[0] > 0
    assert not infer.uncounted
    assert not train.uncounted


def test_frames_of_a_video_are_encoded_one_by_one_and_averaged(monkeypatch):
    models = import_torchvision().models

    def small(num_classes):
        return models.VisionTransformer(224, 112, 1, 2, 8, 16, num_classes=num_classes)

    monkeypatch.setattr(models, "vit_b_32", small)
    session = opened(backbone=Backbone.image, frames=3)
    batch = session.random_batch((224, 224), 2, 0)
    assert batch.inputs.shape == (2, 3, 3, 224, 224)
    with session.inferring():
        assert session.first_forward(batch).shape == (2, len(GESTURES))
        clip = session.module.inputs(batch.inputs)
        frames = torch.stack(
            [session.module.inputs.images(batch.inputs[:, :, number]) for number in range(3)]
        )
    assert torch.allclose(clip, frames.mean(dim=0), atol=1e-5)
    with session.inferring(), pytest.raises(Unsupported, match="set input_size=224"):
        session.first_forward(session.random_batch((64, 64), 1, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"joints": 0}, "model.joints=0: set 1 joint or more"),
        ({"temperature": 0.0}, "model.temperature=0.0: set a positive number"),
        ({"gestures": ["wave", "wave"]}, "two names or more, all different"),
        ({"gestures": ["wave"]}, "two names or more"),
        ({"contrastive_weight": 1.5}, "from 0 to 1"),
        ({"dropout": 1.0}, "from 0, below 1"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ClipGesture(**settings)


def test_every_class_of_the_data_has_a_name():
    assert opened(gestures=["wave", "clap"], num_classes=2).num_classes == 2
    with pytest.raises(UserError, match=r"data has 9 classes, and model\.gestures names 2"):
        opened(gestures=["wave", "clap"], num_classes=9)


def test_a_prompt_is_a_sentence_about_a_gesture():
    assert PROMPT.format(GESTURES[7]) == "a person doing side tap left"


@pytest.mark.slow
def test_made_skeletons_are_learnable_for_unseen_subjects(tmp_path):
    made.skeletons(subjects=10, repetitions=2, seed=0).write(tmp_path / "made", lambda _: None)
    session = opened()
    settings = {
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        "clip_grad_norm": 0.5,
    }
    train = Train(**settings, schedule=Schedule.cosine, warmup_epochs=1, eval_every=1, patience=5)
    procedure = Procedure(
        session=session,
        device=session.device,
        data=Skeletons(root=str(tmp_path / "made")),
        modes={"train": train},
        stopping=Fixed(warmup=1, measure=1),
        epochs=12,
    )
    point = procedure.measure(
        Key(phase="train", input_size=(20, 75), batch_size=16, precision="fp32")
    )
    assert point.status is Status.OK, point.error
    assert point.metric("train/accuracy_best").value >= 0.9
