"""What a forked process changes in torch, so that stand-ins for CUDA tensors work there, computes the same."""

import os

import pytest
import torch
from torch import nn

from perfexp.cost import trial
from perfexp.cost.count import _count, count
from perfexp.cost.trial import isolated
from perfexp.host.forked import Ended, Forked


class Everything(nn.Module):
    """Calls every function that is replaced."""

    def __init__(self):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(self.depthwise(x)).to(torch.float32)
        x[:, :1] = x[:, 1:2]
        kept = torch.empty_like(x).copy_(x.transpose(2, 3).contiguous())
        tokens = kept.flatten(2)[:, None, 0, :8] * torch.tensor(2.0, device=x.device)
        mask = ~torch.ones(1, 1, dtype=torch.bool)
        return self.attention(tokens, tokens, tokens, attn_mask=mask)[0]


@pytest.mark.parametrize("trains", [False, True])
def test_the_work_is_the_same_with_everything_replaced(trains):
    def replaced():
        trial.leave_device_unselected(0)
        return _count(model, (torch.Size((2, 4, 10, 10)),), {}, trains)

    model = Everything().train(trains)
    assert isolated(replaced)() == count(model, torch.Size((2, 4, 10, 10)), backward=trains)


def test_a_forked_process_that_hangs_or_ends_is_reported(monkeypatch):
    monkeypatch.setattr("perfexp.host.forked._TIMEOUT_SECONDS", 0.2)
    with (
        Forked(lambda: os.read(os.pipe()[0], 1)) as hanging,
        pytest.raises(Ended, match=r"within 0 s"),
    ):
        hanging()
    with Forked(lambda: os._exit(3)) as ending, pytest.raises(Ended, match="exit code 3"):
        ending()
    Forked(lambda: 1).close()


def test_calls_in_a_fork_share_its_memory_and_not_the_parents():
    numbers = []
    with Forked(lambda number: numbers.append(number) or len(numbers)) as forked:
        assert [forked(5), forked(6)] == [1, 2]
    assert numbers == []
    with pytest.raises(Ended):
        forked(7)
