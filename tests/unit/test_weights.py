"""The weight channel between processes over gloo: exact bytes, digests, the names of who is missing, no leaks."""

import gc
import multiprocessing as mp
import socket
import time
import traceback
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.comm.buckets import ITEM_BYTES, buckets, is_flat, tensor_bytes
from runtime.comm.network import address_of, address_towards
from runtime.comm.rendezvous import listen_store
from runtime.comm.weights.broadcast import BroadcastReceiver, BroadcastSender
from runtime.comm.weights.tensors import digest, flat_bytes
from runtime.errors import ConfigError, PeerLost, WaitTimeout
from runtime.types import GroupAddress, Manifest

HOST = "127.0.0.1"
LIMIT_S = 20.0

# ---- other members: processes that obey this one over a pipe -----------------------------------------------------


def serve(pipe):
    receivers, held = {}, {}

    def receiver(timeout_s):
        return receivers.setdefault(timeout_s, BroadcastReceiver(device="cpu", timeout_s=timeout_s))

    def obey(order, *args):
        if order == "join":
            address, rank, timeout_s = args
            return receiver(timeout_s).join(address, rank)
        if order == "receive":
            group, manifest, timeout_s = args
            return [
                (n, str(t.dtype), tuple(t.shape), bytes(flat_bytes(t).numpy()), digest(t))
                for cut in buckets(manifest)
                for n, t in receiver(timeout_s).receive(
                    group,
                    manifest.names[cut],
                    manifest.dtypes[cut],
                    manifest.shapes[cut],
                    flat=is_flat(manifest, cut),
                    held=held,
                )
            ]
        if order == "hold":
            held.update((name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in args)
            return None
        if order == "held":
            return {name: digest(tensor) for name, tensor in held.items()}
        if order == "leave":
            group, timeout_s = args
            return receiver(timeout_s).leave(group)
        if order == "as_sglang":
            return as_sglang(*args)
        assert order == "resources"
        return resources()

    while (order := pipe.recv()) is not None:
        try:
            pipe.send((True, obey(*order)))
        except Exception as e:
            pipe.send((False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))


def as_sglang(address, num_bytes):
    """Join as a server does that makes its group with torch's own helper; what it received."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

    limit = timedelta(seconds=LIMIT_S)
    url = f"tcp://{address.host}:{address.port}"
    store, rank, world_size = next(rendezvous(url, 1, address.world_size, timeout=limit))
    store = PrefixStore(address.name, store)
    group, _ = _new_process_group_helper(world_size, rank, [], "gloo", store, group_name=address.name, timeout=limit)
    _world.pg_group_ranks[group] = {r: r for r in range(world_size)}
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    dist.destroy_process_group(group)
    return flat.numpy().tobytes()


def resources():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


class Member:
    def __init__(self):
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()

    def order(self, *order):
        self._pipe.send(order)

    def result(self):
        assert self._pipe.poll(LIMIT_S * 2), "no answer"
        return self._pipe.recv()

    def value(self):
        good, value = self.result()
        assert good, value
        return value

    def end(self):
        self._pipe.send(None)
        self.process.join(10)


@pytest.fixture(scope="module")
def members():
    members = [Member(), Member()]
    yield members
    for member in members:
        member.end()


@pytest.fixture
def sender():
    return BroadcastSender(HOST, "gloo", device="cpu", timeout_s=LIMIT_S)


def manifest_of(tensors, bucket_bytes):
    return Manifest(
        names=tuple(n for n, _ in tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in tensors),
        shapes=tuple(tuple(t.shape) for _, t in tensors),
        bucket_bytes=bucket_bytes,
    )


def form(sender, members, name, timeout_s=LIMIT_S):
    address = sender.open(name, 1 + len(members))
    for rank, member in enumerate(members, 1):
        member.order("join", address, rank, timeout_s)
    sender.join(name)
    for member in members:
        member.value()


def dissolve(sender, members, name, timeout_s=LIMIT_S):
    sender.close(name)
    for member in members:
        member.order("leave", name, timeout_s)
        member.value()


def some_weights():
    torch.manual_seed(0)
    return [
        ("scalar", torch.tensor(3.5)),
        ("bf16", torch.randn(33, 7).bfloat16()),
        ("odd", torch.arange(3, dtype=torch.uint8)),
        ("fp32 behind odd bytes", torch.randn(5, 5)),
        ("none", torch.empty(0, 4)),
        ("large", torch.randn(1000, 30)),
        ("fp16", torch.randn(9).half()),
        ("transposed", torch.randn(6, 4).T),
        ("int64", torch.arange(10)),
        ("nan", torch.tensor([float("nan"), -0.0, float("inf")])),
    ]


# ---- pushes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 500, 1 << 20])
def test_every_member_receives_the_exact_bytes(sender, members, bucket_bytes):
    weights = some_weights()
    manifest = manifest_of(weights, bucket_bytes)
    form(sender, members, "exact")
    for _ in range(2):
        for member in members:
            member.order("receive", "exact", manifest, LIMIT_S)
        digests = sender.push("exact", manifest, iter(weights))
        assert digests == {name: digest(tensor) for name, tensor in weights}
        wanted = [(n, str(t.dtype), tuple(t.shape), bytes(flat_bytes(t).numpy()), digests[n]) for n, t in weights]
        for member in members:
            assert member.value() == wanted
    dissolve(sender, members, "exact")


def test_large_tensors_go_straight_into_those_that_are_held_if_all_of_a_bucket_fit(sender, members):
    torch.manual_seed(0)
    weights = [("a", torch.randn(700, 500)), ("b", torch.randn(900, 800).bfloat16()), ("c", torch.randn(600, 601).T)]
    manifest = manifest_of(weights, 3_000_000)
    assert len(buckets(manifest)) == 2 and not any(is_flat(manifest, cut) for cut in buckets(manifest))
    form(sender, members, "large")
    holds = list(zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True))
    for member, held in zip(members, (holds, [holds[0], ("b", "float32", (900, 800)), holds[2]]), strict=True):
        member.order("hold", *held)
        member.value()
        member.order("receive", "large", manifest, LIMIT_S)
    digests = sender.push("large", manifest, iter(weights))
    for member, written in zip(members, (digests, {"c": digests["c"]}), strict=True):
        assert {name: seen for name, *_, seen in member.value()} == digests
        member.order("held")
        assert {n: seen for n, seen in member.value().items() if digests[n] == seen} == written
    dissolve(sender, members, "large")


def test_two_groups_live_side_by_side(sender, members):
    weights = some_weights()
    manifest = manifest_of(weights, 500)
    form(sender, members, "all")
    form(sender, members[1:], "alone")
    for name, some in (("alone", members[1:]), ("all", members)):
        for member in some:
            member.order("receive", name, manifest, LIMIT_S)
        digests = sender.push(name, manifest, iter(weights))
        for member in some:
            assert [d for *_, d in member.value()] == list(digests.values())
    dissolve(sender, members[1:], "alone")
    dissolve(sender, members, "all")


def test_a_member_that_uses_torchs_own_helper_can_join(sender, members):
    weights = some_weights()
    manifest = manifest_of(weights, 1 << 20)
    address = sender.open("foreign", 2)
    members[0].order("as_sglang", address, sum(map(tensor_bytes, manifest.dtypes, manifest.shapes)))
    sender.join("foreign")
    sender.push("foreign", manifest, iter(weights))
    assert members[0].value() == b"".join(bytes(flat_bytes(t).numpy()) for _, t in weights)
    sender.close("foreign")


def test_weights_that_break_the_manifest_are_not_sent(sender, members):
    weights = some_weights()
    manifest = manifest_of([(n, t.float()) for n, t in weights], 1 << 20)
    form(sender, members[:1], "wrong")
    with pytest.raises(AssertionError, match="bf16"):
        sender.push("wrong", manifest, iter(weights))
    dissolve(sender, members[:1], "wrong")


# ---- members that fail -------------------------------------------------------------------------------------------


def test_a_member_that_does_not_come_is_named_by_all_others(members):
    sender = BroadcastSender(HOST, "gloo", device="cpu", timeout_s=2.0)
    address = sender.open("gap", 3)
    members[1].order("join", address, 2, 2.0)
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"rank 0 of weight group gap waited 2\.\d s for rank 1:"):
        sender.join("gap")
    assert time.monotonic() - start < 4.0
    good, reason = members[1].result()
    assert not good and "WaitTimeout: rank 2 of weight group gap waited 2." in reason
    sender.close("gap")


def test_a_sender_that_is_not_there_is_named(members):
    with socket.create_server((HOST, 0)) as s:
        port = s.getsockname()[1]
    address = GroupAddress(name="nobody", host=HOST, port=port, world_size=2, backend="gloo")
    members[0].order("join", address, 1, 1.0)
    good, reason = members[0].result()
    assert not good and f"for rank 0 at {HOST}:{port}" in reason and "WaitTimeout" in reason


def test_a_member_killed_in_a_push_is_a_lost_peer(members):
    victim = Member()
    victim.order("resources")
    victim.value()  # it has imported torch: the time of that is not the group's
    sender = BroadcastSender(HOST, "gloo", device="cpu", timeout_s=4.0)
    weights = [(str(i), torch.zeros(500_000)) for i in range(40)]
    manifest = manifest_of(weights, 2_000_000)
    form(sender, [members[0], victim], "broken", 4.0)
    members[0].order("receive", "broken", manifest, 4.0)

    def yields():
        for i, item in enumerate(weights):
            if i == 20:
                victim.process.kill()
                victim.process.join()
            yield item

    start = time.monotonic()
    with pytest.raises(PeerLost, match="weight group broken broke"):
        sender.push("broken", manifest, yields())
    assert time.monotonic() - start < 6.0
    sender.close("broken")
    good, reason = members[0].result()
    assert not good and "PeerLost" in reason
    members[0].order("leave", "broken", 4.0)
    members[0].value()


def test_groups_are_rebuilt_without_end(sender, members):
    weights = [("w", torch.ones(10))]
    manifest = manifest_of(weights, 100)
    counts = []
    for i in range(50):
        name = f"group-{i % 2}"
        form(sender, members[:1], name)
        members[0].order("receive", name, manifest, LIMIT_S)
        sender.push(name, manifest, iter(weights))
        members[0].value()
        dissolve(sender, members[:1], name)
        if i in (4, 49):
            members[0].order("resources")
            counts.append((resources(), members[0].value()))
    assert counts[0] == counts[1]


# ---- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_the_digest_sees_one_flipped_bit_and_dtype_and_shape(dtype):
    tensor = torch.arange(1000).to(dtype).reshape(10, 100)
    flipped = tensor.clone()
    flat_bytes(flipped)[777] ^= 1
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.T.contiguous().T)
    others = [flipped, tensor.reshape(100, 10), tensor.view(torch.int8).reshape(-1)]
    assert len({digest(t) for t in [tensor, *others]}) == 4


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=20), st.integers(1, 2000))
def test_buckets_are_whole_tensors_in_order_within_the_limit(tensors, bucket_bytes):
    names = tuple(str(i) for i in range(len(tensors)))
    dtypes = tuple(d for d, _ in tensors)
    manifest = Manifest(names=names, dtypes=dtypes, shapes=tuple(s for _, s in tensors), bucket_bytes=bucket_bytes)
    cuts = buckets(manifest)
    assert tuple(n for cut in cuts for n in names[cut]) == names
    sizes = [[tensor_bytes(d, s) for d, s in tensors[cut]] for cut in cuts]
    assert all(some for some in sizes)
    assert all(sum(some) <= bucket_bytes or len(some) == 1 for some in sizes)
    assert all(sum(some) + after[0] > bucket_bytes for some, after in pairwise(sizes)), "full"


@given(st.permutations(["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa"]), st.integers(1, 12))
def test_what_sglang_makes_one_tensor_of_comes_in_one_bucket(parts, limit):
    names = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ["mlp", *parts, "o_proj"]]
    manifest = Manifest(names=tuple(names), dtypes=("uint8",) * 18, shapes=((1,),) * 18, bucket_bytes=limit)
    held = [names[cut] for cut in buckets(manifest)]
    assert [name for some in held for name in some] == names
    for one, two in ((n, n.replace("q_a_proj", "kv_a_proj_with_mqa")) for n in names if "q_a_proj" in n):
        assert [one in some for some in held] == [two in some for some in held]
    between = sorted(parts.index(part) for part in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert max(map(len, held)) <= max(limit, between[1] - between[0] + 1)


def test_item_sizes_are_torchs():
    assert all(getattr(torch, name).itemsize == size for name, size in ITEM_BYTES.items())


def test_the_store_listens_on_one_address_only():
    store, port = listen_store(HOST, 5.0)
    socket.create_connection((HOST, port), 1).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    del store


def test_addresses():
    assert address_of("") == address_of("lo") == HOST
    assert address_towards("127.0.0.9") == HOST or address_towards("127.0.0.9") == "127.0.0.9"
    with pytest.raises(ConfigError, match=r"'nope0' .*\n.*choose one of: .*lo"):
        address_of("nope0")
