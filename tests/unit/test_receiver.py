"""Where an engine receives a bucket that comes as one piece: straight into what it holds, if that can lie in line."""

import numpy as np
import pytest
import torch

from runtime.comm.buckets import tensor_bytes
from runtime.comm.weights.broadcast import BroadcastReceiver
from runtime.comm.weights.tensors import flat_bytes

SPECS = {"a": ("float32", (8, 16)), "b": ("bfloat16", (64,)), "none": ("float32", (0, 4)), "c": ("float32", (3, 5))}


class Wire:
    """A group whose sender has one piece to send."""

    def __init__(self, piece):
        self.piece = piece

    def broadcast(self, tensor):
        tensor.copy_(self.piece)

    def wait(self, *works):
        pass


def zeros(name):
    dtype, shape = SPECS[name]
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def parameters(names):
    """Each with memory of its own."""
    return {name: torch.nn.Parameter(zeros(name), requires_grad=False) for name in names}


def parts(names):
    """Of one memory, in this order."""
    memory, found, at = torch.zeros(1 << 12, dtype=torch.uint8), {}, 64
    for name in names:
        dtype, shape = SPECS[name]
        size = tensor_bytes(dtype, shape)
        found[name] = memory[at : at + size].view(getattr(torch, dtype)).view(shape)
        at += size
    return found


def views(names):
    """Of parameters that are others' business."""
    return {name: tensor.data.view(tensor.shape) for name, tensor in parameters(names).items()}


def neighbours(names):
    """One after the other, and each a memory of its own."""
    memory, at, found = np.zeros(1 << 12, np.uint8), 0, {}
    for name in names:
        dtype, shape = SPECS[name]
        piece = torch.from_numpy(memory[at : at + tensor_bytes(dtype, shape)])
        found[name] = piece.view(getattr(torch, dtype)).view(shape)
        at += len(piece)
    return found


CASES = {
    "parameters": (parameters, "a b none c", True),
    "an odd place": (parameters, "c a b", False),
    "parts in line": (parts, "a b none c", True),
    "some of the parts": (parts, "a c", False),
    "views": (views, "a b c", False),
    "neighbours": (neighbours, "a b c", False),
    "one view": (views, "a", True),
}


@pytest.mark.parametrize(("hold", "order", "straight"), CASES.values(), ids=list(CASES))
def test_one_piece_goes_straight_into_what_lies_in_line_or_may_be_moved(hold, order, straight):
    names = order.split()
    held = hold([*SPECS] if hold is parts and not straight else names)
    before = {name: tensor.untyped_storage().data_ptr() for name, tensor in held.items()}
    what = (names, [SPECS[name][0] for name in names], [SPECS[name][1] for name in names])
    receiver = BroadcastReceiver(device="cpu", timeout_s=1.0)
    places = []
    for i in range(2):
        sent = {name: zeros(name) + 1.5 + i for name in names}
        receiver._groups["g"] = Wire(torch.cat([flat_bytes(tensor) for tensor in sent.values()]))
        received = receiver.receive("g", *what, held=held)
        assert [name for name, _ in received] == names and all(tensor.equal(sent[name]) for name, tensor in received)
        assert all((tensor is held[name]) == straight for name, tensor in received)
        places.append({name: tensor.untyped_storage().data_ptr() for name, tensor in held.items()})
    assert places[0] == places[1], "moved once"
    if hold is not parameters or not straight:
        assert places[0] == before
    else:
        assert len({*places[0].values()}) == 1 and all(t.data_ptr() % 64 == 0 for t in held.values() if t.numel())
