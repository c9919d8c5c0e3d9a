"""The seams of sampling: Engine, Environment and reward, as Protocols.

A plugin file in engines/, environments/ or rewards/ defines `Config` (a frozen msgspec Struct of its options) and
`build`:

    environments/x.py   build(options) -> Environment
    rewards/x.py        build(options) -> a Reward, or a plain function (text, answer) -> float
    engines/x.py        build(options) -> EngineKind
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from runtime.topology import Kind
from runtime.types import Completion, GroupAddress, Manifest, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from runtime.rollout.pool import Pool


class Description(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: int
    """-1: not yet pushed to."""
    can: tuple[str, ...] = ()
    """Of: seed, spans, digests (its checksums are of the tensors that were pushed), handles (it maps memory that
    trainer ranks share), experts, sleep, lora."""
    num_ranks: int = 1
    """Of a weight group that it takes."""


class Engine(Protocol):
    """One inference server, seen from its agent. Every call is bounded and raises EngineLost with the reason."""

    async def describe(self) -> Description: ...

    async def generate(self, tokens: Sequence[int], params: SamplingParams, session: str = "") -> Completion:
        """Sample after a prefix. A completion that ends early because of `pause` has finish "abort".

        Raises:
            ValueError: the engine refuses the request, such as a prompt that is too long; the engine is well.
        """
        ...

    async def pause(self, mode: str) -> None:
        """Stop decoding; `mode` is abort, retract or in_place. New requests wait."""
        ...

    async def resume(self) -> None: ...

    async def connect(self, address: GroupAddress, rank: int) -> None:
        """Join a weight group, in the rank given."""
        ...

    async def disconnect(self, group: str) -> None: ...

    async def receive(self, manifest: Manifest, version: int, source: str) -> None:
        """Take all of one push, from rank 0 of the weight group of that name or from the folder; the engine is
        paused."""
        ...

    async def take(self, handles: Sequence[str], version: int, *, is_first: bool, is_last: bool) -> None:
        """Take one bucket of a push from shared memory, where it can "handles"; the engine is paused.

        Args:
            handles: one for each of its ranks, see comm.weights.handles.
        """
        ...

    async def sleep(self) -> None:
        """Give all memory back, weights and cache; it is paused, and nothing runs. It answers probes, but generates
        nothing."""
        ...

    async def wake(self, *, serve: bool) -> None:
        """Have memory again: for weights to come (serve False), then for the rest (True). It stays paused."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Weight name -> digest of the bytes it holds. Names and digests are its own, unless it can digests."""
        ...

    async def score(self, tokens: Sequence[int], start: int = 0) -> np.ndarray:
        """[T - start] float32: log-probs at temperature 1 of tokens[start:], 0 for a first one.

        What stands before `start` may be taken from the engine's cache of prefixes.

        Raises:
            ValueError: as `generate`.
        """
        ...

    async def health(self) -> bool: ...

    async def take_over(self) -> None:
        """Undo what an agent that is gone may have left: half a push, a pause. It need not be there."""
        ...

    async def close(self) -> None:
        """Close the connection; ending the process is the spawner's, or somebody else's."""
        ...


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of one engine depends on, beside its options."""

    model: str
    """Folder of its model."""
    dtype: str
    """float32 or bfloat16: it holds weights of this dtype, as the trainer sends them."""
    float32_output: bool = False
    """Its logits are computed in float32, as the trainer's are."""
    host: str
    """Address it listens on."""
    token_file: str
    num_gpus: int
    """That it sees; 0: it runs on a CPU."""
    num_ranks: int = 1
    """That its model is cut over, where it can be: its GPUs, or as many slots of CPUs."""
    num_nodes: int = 1
    """That it stands on, with as many ranks each."""
    node_rank: int = 0
    """Which of them this is; the engine answers on the first."""
    address: str = ""
    """Where the first one's process meets the others; empty: this is the first one, which meets them at PEER_PORT."""
    threads: int
    """Its share of the node's cores."""
    deterministic: bool
    sleeps: bool = False
    """Trainer ranks have its GPUs while it sleeps."""
    is_frozen: bool = False
    """Nothing is pushed to it: it reads its weights itself when it starts, and keeps them while it sleeps."""
    kind: Kind = "regular"


