"""Which trainer ranks lead a data-parallel group, and which cuts of ranks and models come out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Cluster, EngineSet, Parallel, Rollout
from runtime.errors import ConfigError
from runtime.site import SiteConfig
from runtime.topology import EngineSlot, RankSlot, Topology, check_cut, leaders, make

SIZES = st.integers(1, 4)


@given(tensor=SIZES, pipeline=SIZES, context=SIZES, data=SIZES, first=st.integers(0, 9))
def test_leaders_are_the_first_of_each_data_parallel_group(tensor, pipeline, context, data, first):
    """Megatron counts tensor fastest, then context, data, pipeline."""
    trainers = range(first, first + tensor * pipeline * context * data)
    places = itertools.product(range(pipeline), range(data), range(context), range(tensor))
    expected = tuple(r for r, (p, _, c, t) in zip(trainers, places, strict=True) if p == c == t == 0)
    assert leaders(trainers, Parallel(tensor=tensor, pipeline=pipeline, context=context)) == expected
    assert len(expected) == data


def test_uncut_every_trainer_rank_leads():
    assert leaders((1, 2, 4, 5), Parallel()) == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("num_trainers", "parallel", "words"),
    [
        (6, Parallel(tensor=4), ["trainer.parallel:", "tensor 4 * pipeline 1 * context 1", "6 trainer ranks"]),
        (4, Parallel(tensor=2, pipeline=2, context=2), ["tensor 2 * pipeline 2 * context 2", "num_train_nodes"]),
        (8, Parallel(pipeline=2, expert=3), ["trainer.parallel.expert:", "3", "4 trainer ranks of a pipeline stage"]),
    ],
)
def test_ranks_that_cannot_be_cut_so(num_trainers, parallel, words):
    with pytest.raises(ConfigError) as refused:
        leaders(range(num_trainers), parallel)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("parallel", "num_experts", "words"),
    [
        (Parallel(tensor=3), 0, ["trainer.parallel.tensor", "3", "8 attention heads"]),
        (Parallel(tensor=4), 0, ["trainer.parallel.tensor", "4", "2 key-value heads"]),
        (Parallel(pipeline=4, virtual_pipeline=2), 0, ["trainer.parallel.pipeline", "8", "6 layers"]),
        (Parallel(virtual_pipeline=2), 0, ["trainer.parallel.virtual_pipeline", "2", "pipeline is 1"]),
        (Parallel(sequence_parallel=True), 0, ["trainer.parallel.sequence_parallel", "tensor 1"]),
        (Parallel(expert=2), 0, ["trainer.parallel.expert", "no experts"]),
        (Parallel(expert=3), 8, ["trainer.parallel.expert", "3", "8 experts"]),
        (Parallel(tensor=2), 8, ["trainer.parallel.sequence_parallel", "needs it", "true"]),
    ],
)
def test_models_that_cannot_be_cut_so(parallel, num_experts, words):
    with pytest.raises(ConfigError) as refused:
        check_cut(parallel, {"attention heads": 8, "key-value heads": 2}, 6, num_experts)
    assert all(word in str(refused.value) for word in words), refused.value


def test_models_that_can():
    check_cut(Parallel(tensor=2, pipeline=3, virtual_pipeline=2), {"attention heads": 8}, 6, 0)
    check_cut(Parallel(tensor=2, expert=4, sequence_parallel=True), {"attention heads": 8}, None, 8)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"nodes": (0,), "gpus": (0, 1)}, (1, 2)),
        ({"nodes": (1,), "gpus": (1,)}, (5,)),
        ({"nodes": (0, 1), "gpus": (0, 1)}, (1, 2, 4, 5)),
        ({"nodes": (1,), "gpus": ()}, (4,)),
        ({"nodes": (0, 1), "gpus": ()}, (1, 4)),
        ({"nodes": (2,), "gpus": (1,)}, (2,)),
        ({"nodes": (2,), "gpus": ()}, (1,)),
    ],
)
def test_an_engine_maps_memory_of_the_trainer_ranks_on_its_devices(engine, expected):
    """Two nodes with two trainer ranks each, and one with none; without GPUs it is that of the first there."""
    nodes = [0, 0, 0, 1, 1, 1, 2]
    roles = ["agent", "trainer", "trainer"] * 2 + ["agent"]
    ranks = tuple(
        RankSlot(rank=i, node=n, local_rank=i % 3, role=role, device=i % 3 - 1 if i % 3 and engine["gpus"] else None)
        for i, (n, role) in enumerate(zip(nodes, roles, strict=True))
    )
    slot = EngineSlot(id=0, model="policy", **engine)
    assert Topology(nodes=("a", "b", "c"), ranks=ranks, engines=(slot,)).lenders(slot) == expected


def engines(sets=(), *, gpus=8, mode="split", num_rollout_nodes=2, **rollout):
    """(model, node, GPUs, address) of each engine, on one training node and so many rollout nodes."""
    cluster = Cluster(mode=mode, num_train_nodes=1, num_rollout_nodes=num_rollout_nodes)
    made = make(
        cluster,
        Rollout(num_prompts=1, num_samples=1, sets=tuple(EngineSet(**one) for one in sets), **rollout),
        SiteConfig(name="big", gpus_per_node=gpus, cpu_slots_per_node=2),
        [f"node-{i}" for i in range(9)],
    ).engines
    assert [e.id for e in made] == list(range(len(made)))
    return [(e.model, *e.nodes, e.gpus, e.url) for e in made]


def test_other_models_have_the_last_gpus_of_each_node_with_engines_and_the_policy_what_is_left():
    judge = {"model": "judge", "engines_per_node": 2}
    teacher = {"model": "teacher", "gpus_per_engine": 2}
    found = engines([judge, teacher], gpus_per_engine=2)
    for node in (1, 2):
        assert [(model, gpus) for model, at, gpus, _ in found if at == node] == [
            ("policy", (0, 1)),
            ("policy", (2, 3)),
            ("judge", (7,)),
            ("judge", (6,)),
            ("teacher", (4, 5)),
        ]
    assert {node for _, node, _, _ in engines([judge], mode="colocated")} == {0}
    assert engines([{"model": "judge"}], gpus=0, num_rollout_nodes=1) == [("policy", 1, (), ""), ("judge", 1, (), "")]


@given(
    widths=st.tuples(SIZES, SIZES, SIZES),
    numbers=st.tuples(SIZES, SIZES),
    gpus=st.integers(1, 16),
    nodes=st.integers(1, 3),
)
def test_no_gpu_is_given_twice_and_none_is_invented(widths, numbers, gpus, nodes):
    sets = [
        {"model": model, "gpus_per_engine": width, "engines_per_node": number}
        for model, width, number in zip(("judge", "teacher"), widths[1:], numbers, strict=True)
    ]
    try:
        found = engines(sets, gpus=gpus, num_rollout_nodes=nodes, gpus_per_engine=widths[0])
    except ConfigError as e:
        assert widths[0] + sum(w * n for w, n in zip(widths[1:], numbers, strict=True)) > gpus, e
        return
    used = [(node, gpu) for _, node, of_it, _ in found for gpu in of_it]
    assert len(used) == len(set(used)) and all(0 <= gpu < gpus for _, gpu in used)
    assert {(model, node) for model, node, _, _ in found} == {
        (model, node) for model in ("policy", "judge", "teacher") for node in range(1, nodes + 1)
    }


def test_external_engines_of_the_policy_are_dealt_out_and_those_of_others_asked_by_all():
    urls = ("http://a:1", "http://b:1", "http://c:1")
    judge = {"model": "judge", "external": urls[:2], "engines_per_node": 9}
    found = [(model, node, url) for model, node, _, url in engines([judge], external=urls) if url]
    assert found == [
        *(("policy", 1, urls[0]), ("policy", 2, urls[1]), ("policy", 1, urls[2])),
        *(("judge", node, url) for node in (1, 2) for url in urls[:2]),
    ]
    alone = engines([judge], external=urls, num_rollout_nodes=0)
    assert {node for _, node, _, _ in alone} == {0} and len(alone) == 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus_per_engine": 9}, ["rollout.gpus_per_engine", "9", "8 GPUs", "use at most 8"]),
        ({"sets": [{"model": "judge", "engines_per_node": 8}]}, ["rollout.sets", "take 8", "8 GPUs", "policy needs 1"]),
        (
            {"sets": [{"model": "judge"}], "num_rollout_nodes": 0, "external": ("http://a:1",)},
            ["rollout.sets", "the judge's engines need rollout nodes", "external"],
        ),
    ],
)
def test_engines_that_do_not_fit(given, words):
    with pytest.raises(ConfigError) as refused:
        engines(**given)
    assert all(word in str(refused.value) for word in words), refused.value


def test_an_engine_that_needs_more_than_a_node_has_stands_on_several():
    site = SiteConfig(name="x", gpus_per_node=4)
    nodes = [f"n{i}" for i in range(5)]
    wide = Rollout(num_prompts=1, num_samples=1, gpus_per_engine=8)
    made = make(Cluster(num_train_nodes=1, num_rollout_nodes=4), wide, site, nodes)
    assert [(e.id, e.nodes, e.gpus) for e in made.engines] == [(0, (1, 2), (0, 1, 2, 3)), (1, (3, 4), (0, 1, 2, 3))]
    assert [[e.id for e in made.engines_of(n)] for n in range(5)] == [[], [0], [], [1], []]
    assert [[e.id for e in made.parts_of(n)] for n in range(5)] == [[], [0], [0], [1], [1]]
    for width, count, whole in ((6, 4, "8 or 16"), (8, 3, "12")):
        rollout = Rollout(num_prompts=1, num_samples=1, gpus_per_engine=width)
        with pytest.raises(ConfigError, match=f"{width}, but a node .* has 4 GPUs\n.* at most 4, or .* nodes {whole}$"):
            make(Cluster(num_train_nodes=1, num_rollout_nodes=count), rollout, site, nodes)
