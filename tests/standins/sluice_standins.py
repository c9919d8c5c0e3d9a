"""An SGLang plugin (entry-point group `sglang.srt.plugins`): seeded sampling without an accelerator.

`--enable-deterministic-inference` wants an attention backend of its list, and replaces operators by Triton kernels that
do not depend on the batch. On a CPU torch's own operators stay, and the tests say what holds of their results.
"""


def register():
    import torch._dynamo
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backends = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if "torch_native" not in backends:
        backends.append("torch_native")
    kernels = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
    HookRegistry.register(kernels, lambda *args, **given: None, HookType.REPLACE)
    torch._dynamo.config.disable = True  # the sampler is compiled otherwise, with an operator of sgl_kernel's in it
