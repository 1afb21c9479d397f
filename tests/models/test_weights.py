"""Files of weights: which state dict is loaded, under which names, and what is refused with which reason."""

from __future__ import annotations

import argparse
import pickle  # noqa: TID251 (refused files)
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from perfexp.errors import UserError
from perfexp.models.weights import load_weights

State = dict[str, torch.Tensor]


def module() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2)
    )


def state_dict() -> State:
    state = module().state_dict()
    return {
        name: torch.full_like(value, number) for number, (name, value) in enumerate(state.items())
    }


def with_prefix(prefix: str) -> State:
    return {prefix + name: value for name, value in state_dict().items()}


def loaded(content: Any, file: Path) -> State:
    torch.save(content, file)
    target = module()
    load_weights(target, file)
    return target.state_dict()


RANDOM_STATE = torch.zeros(8, dtype=torch.uint8)
CHECKPOINTS = {
    "one level": lambda: {"net": state_dict(), "acc": 1.0},
    "with other tensors": lambda: {
        "params_ema": state_dict(),
        "loss": torch.tensor(0.1),
        "rng_state": RANDOM_STATE,
    },
    "two levels": lambda: {"ema": {"weights": state_dict()}, "epoch": 3},
    "with an optimizer": lambda: {
        "net": state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
    },
    "the usual of two": lambda: {"state_dict_ema": with_prefix("no."), "state_dict": state_dict()},
    "the first of the usual": lambda: {"model": with_prefix("no."), "state_dict": state_dict()},
    "usual, below": lambda: {
        "swa": {"state_dict": state_dict()},
        "callbacks": {"best": {"score": torch.tensor(0.5)}},
    },
    "compiled, then parallel": lambda: with_prefix("_orig_mod.module."),
    "parallel, then compiled": lambda: with_prefix("module._orig_mod."),
    "three": lambda: {"state_dict": with_prefix("model.net._orig_mod.")},
    "twice": lambda: with_prefix("net.model.module.module."),
    "backbone": lambda: with_prefix("module.backbone."),
    "compiled inside": lambda: {
        name.replace("0.", "0._orig_mod."): value for name, value in state_dict().items()
    },
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_state_dict_is_found_without_wrapper_prefixes(
    checkpoint: Callable[[], Any], tmp_path: Path
) -> None:
    found = loaded(checkpoint(), tmp_path / "file.pth")
    assert all(torch.equal(found[name], value) for name, value in state_dict().items())


def test_several_state_dicts_without_a_usual_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"holds 2 state dicts: params, params_ema\. Save one of them"
    ):
        loaded({"params": state_dict(), "params_ema": state_dict()}, tmp_path / "file.pth")


def test_a_prefix_that_is_the_modules_own_stays(tmp_path: Path) -> None:
    target = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 2)})
    state = {
        f"module.{name}": torch.ones_like(value) for name, value in target.state_dict().items()
    }
    torch.save(state, tmp_path / "file.pth")
    load_weights(target, tmp_path / "file.pth")
    assert torch.equal(target.state_dict()["model.weight"], torch.ones(2, 2))


def test_a_prefix_that_only_some_names_have_stays_and_is_named(tmp_path: Path) -> None:
    mixed = with_prefix("backbone.") | {"head.weight": torch.ones(2)}
    with pytest.raises(UserError, match=r"missing: 0\.weight.*unexpected: backbone\.0\.weight"):
        loaded(mixed, tmp_path / "file.pth")


STATE = {"fc.weight": torch.ones(2, 2)}
OTHER_FILES = {
    "git-lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
        "a pointer of Git LFS.*git lfs pull",
    ),
    "HTML": (b"\n<!DOCTYPE html><html>", "a web page.*Download the file itself"),
    "pickle of NumPy": (
        pickle.dumps({"fc.weight": np.ones(2)}),
        "a pickle of Python.*as tensors with torch.save",
    ),
    "pickle of torch": (
        pickle.dumps(STATE, protocol=2),
        "a pickle of Python.*as tensors with torch.save",
    ),
    "npy": (b"\x93NUMPY\x01\0v", r"an array of NumPy.*torch\.from_numpy"),
    "empty": (b"", "it is empty.*again"),
    "gzip": (b"\x1f\x8b\x08abc", "compressed by gzip.*Unpack"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    "text": (b'{"message": "Not found"}', "it is text.*Choose another file"),
    "safetensors": (b"\x02" + bytes(7) + b"{}", "a safetensors file.*load_file"),
    "cut off": (b"PK\x03\x04" + bytes(300), "cut off or damaged.*again"),
}


@pytest.mark.parametrize(("content", "message"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_file_of_another_kind_is_refused_with_a_remedy(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file.pth").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_weights(module(), tmp_path / "file.pth")
    assert "Weights only load failed" not in str(caught.value)


def test_archives_of_other_programs_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "file.npz", weight=np.ones(2))
    with pytest.raises(UserError, match=r"an archive of another program, as \.npz"):
        load_weights(module(), tmp_path / "file.npz")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_refused_with_a_remedy(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "file.pth")
    with pytest.raises(
        UserError, match=r"a TorchScript archive.*torch\.jit\.load\(FILE\)\.state_dict\(\)"
    ):
        load_weights(module(), tmp_path / "file.pth")


OBJECTS = {
    "Namespace": (
        {"model": STATE, "args": argparse.Namespace(a=1)},
        r"a class \(argparse\.Namespace\).*tensors alone",
    ),
    "OmegaConf": (
        {"model": STATE, "cfg": OmegaConf.create({"a": 1})},
        r"a class \(omegaconf\..*tensors alone",
    ),
    "NumPy": ({"model": STATE, "acc": np.float64(1)}, r"numbers of NumPy \(numpy\..*tensors alone"),
    "array": ({"model": STATE, "mean": np.ones(3)}, r"numbers of NumPy \(numpy\..*tensors alone"),
    "model": (torch.nn.Linear(2, 2), r"a pickled model \(torch\.nn\..*Save its state dict"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("content", "message"), OBJECTS.values(), ids=OBJECTS)
def test_weights_with_objects_are_refused_with_their_class(
    content: Any, message: str, zipped: bool, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "file.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=message) as caught:
        load_weights(module(), tmp_path / "file.pth")
    assert "Weights only load failed" not in str(caught.value)


def test_weights_without_numbers_are_refused(tmp_path: Path) -> None:
    stand_ins = {name: value.to("meta") for name, value in state_dict().items()}
    with pytest.raises(UserError, match="shapes without numbers") as told:
        loaded(stand_ins, tmp_path / "meta.pt")
    assert len(str(told.value)) < 300
