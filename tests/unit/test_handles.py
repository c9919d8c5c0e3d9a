"""Memory that a trainer rank lends: what a reader finds there, and that nothing of it is left."""

import base64
import io
import os
import pickle

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from runtime.comm.weights import handles
from runtime.comm.weights.handles import KEPT, SHARED, Lender
from runtime.comm.weights.tensors import flat_bytes
from tests.contract.live import manifest_of

TAKEN = {
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}
"""Of what SGLang 0.5.23 unpickles, that which these handles need."""


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) in TAKEN
        return super().find_class(module, name)


def read(handle):
    """(name, tensor) as SGLang makes them."""
    bucket = Reader(io.BytesIO(base64.b64decode(handle))).load()
    flat = bucket["flattened_tensor"]
    return [(x.name, flat[x.start_idx : x.end_idx].view(x.dtype).reshape(x.shape)) for x in bucket["metadata"]]


def shared():
    """This process's files in shared memory."""
    return set(SHARED.glob(f"torch_{os.getpid()}_*"))


@pytest.fixture
def lender():
    before = shared()
    lender = Lender(torch.device("cpu"))
    yield lender
    lender.take_back()
    assert shared() == before


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "odd": torch.arange(3, dtype=torch.uint8),
        "float32 behind odd bytes": torch.randn(5, 5),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "transposed": torch.randn(6, 4).T,
        "bfloat16": torch.randn(33, 7).bfloat16(),
        "large": torch.randn(1000, 30),
    }


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_readers_find_the_bytes(lender, tensors, bucket_bytes):
    manifest = manifest_of(tensors, bucket_bytes)
    lender.begin(manifest, iter(tensors.items()))
    found = []
    while len(found) < len(tensors):
        handle = lender.lend(2)
        read(handle)
        found += [(name, tensor.clone()) for name, tensor in read(handle)]
    assert [name for name, _ in found] == list(tensors)
    for name, tensor in found:
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert flat_bytes(tensor).equal(flat_bytes(tensors[name]))


@pytest.mark.parametrize("num_read", [0, 4, 10])
def test_memory_goes_whether_readers_came_or_not(lender, num_read):
    """The last ones do not come, or still have it when it is taken back, or when the next push begins."""
    weights = {str(i): torch.full((100,), float(i)) for i in range(10)}
    before, had = shared(), []
    for _ in range(2):
        lender.begin(manifest_of(weights, 400), iter(weights.items()))
        for i in range(10):
            handle = lender.lend(1)
            had += read(handle) if i < num_read else []
            assert len(shared() - before) == min(i + 1, KEPT)
    lender.take_back()
    assert shared() == before
    assert len(had) == 2 * num_read and all(tensor.eq(float(name)).all() for name, tensor in had), "still mapped"
    had.clear()
    assert shared() == before


def test_a_rank_that_no_engine_reads_from_shares_nothing(lender, tensors):
    before = shared()
    gathered = []

    def weights():
        for item in tensors.items():
            gathered.append(item[0])
            yield item

    lender.begin(manifest_of(tensors, 1 << 20), weights())
    assert lender.lend(0) == "" and shared() == before
    assert gathered == list(tensors), "it takes part all the same"


def test_a_handle_of_a_gpu_names_it_so_that_an_engine_that_sees_others_finds_it(monkeypatch):
    """With the driver's part played: whether it maps the memory is for tests/gpu to say."""
    shared = (b"memory", 64, 0, False, b"/counters", 7, b"event", True)

    def reduce_tensor(flat):
        return rebuild_cuda_tensor, (Tensor, flat.shape, flat.stride(), 0, TypedStorage, flat.dtype, 3, *shared)

    class GpuReader(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
                return lambda *args: args
            assert (module, name) in TAKEN | {("torch.storage", "TypedStorage")}
            return super().find_class(module, name)

    released = []
    monkeypatch.setattr(handles, "is_gpu", lambda device: True)
    monkeypatch.setattr(handles, "uuid", lambda device: "GPU-6f1c")
    monkeypatch.setattr(handles, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(TypedStorage, "_release_ipc_counter", lambda *args, device: released.append(args))
    lender = Lender(torch.device("cpu"))
    lender.begin(manifest_of({"w": torch.ones(3)}), iter({"w": torch.ones(3)}.items()))
    bucket = GpuReader(io.BytesIO(base64.b64decode(lender.lend(1)))).load()
    assert bucket["flattened_tensor"] == (Tensor, (12,), (1,), 0, TypedStorage, torch.uint8, "GPU-6f1c", *shared)
    assert not released
    lender.take_back()
    assert released == [(b"/counters", 7)], "as if its reader had said so, which may be gone"
