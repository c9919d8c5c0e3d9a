"""Real engines for the contract tests: processes started by the real spawner, weights over a real gloo group."""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.comm.buckets import buckets
from runtime.comm.weights.broadcast import BroadcastSender
from runtime.device import backend, platform, torch_device, visible
from runtime.errors import EngineLost
from runtime.rollout.base import EngineKind, Launch
from runtime.rollout.engines import embedded, sglang
from runtime.rollout.engines._dialect import DialectClient
from runtime.rollout.proof import off_canary
from runtime.types import Canary, Manifest
from tests.unit.fakes import save_tokenizer

SGLANG = Path(__file__).parents[2] / ".venv-sglang/bin/python"
"""Made by `make`."""
EOS = 1
VOCABULARY = 300
MAX_LENGTH = 320
SLOTS = 16


def make_model(folder, head_dim=16):
    """A small Qwen3 with tied embeddings and random weights that give peaked, varied distributions."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    return made(folder, config)


def made(folder, config):
    """A model with random weights; its folder lacks them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return perturbed(model, 1, 0.08)


def perturbed(model, seed, scale=0.05):
    """A copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval().requires_grad_(False)
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        mine.copy_(theirs + scale * torch.randn(theirs.shape, generator=generator))
    return copy


def logprobs_of(model, tokens):
    """[T] log-probs of these tokens by a plain forward, 0 for the first."""
    ids = torch.tensor(tokens)
    logits = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logits.gather(-1, ids[1:, None])[:, 0]]).numpy()


async def off(live, model):
    """How the engine's log-probs of a canary differ from this model's; "" if they do not."""
    tokens = tuple(range(20, 50))
    return await off_canary(live.engine, Canary(tokens=tokens, logprobs=logprobs_of(model, tokens)), live.dtype)


def manifest_of(tensors, bucket_bytes=1 << 16):
    return Manifest(
        names=tuple(tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        bucket_bytes=bucket_bytes,
    )


def session_of(pid):
    """The living processes of the session that an engine was started in."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == pid and state not in "ZX":
                    found.append(int(entry.name))
    return found


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of engine under test, and what it promises beyond what all do."""

    kind: EngineKind
    deterministic: bool
    num_ranks: int = 1
    repeats_bits: bool = False
    """Log-probs do not depend on what else runs."""
    is_strict: bool = False
    """It generates nothing before whole weights, and refuses an update that is not whole. One that is not says yes to
    all, and is found out by the canary."""
    holds_as: Callable[[str], str] = str
    """Name of a tensor that was pushed -> of the one it is held in."""
    num_in_flight: int = 0
    """Tokens of old weights that are stamped with the new version, where requests keep their cache over an update."""
    cuts_logprobs: bool = False
    """They are of the distribution that top-k and top-p leave, not of the whole."""
    float32_output: bool = False


def kinds_of_engine():
    small = embedded.build(embedded.Config(slots=SLOTS, max_length=MAX_LENGTH))
    exact = {"kind": small, "is_strict": True, "cuts_logprobs": True}
    return {
        "compact": Kind(deterministic=False, **exact),
        "deterministic": Kind(deterministic=True, repeats_bits=True, **exact),
        "sglang": Kind(kind=sglang_kind(), deterministic=True, holds_as=fused, num_in_flight=1),
    }


def fused(name):
    return re.sub("(gate|up)_proj", "gate_up_proj", re.sub("[qkv]_proj", "qkv_proj", name))


def sglang_kind(**server):
    server = {"max-total-tokens": 16384, "max-running-requests": 64, **server}
    return sglang.build(sglang.Config(python=str(SGLANG), max_length=MAX_LENGTH, server=server))


class Live:
    """One engine process and its client, with the trainer's side of its weight group."""

    def __init__(self, name, kind, spawner, folder, gpu=None, kept=None):
        """
        Args:
            gpu: index of the one it runs on, in bfloat16; weights are pushed from the first.
            kept: where deltas are pushed.
        """
        self.name, self.promises, self._kind, self._spawner, self._folder = name, kind, kind.kind, spawner, folder
        self.dtype, self._gpu = "float32" if gpu is None else "bfloat16", gpu
        source = torch.device(torch_device(None if gpu is None else 0))
        self._sender = BroadcastSender("127.0.0.1", backend(source), device=str(source), timeout_s=30, kept=kept)
        self._groups, self._group = 0, f"weights-{name}-0"

    async def start(self):
        self.token = secrets.token_hex(16)
        token_file = self._folder / f"{self.name}.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        argv = self._kind.command(
            Launch(
                model=str(self._folder),
                dtype=self.dtype,
                float32_output=self.promises.float32_output,
                host="127.0.0.1",
                token_file=str(token_file),
                num_gpus=0 if self._gpu is None else 1,
                num_ranks=self.promises.num_ranks,
                threads=self.promises.num_ranks,
                deterministic=self.promises.deterministic,
                sleeps=self._gpu is not None,
            )
        )
        log = self._folder / f"{self.name}.log"
        env = os.environ if self._gpu is None else visible([self._gpu], os.environ, platform())
        started = await self._spawner.start(self.name, argv, env, str(log), "127.0.0.1")
        self.pid, self.url = started.pid, f"http://127.0.0.1:{started.port}"
        self.engine = self._kind.client(url=self.url, token=self.token, timeout_s=60)
        for _ in range(1600):
            if await self.engine.health():
                return
            if not self._spawner.exits.empty():
                break
            await asyncio.sleep(0.25)
        raise AssertionError(f"the engine did not come up:\n{log.read_text()}")

    async def join(self):
        address = self._sender.open(self._group, 1 + self.promises.num_ranks)
        await asyncio.gather(asyncio.to_thread(self._sender.join, self._group), self.engine.connect(address, 1))

    async def rejoin(self):
        """A new group, as after any push that broke."""
        self._sender.close(self._group)
        with contextlib.suppress(EngineLost):
            await self.engine.disconnect(self._group)
        self._groups += 1
        self._group = f"weights-{self.name}-{self._groups}"
        await self.join()

    async def send(self, tensors, version, bucket_bytes=1 << 16, base=-1):
        """All buckets of one push to the paused engine, or what changed since the base; its digests."""
        manifest = manifest_of(tensors, bucket_bytes).since(base)
        pushing = asyncio.to_thread(self._sender.push, self._group, manifest, iter(tensors.items()))
        digests, told = await asyncio.gather(
            pushing, self.engine.receive(manifest, version, self._group), return_exceptions=True
        )
        if isinstance(told, EngineLost):
            raise told
        return digests

    async def push(self, model, version, mode="retract", base=-1):
        await self.engine.pause(mode)
        digests = await self.send(dict(model.named_parameters()), version, base=base)
        await self.engine.resume()
        return digests

    async def push_through_folder(self, sender, model, version, base=-1):
        tensors, folder = dict(model.named_parameters()), str(self._folder / f"versions/{version}")
        manifest = msgspec.structs.replace(manifest_of(tensors).since(base), via="folder")
        sender.push(folder, manifest, iter(tensors.items()))
        await self.engine.pause("retract")
        await self.engine.receive(manifest, version, folder)
        await self.engine.resume()
        sender.close(folder)

    async def push_by_handles(self, lenders, model, version):
        await self.engine.pause("retract")
        await self.take(lenders, model, version)
        await self.engine.resume()

    async def take(self, lenders, model, version):
        """A push from memory of one lender for each of its ranks; it is paused."""
        tensors = dict(model.named_parameters())
        manifest = manifest_of(tensors)
        for lender in lenders:
            lender.begin(manifest, iter(tensors.items()))
        for i, last in enumerate(range(len(buckets(manifest)))[::-1]):
            handles = [lender.lend(1) for lender in lenders]
            await self.engine.take(handles, version, is_first=not i, is_last=not last)
        for lender in lenders:
            lender.take_back()

    async def close(self):
        self._sender.close(self._group)
        await self.engine.close()


@contextlib.contextmanager
def refusing(port: int) -> Iterator[None]:
    """The engine there joins no weight group."""
    connect = DialectClient.connect

    async def of_others(self, address, rank):
        if self._wire.url.endswith(f":{port}"):
            raise EngineLost("it refuses")
        await connect(self, address, rank)

    with mock.patch.object(DialectClient, "connect", of_others):
        yield
