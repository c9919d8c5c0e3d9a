"""Which trainer ranks lead a data-parallel group, and which cuts of ranks and models come out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Parallel
from runtime.errors import ConfigError
from runtime.topology import check_cut, leaders

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
