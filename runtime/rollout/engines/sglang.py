"""SGLang, as it is published: its server in an environment of its own, told what to do by its own options."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError
from runtime.rollout.base import Engine, Launch
from runtime.rollout.engines._sglang_client import LOADER, SGLangClient
from runtime.rollout.pool import Pool
from runtime.rollout.spawning import PEER_PORT, PORT

LAUNCHER: Final = Path(__file__).parents[1] / "sglang_server.py"

INSTALL: Final = (
    "give the interpreter of an environment with SGLang, or a script that starts it, as docs/engines.md shows"
)

OURS: Final = {
    "model-path": "it is in the run's models",
    "host": "it is the node's fabric address",
    "port": "the kernel chooses it",
    "nccl-port": "the kernel chooses it",
    "api-key": "it is made anew for each attempt",
    "admin-api-key": "it is made anew for each attempt",
    "dtype": "it is trainer.precision",
    "enable-fp32-lm-head": "it is trainer.float32_output",
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
    "disaggregation-mode": "it follows from rollout.prefill_per_node",
    "disaggregation-bootstrap-port": "the kernel chooses it",
    "enable-pd-role-switch": "it follows from rollout.prefill_per_node",
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

CPU_SPLIT_DEFAULTS: Final = {
    "disaggregation-transfer-backend": "mooncake_tcp",
    "disaggregation-decode-retraction-backup": "cpu_tensor",
}
"""For prefill and decode engines; else SGLang wants RDMA devices, and memory that is pinned for a GPU."""

HANDS_OVER: Final = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl", "mori": "mori"}
"""SGLang's transfer backend -> the package it needs."""

COMPUTES_WEIGHTS: Final = ("quantization", "torchao-config", "speculative-algorithm")
"""Options with which it makes other weights of those that are sent, or gives them to a second model: no delta fits."""

HAS_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json. For some kernels SGLang holds experts in another order of items, which no delta fits: on AMD it
is one of those that it chooses by itself (aiter). Of those in `IN_ORDER` it holds them as they are sent."""

IN_ORDER: Final = ("triton",)
"""Of `moe-runner-backend`."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    python: str = ""
    """Interpreter of the environment that SGLang is installed in, or a script that passes its arguments on to one, in a
    container say; empty: the run's."""
    max_length: Annotated[int, Meta(ge=0)] = 0
    """Longest prompt and answer together; 0: what the model's config says."""
    server: dict[str, Any] = {}
    """Options of `python -m sglang.launch_server`, as they are: {mem-fraction-static: 0.8, disable-radix-cache: true}.
    true: a flag; false: left out; a list: several values."""

    def __post_init__(self) -> None:
        if self.max_length == 1:
            raise ValueError("max_length is 1, but a prompt and its answer have at least 2 tokens")
        for key in self.server:
            if (name := _name(key)) in OURS:
                raise ValueError(f"server.{key} is not for a config to set: {OURS[name]}")


