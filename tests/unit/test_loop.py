"""The step loop against parts that finish in any order, lose engines and get told to stop; then it is resumed.

The fakes keep no time: whatever the loop does must not depend on it. What the event log says is checked by the ledger.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime import samples
from runtime.buffer import Buffer, equal_rewards
from runtime.comm.messages import Finished
from runtime.config import DataSet, EvalSet
from runtime.data import DataSource
from runtime.errors import ConfigError, EngineLost, WaitTimeout
from runtime.evaluate import Evaluation
from runtime.loop import Loop, Progress, Rules
from runtime.metrics import Recorder
from runtime.state import Checkpoints
from runtime.types import Batch, Lease, Prompt, RunState, SamplingParams
from tests.tools import ledger
from tests.unit.test_buffer import finished

NUM_PROMPTS = 3


class Fleet:
    """Finishes running leases in a random order; sometimes its one engine dies."""

    def __init__(self, rng, deaths=0.0):
        self.rng, self.deaths, self.running, self.up, self.is_fresh = rng, deaths, [], True, True

    def lease(self, leases):
        self.running += leases

    def poll(self, timeout_s):
        if self.rng.random() < self.deaths:
            self.is_fresh = True
        if self.is_fresh or not self.running:
            return []
        out = []
        for _ in range(self.rng.integers(0, 3)):
            if self.running:
                lease = self.running.pop(self.rng.integers(len(self.running)))
                rewards = (1.0, float(self.rng.random() < 0.2))
                out.append(Finished(group=finished(lease, rewards), purpose=lease.purpose, seconds=0.0))
        return out

    def journal(self, timeout_s):
        return {lease.number: lease.journal for lease in self.running}

    def alive(self):
        return {0}

    def fresh(self):
        return {0} if self.is_fresh else set()


class Learner:
    """Takes a few polls for a batch, and a few to write a checkpoint."""

    def __init__(self, rng):
        self.rng, self.saved, self.written = rng, [], None
        self.mismatch = 0.01

    def begin(self, batch):
        self.batch, self.left = batch, self.rng.integers(0, 4)

    def training(self):
        self.left -= 1
        return {"loss": 0.0, "mismatch": self.mismatch} if self.left < 0 else None

    def save(self, folder, written, timeout_s):
        assert self.written is None
        self.saved.append(folder)
        self.written = written

    def tend(self):
        if self.written and self.rng.random() < 0.1:
            self.settle(0.0)

    def settle(self, timeout_s):
        written, self.written = self.written, None
        if written:
            written()


class Publisher:
    made_room = False

    def make_room(self):
        pass

    def __init__(self, fleet):
        self.fleet, self.versions = fleet, []

    def publish(self, version, engines):
        self.versions.append(version)
        self.fleet.is_fresh = False
        return frozenset(engines)


def make_batch(groups, step):
    return Batch(step=step, shares=(), oldest_version=0, metrics={"reward": 0.5})


def make_loop(
    run_dir,
    rng,
    *,
    num_steps=6,
    max_versions=1,
    lockstep=False,
    deaths=0.0,
    stop_after=None,
    rollout_s=60.0,
    save_every=2,
):
    """A loop over the run folder, resumed from its newest checkpoint if it has one."""
    run_dir.mkdir(exist_ok=True)
    data = run_dir / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": i}) + "\n" for i in range(10)))
    (run_dir / "config.yaml").write_text(
        f"rollout: {{num_prompts: {NUM_PROMPTS}, num_samples: 2}}\nstaleness: {{max_versions: {max_versions}}}\n"
    )
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=2)
    found = checkpoints.load()
    state = found[1] if found else RunState()
    source = DataSource([DataSet(path=str(data))], seed=0)
    if state.data:
        source.restore(state.data)
    buffer = Buffer(
        source,
        num_samples=2,
        params=SamplingParams(),
        max_versions=max_versions,
        in_order=lockstep,
        filters=[equal_rewards],
    )
    buffer.restore(state.ready, state.running, state.next_lease, state.version)
    calls = iter(range(10**9))
    fleet = Fleet(rng, deaths)
    return Loop(
        rules=Rules(
            num_steps=num_steps,
            num_prompts=NUM_PROMPTS,
            max_versions=max_versions,
            lockstep=lockstep,
            evaluate_every=2,
            save_every=save_every,
            samples_per_step=4,
            rollout_s=rollout_s,
            train_s=60.0,
            mismatch=0.05,
            batch=make_batch,
        ),
        progress=Progress(
            step=state.step,
            version=state.version,
            taken=state.taken,
            evaluated=state.evaluated,
            failed=state.failed,
        ),
        fleet=fleet,
        learner=Learner(rng),
        publisher=Publisher(fleet),
        buffer=buffer,
        evaluation=Evaluation([EvalSet(path=str(data), name="heldout", limit=2)]),
        recorder=Recorder(run_dir, state.offsets, step=state.step, tensorboard=False),
        checkpoints=checkpoints,
        text=lambda tokens: " ".join(map(str, tokens)),
        stop=lambda: "preempted" if stop_after is not None and next(calls) > stop_after else "",
    )


def end(loop):
    ready, running, _ = loop.buffer.snapshot({})
    loop.recorder.event("end", ready=[g.lease for g in ready], running=[x.number for x in running])


def lines(run_dir, name):
    return [json.loads(x) for x in (run_dir / name).read_text().splitlines()]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    max_versions=st.integers(0, 3),
    lockstep=st.booleans(),
    deaths=st.sampled_from([0.0, 0.1]),
    stop_after=st.integers(0, 120),
    save_every=st.sampled_from([0, 1, 2, 3]),
)
def test_nothing_is_lost_or_doubled_over_a_stop_and_a_resume(
    tmp_path_factory, seed, max_versions, lockstep, deaths, stop_after, save_every
):
    run_dir = tmp_path_factory.mktemp("run")
    options = {"max_versions": max_versions, "lockstep": lockstep, "deaths": deaths, "save_every": save_every}
    first = make_loop(run_dir, np.random.default_rng(seed), stop_after=stop_after, **options)
    try:
        reason = first.run()
    except EngineLost:
        assert lockstep, "only in lockstep is a version gone when training ends"
        reason = "engine_lost"
    if reason:
        first.recorder.close()
        second = make_loop(run_dir, np.random.default_rng(seed + 1), **(options | {"deaths": 0.0}))
        if reason == "preempted":
            assert second.progress.step == first.progress.step, "what was trained is not trained again"
        assert second.run() == ""
        first = second
    end(first)
    assert ledger.check(run_dir) == []
    trained = [x for x in lines(run_dir, "metrics.jsonl") if "reward" in x]
    assert [x["step"] for x in trained] == list(range(1, 7))
    assert max(x["lag"] for x in trained) <= max_versions
    evaluated = [x["step"] for x in lines(run_dir, "metrics.jsonl") if "eval/heldout/accuracy" in x]
    assert evaluated == [0, 2, 4, 6], "each once, whatever was stopped and resumed"


@pytest.mark.parametrize("max_versions", [0, 2])
def test_the_bound_is_used_and_kept(tmp_path, max_versions):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0), num_steps=12, max_versions=max_versions)
    assert loop.run() == ""
    lags = [x["lag"] for x in lines(tmp_path / "run", "metrics.jsonl") if "lag" in x]
    assert max(lags) == max_versions


def test_lockstep_weights_never_change_while_anything_runs(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0), max_versions=2, lockstep=True)
    publish = loop.publisher.publish

    def check(version, engines):
        assert not loop.fleet.running
        return publish(version, engines)

    loop.publisher.publish = check
    assert loop.run() == ""
    assert loop.publisher.versions == list(range(7))


def test_evaluations_and_samples_are_written(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0))
    loop.run()
    evals = [x["step"] for x in lines(tmp_path / "run", "metrics.jsonl") if "eval/heldout/accuracy" in x]
    assert evals == [0, 2, 4, 6]
    rows = lines(tmp_path / "run", "samples/step-000001.jsonl")
    assert len(rows) == 4 and {r["prompt_id"] for r in rows} != {rows[0]["prompt_id"]}
    assert rows[0]["text"] == "2 3" and rows[0]["prompt"].isdigit() and rows[0]["turns"] == []
    lease = Lease(number=0, prompt=Prompt(id="p", dataset="x"), version=0, num_samples=1, params=SamplingParams())
    sample = finished(lease).samples[0]
    mask = np.array([False, True, True, False, True])
    mixed = replace(sample, tokens=np.arange(5, dtype=np.int32), loss_mask=mask)
    turns = samples.turns(mixed, loop.text)
    assert [(t["by"], t["text"]) for t in turns] == [("policy", "1 2"), ("environment", "3"), ("policy", "4")]


def test_waiting_for_groups_is_bounded_and_says_for_whom(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0), rollout_s=-1.0)
    loop.fleet.poll = lambda timeout_s: []
    loop.publish({0})
    loop.feed(0.0)
    with pytest.raises(WaitTimeout, match="6 running, engines up"):
        loop.gather()


def test_sampling_on_for_ever_without_a_useful_group_is_an_error(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0))
    loop.publish({0})
    loop.fleet.poll = lambda timeout_s: [
        Finished(group=finished(loop.fleet.running.pop(), (1.0, 1.0)), purpose="train", seconds=0.0)
        for _ in range(len(loop.fleet.running))
    ]
    with pytest.raises(ConfigError, match="30 groups in a row were dropped, the last one for: equal rewards"):
        loop.gather()


def test_groups_without_a_score_are_counted_over_a_stop(tmp_path):
    """Each at the step that follows; those that a filter drops are not among them."""
    run_dir, options = tmp_path / "run", {"max_versions": 0, "num_steps": 2, "lockstep": True}
    loop = make_loop(run_dir, np.random.default_rng(0), **options)
    loop.publish({0})
    loop.fleet.poll = lambda timeout_s: [
        Finished(group=finished(loop.fleet.running.pop(), rewards), purpose="train", seconds=0.0)
        for rewards in ((None, None), (1.0, 1.0))
    ]
    loop.feed(0.0)
    loop.fleet.poll = lambda timeout_s: []
    loop.save()
    loop.learner.settle(0.0)
    loop.recorder.close()
    assert make_loop(run_dir, np.random.default_rng(0), **options).run() == ""
    trained = [x for x in lines(run_dir, "metrics.jsonl") if "reward" in x]
    assert [x["dropped_groups"] for x in trained] == [1, 0]


@pytest.mark.parametrize("found", [0.06, float("nan")])
def test_engines_and_trainer_that_disagree_end_the_run_after_its_metrics_show_it(tmp_path, found):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0))
    loop.learner.mismatch = found
    with pytest.raises(ConfigError, match=r"limits.mismatch: is 0.05, but in step 1 log-probs .* off"):
        loop.run()
    assert "mismatch" in lines(tmp_path / "run", "metrics.jsonl")[-1]


def test_a_stop_in_the_last_evaluation_is_no_end(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0))
    loop.stop = lambda: "preempted" if loop.progress.step == 6 else ""
    assert loop.run() == "preempted"
    loop.recorder.close()
    again = make_loop(tmp_path / "run", np.random.default_rng(0))
    assert again.progress.step == 6 and again.run() == ""
    assert [x["step"] for x in lines(tmp_path / "run", "metrics.jsonl") if "eval/heldout/accuracy" in x] == [0, 2, 4, 6]


def test_what_was_sampled_since_a_checkpoint_of_the_same_step_is_saved(tmp_path):
    loop = make_loop(tmp_path / "run", np.random.default_rng(0), max_versions=2)
    loop.publish({0})
    loop.save()
    while loop.buffer.open() == loop.buffer.running():
        loop.feed(0.0)
    loop.save()
    ready = len(loop.buffer.snapshot({})[0])
    loop.recorder.close()
    assert len(make_loop(tmp_path / "run", np.random.default_rng(0)).buffer.snapshot({})[0]) == ready > 0
