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
from runtime.comm import messages as m
from runtime.comm.buckets import buckets
from runtime.comm.messages import decode, encode
from runtime.comm.weights.broadcast import BroadcastReceiver, BroadcastSender
from runtime.comm.weights.tensors import digest
from runtime.errors import PeerLost, SluiceError, WaitTimeout
from runtime.trainer import worker
from runtime.trainer.algorithms import grpo
from tests.contract.live import logprobs_of
from tests.contract.trainer_setup import LAYOUTS, around, make_groups, make_model, make_trainer, weights_of

SETTINGS = worker.Settings(device="cpu", timeout_s=1.0)


class Script:
    """A port that says these commands, one after the other, and keeps the answers; messages go through the codec."""

    def __init__(self, *commands: m.Command) -> None:
        self.commands, self.answers = list(commands), []

    def receive(self, timeout_s: float) -> m.Command:
        if not self.commands:
            raise WaitTimeout(f"nothing was said for {timeout_s} s")
        return decode([bytes(frame) for frame in encode(self.commands.pop(0))], m.Command)

    def answer(self, answer: m.Answer) -> None:
        self.answers.append(decode([bytes(frame) for frame in encode(answer)], m.Answer))


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


def serve(port: Script, trainer, sender=None, options: grpo.Config | None = None) -> list[m.Answer]:
    worker.serve(port, trainer, grpo.build(options or grpo.Config()), sender, SETTINGS)
    assert not port.commands
    return port.answers


def test_training_saving_and_exporting(make, model: Path, tmp_path: Path) -> None:
    trainer, before = make(model), None
    before = weights_of(trainer)
    saved, exported = tmp_path / "shards", tmp_path / "hf"
    train, described, *done = serve(
        Script(
            m.Train(share=share(0, 2)),
            m.Describe(),
            m.Save(path=str(saved)),
            m.Export(path=str(exported)),
            m.StopTrainer(),
        ),
        trainer,
        options=grpo.Config(entropy_coef=0.01),
    )
    assert isinstance(train, m.Trained)
    wanted = {"loss", "grad_norm", "learning_rate", "clip_fraction", "mismatch", "mismatch_max", "entropy", "update_s"}
    assert wanted <= train.metrics.keys()
    assert train.metrics["train_tokens"] == sum(t.tokens for t in share(0, 2).totals)
    assert train.metrics["kl_old"] > 0, "the second update is off the policy that old log-probs were taken from"
    assert described == m.Described(manifest=trainer.manifest())
    assert done == [m.Done()] * 3
    assert not all(tensor.equal(before[name]) for name, tensor in trainer.weights())
    other = make(model)
    other.restore(saved)
    assert all(tensor.equal(weights_of(trainer)[name]) for name, tensor in other.weights())
    assert (exported / "model.safetensors").exists()