class SGLangKind:
    runs_on_gpu = True
    spans_nodes = True
    takes_handles = True
    splits = True

    def __init__(self, config: Config, prefills: Pool | None = None) -> None:
        self._config, self._prefills = config, prefills
        self._given = {_name(key): value for key, value in config.server.items()}

    def command(self, launch: Launch) -> list[str]:
        on_cpu = launch.num_gpus == 0
        options = DEFAULTS | (FROZEN_DEFAULTS if launch.is_frozen else {}) | (CPU_DEFAULTS if on_cpu else {})
        options |= self._given
        options |= {"model-path": launch.model, "dtype": launch.dtype, "weight-version": "default"}
        options |= {"host": launch.host, "port": PORT, "nccl-port": PEER_PORT, "tp-size": launch.num_ranks}
        options["custom-weight-loader"] = LOADER
        options["enable-fp32-lm-head"] = launch.float32_output
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
        if launch.kind != "regular":
            options["disaggregation-mode"] = launch.kind
            options = (CPU_SPLIT_DEFAULTS if on_cpu else {}) | options
        if launch.deterministic:
            options["enable-deterministic-inference"] = True
        return [*argv, *(part for name, value in options.items() for part in _argument(name, value))]

    def client(self, *, url: str, token: str, timeout_s: float) -> Engine:
        return SGLangClient(url=url, token=token, timeout_s=timeout_s, prefills=self._prefills)

    def fed_by(self, prefills: Pool) -> SGLangKind:
        return SGLangKind(self._config, prefills)

    def lacks(self, model: Mapping[str, Any]) -> str:
        return ""  # it says so itself as it starts

    def takes_deltas(self, model: Mapping[str, Any]) -> bool:
        in_order = self._given.get("moe-runner-backend") in IN_ORDER or not any(map(model.get, HAS_EXPERTS))
        return in_order and not any(self._given.get(name) for name in COMPUTES_WEIGHTS)

    def check(self, where: str) -> list[str]:
        self._check_package("sglang", where)
        if not _is_script(python := self._config.python):
            return []
        says = f"`{python} -c 'import sglang'` on a compute node says whether it finds SGLang"
        return [f"{where}: python: {python} is a script, and what it starts cannot be looked at from here; {says}"]

    def check_sleep(self, where: str) -> None:
        self._check_package("torch_memory_saver", where)

    def check_split(self, where: str) -> None:
        backend = self._given.get("disaggregation-transfer-backend", "mooncake")
        if backend not in HANDS_OVER:
            problem = f"server.disaggregation-transfer-backend {backend!r} hands nothing over"
            raise ConfigError(where, problem, f"use one of: {', '.join(HANDS_OVER)}")
        self._check_package(HANDS_OVER[backend], where)

    def check_group(self, where: str) -> None:
        python = self._config.python or sys.executable
        its, ours = (_version("nvidia_nccl_cu", _places(path)) for path in (python, sys.executable))
        if its and ours and its[1] != ours[1]:
            raise ConfigError(
                where,
                f"python: {python} has NCCL {its[1]}, the run's {sys.executable} has {ours[1]}, and members of one "
                "process group must have the same",
                f"run: {sys.executable} -m pip install {ours[0].replace('_', '-')}=={its[1]} (torch takes another than "
                "it asks for), or write sync.channel: disk",
            )

    def _check_package(self, name: str, where: str) -> None:
        python = self._config.python or sys.executable
        if shutil.which(python) is None:
            raise ConfigError(where, f"python: there is no {python!r} that can be started", INSTALL)
        is_there = any(place.joinpath(name).is_dir() or any(place.glob(f"{name}-*")) for place in _places(python))
        if not is_there and not _is_script(python):
            problem = f"python: {python} has no package {name} under {_prefix(python)}"
            raise ConfigError(where, problem, INSTALL)


def _is_script(python: str) -> bool:
    """Whether it is no interpreter, but starts one, whose packages are nobody knows where."""
    found = shutil.which(python)
    if found is None:
        return False
    with Path(found).open("rb") as file:
        return file.read(2) == b"#!"


def _prefix(python: str) -> Path:
    """Of the environment of an interpreter."""
    return Path(shutil.which(python) or python).absolute().parents[1]


def _places(python: str) -> list[Path]:
    """Where an interpreter's packages are; nowhere, as far as one knows, where a script starts it."""
    if _is_script(python):
        return []
    return [p for lib in ("lib*", "local/lib*") for p in _prefix(python).glob(f"{lib}/python3*/*-packages")]


def _version(start: str, places: Sequence[Path]) -> tuple[str, str] | None:
    """Name and version of an installed package whose name starts so."""
    found = (folder.name.split("-") for place in places for folder in place.glob(f"{start}*.dist-info"))
    return next(((name, version.removesuffix(".dist")) for name, version, *_ in found), None)


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
