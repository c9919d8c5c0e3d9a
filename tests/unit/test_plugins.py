"""Somebody's environments, rewards and chat templates: what is wrong with one is told early, and as theirs to mend."""

import asyncio
import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from launcher import cli
from runtime import plugins
from runtime.config import DataSet
from runtime.errors import ConfigError, WaitTimeout
from runtime.rank import Guard
from runtime.report import Report
from runtime.rollout.environments.single_turn import SingleTurn
from runtime.rollout.scoring import RewardPool
from runtime.rollout.tokenizer import HfTokenizer
from runtime.rollout.watchdog import Watchdog, running
from runtime.trainer import base
from runtime.types import Prompt
from tests.unit.fakes import save_tokenizer
from tests.unit.test_sampler import engine, lease, play

# ---- before the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "plays", "words"),
    [
        (
            "reward",
            "two_turns",
            ["is no reward", "no function of text and answer", "TwoTurns has no `async def score`"],
        ),
        ("reward", "of_text", ["is no reward", "cannot be called with (text, answer)", "too many"]),
        ("reward", "waiting", ["is no reward", "it is async"]),
        ("environment", "plain", ["is no environment", "function has no `async def run`", "docs/environments.md"]),
        ("environment", "judge", ["is no environment", "Judge has no `async def run`"]),
        ("environment", "not_async", ["is no environment", "its `run` is no `async def`"]),
        ("environment", "file", ["`build` of environment", "FileNotFoundError", "no/such/file", "plays.py"]),
        ("reward", "leave", ["`build` of reward", "SystemExit: 0", "plays.py"]),
    ],
)
def test_plugins_of_another_kind_or_shape_are_refused(here, capsys, key, plays, words):
    options = f"data.0={{path: train.jsonl, {key}: tests.unit.plays, {key}_options: {{play: {plays}}}}}"
    assert cli.main(["plan", "run.yaml", "--set", options]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in (f"data.0.{key}:", "'tests.unit.plays'", *words)), message


def test_plugins_that_raise_or_leave_are_told_of(here, capsys):
    """A plugin's own exit would look like a submission that went well."""

    def told(*changes: str) -> str:
        assert cli.main(["plan", "run.yaml", *(word for change in changes for word in ("--set", change))]) == 2
        return capsys.readouterr().err

    (here / "mine").mkdir()
    (here / "mine/leaves.py").write_text("import sys\nsys.exit(0)\n")
    (here / "mine/bare.py").write_text("class Config: pass\ndef build(options): pass\n")
    algorithm = "needs, atom, denominator, losses = frozenset(), 'sample', 'tokens', {'policy': max}"
    algorithm += "\n    def advantages(self, rewards): raise ValueError('nothing to go by')\n    refine = max\n"
    head = "import msgspec\nclass Config(msgspec.Struct): pass\ndef build(options): return A()\nclass A:\n    "
    (here / "mine/raises.py").write_text(head + algorithm)
    (here / "mine/other_atom.py").write_text(head + algorithm.replace("'sample'", "'prompt'"))
    (here / "mine/other_needs.py").write_text(head + algorithm.replace("frozenset()", "{'reference', 'odl'}"))
    assert "data.0.reward: importing reward 'mine.leaves' failed: SystemExit: 0" in told("data.0.reward=mine.leaves")
    assert "`Config` of 'mine.bare' is no msgspec.Struct" in told("data.0.reward=mine.bare")
    none = "data.0={path: train.jsonl, reward: tests.unit.plays, reward_options: {play: none}}"
    assert "data.0.reward_options: `Config` of 'tests.unit.plays' raised LookupError: there is no such play" in told(
        none
    )
    assert "`advantages` of 'mine.raises' raised ValueError" in told(
        "algorithm.name=mine.raises", "rollout.num_samples=1"
    )
    assert "its `atom` is not of sample, group" in told("algorithm.name=mine.other_atom")
    assert "its `needs` is not of old, " in told("algorithm.name=mine.other_needs")
    (here / "mine/imports.py").write_text("import no_such_package.inner\n")
    file = here / "mine/imports.py"
    assert f"cannot import reward 'mine.imports': {file} imports 'no_such_package', which is not installed" in told(
        "data.0.reward=mine.imports"
    )
    (here / "mine/world.py").write_text(
        "import msgspec\nclass Config(msgspec.Struct): pass\nclass World:\n"
        "    async def run(self, prompt, index, generate, tokenizer): pass\ndef build(options): return World()\n"
    )
    assert "what 'mine.world' builds is no reward: it is no function of text and answer, and World has no" in told(
        "data.0.reward=mine.world", "data.0.reward_options={after: x}"
    )
    assert "that is the name of an environment; choose one of" in told("data.0.reward=single_turn")
    for path in ("mine/world.py", "./mine/world", "/somewhere/else/mine/world.py"):
        assert "did you mean mine.world?" in told(f"data.0.reward={path}")
    assert "my_project.world" in told("data.0.reward=world.py")


