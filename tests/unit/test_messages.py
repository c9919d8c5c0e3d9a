"""The codec and the stream framing under random messages, and under damage."""

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.comm import framing
from runtime.comm.codec import decode, encode
from runtime.comm.commands import Answer, Command, Train
from runtime.comm.messages import Finished, FromAgent, Journal, Restart, ToAgent, Work
from runtime.types import Completion, Group, Lease, MicroBatch, Prompt, Sample, SamplingParams, Share, Totals

DTYPES = ["<i4", "<f4", "<f8", "<f2", "|b1", "|u1", "<i8", "<c8", ">f4"]


def arrays(dtypes=tuple(DTYPES)):
    shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)

    def make(draw):
        dtype, shape, seed = draw
        data = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize)
        made = np.frombuffer(data, np.uint8).copy()
        return (made % 2 if dtype == "|b1" else made).view(dtype).reshape(shape)

    return st.tuples(st.sampled_from(dtypes), shapes, st.integers(0, 9)).map(make)


spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
prompts = st.builds(
    Prompt, id=st.text(max_size=9), answer=json_values, dataset=st.text(max_size=5), tokens=st.just((1, 2))
)
samples = st.builds(
    Sample,
    prompt_id=st.text(max_size=9),
    index=st.integers(0, 9),
    tokens=arrays(),
    loss_mask=arrays(),
    logprobs=arrays(),
    versions=spans,
    reward=st.none() | st.floats(allow_nan=False),
)
completions = st.builds(
    Completion, tokens=arrays(), logprobs=arrays(), versions=spans, finish=st.sampled_from(["stop", "length", "abort"])
)
journals = st.lists(st.lists(completions, max_size=2).map(tuple), max_size=2).map(tuple)
groups = st.builds(
    Group,
    lease=st.integers(0, 99),
    prompt=prompts,
    samples=st.lists(samples, max_size=3).map(tuple),
    version=st.just(3),
)
leases = st.builds(
    Lease,
    number=st.integers(0, 99),
    prompt=prompts,
    num_samples=st.just(2),
    version=st.just(0),
    params=st.builds(SamplingParams, temperature=st.floats(0, 2)),
)
micro_batches = st.builds(
    MicroBatch,
    **dict.fromkeys(["tokens", "positions", "loss_mask", "weights", "advantages", "rollout_logprobs"], arrays()),
    starts=st.just((0, 4)),
    extras=st.dictionaries(st.text(max_size=4), arrays(), max_size=2),
    per_seq=st.dictionaries(st.text(max_size=4), arrays(), max_size=2),
)
shares = st.builds(
    Share,
    step=st.integers(0, 9),
    updates=st.lists(st.lists(micro_batches, max_size=2).map(tuple), max_size=2).map(tuple),
    totals=st.just((Totals(tokens=1, answers=1, groups=1),)),
)
messages = st.one_of(
    st.tuples(st.builds(Finished, group=groups, purpose=st.just("train"), seconds=st.floats(0, 9)), st.just(FromAgent)),
    st.tuples(
        st.builds(Journal, request=st.just(1), journals=st.dictionaries(st.integers(0, 9), journals, max_size=2)),
        st.just(FromAgent),
    ),
    st.tuples(st.builds(Work, leases=st.lists(leases, max_size=2).map(tuple)), st.just(ToAgent)),
    st.tuples(st.builds(Train, share=shares), st.just(Command)),
)


COMPLETION = {"tokens": (1, "<i4", (1,)), "logprobs": (1, "<f4", (1,)), "versions": [], "finish": "stop"}


def equal(a, b):
    """Value equality that looks into arrays, bit for bit."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(equal(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@given(messages)
@settings(deadline=None, max_examples=80)
def test_what_is_decoded_is_what_was_encoded(message_and_kind):
    message, kind = message_and_kind
    frames = [bytes(f) for f in encode(message)]
    assert equal(decode(frames, kind), message)


@given(messages, st.data())
@settings(deadline=None, max_examples=150)
def test_damaged_frames_are_refused_or_read_never_worse(message_and_kind, data):
    message, kind = message_and_kind
    frames = [bytearray(f) for f in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        which = data.draw(st.integers(0, len(frames) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "drop", "swap"]))
        if how == "flip" and frames[which]:
            frames[which][data.draw(st.integers(0, len(frames[which]) - 1))] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del frames[which][data.draw(st.integers(0, len(frames[which]))) :]
        elif how == "drop" and which:
            del frames[which]
        else:
            frames[which], frames[-1] = frames[-1], frames[which]
    with suppress(msgspec.MsgspecError, ValueError):
        decode([bytes(f) for f in frames], kind)


@pytest.mark.parametrize(
    "place",
    [
        (1, "O", (1,)),
        (1, "(", (1,)),
        (1, "", (1,)),
        (1, "V0", (1,)),
        (1, "<i4", (-1, -1)),
        (1, "<i4", (2**62, 2**62)),
        (1, "<i4", ("a",)),
        (1, ["a", ["b"]], (1,)),
        (0, "<i4", (1,)),
        (-1, "<i4", (1,)),
        (9, "<i4", (1,)),
        ("1", "<i4", (1,)),
        (1, "<i4"),
        None,
    ],
    ids=str,
)
def test_a_malicious_array_is_refused(place):
    fields = {"type": "journal", "request": 1, "journals": {0: [[{**COMPLETION, "tokens": place}]]}}
    with pytest.raises(msgspec.ValidationError):
        decode([msgspec.msgpack.encode(fields), bytes(4)], FromAgent)


def test_a_message_of_another_direction_is_refused():
    frames = encode(Restart(engines=(1,), reason=""))
    with pytest.raises(msgspec.ValidationError, match="restart"):
        decode(frames, FromAgent)
    with pytest.raises(msgspec.ValidationError):
        decode(frames, Answer)


def test_the_frame_of_these_tests_is_read():
    fields = {"type": "journal", "request": 1, "journals": {0: [[COMPLETION]]}}
    assert isinstance(decode([msgspec.msgpack.encode(fields), bytes(4)], FromAgent), Journal)


def test_objects_do_not_travel():
    array = np.array([print, 1], dtype=object)
    with pytest.raises((ValueError, TypeError)):
        encode(Completion(tokens=array, logprobs=array, versions=(), finish="stop"))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.integers(1, 300))
@settings(deadline=None)
def test_a_stream_comes_apart_as_it_was_put_together(frames, piece_bytes):
    pieces = list(framing.pieces(frames, piece_bytes))
    assert all(0 < len(p) <= piece_bytes for p in pieces)
    stream = b"".join(pieces)
    assert len(stream) == framing.stream_bytes(frames)
    assert [bytes(f) for f in framing.split(memoryview(stream), len(frames))] == frames


def test_large_frames_are_cut_and_not_copied():
    large = np.arange(framing.JOIN_BYTES, dtype=np.uint16)
    frames = [b"head", large.view(np.uint8).data, b"tail"]
    pieces = list(framing.pieces(frames, 500_000))
    assert sum(np.shares_memory(large, np.frombuffer(p, np.uint8)) for p in pieces) == -(-large.nbytes // 500_000)
    assert [bytes(f) for f in framing.split(memoryview(b"".join(pieces)), 3)] == [bytes(f) for f in frames]


@given(st.binary(min_size=0, max_size=200), st.integers(-1, 30))
def test_a_damaged_stream_is_refused(stream, num_frames):
    try:
        frames = framing.split(memoryview(stream), num_frames)
    except ValueError:
        return
    assert framing.stream_bytes(frames) == len(stream)