class EngineKind(Protocol):
    """How one kind of engine is started and spoken to."""

    runs_on_gpu: bool
    """Whether it uses the GPUs of its slot, or a CPU."""
    spans_nodes: bool
    """Whether an engine may stand on several nodes, one process tree on each."""
    takes_handles: bool
    """Whether it maps memory that trainer ranks share with it: comm.weights.handles."""
    splits: bool
    """Whether prompts and what follows them can be computed by engines of their own, prefill and decode."""

    def command(self, launch: Launch) -> list[str]:
        """argv of the server.

        No port is raced for. Either the server listens on an inherited socket, whose number the spawner puts where the
        argv says spawning.SOCKET_FD; or it binds ports that the spawner holds for it, spawning.PORT (where it answers)
        and spawning.PEER_PORT.
        """
        ...

    def client(self, *, url: str, token: str, timeout_s: float) -> Engine: ...

    def fed_by(self, prefills: Pool) -> EngineKind:
        """Of decode engines: their clients have prompts computed by these, and score with them. Only where it splits.

        While none of them is there, `generate` waits and `score` raises ValueError.
        """
        ...

    def lacks(self, model: Mapping[str, Any]) -> str:
        """What one that is started here has not that this model needs; empty: nothing, as far as its config.json tells.

        Args:
            model: its config.json.
        """
        ...

    def takes_deltas(self, model: Mapping[str, Any]) -> bool:
        """Whether one that is started here, with these options, can be pushed comm.weights.delta.

        Args:
            model: its config.json.
        """
        ...

    def check(self, where: str) -> list[str]:
        """Before a run is submitted: whether what the server needs is there. Fast, and without starting anything.

        Args:
            where: how an error names the place of the kind's options.

        Returns:
            Warnings: what could not be looked at.

        Raises:
            ConfigError: it is not.
        """
        ...

    def check_sleep(self, where: str) -> None:
        """As `check`, whether a server on a GPU can give its memory back."""
        ...

    def check_group(self, where: str) -> None:
        """As `check`, whether its ranks on GPUs and the trainer's can be members of one process group."""
        ...

    def check_split(self, where: str) -> None:
        """As `check`, whether prefill engines can hand over what they computed. Only where it splits."""
        ...


Generate = Callable[[Sequence[int]], Awaitable[Completion]]
"""Sample after these tokens with the lease's parameters; seeded by (run, prompt, sample, turn), journaled, retried on
another engine when one is lost."""


class Tokenizer(Protocol):
    eos_token_id: int

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the chat template with the generation prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...


class Environment(Protocol):
    """Plays one sample of one prompt. Replayable: it draws no randomness and keeps no state of its own."""

    async def run(self, prompt: Prompt, index: int, generate: Generate, tokenizer: Tokenizer) -> list[Sample]:
        """Segments of one answer, usually one. Rewards are filled in after."""
        ...


GREEDY: Final = SamplingParams(temperature=0.0)


class Ask(Protocol):
    async def __call__(self, model: str, messages: Sequence[Mapping[str, str]], params: SamplingParams = GREEDY) -> str:
        """What a model of `rollout.sets` answers: text, without special tokens. Its seed, if `params` has none, follows
        from run, prompt and question. While no engine of it is up the reward's time stands still.

        Raises:
            ValueError: no set serves such a model, or its engine refuses the question, such as one that is too long.
            WaitTimeout: no engine of it was up for as long as one may take to start.
        """
        ...


class Reward(Protocol):
    async def score(
        self, samples: Sequence[Sample], texts: Sequence[str], prompt: Prompt, ask: Ask
    ) -> list[float | None]:
        """One reward a sample; None where it failed. texts[i] is the sampled text of samples[i]."""
        ...


PlainReward = Callable[[str, Any], float]
"""(sampled text, prompt.answer) -> reward; runs in a worker process."""