def test_what_an_algorithm_may_be_is_what_trainers_know():
    known = {name: base.Algorithm.__annotations__[name] for name in plugins.ONE_OF}
    assert {name: get_args(eval(text, vars(base))) for name, text in known.items()} == plugins.ONE_OF
    assert get_args(base.Need) == plugins.NEEDS


def test_plugins_that_may_be_called_as_theirs_are_taken(here, capsys):
    for key, plays in (("reward", "plain"), ("reward", "asks"), ("environment", "raises")):
        options = f"data.0={{path: train.jsonl, {key}: tests.unit.plays, {key}_options: {{play: {plays}}}}}"
        assert cli.main(["plan", "run.yaml", "--set", options]) == 0, capsys.readouterr().err


def test_a_hang_that_would_look_like_lost_agents_is_warned_of(here, capsys):
    assert cli.main(["plan", "run.yaml", "--set", "limits.rollout_s=40"]) == 0
    assert "limits.rollout_s is 40: if all environments hang" in capsys.readouterr().err


# ---- at the start ------------------------------------------------------------------------------------------------


def test_a_plugin_that_breaks_at_the_start_is_no_bug_of_ours(tmp_path, caplog):
    """As where a file that `build` opens is there on the login node only."""
    broken = DataSet(path="none", reward="tests.unit.plays", reward_options={"play": "file"})
    guard = Guard(tmp_path, 0)
    codes: list[int] = []
    guard.abort = codes.append
    with pytest.raises(ConfigError) as raised:
        RewardPool.start({"train": broken}, 1, 1.0, {"train": "data.3"})
    with caplog.at_level(logging.ERROR):
        guard.end(raised.value)
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert (report.kind, codes) == ("config", [2])
    assert report.message.startswith("data.3.reward: `build` of reward 'tests.unit.plays' raised FileNotFoundError")
    assert 'return Path("no/such/file").open()' in caplog.text, "the log has the plugin's own traceback"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2 raised TemplateSyntaxError"),
        ("{{ raise_exception('no system role') }}", "raised TemplateError: no system role"),
        ("{{ messages[7].content + 1 }}", "raised UndefinedError"),
    ],
)
def test_a_broken_chat_template_is_its_owners_to_mend(tmp_path, template, words):
    save_tokenizer(tmp_path, template)
    with pytest.raises(ConfigError, match=words) as raised:
        HfTokenizer(str(tmp_path)).chat([{"role": "user", "content": "1+1"}])
    assert raised.value.where == str(tmp_path)


