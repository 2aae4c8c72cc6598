"""Attention as one operator of ONNX Runtime: where it can be, and with the same answers."""

import pytest
import torch

import vitrail as vt
from vitrail.fast.onnx_graph import OnnxForward, build_onnx

SIZES = {"width": 48, "depth": 2, "heads": 4, "patch": 8, "size": 32, "classes": 5}


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, 2),
        ({"head_width": 20, "registers": 2}, 2),
        ({"qkv_bias": "no-k", "block": "parallel"}, 2),
        ({"qkv_bias": "none", "block": "post-norm", "scale": "none"}, 2),
        ({"pool": "attention", "class_token": False}, 2),
        ({"qk_norm": True}, 0),
        ({"position": "rotary"}, 0),
        ({"position": "relative"}, 0),
    ],
    ids=str,
)
def test_attention_is_one_operator_with_the_same_answers(options, fused):
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(**SIZES, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    graph = build_onnx(model)
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("MultiHeadAttention") == fused
    assert kinds.count("Softmax") == 2 - fused + (options.get("pool") == "attention")
    images = torch.randn(3, *model.config.input_shape)
    with torch.no_grad():
        pooled, logits = model.encode(images).pooled, model(images)
    for found, exact in zip(OnnxForward(graph)(images), (pooled, logits), strict=True):
        assert (found - exact).abs().max() < 2e-6 * exact.abs().max()
