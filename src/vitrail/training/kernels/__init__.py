"""Triton kernels of a training step in bf16: attention over few tokens, GELU and LayerNorm, with gradients.

Each is a custom operator of torch, so that it can be compiled around and captured in a CUDA graph. Only
`vitrail.training.lean` imports them, where Triton is installed and the step runs on a GPU.

Triton launches on torch's current device, so every launch is in a block of `torch.cuda.device_of`.
"""
