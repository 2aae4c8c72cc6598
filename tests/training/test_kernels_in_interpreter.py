"""The kernels of training on a GPU, and their gradients, in Triton's interpreter: in fp32, on any machine.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own. bf16 products
are wrong in it; tests/gpu has them on a GPU.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.training_kernels import (
    ATTENTION,
    LONG_ATTENTION,
    check_attention,
    check_gelu,
    check_layer_norm,
    check_long_gradients,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(
    not INTERPRETED, reason="runs in the process that test_all_in_the_interpreter starts"
)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="needs Triton")
def test_all_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") >= 14, "they were skipped"


@inside
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_and_its_gradients(case):
    check_attention(case, "cpu", torch.float32)


@inside
@pytest.mark.parametrize("case", LONG_ATTENTION)
def test_the_gradient_kernel_of_long_attention(case):
    check_long_gradients(case, "cpu", torch.float32)


@inside
@pytest.mark.parametrize("shape", [(2, 50, 512), (3, 197, 768), (1, 5, 100)])
def test_gelu_and_its_gradients(shape):
    check_gelu(shape, "cpu", torch.float32)


@inside
@pytest.mark.parametrize("shape", [(2, 50, 128), (5, 197, 768), (1, 3, 100)])
def test_layer_norm_and_its_gradients(shape):
    check_layer_norm(shape, "cpu", torch.float32)
