"""Prefill and decode engines: what is refused, how they are started, and an agent that keeps both."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from launcher import cli
from runtime import topology
from runtime.comm.messages import EngineDown, EngineReady, Restart, Work
from runtime.config import Cluster, EngineSet, Rollout
from runtime.rollout import proof
from runtime.rollout.base import Launch
from runtime.rollout.engines import sglang
from runtime.site import SiteConfig
from tests.unit import agents
from tests.unit.agents import drive, finished, lease  # noqa: F401  # pytest finds a fixture by its name
from tests.unit.fakes import CANARY, FakeEngine, FakeKind

TRANSFER = "--disaggregation-transfer-backend"
NIXL = {"disaggregation_transfer_backend": "nixl"}
SPLIT = ("rollout.prefill_per_node=1", "rollout.engine=sglang", "sync.pause=abort")


@pytest.fixture
def environment(here):
    """Of SGLang, without what hands prompts over."""
    python = here / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o700)
    (here / "env/lib/python3.11/site-packages/sglang").mkdir(parents=True)
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 2\n")
    return here / "env"


def told(environment, *changes):
    options = f"rollout.engine_options={{python: {environment}/bin/python}}"
    changes = ("site=slots.yaml", *SPLIT[:2], options, *SPLIT[2:], *changes)
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("rollout.prefill_per_node=2",), ["rollout.prefill_per_node", "2, but a node has 2", "left to decode"]),
        (("rollout.engine=embedded", "rollout.engine_options={}"), ["prefill_per_node", "'embedded'", "sglang"]),
        (("cluster.mode=colocated",), ["rollout.prefill_per_node", "engines sleep", "cluster.mode: split"]),
        (("rollout.external=['http://far:1']",), ["rollout.prefill_per_node", "external ones too"]),
        (("sync.pause=retract",), ["sync.pause", "'retract', but a decode engine", "write abort"]),
        (("deterministic=true",), ["rollout.engine", "'sglang' does not repeat"]),
        ((), ["rollout.engine_options", "has no package mooncake", "docs/engines.md"]),
        (
            ("rollout.engine_options.server={disaggregation-transfer-backend: fake}",),
            ["rollout.engine_options", "'fake' hands nothing over", "mooncake"],
        ),
        (
            ("rollout.engine_options.server={disaggregation-mode: decode}",),
            ["rollout.engine_options", "server.disaggregation-mode", "rollout.prefill_per_node"],
        ),
    ],
)
def test_what_cannot_be_split_is_refused(environment, capsys, changes, words):
    assert cli.main(["plan", "run.yaml", *told(environment, *changes)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_the_plan_shows_which_engine_does_what(environment, capsys):
    (environment / "lib/python3.11/site-packages/mooncake").mkdir()
    assert cli.main(["plan", "run.yaml", *told(environment)]) == 0
    rows = [row.split() for row in capsys.readouterr().out.split("engine  model ")[1].splitlines()[1:3]]
    assert rows == [["0", "policy", "local-1", "cpu,", "prefill"], ["1", "policy", "local-1", "cpu,", "decode"]]


def test_the_first_of_the_policys_engines_on_each_node_compute_prompts():
    rollout = Rollout(
        num_prompts=1, num_samples=1, prefill_per_node=1, gpus_per_engine=2, sets=(EngineSet(model="judge"),)
    )
    site = SiteConfig(name="x", gpus_per_node=8)
    made = topology.make(Cluster(num_train_nodes=1, num_rollout_nodes=2), rollout, site, ["a", "b", "c"])
    for node in (1, 2):
        kinds = [(e.model, e.kind, e.gpus) for e in made.engines_of(node)]
        assert kinds == [
            ("policy", "prefill", (0, 1)),
            ("policy", "decode", (2, 3)),
            ("policy", "decode", (4, 5)),
            ("judge", "regular", (7,)),
        ]


@pytest.mark.parametrize(
    ("num_gpus", "given", "backend"), [(0, {}, ["mooncake_tcp"]), (1, {}, []), (0, NIXL, ["nixl"])]
)
def test_sglang_is_told_which_of_the_two_it_is(num_gpus, given, backend):
    kind = sglang.build(sglang.Config(server=given))
    launch = {"model": "m", "dtype": "float32", "host": "h", "token_file": "t", "threads": 1, "deterministic": False}
    for which in ("regular", "prefill", "decode"):
        argv = kind.command(Launch(**launch, num_gpus=num_gpus, kind=which))
        values = {flag: argv[argv.index(flag) + 1] for flag in argv if flag.startswith("--disaggregation")}
        if which == "regular":
            assert values.keys() <= {TRANSFER}
        else:
            assert values["--disaggregation-mode"] == which and [values[k] for k in values if k == TRANSFER] == backend


# ---- an agent with both


class Fed(FakeEngine):
    def __init__(self, prefills):
        super().__init__()
        self.prefills, self.fed, self.off = prefills, [], 0.0

    async def generate(self, tokens, params, session=""):
        prefill = await self.prefills.pick(None, 0)
        self.fed.append((len(tokens), prefill.id))
        return await super().generate(tokens, params, session)

    async def score(self, tokens, start=0):
        if self.prefills.is_empty:
            raise ValueError("no prefill engine is up")
        self.scored.append((len(tokens), start))
        return self.off - np.arange(1, len(tokens) - start + 1, dtype=np.float32)


class SplitKind(FakeKind):
    prefills = None

    def fed_by(self, prefills):
        kind = SplitKind(self.engines, self.prepare)
        kind.prefills = prefills
        return kind

    def client(self, *, url, token, timeout_s):
        engine = super().client(url=url, token=token, timeout_s=timeout_s)
        if self.prefills is None:
            return engine
        engine = self.engines[int(url.rpartition(":")[2])] = Fed(self.prefills)
        self.prepare(engine)
        return engine


class SplitBench(agents.Bench):
    """Engine 0 decodes, so that order alone does not bring the prefill engine first."""

    def __init__(self, folder, **changes):
        super().__init__(folder, **changes)
        self.kind = SplitKind()
        self.kinds = {"policy": self.kind, "judge": self.kind}
        starts = (msgspec.structs.replace(e, kind=k) for e, k in zip(self.settings.engines, KINDS, strict=True))
        self.settings = msgspec.structs.replace(self.settings, engines=tuple(starts), environment_timeout_s=0.3)

    def by_kind(self):
        fed = [isinstance(e, Fed) for e in self.kind.engines.values()]
        both = list(self.kind.engines.values())
        return both[fed.index(True)], both[fed.index(False)]


KINDS = ("decode", "prefill")


def test_decode_engines_are_sampled_from_and_proved_by_prefill_engines(drive, monkeypatch):  # noqa: F811
    monkeypatch.setattr(agents, "Bench", SplitBench)
    monkeypatch.setattr(proof, "DECODED_S", 0.2)

    async def scenario(bench):
        for _ in KINDS:
            await bench.until(EngineReady)
        decode, prefill = bench.by_kind()
        decode.off = 0.5
        told = await bench.publish(0)
        assert list(told) == [0] and "decodes with other weights than its prefill engine holds" in told[0]
        assert decode.fed == [(len(CANARY.tokens), 1)], "the prefill engine was committed first"
        decode.off = 0.0
        assert await bench.publish(1) == {}
        asked, (length, start) = len(CANARY.tokens), decode.scored[-1]
        assert prefill.scored[-1] == 0 and start == asked < length, "what it sampled is scored"
        decode.faults.append("hangs")
        assert await bench.publish(2) == {}, "a prefill engine that was lost comes back after the push"
        bench.mailbox.tell(Work(leases=(lease(0),)))
        assert len((await finished(bench, 1))[0].group.samples) == 4
        assert not prefill.calls and {id for _, id in decode.fed} == {1}

    drive(scenario)


def test_without_a_prefill_engine_decode_engines_are_pushed_to_and_wait(drive, monkeypatch):  # noqa: F811
    monkeypatch.setattr(agents, "Bench", SplitBench)

    async def scenario(bench):
        await bench.started()
        decode, _ = bench.by_kind()
        bench.mailbox.tell(Restart(engines=(1,), reason="for a test"))
        assert (await bench.until(EngineDown)).engine == 1
        calls = len(decode.calls)
        assert await bench.publish(1, engines=(0,)) == {}
        bench.mailbox.tell(Work(leases=(lease(0),)))
        await bench.until(EngineReady)
        await asyncio.sleep(0.4)
        assert len(decode.calls) == calls
        assert await bench.publish(1, engines=(1,)) == {}
        (done,) = await finished(bench, 1)
        assert len(decode.calls) > calls
        assert [s.reason for s in done.group.samples] == [""] * 4, "the environments' time stood still"

    drive(scenario)