def test_a_tokenizer_that_is_none(tmp_path):
    save_tokenizer(tmp_path)
    Path(tmp_path, "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        HfTokenizer(str(tmp_path))


# ---- while it runs -----------------------------------------------------------------------------------------------


class Slow(SingleTurn):
    async def run(self, prompt, index, generate, tokenizer):
        await asyncio.sleep(60 if index else 0)
        return await super().run(prompt, index, generate, tokenizer)


class Wrong(SingleTurn):
    """What an environment may return by mistake."""

    async def run(self, prompt, index, generate, tokenizer):
        (sample,) = await super().run(prompt, index, generate, tokenizer)
        made = [msgspec.structs.replace(sample, loss_mask=sample.loss_mask.tolist())], "text"
        made += ([msgspec.structs.replace(sample, logprobs=sample.logprobs.astype(np.float64))],)
        made += ([msgspec.structs.replace(sample, index=7)],)
        if index == 4:
            raise SystemExit(3)
        return made[index]


def reasons(group):
    return [s.reason for s in group.samples if s.status == "failed"]


def test_an_environment_that_takes_too_long_fails_its_sample_and_is_named():
    group, _ = play([engine()], lease(num_samples=2), Slow(), names={"letters": "my.slow"}, timeout_s=0.2)
    assert reasons(group) == ["the environment my.slow took longer than 0.2 s (rollout.environment_timeout_s)"]
    assert group.samples[0].status != "failed"


def test_while_no_engine_is_up_an_environments_time_stands_still():
    async def wakes(pool, runnings):
        runnings[0].lose("it is gone")
        await asyncio.sleep(0.4)
        loop = asyncio.get_running_loop()
        pool.admit(type(runnings[0])(1, engine(), loop.create_future()))

    group, _ = play([engine("hangs")], lease(num_samples=1), timeout_s=0.2, meanwhile=wakes)
    assert reasons(group) == []


def test_what_an_environment_returns_by_mistake_fails_its_sample():
    group, _ = play([engine()], lease(num_samples=5), Wrong())
    assert reasons(group) == [
        "the environment returned a sample whose loss_mask are no flat bool array, but a list",
        "the environment returned no list of samples, but 'text'",
        "the environment returned a sample whose logprobs are no flat float32 array, but a float64 array",
        "the environment returned a sample 7 of prompt letters:0, where 3 of letters:0 was asked for",
        "the environment raised SystemExit: 3",
    ]


class Blocks(SingleTurn):
    async def run(self, prompt, index, generate, tokenizer):
        async def inner():
            end = time.monotonic() + 0.8
            while time.monotonic() < end:
                pass

        await asyncio.sleep(0.1)
        await asyncio.gather(inner())
        return await super().run(prompt, index, generate, tokenizer)


@pytest.fixture
def raised(monkeypatch):
    """What ends a thread, and so all ranks."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


def test_an_environment_that_keeps_the_loop_to_itself_is_named(raised, caplog):
    async def watched(pool, runnings):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Watchdog(0.3).tick(), 1.0)

    play([engine()], lease(num_samples=1), Blocks(), names={"letters": "my.loop"}, meanwhile=watched)
    (error,) = raised
    assert isinstance(error, ConfigError) and error.where == "the environment my.loop, prompt letters:0"
    assert "did not `await` for 0.3 s" in error.problem and "test_plugins.py" in error.problem
    assert "while time.monotonic() < end" in caplog.text


def test_a_reward_that_keeps_the_loop_to_itself_is_named_and_we_are_not_its_alibi(raised):
    class Sleeps:
        async def score(self, samples, texts, prompt, ask):
            await asyncio.sleep(0.05)
            time.sleep(0.8)
            return []

    async def main(what):
        watching = asyncio.create_task(Watchdog(0.3).tick())
        await asyncio.sleep(0.1)
        await what()
        watching.cancel()

    pool = RewardPool.start({}, 1, 0.1)
    pool._here["judged"] = Sleeps()
    try:
        pool._ask_of = lambda prompt, limit: None
        asyncio.run(main(lambda: pool.score([], [], Prompt(id="judged:4", dataset="judged"))))
    finally:
        pool.close()

    async def ours():
        time.sleep(0.8)

    asyncio.run(main(ours))
    theirs, own = raised
    assert isinstance(theirs, ConfigError) and theirs.where.endswith("test_plugins, prompt judged:4")
    assert isinstance(own, WaitTimeout) and "stood still for 0.3 s" in str(own)


def test_a_loop_that_awaits_is_left_alone(raised):
    async def main():
        watching = asyncio.create_task(Watchdog(0.3).tick())
        with running("the environment x"):
            for _ in range(10):
                time.sleep(0.05)
                await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(main())
    assert raised == []


def test_code_that_never_lets_go_of_the_interpreter_is_in_the_log(capfd):
    async def holds():
        ctypes.PyDLL(None).usleep(500_000)

    async def main():
        watching = asyncio.create_task(Watchdog(0.6).tick())
        await asyncio.sleep(0.1)
        await holds()
        watching.cancel()

    asyncio.run(main())
    assert "test_plugins.py" in (told := capfd.readouterr().err) and "in holds" in told
