"""MACs and parameters of torchvision's models are those that torchvision publishes; the benchmark compares them all."""

import pytest
import torch

from perfexp.cost.count import count
from perfexp.models.torchvision_import import import_torchvision
from tests.support.published_models import ROUNDING, TOLERANCE, build, size_of
from tests.support.selection import first_always

#: One of each kind.
NAMES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", first_always("README: FLOPs", NAMES))
def test_macs_and_parameters_are_those_that_are_published(name):
    models = import_torchvision().models
    weights = models.get_model_weights(name).DEFAULT
    size = size_of(weights)
    work = count(build(models, name, size), torch.Size((1, 3, size, size)))
    published = weights.meta["_ops"]
    assert work.macs * 1e-9 == pytest.approx(published, rel=TOLERANCE, abs=ROUNDING)
    assert work.parameters == weights.meta["num_params"]
    assert work.uncounted == ()
    assert work.macs == sum(row.macs for row in work.rows)
    if name != "inception_v3":  # whose auxiliary classifier is there and is not called
        assert sum(row.parameters for row in work.rows) == work.parameters


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0", "resnet50"])
def test_a_training_step_has_six_flops_per_published_mac(name):
    models = import_torchvision().models
    published = models.get_model_weights(name).DEFAULT.meta["_ops"]
    step = count(build(models, name, 224).train(), torch.Size((2, 3, 224, 224)), backward=True)
    assert step.contraction_flops * 1e-9 == pytest.approx(2 * 6 * published, rel=0.01), (
        "a batch of two"
    )
