"""One lease to its group: seeds, journals, lost engines, pauses that abort, failing environments and rewards."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.errors import ConfigError, WaitTimeout
from runtime.rollout.environments.single_turn import SingleTurn
from runtime.rollout.pool import Pool, Running
from runtime.rollout.reward_host import Verdict
from runtime.rollout.sampler import Sampler, join, seed_of
from runtime.rollout.tokenizer import HfTokenizer
from runtime.types import Completion, Lease, Prompt, SamplingParams
from tests.unit.fakes import TEMPLATE, FakeEngine, drawn, save_tokenizer
from tests.unit.plays import Cancelled, Ragged, Raises, TwoTurns

TOKENS = (1, 2, 3)


class Letters:
    """A tokenizer: token t is the letter number t."""

    eos_token_id = 5

    def chat(self, messages):
        return [1, *self.encode(messages[-1]["content"])]

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + t) for t in tokens if t != self.eos_token_id)


class Lengths:
    """Rewards an answer with its length; "bad" answers fail."""

    def __init__(self, bad=()):
        self.bad, self.scored = bad, []

    async def score(self, samples, texts, prompt):
        self.scored += texts
        return [Verdict(None, "no") if s.index in self.bad else Verdict(float(len(s.tokens))) for s in samples]


def lease(num_samples=3, max_new_tokens=6, **fields):
    prompt = Prompt(id="letters:0", tokens=TOKENS, dataset="letters", answer="x")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Lease(**{"number": 4, "prompt": prompt, "version": 7, "num_samples": num_samples, "params": params} | fields)


def play(engines, lease=None, environment=None, journal=None, rewards=None, wait_s=2.0, meanwhile=None, **more):
    """The group, and the journal, of a lease that ran on these engines."""
    lease = lease or globals()["lease"]()
    journal = journal if journal is not None else [[] for _ in range(lease.num_samples)]

    async def main():
        pool = Pool(wait_s)
        runnings = [Running(i, e, asyncio.get_running_loop().create_future()) for i, e in enumerate(engines)]
        for running in runnings:
            pool.admit(running)
        sampler = Sampler(
            seed=0,
            pool=pool,
            permits=asyncio.Semaphore(2),
            environments={"letters": environment or SingleTurn()},
            tokenizer=Letters(),
            rewards=rewards or Lengths(),
            **more,
        )
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(sampler.run(lease, journal))
            if meanwhile:
                tasks.create_task(meanwhile(pool, runnings))
        return group.result()

    return asyncio.run(asyncio.wait_for(main(), 10)), journal


def engine(*faults, version=7):
    made = FakeEngine(version)
    made.faults = list(faults)
    return made


def expected(index, turn=0, prefix=TOKENS, n=6):
    """What every engine samples after this prefix."""
    seed = seed_of(0, "letters:0", index, turn)
    made = [drawn(seed, len(prefix) + i) for i in range(n)]
    return made[: made.index(5) + 1] if 5 in made else made


def same(a, b):
    assert len(a.samples) == len(b.samples)
    for x, y in zip(a.samples, b.samples, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist()
        assert x.logprobs.tolist() == y.logprobs.tolist()
        assert x.loss_mask.tolist() == y.loss_mask.tolist()
        assert (x.index, x.segment, x.versions, x.reward, x.status) == (
            y.index,
            y.segment,
            y.versions,
            y.reward,
            y.status,
        )


def test_a_group():
    group, journal = play([engine()], lease(num_samples=8))
    assert (group.lease, group.version, group.prompt.id) == (4, 7, "letters:0")
    assert {s.status for s in group.samples} == {"done", "truncated"}, "the seeds give both"
    for i, s in enumerate(group.samples):
        made = expected(i)
        assert s.index == i
        assert s.tokens.tolist() == [*TOKENS, *made]
        assert s.loss_mask.tolist() == [False] * 3 + [True] * len(made)
        assert s.logprobs.tolist() == [0.0] * 3 + [-float(k) for k in range(1, len(made) + 1)]
        assert s.versions == ((3, 7),)
        assert s.status == ("done" if made[-1] == 5 else "truncated")
        assert s.reward == len(s.tokens)
        assert s.trainable
        assert journal[i][0].tokens.tolist() == made


def test_messages_go_through_the_chat_template():
    chat = Prompt(id="letters:0", messages=({"role": "user", "content": "cd"},), dataset="letters")
    group, _ = play([engine()], lease(prompt=chat))
    assert all(s.tokens[:3].tolist() == [1, 2, 3] for s in group.samples)


def test_seeds_are_a_pure_function_of_63_bits():
    seeds = {seed_of(r, p, i, t) for r in (0, 1) for p in ("a:1", "a:11") for i in range(20) for t in range(20)}
    assert len(seeds) == 1600
    assert all(0 <= s < 2**63 for s in seeds)
    assert seed_of(7, "arith:0:1f", 3, 1) == 1030929286081590772


def test_a_journal_gives_the_same_group_without_an_engine_call():
    first, journal = play([engine()], environment=TwoTurns())
    idle = engine()
    again, _ = play([idle], environment=TwoTurns(), journal=[list(made) for made in journal])
    same(first, again)
    assert idle.calls == []


def test_a_journal_is_gone_on_from_where_it_ends():
    first, journal = play([engine()], environment=TwoTurns())
    part = [list(journal[0]), list(journal[1][:1]), []]
    second = engine()
    again, completed = play([second], environment=TwoTurns(), journal=part)
    same(first, again)
    assert len(second.calls) == 3, "turn 1 of sample 1, both turns of sample 2"
    assert [[c.tokens.tolist() for c in made] for made in completed] == [
        [c.tokens.tolist() for c in made] for made in journal
    ]


def test_a_lost_engine_loses_and_doubles_nothing():
    """Engine 0 dies at its second call: every sample is what one healthy engine gives."""
    healthy, _ = play([engine()], lease(num_samples=6))
    group, journal = play([engine(None, "dies"), engine()], lease(num_samples=6))
    same(healthy, group)
    assert [len(made) for made in journal] == [1] * 6


def test_an_engine_that_forgot_its_weights_is_lost_and_its_answer_too():
    """As one that somebody else runs, and started anew while nobody looked."""
    lost = []

    async def look(pool, runnings):
        while not lost:
            await asyncio.sleep(0.01)
            lost.extend(r.id for r in runnings if r.is_lost)

    group, _ = play([engine(version=-1), engine(version=7)], meanwhile=look)
    assert lost == [0]
    same(group, play([engine()])[0])


def test_a_call_to_a_lost_engine_ends_at_once():
    """A hang is not waited for: when the engine counts as lost, its calls go to the next one."""

    async def lose(pool, runnings):
        await asyncio.sleep(0.05)
        pool.withdraw(0)
        runnings[0].lose("it is silent")

    healthy, _ = play([engine()])
    same(healthy, play([engine("hangs", "hangs"), engine()], meanwhile=lose)[0])


def test_a_lost_engine_is_not_admitted():
    """A commit may end in the moment in which its engine is lost."""

    async def main():
        pool = Pool(0.05)
        running = Running(0, engine(), asyncio.get_running_loop().create_future())
        running.lose("it died")
        pool.admit(running)
        with pytest.raises(WaitTimeout):
            await pool.pick(None, 0)

    asyncio.run(main())


def test_calls_wait_for_the_next_engine():
    async def replace_engine(pool, runnings):
        await runnings[0].loss(5.0)
        pool.withdraw(0)
        await asyncio.sleep(0.05)
        pool.admit(Running(0, engine(), asyncio.get_running_loop().create_future()))

    healthy, _ = play([engine()])
    same(healthy, play([engine("dies")], meanwhile=replace_engine)[0])


def test_no_engine_in_time_ends_the_lease():
    with pytest.raises(ExceptionGroup) as caught:
        play([], wait_s=0.05)
    (first, *_) = caught.value.exceptions
    while isinstance(first, ExceptionGroup):
        (first, *_) = first.exceptions
    assert isinstance(first, WaitTimeout)
    assert "waited 0.05 s for any engine" in str(first)


@pytest.mark.parametrize("aborts", [(2,), (0, 1, 2), (3, 3), (6,)])
def test_an_aborted_completion_is_gone_on_with(aborts):
    """The same tokens as without a pause, in spans of the versions that made them."""
    whole, _ = play([engine()], lease(num_samples=1))
    one = engine(*aborts)
    group, journal = play([one], lease(num_samples=1))
    assert group.samples[0].tokens.tolist() == whole.samples[0].tokens.tolist()
    assert group.samples[0].status == whole.samples[0].status
    assert len(journal[0]) == 1
    assert journal[0][0].finish != "abort"
    budgets = [(len(tokens), params.max_new_tokens) for tokens, params, _ in one.calls]
    assert all(have + left == len(TOKENS) + 6 for have, left in budgets)
    assert len({params.seed for _, params, _ in one.calls}) == 1


def test_versions_of_an_aborted_completion():
    class Newer(FakeEngine):
        async def generate(self, tokens, params, session=""):
            made = await super().generate(tokens, params, session)
            self.version += 1
            return made

    one = Newer(7)
    one.faults = [2, 1]
    group, _ = play([one], lease(num_samples=1, max_new_tokens=4))
    n = len(group.samples[0].tokens)
    assert group.samples[0].versions == ((3, 7), (5, 8), (6, 9))[: 1 + (n > 5) + (n > 6)]
    assert group.oldest_version == 7


def test_a_partial_completion_in_a_journal_is_gone_on_with():
    whole, journal = play([engine()], lease(num_samples=1))
    made = journal[0][0]
    part = replace(made, tokens=made.tokens[:2], logprobs=made.logprobs[:2], finish="abort")
    one = engine()
    group, _ = play([one], lease(num_samples=1), journal=[[part]])
    assert group.samples[0].tokens.tolist() == whole.samples[0].tokens.tolist()
    assert one.calls[0][0] == [*TOKENS, *made.tokens[:2].tolist()]


@pytest.mark.parametrize(
    ("environment", "reason", "fails"),
    [
        (Raises(), "sandbox is gone", [False, True, False]),
        (Ragged(), "log-probs", [True] * 3),
        (Cancelled(), "awaited something that was cancelled", [True] * 3),
    ],
)
def test_a_failing_environment_is_no_reward(environment, reason, fails):
    group, _ = play([engine()], environment=environment)
    bad = group.samples[1]
    assert len(group.samples) == 3, "the group keeps its size"
    assert (bad.status, bad.reward, bad.trainable, len(bad.tokens)) == ("failed", None, False, 0)
    assert reason in bad.reason and [s.status == "failed" for s in group.samples] == fails


def test_a_failed_reward_is_none_and_not_trained():
    group, _ = play([engine()], rewards=Lengths(bad={2}))
    assert [s.reward is None for s in group.samples] == [False, False, True]
    assert [s.trainable for s in group.samples] == [True, True, False]
    assert (group.samples[2].status, group.samples[2].reason) == ("failed", "no")
    assert len(group.samples[2].tokens) > 3


def test_segments_share_the_reward_of_the_last():
    rewards = Lengths()
    group, _ = play([engine()], environment=TwoTurns(), rewards=rewards)
    assert [(s.index, s.segment) for s in group.samples] == [(i, j) for i in range(3) for j in range(2)]
    assert len(rewards.scored) == 3
    for first, second in zip(group.samples[::2], group.samples[1::2], strict=True):
        assert first.reward == second.reward == len(second.tokens)


def test_a_lease_stays_with_one_engine_unless_that_is_busy():
    engines = [engine(), engine()]
    play(engines, lease(num_samples=2))
    assert sorted(len(e.calls) for e in engines) == [0, 2]


# ---- joining


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4)


def completion(parts, finish="stop"):
    """Of (version, number of tokens); neighbours of one version are one span."""
    versions, at = [], 0
    for version, n in parts:
        if not versions or versions[-1][1] != version:
            versions.append((at, version))
        at += n
    numbers = np.arange(at)
    return Completion(
        tokens=numbers.astype(np.int32),
        logprobs=-numbers.astype(np.float32),
        versions=tuple(versions),
        finish=finish,
    )


def version_of_each(c):
    return [next(v for start, v in reversed(c.versions) if start <= t) for t in range(len(c.tokens))]


@given(spans, spans, spans)
def test_joining_keeps_every_token_with_its_version(a, b, c):
    x, y, z = completion(a, "abort"), completion(b, "abort"), completion(c, "length")
    whole = join(join(x, y), z)
    assert whole.finish == "length"
    assert whole.tokens.tolist() == [*x.tokens, *y.tokens, *z.tokens]
    assert whole.logprobs.tolist() == [*x.logprobs, *y.logprobs, *z.logprobs]
    assert version_of_each(whole) == version_of_each(x) + version_of_each(y) + version_of_each(z)
    assert whole.versions == completion([*a, *b, *c]).versions
    assert join(x, join(y, z)).versions == whole.versions
    nothing = replace(completion([], "abort"), versions=((0, 9),))
    assert join(nothing, whole).versions == whole.versions, "an engine may name its version for no token"


# ---- the tokenizer


CHATS = [
    [{"role": "user", "content": " what is 12+34? "}],
    [{"role": "system", "content": "Be brief.\n\nÄß 漢字 🙂"}, {"role": "user", "content": "<s>46</s>"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": ""}],
]


def test_the_tokenizer_is_transformers(tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    ours, theirs = HfTokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id
    for chat in CHATS:
        tokens = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.chat(chat) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
        text = chat[-1]["content"]
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_template_inside_the_config(tmp_path):
    save_tokenizer(tmp_path)
    expected = HfTokenizer(str(tmp_path)).chat(CHATS[0])
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for given_as in (TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]):
        file.write_text(json.dumps(config | {"chat_template": given_as}))
        assert HfTokenizer(str(tmp_path)).chat(CHATS[0]) == expected


def test_a_folder_without_what_is_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        HfTokenizer(str(tmp_path))
    save_tokenizer(tmp_path, eos="<none>")
    with pytest.raises(ConfigError, match="eos_token names no token"):
        HfTokenizer(str(tmp_path))
    save_tokenizer(tmp_path, template="")
    with pytest.raises(ConfigError, match="no chat template"):
        HfTokenizer(str(tmp_path)).chat(CHATS[0])
