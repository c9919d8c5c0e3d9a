"""Number of ranks -> name -> (how the model is cut, models that are run so)."""

from runtime.config import Parallel

DENSE = ("qwen3", "qwen3_tied", "qwen2", "qwen2_tied", "llama")
SPARSE = ("qwen3_moe", "deepseek_v3", "glm4_moe")
VARIANTS = ("qwen3_moe_raw", "deepseek_v3_plain")
LATE = "deepseek_v3_late"
"""Its first pipeline stage of two has no experts."""

LAYOUTS: dict[int, dict[str, tuple[Parallel, tuple[str, ...]]]] = {
    1: {"one rank": (Parallel(), (*DENSE, *SPARSE, *VARIANTS))},
    2: {
        "dp2": (Parallel(), ("qwen3", "qwen3_tied", *SPARSE, "qwen3_moe apart")),
        "tp2": (Parallel(tensor=2), ("qwen3", "qwen3_odd", "qwen2_tied", "llama", "qwen3_odd float32-output")),
        "tp2 sp": (
            Parallel(tensor=2, sequence_parallel=True),
            (*DENSE, *SPARSE, *VARIANTS, "deepseek_v3 bfloat16", "qwen2 float32-output"),
        ),
        "pp2": (
            Parallel(pipeline=2),
            ("qwen3", "qwen3_tied", "qwen2_tied", *SPARSE, LATE, "qwen3_tied bfloat16", "qwen3_tied float32-output"),
        ),
        "pp2 vpp2": (Parallel(pipeline=2, virtual_pipeline=2), ("qwen3", "qwen3_tied", "qwen3_moe")),
        "cp2": (Parallel(context=2), ("qwen3", "qwen2_tied", "llama", *SPARSE)),
        "ep2": (Parallel(expert=2), (*SPARSE, "qwen3 beside")),
    },
    4: {
        "tp2 pp2": (Parallel(tensor=2, pipeline=2), ("qwen3_tied", "qwen3_odd", "qwen2")),
        "tp2 dp2": (Parallel(tensor=2), ("qwen3", "llama")),
        "pp2 dp2": (Parallel(pipeline=2), ("qwen3_tied", "qwen3_moe apart")),
        "pp2 vpp2 dp2": (Parallel(pipeline=2, virtual_pipeline=2), ("qwen3_tied",)),
        "pp2 vpp2 cp2": (Parallel(pipeline=2, virtual_pipeline=2, context=2), ("qwen3", "qwen3_moe")),
        "pp2 vpp2 ep2": (Parallel(pipeline=2, virtual_pipeline=2, expert=2), ("qwen3_moe",)),
        "tp2 sp pp2 vpp2": (
            Parallel(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=True),
            ("qwen3_tied", "qwen3_moe"),
        ),
        "pp2 cp2": (Parallel(pipeline=2, context=2), ("qwen3", "deepseek_v3")),
        "tp2 sp cp2": (Parallel(tensor=2, context=2, sequence_parallel=True), ("qwen3_tied", "deepseek_v3")),
        "tp2 sp ep2": (Parallel(tensor=2, expert=2, sequence_parallel=True), (*SPARSE, "qwen3_moe apart")),
        "tp2 sp ep4": (Parallel(tensor=2, expert=4, sequence_parallel=True), ("deepseek_v3",)),
        "pp2 ep2": (Parallel(pipeline=2, expert=2), (*SPARSE, LATE)),
        "cp2 ep2": (Parallel(context=2, expert=2), ("qwen3_moe",)),
        "pp4": (Parallel(pipeline=4), ("qwen3_tied",)),
    },
}
