"""What test_world.py starts on four ranks: each function is one case, run by all ranks in the same order.

mpiexec -n 4 python -m mpi4py tests/mpi/cases.py FOLDER    each rank writes FOLDER/<rank>.json: case -> ok or why not
mpiexec -n 2 python -m mpi4py tests/mpi/cases.py --wrong-size
mpiexec -n 4 python -m mpi4py tests/mpi/cases.py --raise     rank 2 fails while the others wait for it
"""

import inspect
import json
import sys
import time
import traceback
from pathlib import Path

import msgspec
import numpy as np

from runtime.comm.commands import Answer, Command, Describe, Done, Failed, Save, Train, Trained
from runtime.comm.world import World
from runtime.config import Cluster, Rollout
from runtime.errors import WaitTimeout
from runtime.site import SiteConfig
from runtime.topology import make
from runtime.types import MicroBatch, Share, Totals

LIMIT_S = 20.0
TOPOLOGY = make(
    Cluster(num_train_nodes=1, num_rollout_nodes=1),
    Rollout(num_prompts=1, num_samples=1),
    SiteConfig(name="test", cpu_slots_per_node=2),
    ["a", "b"],
)
"""Ranks: controller, two trainer ranks, one agent on a node of its own."""


def share(num_tokens, step=0):
    """A share whose arrays have every dtype that travels, and odd lengths."""
    t = np.arange(num_tokens)
    extras = {
        d: (t % 100).astype(d) for d in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8")
    }
    extras["two_dimensional"] = np.arange(num_tokens * 3, dtype=np.int16).reshape(num_tokens, 3)
    extras["strided"] = np.arange(2 * num_tokens)[::2]
    batch = MicroBatch(
        tokens=t.astype(np.int32),
        positions=t.astype(np.int32),
        starts=(0, num_tokens),
        loss_mask=t % 2 == 0,
        weights=np.ones(num_tokens, np.float32),
        advantages=np.linspace(-1, 1, num_tokens, dtype=np.float32),
        rollout_logprobs=-t.astype(np.float32),
        extras=extras,
        per_seq={"none": np.zeros(0, np.float64)},
    )
    return Share(step=step, updates=((batch,),), totals=(Totals(tokens=num_tokens, answers=1, groups=1),))


def assert_same_share(found, wanted):
    assert (found.step, found.totals) == (wanted.step, wanted.totals)
    (a,), (b,) = found.updates[0], wanted.updates[0]
    assert a.starts == b.starts
    pairs = [(a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.advantages, b.advantages)]
    assert a.extras.keys() == b.extras.keys()
    pairs += [(a.extras[k], b.extras[k]) for k in b.extras] + [(a.per_seq["none"], b.per_seq["none"])]
    for x, y in pairs:
        assert x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y)


def raises(error, *words):
    class Check:
        def __enter__(self):
            return self

        def __exit__(self, kind, value, _):
            assert kind is not None and issubclass(kind, error), f"expected {error}, got {kind}: {value}"
            for word in words:
                assert word in str(value), f"{word!r} is not in {str(value)!r}"
            return True

    return Check()


def broadcast_reaches_all(world):
    message = Save(path="x" * 3000) if world.rank == 0 else None
    assert world.broadcast(message, Save, LIMIT_S).path == "x" * 3000


def trainers_broadcast_reaches_trainers_only(world):
    if world.rank in TOPOLOGY.trainers:
        message = Failed(reason="hello") if world.rank == 1 else None
        assert world.trainers_broadcast(message, Failed, LIMIT_S).reason == "hello"
    else:
        assert world.poll(1, Failed, LIMIT_S) is None


def shares_are_dealt_unchanged(world):
    for size in (0, 1, 1000):
        if world.rank == 0:
            world.deal({r: Train(share=share(size, r)) for r in TOPOLOGY.trainers}, LIMIT_S)
            answers = world.gather(TOPOLOGY.trainers, Answer, LIMIT_S)
            assert {r: a.metrics["sum"] for r, a in answers.items()} == {1: size + 1.0, 2: size + 2.0}
        elif world.rank in TOPOLOGY.trainers:
            command = world.receive(0, Command, LIMIT_S)
            assert_same_share(command.share, share(size, world.rank))
            world.send(0, Trained(metrics={"sum": size + float(world.rank)}), LIMIT_S)


