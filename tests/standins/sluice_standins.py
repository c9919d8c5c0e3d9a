"""An SGLang plugin (entry-point group `sglang.srt.plugins`): seeded sampling without an accelerator.

`--enable-deterministic-inference` wants an attention backend of its list, and replaces operators by Triton kernels that
do not depend on the batch. On a CPU torch's own operators stay, and the tests say what holds of their results.

With SLUICE_LATENT_ATTENTION in the environment latent attention is computed as when decoding: torch's own attention can
do no other of SGLang's ways.
"""

import os


def register():
    import torch._dynamo
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backends = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if "torch_native" not in backends:
        backends.append("torch_native")
    kernels = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
    HookRegistry.register(kernels, lambda *args, **given: None, HookType.REPLACE)
    if "SLUICE_LATENT_ATTENTION" in os.environ:
        way = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
        HookRegistry.register(way, _absorbed, HookType.REPLACE)
    torch._dynamo.config.disable = True  # the sampler is compiled otherwise, with an operator of sgl_kernel's in it


def _absorbed(self, forward_batch):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
