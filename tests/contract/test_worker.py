"""A trainer rank's command stream: real trainers, real algorithm, real weight channel; commands given by hand."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.batching import make_batch
from runtime.comm import commands as c
from runtime.comm.buckets import buckets
from runtime.comm.codec import decode, encode
from runtime.comm.weights.broadcast import BroadcastReceiver, BroadcastSender
from runtime.comm.weights.tensors import digest
from runtime.errors import OutOfMemory, PeerLost, SluiceError, WaitTimeout
from runtime.trainer import worker
from runtime.trainer.algorithms import grpo
from tests.contract.live import logprobs_of
from tests.contract.trainer_setup import LAYOUTS, around, make_groups, make_model, make_trainer, weights_of

SETTINGS = worker.Settings(device="cpu", timeout_s=1.0)


class Script:
    """A port that says these commands, one after the other, and keeps the answers; messages go through the codec."""

    def __init__(self, *commands: c.Command) -> None:
        self.commands, self.answers = list(commands), []

    def receive(self, timeout_s: float) -> c.Command:
        if not self.commands:
            raise WaitTimeout(f"nothing was said for {timeout_s} s")
        return decode([bytes(frame) for frame in encode(self.commands.pop(0))], c.Command)

    def answer(self, answer: c.Answer) -> None:
        self.answers.append(decode([bytes(frame) for frame in encode(answer)], c.Answer))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module", params=LAYOUTS)
def make(request):
    """Makes trainers of one kind: the stream of commands is the same for all."""
    with around(request.param):
        yield partial(make_trainer, kind=request.param)


def share(seed: int, num_updates: int):
    algorithm = grpo.build(grpo.Config())
    batch = make_batch(make_groups(seed), 0, algorithm, num_dp=1, num_updates=num_updates, max_tokens=64)
    return batch.shares[0]


def serve(port: Script, trainer, sender=None, options: grpo.Config | None = None) -> list[c.Answer]:
    worker.serve(port, trainer, grpo.build(options or grpo.Config()), sender, SETTINGS)
    assert not port.commands
    return port.answers


def test_training_saving_and_exporting(make, model: Path, tmp_path: Path) -> None:
    trainer, before = make(model), None
    before = weights_of(trainer)
    saved, exported = tmp_path / "shards", tmp_path / "hf"
    train, described, *done = serve(
        Script(
            c.Train(share=share(0, 2)),
            c.Describe(),
            c.Save(path=str(saved)),
            c.Export(path=str(exported)),
            c.StopTrainer(),
        ),
        trainer,
        options=grpo.Config(entropy_coef=0.01),
    )
    assert isinstance(train, c.Trained)
    wanted = {"loss", "grad_norm", "learning_rate", "clip_fraction", "mismatch", "mismatch_max", "entropy", "update_s"}
    assert wanted <= train.metrics.keys()
    assert train.metrics["train_tokens"] == sum(t.tokens for t in share(0, 2).totals)
    assert train.metrics["kl_old"] > 0, "the second update is off the policy that old log-probs were taken from"
    assert described == c.Described(manifest=trainer.manifest())
    assert done == [c.Done()] * 3
    assert not all(tensor.equal(before[name]) for name, tensor in trainer.weights())
    other = make(model)
    other.restore(saved)
    assert all(tensor.equal(weights_of(trainer)[name]) for name, tensor in other.weights())
    assert (exported / "model.safetensors").exists()


def test_engines_that_sleep_and_keep_a_device_are_found_before_the_trainer_wakes(
    make, model: Path, monkeypatch
) -> None:
    trainer, free = make(model), iter((60 << 30, 55 << 30, 29 << 30))
    monkeypatch.setattr(worker.device, "free_memory", lambda device: next(free))
    woken: list[bool] = []
    monkeypatch.setattr(type(trainer), "wake", lambda self: woken.append(True))
    port = Script(c.Sleep(), c.Wake(), c.Sleep(), c.Wake())
    with pytest.raises(OutOfMemory, match=r"29\.0 GiB of cpu are free, and 60\.0 were before"):
        serve(port, trainer)
    assert port.answers == [c.Done()] * 3 and woken == [True]


class Asking(Script):
    """Saves, and asks until it is written, which it lets happen after three questions."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        super().__init__(c.Save(path=str(path)))
        self.gate = gate

    def receive(self, timeout_s: float) -> c.Command:
        if len(self.answers) > 3:
            self.gate.set()
        is_written = self.answers and self.answers[-1] == c.Saved(is_written=True)
        self.commands = self.commands or [c.StopTrainer() if is_written else c.AskSaved()]
        return super().receive(timeout_s)


def test_a_checkpoint_is_told_to_be_written_when_it_is(make, model: Path, tmp_path: Path) -> None:
    trainer, gate = make(model), threading.Event()
    trainer.writer._thread.submit(gate.wait)
    done, *asked, stopped = serve(Asking(tmp_path / "saved", gate), trainer)
    assert done == stopped == c.Done()
    assert asked[:3] == [c.Saved(is_written=False)] * 3 and asked[-1] == c.Saved(is_written=True)
    make(model).restore(tmp_path / "saved")


