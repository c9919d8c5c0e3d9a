"""A delta's way through a model that fuses, cuts and casts what it loads, held to a model that loads everything."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from runtime.comm.buckets import buckets
from runtime.comm.weights.delta import Kept
from runtime.comm.weights.loader import load
from tests.contract.live import manifest_of


class Fusing(nn.Module):
    """Loads as SGLang's models do: rank 1 of two."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 8), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.words = nn.Parameter(torch.zeros(20, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float32), requires_grad=False)
        self.halves = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, named):
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(getattr(self, f"load_{name}"), tensor) for name, tensor in named]
        for future in done:
            future.result()

    def fuse(self, into, tensor):
        into.data.copy_(tensor.narrow(0, 4, 4))

    def load_q(self, tensor):
        self.fuse(self.qkv[:4], tensor)

    def load_k(self, tensor):
        self.fuse(self.qkv[4:8], tensor[:].contiguous())

    def load_v(self, tensor):
        self.fuse(self.qkv[8:], tensor.t().reshape(8, 8).T)

    def load_down(self, tensor):
        self.down.data.copy_(torch.cat(tensor.chunk(2, dim=1)[1:], dim=0))

    def load_words(self, tensor):
        self.words.data.copy_(nn.functional.pad(tensor, (0, 0, 0, 2)))

    def load_scale(self, tensor):
        self.scale.data.fill_(tensor.item())

    def load_bias(self, tensor):
        self.bias.data.copy_(tensor)

    def load_halves(self, tensor):
        self.halves[:3].copy_(tensor[:3])
        self.halves[3:].copy_(tensor.split(3)[1])

    def load_doubled(self, tensor):
        self.bias.copy_(tensor * 2)


def some_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "down": (8, 8), "words": (18, 8), "scale": (1,)}
    found = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return found | {name: torch.randn(6, generator=generator).bfloat16() for name in ("bias", "halves")}


@pytest.mark.parametrize("in_inference", [False, True])
def test_a_delta_leaves_what_loading_everything_leaves(in_inference):
    taking, wanted, kept, old = Fusing(), Fusing(), Kept(), some_weights(0)
    kept.keep(list(old.items()))
    taking.load_weights(old.items())
    manifest = manifest_of(old, bucket_bytes=600)
    assert len(buckets(manifest)) > 1
    for share in (0.2, 0.0, 0.01, 1.0):
        every = {name: tensor + 1 for name, tensor in old.items()}
        new = {name: torch.where(torch.rand(t.shape) < share, every[name], t) for name, t in old.items()}
        if share == 0.2:
            new["q"][0, 0], new["halves"][5] = torch.nan, -0.0
        with torch.inference_mode(in_inference):
            for place in buckets(manifest):
                payload = kept.encode([(name, new[name]) for name in manifest.names[place]])
                assert load(taking, payload, manifest, place) == ""
        wanted.load_weights(new.items())
        for (name, one), other in zip(taking.named_parameters(), wanted.parameters(), strict=True):
            assert one.view(torch.uint8).equal(other.view(torch.uint8)), name
        old = new


def test_a_model_that_computes_with_what_it_loads_is_found_out_and_so_is_damage():
    kept, old = Kept(), {"q": torch.zeros(8, 8), "doubled": torch.zeros(6)}
    kept.keep(list(old.items()))
    manifest, model = manifest_of(old), Fusing()
    payload = kept.encode([("q", old["q"]), ("doubled", torch.tensor([0.0, 0, 0, 0, 0, 1]))])
    before = [p.clone() for p in model.parameters()]
    damaged = payload.clone()
    damaged[-1] ^= 1
    assert "the delta of tensor 'doubled' was damaged" in load(model, damaged, manifest, slice(0, 2))
    assert all(map(torch.equal, before, model.parameters())), "nothing of a damaged bucket is taken"
    assert "computes mul of what it loads" in load(model, payload, manifest, slice(0, 2))
    assert "does not fit its 20 bytes" in load(
        model, payload, manifest_of(old | {"doubled": torch.zeros(5)}), slice(0, 2)
    )
