"""As test_layouts.py, for the layers that a GPU gets: Transformer Engine's, here a stand-in of plain torch.

It proves the plan of the layers, their names in a checkpoint, what they are given and how their gradients are summed;
not the kernels.
"""

import functools

import pytest

from tests.megatron.fused import FEW
from tests.megatron.test_layouts import ALWAYS, check, launch, prepared

pytestmark = pytest.mark.long

CASES = [(n, f"{layout} {name}") for n, layouts in FEW.items() for layout, names in layouts.items() for name in names]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return functools.cache(functools.partial(launch, prepared(tmp_path_factory.mktemp("fused")), program="fused"))


@pytest.mark.parametrize(("num_ranks", "case"), [pytest.param(*case, id=case[1]) for case in CASES])
def test_it_computes_what_transformers_does(answers, num_ranks, case):
    check(answers, num_ranks, case, ALWAYS)
