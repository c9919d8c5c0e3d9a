"""The seams of sampling: Engine, Environment and reward, as Protocols.

A plugin file in engines/, environments/ or rewards/ defines `Config` (a frozen msgspec Struct of its options) and
`build`:

    environments/x.py   build(options) -> Environment
    rewards/x.py        build(options) -> a Reward, or a plain function (text, answer) -> float
    engines/x.py        build(options) -> EngineKind
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from runtime.types import Completion, GroupAddress, Manifest, Prompt, Sample, SamplingParams


class Description(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: int
    """-1: not yet pushed to."""
    can: tuple[str, ...] = ()
    """Of: seed, spans, experts, sleep, lora."""


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

    async def receive(self, manifest: Manifest, version: int, group: str) -> None:
        """Take all buckets of one push from group rank 0; the engine is paused."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Weight name -> digest of the bytes it holds."""
        ...

    async def health(self) -> bool: ...

    async def close(self) -> None:
        """Close the connection; ending the process is the spawner's."""
        ...


class EngineKind(Protocol):
    """How one kind of engine is started and spoken to."""

    runs_on_gpu: bool
    """Whether it uses the GPUs of its slot, or a CPU."""

    def command(self, *, model: str, dtype: str, token_file: str, threads: int, deterministic: bool) -> list[str]:
        """argv of the server.

        It holds weights of this dtype (float32 or bfloat16), as the trainer sends them. It listens on an inherited
        socket, so no port is raced for: the spawner binds it and puts its number where the argv says
        process.SOCKET_FD.
        """
        ...

    def client(self, *, url: str, token: str, timeout_s: float) -> Engine: ...


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


class Reward(Protocol):
    async def score(self, samples: Sequence[Sample], texts: Sequence[str], prompt: Prompt) -> list[float | None]:
        """One reward a sample; None where it failed. texts[i] is the sampled text of samples[i]."""
        ...


PlainReward = Callable[[str, Any], float]
"""(sampled text, prompt.answer) -> reward; runs in a worker process."""
