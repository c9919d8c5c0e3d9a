"""The engines under test."""

import asyncio

import pytest

from runtime.comm.weights.delta import Kept
from runtime.rollout.spawning import Spawner
from tests.contract.live import Kind, Live, kinds_of_engine, make_model, perturbed, sglang_kind
from tests.unit.fakes import save_tokenizer

KINDS = kinds_of_engine()


@pytest.fixture(scope="package")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def exported(model, tmp_path_factory):
    """Other weights, and the folder a run would end with."""
    folder = tmp_path_factory.mktemp("export")
    other = perturbed(model, 11)
    other.save_pretrained(folder)
    save_tokenizer(folder)
    return other, folder


@pytest.fixture(scope="package")
def lives(runner, model, exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    model.config.save_pretrained(folder)
    save_tokenizer(folder)
    spawner = Spawner()
    lives = {name: Live(name, kind, spawner, folder) for name, kind in KINDS.items()}
    kind = sglang_kind(**{"load-format": "auto"})
    from_disk = Kind(kind=kind, deterministic=False, num_ranks=2, float32_output=True)
    lives["from disk"] = Live("from disk", from_disk, spawner, exported[1], kept=Kept())

    async def start():
        await asyncio.gather(*(live.start() for live in lives.values()))

    async def close():
        for live in lives.values():
            await live.close()

    try:
        runner.run(start())
        yield lives
        runner.run(close())
    finally:
        spawner.close()


@pytest.fixture(params=KINDS, scope="module")
def fresh(request, lives):
    """Before its first weights."""
    return lives[request.param]


async def hand_version_1(live, model):
    if (await live.engine.describe()).version == -1:
        await live.join()
    await live.push(model, 1)


@pytest.fixture
def live(fresh, runner, model):
    """With version 1 of the weights, which are `model`'s."""
    runner.run(hand_version_1(fresh, model))
    return fresh


@pytest.fixture
def from_disk(lives, runner, model):
    """An SGLang of two ranks that read `exported` and was then pushed version 1. It keeps prefixes, knows no seeds."""
    live = lives["from disk"]
    if not hasattr(live, "checksums_from_disk"):
        live.checksums_from_disk = runner.run(live.engine.checksums())
    runner.run(hand_version_1(live, model))
    return live
