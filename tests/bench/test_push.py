"""Pushes over gloo against a plain broadcast of the same bytes, and deltas against full pushes, in turns."""

import multiprocessing as mp
import time
from statistics import median

import numpy as np
import pytest
import torch

from runtime.comm.buckets import buckets, is_flat
from runtime.comm.rendezvous import make_group, reach_store
from runtime.comm.weights.broadcast import BroadcastReceiver, BroadcastSender
from runtime.comm.weights.delta import Kept, apply
from runtime.config import Sync
from runtime.types import Manifest

pytestmark = pytest.mark.bench

MB = 1_000_000
LIMIT_S = 120.0
ROUNDS = 5
AT_LEAST = 0.4
"""Of a plain broadcast's speed, on two cores; most of the difference is the trainer's checksums."""


def engine(pipe):
    """Obeys one order after the other; says when each is done."""
    torch.set_num_threads(1)
    receiver = BroadcastReceiver(device="cpu", timeout_s=LIMIT_S)
    while (order := pipe.recv()) is not None:
        match order:
            case ("join", address):
                receiver.join(address, 1)
            case ("join plain", address):
                plain = make_group(address, 1, reach_store(address, 1, LIMIT_S), LIMIT_S)
            case ("hold", manifest):
                shapes = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
                holds = {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes}
                flat = torch.ones(sum(t.nbytes for t in holds.values()), dtype=torch.uint8)
            case "plain":
                plain.wait(plain.broadcast(flat))
            case "full":
                for cut in buckets(manifest):
                    what = (manifest.names[cut], manifest.dtypes[cut], manifest.shapes[cut])
                    for name, tensor in receiver.receive("push", *what, flat=is_flat(manifest, cut)):
                        holds[name].copy_(tensor)
            case "delta":
                for _ in buckets(manifest):
                    apply(receiver.receive_delta("push"), holds)
        pipe.send("done")


class Bench:
    """The trainer's side, and the engine that it drives."""

    def __init__(self):
        torch.set_num_threads(1)
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=engine, args=(theirs,), daemon=True)
        self.process.start()
        self.senders = {
            kind: BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=LIMIT_S) for kind in ("push", "plain")
        }
        self.form("push", "join", "push")
        self.form("plain", "join plain", "plain")

    def form(self, sender, order, name):
        address = self.senders[sender].open(name, 2)
        self.pipe.send((order, address))
        self.senders[sender].join(name)
        self.done()

    def done(self):
        assert self.pipe.poll(LIMIT_S) and self.pipe.recv() == "done"

    def hold(self, weights):
        self.weights = weights
        self.manifest = Manifest(
            names=tuple(weights),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in weights.values()),
            shapes=tuple(tuple(t.shape) for t in weights.values()),
            bucket_bytes=Sync().bucket_bytes,
        )
        self.flat = torch.ones(sum(t.nbytes for t in weights.values()), dtype=torch.uint8)
        self.pipe.send(("hold", self.manifest))
        self.done()

    def seconds(self, kind):
        start = time.perf_counter()
        self.pipe.send(kind)
        if kind == "plain":
            group = self.senders["plain"]._groups["plain"]
            group.wait(group.broadcast(self.flat))
        else:
            manifest = self.manifest if kind == "full" else self.manifest.since(0)
            self.senders["push"].push("push", manifest, iter(self.weights.items()))
        self.done()
        return time.perf_counter() - start

    def close(self):
        self.pipe.send(None)
        self.process.join(10)


@pytest.fixture(scope="module")
def bench():
    bench = Bench()
    yield bench
    bench.close()


def model(size):
    """Matrices and norms of bfloat16, as of a transformer, of about so many bytes."""
    width = 4096 if size > 1000 * MB else 1024 if size > 100 * MB else 256
    weights, i = {}, 0
    while (left := size - sum(t.nbytes for t in weights.values())) > 0:
        rows = max(1, min(4 * width, left // (2 * width)))
        weights[f"{i}.up"] = torch.randn(rows, width).bfloat16()
        weights[f"{i}.norm"] = torch.ones(width).bfloat16()
        i += 1
    return weights


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [4 * MB, 400 * MB, 2000 * MB])
def test_a_push_is_nearly_as_fast_as_a_plain_broadcast(bench, size):
    bench.hold(model(size))
    for kind in ("plain", "full"):
        bench.seconds(kind)
    ratios = [bench.seconds("plain") / bench.seconds("full") for _ in range(ROUNDS if size < 1000 * MB else 3)]
    print(
        f"\n{size / MB:.0f} MB: {median(ratios):.2f} of the speed of a plain broadcast ({bench.seconds('full'):.3f} s)"
    )
    assert median(ratios) >= AT_LEAST


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", [0.01, 0.03, 0.2])
def test_deltas_are_smaller_and_faster_than_full_pushes(bench, share):
    bench.hold(model(400 * MB))
    full = min(bench.seconds("full") for _ in range(3))
    kept, rng, times, sizes = Kept(), np.random.default_rng(0), [], []
    bench.senders["push"]._kept = kept
    kept.keep(list(bench.weights.items()))
    encode = kept.encode
    kept.encode = lambda tensors: sizes.append(len(made := encode(tensors))) or made
    for _ in range(3):
        for tensor in bench.weights.values():
            items = tensor.view(torch.int16).reshape(-1).numpy()
            items[rng.random(len(items), np.float32) < share] ^= 1
        sizes.clear()
        times.append(bench.seconds("delta"))
    bench.senders["push"]._kept = None
    part = sum(sizes) / len(bench.flat)
    print(f"\n{share:.0%} changed: {part:.1%} of the bytes, {min(times):.3f} s against {full:.3f} s")
    assert part < 1.6 * share + 0.005
