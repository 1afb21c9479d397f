"""Architectures of transformers in sizes for tests, with random weights."""

import importlib.util
import json

import pytest
import torch

from perfexp.cli.composition import compose
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.main import main
from perfexp.measuring.probes.work_rates import add_token_metrics
from perfexp.models import Execution, Precision, hf
from perfexp.models.hf import HuggingFace
from perfexp.records.record import Key, Point, Record, Series, Status

of_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
FP32 = Precision(name="fp32")
#: Text of 32 tokens or images of 32 × 32 pixels, in batches of 2.
BATCH, SIZE = 2, (32, 32)
WIDTH, INNER, LAYERS, VOCABULARY = 32, 64, 2, 100
HEADS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
TEXT = {**HEADS, "intermediate_size": INNER, "vocab_size": VOCABULARY}
IMAGES = {**HEADS, "image_size": 32, "patch_size": 8}
VIT = {**IMAGES, "intermediate_size": INNER}
LLAMA = {**TEXT, "num_key_value_heads": 1}
PYRAMID = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}
SMALL = {
    "bert": TEXT,
    "clip": {"text_config": TEXT, "vision_config": VIT, "projection_dim": 16},
    "convnextv2": PYRAMID,
    "dinov2": IMAGES,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 16},
    "roberta": TEXT,
    "segformer": {**PYRAMID, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    "t5": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 100,
    },
    "vit": VIT,
}
#: Parameters of a mask for images, which a model without masks leaves out.
UNTRAINED = {"dinov2": ["dinov2.embeddings.mask_token"]}
KINDS = {
    **dict.fromkeys(("bert", "distilbert", "roberta"), "masked language model"),
    **dict.fromkeys(("gpt2", "llama", "qwen3"), "causal language model"),
    **dict.fromkeys(("vit", "dinov2", "convnextv2"), "classification"),
    "segformer": "segmentation",
    "t5": "encoder-decoder",
    "clip": "contrastive of images and texts",
}


def opened(name, *, seed=0, precision=FP32, **settings):
    config = settings.pop("config", SMALL.get(name, {}))
    return HuggingFace(name=f"hf:{name}", config=config, **settings).open(
        device=CpuDevice(),
        precision=precision,
        execution=Execution(),
        num_classes=None,
        seed=seed,
    )


@of_transformers
@pytest.mark.parametrize("name", SMALL)
def test_an_architecture_infers_and_trains_all_parameters(name):
    session = opened(name)
    assert session.facts()["kind"] == KINDS[name]
    batch = session.random_batch(SIZE, BATCH, seed=0)
    with session.inferring():
        assert session.is_finite(session.first_forward(batch))
    work = session.work(batch.inputs, training=True)
    assert work.macs > 0
    assert not work.uncounted
    batch.targets = session.random_targets(SIZE, BATCH, seed=1)
    with session.training():
        update = session.optimizer({"name": "sgd", "lr": 0.1})
        loss = session.loss(session.first_forward(batch), batch.targets)
        session.backward(loss)
        untrained = [key for key, one in session.module.named_parameters() if one.grad is None]
        update()
    assert torch.isfinite(loss)
    assert untrained == UNTRAINED.get(name, [])


def macs(name):
    session = opened(name)
    return session.work(session.random_batch(SIZE, BATCH, 0).inputs, training=False).macs


def of_block(length, *, keys=WIDTH, products=2):
    """MACs of a layer: queries and outputs, keys and values, scores and their sums, and the MLP."""
    attention = length * (2 * WIDTH * WIDTH + 2 * WIDTH * keys) + 2 * length * length * WIDTH
    return attention + products * length * WIDTH * INNER


@of_transformers
def test_macs_are_those_of_the_formulas_of_transformers():
    length, patches = SIZE[1], 16
    head = length * WIDTH * (WIDTH + VOCABULARY)
    assert macs("bert") == BATCH * (LAYERS * of_block(length) + head)
    head = length * WIDTH * VOCABULARY
    block = of_block(length, keys=WIDTH // 2, products=3)
    assert macs("llama") == pytest.approx(BATCH * (LAYERS * block + head), rel=0.01)
    ends = patches * WIDTH * 3 * 8 * 8 + WIDTH * 2
    assert macs("vit") == BATCH * (LAYERS * of_block(patches + 1) + ends)


@of_transformers
def test_a_seed_gives_the_same_weights():
    first, same, other = (opened("bert", seed=seed).module.state_dict() for seed in (1, 1, 2))
    key = "bert.embeddings.word_embeddings.weight"
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first[key], other[key])