class Asking(Script):
    """Saves, and asks until it is written, which it lets happen after three questions."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        super().__init__(m.Save(path=str(path)))
        self.gate = gate

    def receive(self, timeout_s: float) -> m.Command:
        if len(self.answers) > 3:
            self.gate.set()
        is_written = self.answers and self.answers[-1] == m.Saved(is_written=True)
        self.commands = self.commands or [m.StopTrainer() if is_written else m.AskSaved()]
        return super().receive(timeout_s)


def test_a_checkpoint_is_told_to_be_written_when_it_is(make, model: Path, tmp_path: Path) -> None:
    trainer, gate = make(model), threading.Event()
    trainer.writer._thread.submit(gate.wait)
    done, *asked, stopped = serve(Asking(tmp_path / "saved", gate), trainer)
    assert done == stopped == m.Done()
    assert asked[:3] == [m.Saved(is_written=False)] * 3 and asked[-1] == m.Saved(is_written=True)
    make(model).restore(tmp_path / "saved")


def test_a_checkpoint_that_cannot_be_written_ends_the_rank(make, model: Path, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").mkdir()
    with pytest.raises(SluiceError, match=f"{tmp_path}: rank 0 could not write its part: IsADirectory"):
        serve(Script(m.Save(path=str(tmp_path)), m.StopTrainer()), make(model))


def test_one_update_needs_no_second_forward(make, model: Path) -> None:
    trainer = make(model)
    scored: list[str] = []
    score = trainer.score
    trainer.score = lambda batches, module, want: scored.append(module) or score(batches, module, want)
    serve(Script(m.Train(share=share(0, 1)), m.StopTrainer()), trainer)
    assert scored == []
    serve(Script(m.Train(share=share(0, 2)), m.StopTrainer()), trainer)
    assert scored == ["policy"]


def test_a_share_without_updates_trains_nothing(make, model: Path) -> None:
    trainer = make(model)
    before = weights_of(trainer)
    empty = make_batch([], 0, grpo.build(grpo.Config()), num_dp=1, num_updates=1, max_tokens=64).shares[0]
    answer, _ = serve(Script(m.Train(share=empty), m.StopTrainer()), trainer)
    assert isinstance(answer, m.Trained) and answer.metrics["train_tokens"] == 0.0
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
        def answer(self, answer: m.Answer) -> None:
            super().answer(answer)
            if isinstance(answer, m.Opened):
                self.thread = threading.Thread(target=engine, args=(answer.address, trainer.manifest()), daemon=True)
                self.thread.start()

    port = Port(
        m.OpenGroup(name="g", world_size=2),
        m.JoinGroup(name="g"),
        m.Push(source="g", version=1),
        m.CloseGroup(name="g"),
        m.StopTrainer(),
    )
    _, joined, pushed, closed, _ = serve(port, trainer, sender)
    port.thread.join(20.0)
    assert joined == closed == m.Done() and isinstance(pushed, m.Pushed)
    assert pushed.digests == {name: digest(tensor) for name, tensor in received.items()}
    assert all(tensor.equal(received[name]) for name, tensor in trainer.weights())


def test_a_group_that_does_not_form_is_a_failure_and_no_end(make, model: Path) -> None:
    sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=0.5)
    opened, joined, closed, stopped = serve(
        Script(m.OpenGroup(name="g", world_size=2), m.JoinGroup(name="g"), m.CloseGroup(name="g"), m.StopTrainer()),
        make(model),
        sender,
    )
    assert isinstance(opened, m.Opened)
    assert isinstance(joined, m.Failed) and "rank 1" in joined.reason
    assert closed == stopped == m.Done()


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
        def push(self, name, manifest, weights):
            next(weights)
            raise PeerLost(f"a member of {name} left")

    trainer.weights = counted
    pushed, _ = serve(Script(m.Push(source="g", version=1), m.StopTrainer()), trainer, Broken())
    assert pushed == m.Failed(reason="PeerLost: a member of g left")
    assert tuple(gathered) == trainer.manifest().names


def test_a_rank_without_groups_takes_part_in_gathering(make, model: Path) -> None:
    trainer = make(model)
    commands = (m.OpenGroup(name="g", world_size=2), m.Push(source="g", version=1), m.StopTrainer())
    assert serve(Script(*commands), trainer) == [m.Done(), m.Pushed(digests={}), m.Done()]


def test_a_push_brings_the_canary_at_temperature_1(make, model: Path) -> None:
    """Whatever is sampled at: engines give the log-probs of a prompt at that temperature alone."""
    tokens = (5, 6, 7, 8, 9, 10)
    trainer = make(model, temperature=0.5)
    pushed, _ = serve(Script(m.Push(source="g", version=1, canary=tokens), m.StopTrainer()), trainer)
    assert isinstance(pushed, m.Pushed) and pushed.canary is not None
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = logprobs_of(plain, tokens)
    assert pushed.canary.tokens == tokens
    np.testing.assert_allclose(pushed.canary.logprobs, expected, atol=1e-5)


def test_what_is_no_fault_of_a_group_ends_the_rank(make, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        serve(Script(m.Export(path=str(tmp_path / "file" / "hf"))), make(model))


def test_silence_ends_the_rank(make, model: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"1\.0 s"):
        serve(Script(m.Describe()), make(model))
