"""Triton kernels of inference in bf16 and fp8: LayerNorm, GELU, and products with what follows them.

Each has a plain function of torch beside it that computes the same, and tests hold them equal. Only
`vitrail.fast.fused` imports them, where Triton is installed.

Triton launches on torch's current device, so every launch is in a block of `torch.cuda.device_of`.
"""
