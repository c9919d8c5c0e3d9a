"""An engine in process that can be told to fail, the other ends of an agent (mailbox, spawner), settings, a tokenizer.

Faults such as a hang, a death in mid-generation or weights of wrong bytes cannot be made at will with a real engine.
"""

import asyncio
import contextlib
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers

from runtime.errors import EngineLost
from runtime.rollout.base import Description
from runtime.rollout.spawning import Exited, Started
from runtime.rollout.start import EngineSettings
from runtime.types import Canary, Completion

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' }}{{ m.role }}: {{ m.content | trim }}{% generation %}</s>{% endgeneration %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}{{ eos_token }}"
)


EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "special": True}
CANARY = Canary(tokens=(1, 2, 3, 4), logprobs=np.array([0.0, -1.0, -2.0, -3.0], dtype=np.float32))
WEIGHTS = {"embed": "d0", "layers.0.up": "d1", "layers.0.down": "d2"}


def drawn(seed, position, vocabulary=8):
    """The token that every engine draws at this position: as with the real ones, a function of seed and position."""
    return 5 + hashlib.blake2b(f"{seed}|{position}".encode()).digest()[0] % vocabulary


class FakeEngine:
    """Implements rollout.base.Engine."""

    def __init__(self, version=-1):
        self.version = version
        self.calls = []
        self.faults = []
        """One a generate call: None, "dies", "hangs", or a number of tokens after which it aborts."""
        self.held = dict(WEIGHTS)
        self.logprobs, self.stale = CANARY.logprobs, 0.0
        """Of the canary; and how much is wrong with what it remembers."""
        self.scored = []
        self.answers: bool | None = True
        """To probes; None: that it is not well."""
        self.paused = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()
        self.groups = []
        self.broken_group = ""
        self.delay_s = 0.0
        self.sleeps = False
        self.taken_over = 0
        self.aborting = asyncio.Event()

    async def describe(self):
        return Description(model="policy", version=self.version, can=("seed", "spans", "digests"))

    async def generate(self, tokens, params, session=""):
        self.calls.append((list(tokens), params, session))
        fault = self.faults.pop(0) if self.faults else None
        await self.running.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.aborting.wait(), self.delay_s)
            fault = 1
        if fault == "dies":
            raise EngineLost("connection reset")
        if fault == "hangs":
            await asyncio.Event().wait()
        n = params.max_new_tokens if fault is None else fault
        made = [drawn(params.seed, len(tokens) + i) for i in range(n)]
        stop = next((i + 1 for i, t in enumerate(made) if t == 5), None)
        finish = "stop" if stop else "length" if fault is None else "abort"
        made = made[:stop]
        return Completion(
            tokens=np.array(made, np.int32),
            logprobs=-np.arange(1, len(made) + 1, dtype=np.float32),
            versions=((0, self.version),) if made else (),
            finish=finish,
        )

    async def pause(self, mode):
        self.running.clear()
        if mode == "abort":
            self.aborting.set()
            self.aborting = asyncio.Event()

    async def resume(self):
        self.running.set()

    async def connect(self, address, rank):
        if self.broken_group:
            raise EngineLost(self.broken_group)
        self.groups.append((address.name, rank))

    async def disconnect(self, group):
        self.groups = [g for g in self.groups if g[0] != group]

    async def receive(self, manifest, version, group):
        assert not self.running.is_set(), "an engine takes weights when it is paused"
        self.version = version

    async def sleep(self):
        assert not self.running.is_set()
        self.sleeps = True

    async def wake(self, *, serve):
        self.sleeps = self.sleeps and not serve

    async def checksums(self):
        return self.held

    async def score(self, tokens, start=0):
        assert self.running.is_set(), "it scores as little as it samples while paused"
        self.scored.append(start)
        return self.logprobs[start:] + (self.stale if start else 0.0)

    async def take_over(self):
        self.taken_over += 1

    async def health(self):
        if self.answers is False:
            await asyncio.Event().wait()
        return self.answers is True

    async def close(self):
        pass


@dataclass
class FakeKind:
    """Engines by the port that the spawner gave out."""

    engines: dict = field(default_factory=dict)
    prepare: object = lambda engine: None
    """Called with each new engine."""

    def command(self, launch):
        return ["engine", launch.model]

    def client(self, *, url, token, timeout_s):
        engine = self.engines[int(url.rpartition(":")[2])] = FakeEngine()
        self.prepare(engine)
        return engine


class FakeSpawner:
    def __init__(self):
        self.exits = asyncio.Queue()
        self.names = []
        self.stopped = []
        self.refuse = 0
        """So many processes exit at once."""
        self.code = 3
        """As these do."""

    async def start(self, name, argv, env, log, host):
        self.names.append(name)
        if self.refuse:
            self.refuse -= 1
            Path(log).write_text("no such model\n")
            self.exits.put_nowait(Exited(name, self.code))
        return Started(pid=1, port=len(self.names))

    async def stop(self, name, grace_s):
        if name not in self.stopped:
            self.stopped.append(name)
            self.exits.put_nowait(Exited(name, -15))


class FakeMailbox:
    """Both ends: the agent's (`send`, `next`) and the test's (`tell`, `until`)."""

    def __init__(self):
        self._in = asyncio.Queue()
        self._out = asyncio.Queue()
        self._unread = defaultdict(list)
        self.seen = defaultdict(list)
        """All that `until` came by."""

    def send(self, message):
        self._out.put_nowait(message)

    async def next(self):
        return await self._in.get()

    def tell(self, message):
        self._in.put_nowait(message)

    async def until(self, kind, limit_s=5.0):
        """The next message of this kind; others stay for who asks for theirs."""
        while not self._unread[kind]:
            message = await asyncio.wait_for(self._out.get(), limit_s)
            self.seen[type(message)].append(message)
            self._unread[type(message)].append(message)
        return self._unread[kind].pop(0)


def engine_settings(folder, **changes):
    """Of engines that keep their files in this folder; it writes their token."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("secret\n")
    settings = {
        "host": "127.0.0.1",
        "log_dir": str(folder),
        "token_file": str(token),
        "dtype": "float32",
        "threads": 1,
        "deterministic": False,
        "pause": "retract",
        "call_s": 10.0,
        "order_s": 5.0,
        "start_s": 5.0,
        "silence_s": 0.3,
        "restarts": 2,
    }
    return EngineSettings(**settings | changes)


def save_tokenizer(folder, template=TEMPLATE, eos=EOS):
    model = tokenizers.models.BPE(unk_token=None)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user: what is 12+34? assistant: 46"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": "<s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
