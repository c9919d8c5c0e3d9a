"""Real engines for the contract tests: processes started by the real spawner, weights over a real gloo group."""

import asyncio
import os
import secrets

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.comm.weights import BroadcastSender
from runtime.errors import EngineLost
from runtime.types import Manifest

EOS = 2
MAX_LENGTH = 320
SLOTS = 16


def make_model(folder):
    """A small Qwen3 with tied embeddings and random weights that give peaked, varied distributions."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    config.save_pretrained(folder)
    return perturbed(model, 1, 0.08)


def perturbed(model, seed, scale=0.05):
    """A copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval().requires_grad_(False)
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        mine.copy_(theirs + scale * torch.randn(theirs.shape, generator=generator))
    return copy


def manifest_of(tensors, bucket_bytes=1 << 16):
    return Manifest(
        names=tuple(tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        bucket_bytes=bucket_bytes,
    )


class Live:
    """One engine process and its client, with the trainer's side of its weight group."""

    def __init__(self, name, kind, spawner, folder):
        self.name, self._kind, self._spawner, self._folder = name, kind, spawner, folder
        self._sender = BroadcastSender("127.0.0.1", "gloo", device="cpu", timeout_s=30)
        self._group = f"weights-{name}"

    async def start(self, *, deterministic):
        self.token = secrets.token_hex(16)
        token_file = self._folder / f"{self.name}.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        argv = self._kind.command(
            model=str(self._folder),
            dtype="float32",
            token_file=str(token_file),
            threads=1,
            deterministic=deterministic,
        )
        log = self._folder / f"{self.name}.log"
        started = await self._spawner.start(self.name, argv, os.environ, str(log), "127.0.0.1")
        self.url = f"http://127.0.0.1:{started.port}"
        self.engine = self._kind.client(url=self.url, token=self.token, timeout_s=60)
        for _ in range(240):
            if await self.engine.health():
                return
            if not self._spawner.exits.empty():
                break
            await asyncio.sleep(0.25)
        raise AssertionError(f"the engine did not come up:\n{log.read_text()}")

    async def join(self):
        address = self._sender.open(self._group, 2)
        await asyncio.gather(asyncio.to_thread(self._sender.join, self._group), self.engine.connect(address, 1))

    async def send(self, tensors, version, bucket_bytes=1 << 16):
        """All buckets of one push to the paused engine; its digests."""
        manifest = manifest_of(tensors, bucket_bytes)
        pushing = asyncio.to_thread(self._sender.push, self._group, manifest, iter(tensors.items()))
        digests, told = await asyncio.gather(
            pushing, self.engine.receive(manifest, version, self._group), return_exceptions=True
        )
        if isinstance(told, EngineLost):
            raise told
        return digests

    async def push(self, model, version, mode="retract"):
        await self.engine.pause(mode)
        digests = await self.send(dict(model.named_parameters()), version)
        await self.engine.resume()
        return digests

    async def close(self):
        self._sender.close(self._group)
        await self.engine.close()
