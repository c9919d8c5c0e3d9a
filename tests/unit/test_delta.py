"""What changed between two versions of a bucket, against the plain bytes, and how a damaged one is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.comm.weights.delta import Damaged, Kept, apply
from runtime.comm.weights.folder import FolderSender, read
from runtime.errors import ConfigError
from runtime.types import Manifest

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bucket(seed, dtypes, num_items):
    rng = np.random.default_rng(seed)
    tensors = [torch.empty(n, dtype=d) for d, n in zip(dtypes, num_items, strict=True)]
    for tensor in tensors:
        tensor.view(torch.uint8).numpy()[...] = rng.integers(0, 2, tensor.nbytes, np.uint8)
    return [(str(i), tensor.reshape(-1, 1)) for i, tensor in enumerate(tensors)]


def changed(tensors, share, seed):
    rng, new = np.random.default_rng(seed), []
    for name, tensor in tensors:
        copy = tensor.clone()
        items = copy.reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())
        items[rng.random(len(items)) < share] ^= 3
        new.append((name, copy))
    return new


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 255, 256, 257, 5000])), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]),
    st.integers(0, 99),
)
def test_engines_hold_the_new_bytes_after_any_number_of_deltas(kinds, share, seed):
    old = bucket(seed, *zip(*kinds, strict=True))
    kept, holds = Kept(), {name: tensor.clone() for name, tensor in old}
    kept.keep(old)
    for step in range(3):
        new = changed(old, share, seed + step)
        payload = kept.encode(new)
        assert len(payload) <= sum(t.nbytes for _, t in new) + 8 + 40 * len(new)
        assert apply(payload, holds) == [name for name, _ in new]
        assert [bits(holds[name]) for name, _ in new] == [bits(tensor) for _, tensor in new]
        old = new


@pytest.mark.parametrize(("share", "bound"), [(0.01, 0.018), (0.03, 0.047), (0.2, 0.31)])
def test_a_change_costs_little_more_than_its_new_bytes(share, bound):
    """Of bfloat16: 2 bytes for the value, one for the place."""
    old = [("w", torch.randn(500, 1000).bfloat16())]
    kept = Kept()
    kept.keep(old)
    assert len(kept.encode(changed(old, share, 0))) / 1e6 < bound


def test_whatever_byte_is_damaged_it_is_found():
    old = bucket(0, (torch.float32, torch.bfloat16), (300, 300))
    kept = Kept()
    kept.keep(old)
    payload = kept.encode(changed(old, 0.1, 1))
    for at in range(len(payload)):
        damaged, holds = payload.clone(), {name: tensor.clone() for name, tensor in old}
        damaged[at] ^= 255
        with pytest.raises(Damaged):
            apply(damaged, holds)
    for size in (0, 5, len(payload) - 1):
        with pytest.raises(Damaged):
            apply(payload[:size].clone(), dict(old))
    with pytest.raises(Damaged, match="'1', which the model does not have"):
        apply(payload, dict(old[:1]))
    with pytest.raises(Damaged, match="'1' does not fit its 10 bytes"):
        apply(payload, {"0": old[0][1].clone(), "1": torch.zeros(5, dtype=torch.bfloat16)})


# ---- folders


def manifest_of(tensors):
    return Manifest(
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in tensors),
        shapes=tuple(tuple(t.shape) for _, t in tensors),
        bucket_bytes=600,
    )


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_version_has_its_name_when_it_is_whole(tmp_path, in_memory):
    tensors = bucket(0, DTYPES, (100, 1, 5, 0, 9))
    manifest, folder = manifest_of(tensors), tmp_path / "run" / "1"

    def half():
        yield from tensors[:2]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        FolderSender(in_memory=in_memory).push(str(folder), manifest, half())
    assert not folder.exists() and (tmp_path / "run" / "1.part").exists()
    sender = FolderSender(in_memory=in_memory)
    sender.push(str(folder), manifest, iter(tensors))
    assert [path.name for path in folder.parent.iterdir()] == ["1"], "what an earlier attempt left is gone"
    assert all(path.is_symlink() == in_memory for path in folder.iterdir())
    found = {name: tensor for named in read(folder) for name, tensor in named.items()}
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors
    }
    sender.close(str(folder))
    assert not folder.exists()
    with pytest.raises(Damaged, match="holds no"):
        list(read(folder))


def test_a_folder_that_cannot_be_made_or_is_full_is_the_users_to_change():
    nothing = Manifest(names=(), dtypes=(), shapes=(), bucket_bytes=1)
    with pytest.raises(ConfigError, match=r"sync\.folder: /proc/x cannot be made"):
        FolderSender().push("/proc/x/0", nothing, iter(()))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        FolderSender()._write("1", Path("/dev/full"), [torch.zeros(1)])