@of_transformers
def test_the_loss_of_a_causal_model_is_of_the_next_tokens():
    session = opened("llama")
    batch = session.random_batch(SIZE, BATCH, seed=0)
    outputs = session.forward(batch.inputs)
    expected = session.module(batch.inputs, labels=batch.targets).loss
    assert session.loss(outputs, batch.targets).item() == pytest.approx(expected.item(), rel=1e-5)


@of_transformers
def test_the_loss_of_bf16_logits_is_computed_in_float32():
    session = opened("llama", precision=Precision(name="bf16", storage="bfloat16"))
    batch = session.random_batch(SIZE, BATCH, seed=0)
    outputs = session.forward(batch.inputs)
    assert outputs.logits.dtype == torch.bfloat16
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    expected = torch.nn.functional.cross_entropy(logits, batch.targets[:, 1:].flatten())
    loss = session.loss(outputs, batch.targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@of_transformers
def test_weights_of_a_folder_are_loaded_and_must_be_complete(tmp_path):
    saved = opened("bert", seed=3).module
    saved.save_pretrained(tmp_path / "bert")
    session = opened("bert", config={}, weights=str(tmp_path / "bert"))
    loaded = session.module.state_dict()
    assert all(torch.equal(loaded[name], one) for name, one in saved.state_dict().items())
    with pytest.raises(UserError, match="holds a bert: model=hf:bert"):
        opened("llama", config={}, weights=str(tmp_path / "bert"))
    with pytest.raises(UserError, match=r"lacks \d+ weights of BertLMHeadModel"):
        del saved.cls
        saved.save_pretrained(tmp_path / "part")
        opened("bert", config={}, weights=str(tmp_path / "part"), task="causal")


@of_transformers
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("brt", {}, "no architecture 'brt'. Did you mean bert"),
        ("bert", {"config": {"hiden_size": 3}}, "model.config.hiden_size: .*hidden_size"),
        ("bert", {"config": {"_attn_implementation": "x/y"}}, "has no such key"),
        ("clip", {"config": {"text_config": {"wide": 1}}}, "model.config.text_config.wide"),
        ("bert", {"config": {**TEXT, "num_attention_heads": 3}}, "with these settings: .*heads"),
        ("bert", {"task": "caual"}, "model.task=caual: set one of"),
        ("vit", {"task": "causal"}, "no head for model.task=causal, only for classification"),
        ("bert", {"decode": True}, "causal language model; hf:bert is for masked"),
        ("vit", {"decode": True}, "needs a causal language model"),
        ("bert", {"weights": "nowhere"}, "is not a folder with config.json"),
        ("wav2vec2", {"config": {"num_hidden_layers": 1}}, "takes input_values"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(name, settings, message):
    with pytest.raises(UserError, match=message) as raised:
        opened(name, **settings)
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(hf, "transformers", None)
    with pytest.raises(UserError, match=r"hf:bert needs transformers: pip install 'perfexp\[hf\]'"):
        opened("bert")


@of_transformers
@pytest.mark.parametrize(("name", "longest"), [("bert", 512), ("roberta", 510), ("gpt2", 1024)])
def test_a_text_longer_than_the_positions_is_unsupported(name, longest):
    session = opened(name)
    session.random_batch((longest, longest), 1, seed=0)
    with pytest.raises(Unsupported, match=f"positions for {longest} tokens; set input_size"):
        session.random_batch((longest + 1, longest + 1), 1, seed=0)


@of_transformers
def test_an_image_size_other_than_the_models_is_explained():
    session = opened("vit")
    batch = session.random_batch((64, 64), 1, seed=0)
    with session.inferring(), pytest.raises(Unsupported, match=r"Set model.config.image_size"):
        session.first_forward(batch)


@of_transformers
def test_images_for_text_and_tokens_for_images_are_refused():
    text, images = opened("bert"), opened("vit")
    with pytest.raises(UserError, match="takes inputs of 2 dimensions, the data gives 4"):
        text.place(images.random_batch(SIZE, BATCH, 0))
    with pytest.raises(UserError, match="takes inputs of 4 dimensions, the data gives 2"):
        images.place(text.random_batch(SIZE, BATCH, 0))


@of_transformers
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_decode_computes_the_token_after_a_full_cache(name):
    session = opened(name, decode=True)
    batch = session.random_batch(SIZE, BATCH, seed=0)
    cache = next(one for one in batch.inputs.values() if hasattr(one, "layers"))
    with session.inferring():
        first = session.first_forward(batch).logits
        again = session.forward(batch.inputs).logits
    assert first.shape == (BATCH, 1, VOCABULARY)
    assert torch.equal(first, again)
    assert cache.layers[0].keys.shape[2] == SIZE[1]
    assert cache.layers[0].cumulative_length == SIZE[1]


@of_transformers
def test_decode_agrees_with_the_last_token_of_a_prefill():
    session = opened("llama", decode=True)
    ids = torch.randint(VOCABULARY, (BATCH, SIZE[1]))
    batch = session.random_batch(SIZE, BATCH, seed=0)
    name, cache = next((key, one) for key, one in batch.inputs.items() if hasattr(one, "layers"))
    with session.inferring():
        cache.lengths.fill_(0)
        session.module(ids[:, :-1], **{name: cache}, use_cache=True)
        batch.inputs["input_ids"] = ids[:, -1:]
        one = session.forward(batch.inputs).logits
        whole = session.module(ids).logits[:, -1:]
    torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-5)


@of_transformers
def test_tokens_and_bytes_of_a_decode_are_those_of_its_formula():
    session = opened("llama", decode=True)
    inputs = session.random_batch(SIZE, BATCH, seed=0).inputs
    tokens = session.tokens(inputs)
    embeddings = VOCABULARY * WIDTH
    assert tokens.count == BATCH
    assert tokens.cache_bytes == LAYERS * 2 * BATCH * SIZE[1] * WIDTH // 2 * 4
    assert tokens.weight_bytes == 4 * (session.facts()["parameters"] - embeddings)
    point = Point(
        key=Key(phase="inference", input_size=SIZE, batch_size=BATCH, precision="fp32"),
        status=Status.OK,
        series=[Series(name="latency", unit="seconds", samples=[0.5] * 4, warmup=0)],
    )
    add_token_metrics(point, tokens)
    assert point.metric("tokens_per_second").value == pytest.approx(BATCH / 0.5)
    assert "probes.ceilings=true measures it" in point.metric("mbu").reason
    point.metrics.clear()
    add_token_metrics(point, tokens, {"bytes_per_second": 1e6})
    expected = (tokens.weight_bytes + tokens.cache_bytes) / 0.5 / 1e6
    assert point.metric("mbu").value == pytest.approx(expected)


@of_transformers
@pytest.mark.parametrize(
    ("name", "count"), [("bert", 64), ("t5", 128), ("vit", None), ("clip", None)]
)
def test_tokens_are_counted_for_texts_alone(name, count):
    session = opened(name)
    tokens = session.tokens(session.random_batch(SIZE, BATCH, 0).inputs)
    assert (tokens and tokens.count) == count


def test_typed_keys_of_a_configuration_need_no_plus():
    words = ["model=hf:clip", "model.config.text_config.hidden_size=32", "gpu=cpu"]
    node = compose(words)["model"]
    assert (node["name"], node["config"]) == ("hf:clip", {"text_config": {"hidden_size": 32}})
    assert node["decode"] is False


def test_mode_decode_asks_for_a_model_of_transformers():
    assert compose(["model=hf:llama", "mode=decode"])["model"]["decode"] is True
    with pytest.raises(UserError, match="mode=decode needs a causal language model"):
        compose(["model=resnet18", "mode=decode"])


@of_transformers
@pytest.mark.slow
@pytest.mark.always("hf: models are promised")
@pytest.mark.parametrize("mode", ["train", "decode"])
def test_a_typed_architecture_is_measured(mode, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = [f"model.config.{key}={value}" for key, value in LLAMA.items()]
    words = ["gpu=cpu", "tracking=none", "stopping=fixed", "stopping.measure=5", "cold_start=false"]
    words += ["input_size=[16,32]", "batch_size=2", f"mode={mode}", "output_dir=run", "processes=1"]
    assert main(["model=hf:llama", *config, *words]) == 0
    assert f"[1/2] {mode} 16 batch 2: latency" in capsys.readouterr().out
    record = Record.load(tmp_path / "run")
    assert [point.status for point in record.points] == [Status.OK] * 2
    assert all(point.metric("tokens_per_second").value > 0 for point in record.points)
    assert all(point.metric("work/forward_macs").value > 0 for point in record.points)
    plan = json.loads((tmp_path / "run" / "record.json").read_text())["plan"]
    assert plan["model"]["config"] == LLAMA


@of_transformers
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5"])
def test_a_call_reads_no_numbers_back(name):
    session = opened(name)
    inputs = session.random_batch(SIZE, BATCH, seed=0).inputs
    with torch.profiler.profile() as profile, session.inferring():
        session.forward(inputs)
    names = {event.name for event in profile.events()}
    assert "aten::linear" in names or "aten::addmm" in names
    assert not names & {"aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"}
