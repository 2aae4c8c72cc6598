"""Operators of ONNX Runtime's own: where they can be, and with the same answers."""

import pytest
import torch

import vitrail as vt
from vitrail.fast.choices import Choices
from vitrail.fast.inference_routes import Builder
from vitrail.fast.onnx_fuse import fuse_products
from vitrail.fast.onnx_graph import OnnxForward, build_onnx

SIZES = {"width": 48, "depth": 2, "heads": 4, "patch": 8, "size": 32, "classes": 5}


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, 1),  # in the last block, q of the class token and k and v of all are products of their own
        ({"head_width": 20, "registers": 2}, 1),
        ({"pool": "mean"}, 2),
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


@pytest.mark.parametrize("options", [{}, {"linear_bias": False, "qkv_bias": "none"}], ids=str)
def test_products_of_int8_take_their_bias_and_give_the_same_answers(options):
    """And an image at a time, each gets exactly what it gets alone."""
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(**SIZES, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.randn(8, *model.config.input_shape)
    cpu = torch.device("cpu")
    builder = Builder(model, cpu, "throughput", Choices(cpu, remember=False), images)
    graph = builder.quantized_graph((), build_onnx)
    standard = OnnxForward(graph)
    assert fuse_products(graph) == 9
    kinds = [node.op_type for node in graph.graph.node]
    assert (
        kinds.count("MatMulIntegerToFloat") == 11
    )  # q, k and v have one each; in the last block q, and k and v
    assert not {"DequantizeLinear", "Split"}.intersection(kinds)
    assert kinds.count("Add") == 6  # residuals, positions and the patch embedding; no bias
    for found, exact in zip(OnnxForward(graph)(images), standard(images), strict=True):
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    alone = torch.cat([OnnxForward(graph)(one)[1] for one in images.split(1)])
    assert torch.equal(OnnxForward(graph, one_by_one=True)(images)[1], alone)
