"""SGLang, as it is published: its server in an environment of its own, told what to do by its own options."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError
from runtime.rollout.base import Engine, Launch
from runtime.rollout.engines._sglang_client import LOADER, SGLangClient
from runtime.rollout.process import PEER_PORT, PORT

LAUNCHER: Final = Path(__file__).parents[1] / "sglang_server.py"

INSTALL: Final = "give the interpreter of an environment with SGLang, as docs/engines.md shows"

OURS: Final = {
    "model-path": "it is in the run's models",
    "host": "it is the node's fabric address",
    "port": "the kernel chooses it",
    "nccl-port": "the kernel chooses it",
    "api-key": "it is made anew for each attempt",
    "admin-api-key": "it is made anew for each attempt",
    "dtype": "it is trainer.precision",
    "context-length": "it is max_length",
    "device": "it follows from the site's GPUs",
    "tp-size": "it is rollout.gpus_per_engine",
    "weight-version": "it is the policy version",
    "nnodes": "it follows from rollout.gpus_per_engine",
    "node-rank": "it follows from rollout.gpus_per_engine",
    "dist-init-addr": "the kernel chooses it",
    "dp-size": "each engine is one replica",
    "pp-size": "weights reach tensor-parallel ranks only",
    "skip-server-warmup": "an engine is used once it is warm",
    "custom-weight-loader": "it takes deltas",
}
"""Options of SGLang that follow from the run -> how."""

OTHER_NAMES: Final = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "nccl-init-addr": "dist-init-addr",
}
"""As SGLang spells them too."""

DEFAULTS: Final = {"load-format": "dummy", "log-level": "warning"}
"""The first push brings every weight, so none is read from disk before; what a push leaves out shows in the canary."""

FROZEN_DEFAULTS: Final = {"load-format": "auto"}
"""Nothing is pushed."""

CPU_DEFAULTS: Final = {
    "attention-backend": "torch_native",
    "grammar-backend": "none",
    "max-total-tokens": 65536,
    "sleep-on-idle": True,
}
"""Without them SGLang takes most of a machine's memory for its cache, and a core for waiting."""

COMPUTES_WEIGHTS: Final = ("quantization", "torchao-config", "speculative-algorithm")
"""Options with which it makes other weights of those that are sent, or gives them to a second model: no delta fits."""

HAS_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json. For some kernels SGLang holds experts in another order of items: no delta fits those either."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    python: str = ""
    """Interpreter of the environment that SGLang is installed in; empty: that of the run."""
    max_length: Annotated[int, Meta(ge=0)] = 0
    """Longest prompt and answer together; 0: what the model's config says."""
    server: dict[str, Any] = {}
    """Options of `python -m sglang.launch_server`, as they are: {mem-fraction-static: 0.8, disable-radix-cache: true}.
    true: a flag; false: left out; a list: several values."""

    def __post_init__(self) -> None:
        for key in self.server:
            if (name := _name(key)) in OURS:
                raise ValueError(f"server.{key} is not for a config to set: {OURS[name]}")


class SGLangKind:
    runs_on_gpu = True
    spans_nodes = True
    takes_handles = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = {_name(key): value for key, value in config.server.items()}

    def command(self, launch: Launch) -> list[str]:
        on_cpu = launch.num_gpus == 0
        options = DEFAULTS | (FROZEN_DEFAULTS if launch.is_frozen else {}) | (CPU_DEFAULTS if on_cpu else {})
        options |= self._given
        options |= {"model-path": launch.model, "dtype": launch.dtype, "weight-version": "default"}
        options |= {"host": launch.host, "port": PORT, "nccl-port": PEER_PORT, "tp-size": launch.num_ranks}
        options["custom-weight-loader"] = LOADER
        if launch.num_nodes > 1:
            options |= {"nnodes": launch.num_nodes, "node-rank": launch.node_rank}
            options["dist-init-addr"] = launch.address or f"{launch.host}:{PEER_PORT}"
        if self._config.max_length:
            options["context-length"] = self._config.max_length
        argv = [self._config.python or sys.executable, str(LAUNCHER), "--token-file", launch.token_file]
        if on_cpu:
            argv += ["--threads", str(launch.threads)]
            options["device"] = "cpu"
        elif launch.sleeps:
            options["enable-memory-saver"] = True
            options["enable-weights-cpu-backup"] = launch.is_frozen  # else they come with the next push
        if launch.deterministic:
            options["enable-deterministic-inference"] = True
        return [*argv, *(part for name, value in options.items() for part in _argument(name, value))]

    def client(self, *, url: str, token: str, timeout_s: float) -> Engine:
        return SGLangClient(url=url, token=token, timeout_s=timeout_s)

    def takes_deltas(self, model: Mapping[str, Any]) -> bool:
        return not any(self._given.get(name) for name in COMPUTES_WEIGHTS) and not any(map(model.get, HAS_EXPERTS))

    def check(self, where: str) -> None:
        self._check_package("sglang", where)

    def check_sleep(self, where: str) -> None:
        self._check_package("torch_memory_saver", where)

    def _check_package(self, name: str, where: str) -> None:
        python = self._config.python or sys.executable
        found = shutil.which(python)
        if found is None:
            raise ConfigError(where, f"python: there is no {python!r}", INSTALL)
        prefix = Path(found).absolute().parents[1]
        places = [place for lib in ("lib*", "local/lib*") for place in prefix.glob(f"{lib}/python3*/*-packages")]
        if not any(place.joinpath(name).is_dir() or any(place.glob(f"{name}-*")) for place in places):
            raise ConfigError(where, f"python: {python} has no package {name} under {prefix}", INSTALL)


def _name(key: str) -> str:
    name = key.lstrip("-").replace("_", "-")
    return OTHER_NAMES.get(name, name)


def _argument(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def build(options: Config) -> SGLangKind:
    return SGLangKind(options)