def a_large_share_is_dealt(world):
    """Above the size that is joined, so that arrays are cut without being copied."""
    if world.rank == 0:
        world.deal({r: Train(share=share(400_000, r)) for r in TOPOLOGY.trainers}, LIMIT_S)
    elif world.rank in TOPOLOGY.trainers:
        assert_same_share(world.receive(0, Command, LIMIT_S).share, share(400_000, world.rank))


def messages_keep_their_order(world):
    if world.rank == 0:
        for i in range(200):
            world.send(1, Save(path=str(i)), LIMIT_S)
    elif world.rank == 1:
        assert [world.receive(0, Command, LIMIT_S).path for _ in range(200)] == [str(i) for i in range(200)]


def a_wrong_kind_is_refused(world):
    if world.rank == 0:
        world.send(1, Describe(), LIMIT_S)
    elif world.rank == 1:
        with raises(msgspec.ValidationError):
            world.receive(0, Answer, LIMIT_S)


def a_late_answer_times_out_by_name_and_can_still_come(world):
    if world.rank == 0:
        with raises(WaitTimeout, "rank 0 waited", "on rank 2", "Done"):
            world.gather([1, 2], Done, 0.2)
        world.send(2, Describe(), LIMIT_S)
        assert world.receive(2, Done, LIMIT_S) == Done()
    elif world.rank == 1:
        world.send(0, Done(), LIMIT_S)
    elif world.rank == 2:
        world.receive(0, Describe, LIMIT_S)
        world.send(0, Done(), LIMIT_S)


def poll_does_not_wait(world):
    if world.rank == 1:
        assert world.poll(0, Command, LIMIT_S) is None
    world.barrier("world", LIMIT_S)
    if world.rank == 0:
        world.send(1, Describe(), LIMIT_S)
    elif world.rank == 1:
        end = time.monotonic() + LIMIT_S
        while (found := world.poll(0, Command, LIMIT_S)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert found == Describe()


def a_message_arrives_though_its_sender_does_something_else(world):
    """Between every pair that ever talks, also for the first time."""
    for source, dest in ((0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (1, 2)):
        world.barrier("world", LIMIT_S)
        if world.rank == source:
            world.send(dest, Describe(), LIMIT_S)
            time.sleep(0.6)
        elif world.rank == dest:
            start = time.monotonic()
            world.receive(source, Describe, LIMIT_S)
            assert time.monotonic() - start < 0.5


def the_watch_ends_a_wait(world):
    def watch():
        raise InterruptedError("told to stop")

    if world.rank == 3:
        world.watch = watch
        with raises(InterruptedError):
            world.receive(0, Command, LIMIT_S)
        world.watch = lambda: None


def waiting_burns_no_core(world):
    if world.rank == 0:
        time.sleep(2.0)
        world.deal(dict.fromkeys((1, 2, 3), Describe()), LIMIT_S)
    else:
        before = time.process_time()
        world.receive(0, Command, LIMIT_S)
        used = time.process_time() - before
        assert used < 0.1, f"{used:.3f} s of CPU in a wait of 2 s"


def barriers_end_in_time(world):
    group = "trainers" if world.rank in TOPOLOGY.trainers else "agents"
    world.barrier(group, LIMIT_S)
    start = time.monotonic()
    if world.rank == 2:
        time.sleep(0.3)
    world.barrier("world", LIMIT_S)
    assert world.rank == 2 or time.monotonic() - start > 0.2


CASES = [
    f for f in list(globals().values()) if inspect.isfunction(f) and list(inspect.signature(f).parameters) == ["world"]
]


def main():
    [what] = sys.argv[1:]
    # pieces of 4099 bytes cut streams at places that nothing else is aligned to
    world = World.start(TOPOLOGY, hosts_are_nodes=what == "--nodes", timeout_s=LIMIT_S, piece_bytes=4099)
    if what == "--raise":
        if world.rank == 2:
            raise RuntimeError("rank 2 fails")
        world.receive(2, Command, 60.0)
    results = {}
    for case in CASES:
        try:
            case(world)
            world.barrier("world", LIMIT_S)
            results[case.__name__] = "ok"
        except Exception:
            results[case.__name__] = traceback.format_exc()
            break
    Path(what, f"{world.rank}.json").write_text(json.dumps(results))
    world.close(LIMIT_S)


if __name__ == "__main__":
    main()
