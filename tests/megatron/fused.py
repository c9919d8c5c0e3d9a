"""As program.py, with layers that stand for Transformer Engine's: a few cuts of each kind of model.

Usage: fused.py FOLDER RANK RANKS
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.megatron import te

te.install()

from runtime.trainer.megatron import model, spec  # noqa: E402  # Megatron looks for Transformer Engine when it is imported
from tests.megatron import layouts, program  # noqa: E402

FEW = {
    1: {"one rank": ("qwen2_tied", "llama", "glm4_moe")},
    2: {
        "tp2": ("qwen3",),
        "tp2 sp": ("qwen2", "qwen3_moe", "deepseek_v3", "deepseek_v3_plain"),
        "cp2": ("llama", "deepseek_v3"),
        "ep2": ("qwen3_moe",),
    },
}


def main(folder: Path, rank: int, num_ranks: int) -> None:
    assert spec.transformer_engine.HAVE_TE
    spec.has_fused_kernels = lambda device, dtype: True
    of_gpu = model.transformer_config

    def config(*args):
        made = of_gpu(*args)
        if made.multi_latent_attention:
            made.apply_rope_fusion = False  # a kernel of Triton's
        return made

    model.transformer_config = config
    every = layouts.LAYOUTS[num_ranks]
    layouts.LAYOUTS[num_ranks] = {name: (every[name][0], models) for name, models in FEW[num_ranks].items()}
    program.main(folder, rank, num_ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