def test_a_checkpoint_that_cannot_be_written_ends_the_rank(make, model: Path, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").mkdir()
    with pytest.raises(SluiceError, match=f"{tmp_path}: rank 0 could not write its part: IsADirectory"):
        serve(Script(c.Save(path=str(tmp_path)), c.StopTrainer()), make(model))


def test_one_update_needs_no_second_forward(make, model: Path) -> None:
    trainer = make(model)
    scored: list[str] = []
    score = trainer.score
    trainer.score = lambda batches, module, want: scored.append(module) or score(batches, module, want)
    serve(Script(c.Train(share=share(0, 1)), c.StopTrainer()), trainer)
    assert scored == []
    serve(Script(c.Train(share=share(0, 2)), c.StopTrainer()), trainer)
    assert scored == ["policy"]


def test_a_share_without_updates_trains_nothing(make, model: Path) -> None:
    trainer = make(model)
    before = weights_of(trainer)
    empty = make_batch([], 0, grpo.build(grpo.Config()), num_dp=1, num_updates=1, max_tokens=64).shares[0]
    answer, _ = serve(Script(c.Train(share=empty), c.StopTrainer()), trainer)
    assert isinstance(answer, c.Trained) and answer.metrics["train_tokens"] == 0.0
    assert all(tensor.equal(before[name]) for name, tensor in trainer.weights())


def test_a_push_reaches_a_member(make, model: Path) -> None:
    """The engine's side runs beside it in a thread, and holds what the trainer holds."""
    trainer = make(model)
    sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=20.0)
    received: dict[str, torch.Tensor] = {}

    def engine(address, manifest) -> None:
        receiver = BroadcastReceiver(device="cpu", timeout_s=20.0)
        receiver.join(address, 1)
        for cut in buckets(manifest):
            bucket = receiver.receive("g", manifest.names[cut], manifest.dtypes[cut], manifest.shapes[cut])
            received.update((name, tensor.clone()) for name, tensor in bucket)

    class Port(Script):
        def answer(self, answer: c.Answer) -> None:
            super().answer(answer)
            if isinstance(answer, c.Opened):
                self.thread = threading.Thread(target=engine, args=(answer.address, trainer.manifest()), daemon=True)
                self.thread.start()

    port = Port(
        c.OpenGroup(name="g", world_size=2),
        c.JoinGroup(name="g"),
        c.Push(source="g", version=1, digests=True),
        c.CloseGroup(name="g"),
        c.StopTrainer(),
    )
    _, joined, pushed, closed, _ = serve(port, trainer, sender)
    port.thread.join(20.0)
    assert joined == c.Joined() and closed == c.Done() and isinstance(pushed, c.Pushed)
    assert pushed.digests == {name: digest(tensor) for name, tensor in received.items()}
    assert all(tensor.equal(received[name]) for name, tensor in trainer.weights())


def test_who_has_not_come_to_a_group_is_told_and_not_waited_for(make, model: Path) -> None:
    sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=600.0)
    opened, joined, closed, stopped = serve(
        Script(c.OpenGroup(name="g", world_size=3), c.JoinGroup(name="g"), c.CloseGroup(name="g"), c.StopTrainer()),
        make(model),
        sender,
    )
    assert isinstance(opened, c.Opened)
    assert joined == c.Joined(missing=(1, 2))
    assert closed == stopped == c.Done()


def test_a_push_that_breaks_gathers_to_the_end(make, model: Path) -> None:
    """Other ranks gather every weight, so this one must, or the next collective would meet the wrong one."""
    trainer = make(model)
    gathered: list[str] = []
    weights = trainer.weights

    def counted():
        for name, tensor in weights():
            gathered.append(name)
            yield name, tensor

    class Broken:
        def push(self, name, manifest, weights, *, digests):
            next(weights)
            raise PeerLost(f"a member of {name} left")

    trainer.weights = counted
    pushed, _ = serve(Script(c.Push(source="g", version=1), c.StopTrainer()), trainer, Broken())
    assert pushed == c.Failed(reason="PeerLost: a member of g left")
    assert tuple(gathered) == trainer.manifest().names


def test_a_rank_without_groups_takes_part_in_gathering(make, model: Path) -> None:
    trainer = make(model)
    commands = (c.OpenGroup(name="g", world_size=2), c.Push(source="g", version=1), c.StopTrainer())
    assert serve(Script(*commands), trainer) == [c.Done(), c.Pushed(digests={}), c.Done()]


def test_a_push_brings_the_canary_at_temperature_1(make, model: Path) -> None:
    """Whatever is sampled at: engines give the log-probs of a prompt at that temperature alone."""
    tokens = (5, 6, 7, 8, 9, 10)
    trainer = make(model, temperature=0.5)
    pushed, _ = serve(Script(c.Push(source="g", version=1, canary=tokens), c.StopTrainer()), trainer)
    assert isinstance(pushed, c.Pushed) and pushed.canary is not None
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = logprobs_of(plain, tokens)
    assert pushed.canary.tokens == tokens
    np.testing.assert_allclose(pushed.canary.logprobs, expected, atol=1e-5)


def test_what_is_no_fault_of_a_group_ends_the_rank(make, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        serve(Script(c.Export(path=str(tmp_path / "file" / "hf"))), make(model))


def test_silence_ends_the_rank(make, model: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"1\.0 s"):
        serve(Script(c.Describe()), make(model))
