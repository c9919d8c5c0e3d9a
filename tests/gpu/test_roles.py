"""The models beside a policy on one GPU: as on the CPU, and out of its memory while they do not score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.roles_setup import make_roles, scored, teach
from tests.contract.trainer_setup import LAYOUTS, around, make_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),  # kernels are compiled on first use
]
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_all_roles_learn_as_on_the_cpu(tmp_path: Path, kind: str, precision: str, tolerance: float) -> None:
    models = {
        "tied": make_model(tmp_path / "tied", head_dim=32),
        "untied": make_model(tmp_path / "untied", head_dim=32, tie_word_embeddings=False),
    }
    expected = teach(make_roles(models))
    with around(kind, device=GPU):
        roles = make_roles(models, kind=kind, precision=precision, device=GPU)
        used = torch.cuda.memory_allocated()
        reference = scored(roles, "reference")
        assert (reference - scored(roles, "policy")).abs().max() < tolerance
        assert torch.cuda.memory_allocated() <= used + reference.nbytes
        for mine, other in zip(teach(roles), expected, strict=True):
            for name in ("loss", "kl", "value_loss", "grad_norm", "critic_grad_norm", "divergence0", "teacher"):
                assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name
        assert scored(roles, "reference").equal(reference)
