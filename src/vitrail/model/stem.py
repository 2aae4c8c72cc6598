"""Convolutional stems for hybrids: patches are cut from their feature map instead of from pixels (paper,
Section 3.1, "Hybrid Architecture").

A stem maps images (B, C, H, W) to a feature map (B, out_channels, H/stride, W/stride), with sides rounded
up. `ConvStem` is two convolutions; `ResNetStem` is the R50 of R50+ViT-B/16; `MobileStem` is that of
MobileCLIP-B. Norms are group norms, or batch norms whose statistics do not change, so the output for an image
does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.init import lecun_normal
from vitrail.model.tap import TappedModule

# As in timm's hybrids. The paper's code divides a kernel by (standard deviation + 1e-5) instead, and its
# group norms have an eps of 1e-6.
_KERNEL_EPS = 1e-8
_NORM_EPS = 1e-5
_GROUPS = 32


def initialize_stem(module: nn.Module) -> None:
    """Initialize all parameters of a stem.

    | parameter                 | initialization                                         |
    |---------------------------|--------------------------------------------------------|
    | weight of a convolution   | LeCun normal: variance 1/(C k k), truncated at 2 sigma |
    | weight of a norm          | 1                                                      |
    | bias of a norm            | 0                                                      |

    These are Flax's defaults, as in the paper's code, except that there the last norm of a unit (norm3)
    starts with weight 0, so that each unit starts as its shortcut.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                lecun_normal(layer.weight)
            elif isinstance(layer, (nn.GroupNorm, FixedBatchNorm)):
                nn.init.ones_(layer.weight)
                nn.init.zeros_(layer.bias)


class ConvStem(nn.Module):
    """Two 3x3 convolutions of stride 2, each with a norm and a ReLU: C -> width/2 -> width channels.

    The first two layers of the stem of Xiao et al. (2021), "Early convolutions help transformers see
    better": channels double where the sides halve. Their stem continues to the stride of a patch; here
    patches of side P/4 are cut from the feature map. Instead of their batch norm it has a group norm with
    one group, so that the tokens of an image do not depend on the batch, in training either.

    Keys: `conv1.weight`, `norm1.{weight,bias}`, `conv2.weight`, `norm2.{weight,bias}`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.out_channels = width
        self.conv1 = nn.Conv2d(channels, width // 2, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(1, width // 2)
        self.conv2 = nn.Conv2d(width // 2, width, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, width)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(images)))  # (B, width/2, H/2, W/2)
        return F.relu(self.norm2(self.conv2(x)))  # (B, width, H/4, W/4)


class FixedBatchNorm(nn.Module):
    """Batch norm with the statistics of a file, in training as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=_NORM_EPS)


class MobileStem(nn.Module):
    """Convolutions of 4x4 and 2x2 pixels that do not overlap, each with a batch norm and a GELU, to width/4
    channels (MobileCLIP-B, Vasu et al. 2023). Patches of side P/8 are cut from the feature map.

    Keys: `conv1.weight`, `norm1.{weight,bias,running_mean,running_var}`, and the same for 2.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.out_channels = width // 4
        self.conv1 = nn.Conv2d(channels, width // 4, kernel_size=4, stride=4, bias=False)
        self.norm1 = FixedBatchNorm(width // 4)
        self.conv2 = nn.Conv2d(width // 4, width // 4, kernel_size=2, stride=2, bias=False)
        self.norm2 = FixedBatchNorm(width // 4)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.conv1(images)))  # (B, width/4, H/4, W/4)
        return F.gelu(self.norm2(self.conv2(x)))  # (B, width/4, H/8, W/8)


def standardize(kernel: Tensor) -> Tensor:
    """Weight standardization (Qiao et al. 2019): mean 0 and variance 1 for each output channel."""
    return F.layer_norm(kernel, kernel.shape[1:], eps=_KERNEL_EPS)


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zero-pad a feature map so that its sides become ceil(side / stride): TensorFlow's "SAME" padding.

    The amount depends on the side, and an odd pixel goes to the right and the bottom. Symmetric padding
    gives maps of the same shape, but shifted by a pixel where the side is even.
    """
    before_and_after = []
    for side in (x.shape[3], x.shape[2]):  # F.pad starts with the last axis
        steps = -(-side // stride)  # rounded up
        missing = max((steps - 1) * stride + kernel - side, 0)
        before_and_after += [missing // 2, missing - missing // 2]
    return F.pad(x, before_and_after)


class StandardizedConv(nn.Conv2d):
    """A convolution with weight standardization, SAME padding and no bias."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, width, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, standardize(self.weight), stride=self.stride)


class Root(nn.Module):
    """The first layers of a ResNet: 7x7 convolution, norm, ReLU and 3x3 max pooling, of stride 2 each."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = StandardizedConv(channels, width, kernel=7, stride=2)
        self.norm = nn.GroupNorm(_GROUPS, width, eps=_NORM_EPS)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))  # (B, width, H/2, W/2)
        return self.pool(pad_same(x, kernel=3, stride=2))  # after a ReLU, zeros do not change a maximum


class Bottleneck(TappedModule):
    """A residual unit: 1x1 to `width`, 3x3 with the stride, 1x1 to 4 `width`; ReLU after the sum."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Identity()
        self.proj_norm: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:  # the shortcut needs the shape of the sum
            self.proj = StandardizedConv(channels, 4 * width, kernel=1, stride=stride)
            self.proj_norm = nn.GroupNorm(_GROUPS, 4 * width, eps=_NORM_EPS)
        self.conv1 = StandardizedConv(channels, width, kernel=1)
        self.norm1 = nn.GroupNorm(_GROUPS, width, eps=_NORM_EPS)
        self.conv2 = StandardizedConv(width, width, kernel=3, stride=stride)
        self.norm2 = nn.GroupNorm(_GROUPS, width, eps=_NORM_EPS)
        self.conv3 = StandardizedConv(width, 4 * width, kernel=1)
        self.norm3 = nn.GroupNorm(_GROUPS, 4 * width, eps=_NORM_EPS)
        self.out = nn.ReLU()  # a module, so that the output of a unit can be recorded by name

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.proj_norm(self.proj(x))
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.out(self.norm3(self.conv3(x)) + shortcut)  # (B, 4 width, H/stride, W/stride)


class ResNetStem(nn.Module):
    """A ResNet without its head; by default the stem of R50+ViT-B/16, of stride 16 and 1024 channels.

    Post-activation order (convolution, norm, ReLU), with standardized kernels and group norms. The root has
    stride 4; every stage after the first halves the sides once more and doubles the width.

    | module here              | name in Google's npz           |
    |--------------------------|--------------------------------|
    | root.conv                | conv_root                      |
    | root.norm                | gn_root                        |
    | stages.{i}.{j}.conv1     | block{i+1}/unit{j+1}/conv1     |
    | stages.{i}.{j}.norm1     | block{i+1}/unit{j+1}/gn1       |
    | stages.{i}.{j}.conv2     | block{i+1}/unit{j+1}/conv2     |
    | stages.{i}.{j}.norm2     | block{i+1}/unit{j+1}/gn2       |
    | stages.{i}.{j}.conv3     | block{i+1}/unit{j+1}/conv3     |
    | stages.{i}.{j}.norm3     | block{i+1}/unit{j+1}/gn3       |
    | stages.{i}.{j}.proj      | block{i+1}/unit{j+1}/conv_proj |
    | stages.{i}.{j}.proj_norm | block{i+1}/unit{j+1}/gn_proj   |

    Only the first unit of a stage has a proj. `weight` is their `kernel` (k, k, in, out), permuted to
    (out, in, k, k), or their `scale`; `bias` is `bias`. Scales and biases may have the shape (1, 1, 1, C).

    Args:
        layers: the number of units in each stage; (2, 2, 2, 2) is the R26 of stride 32, () only the root.
    """

    def __init__(self, channels: int = 3, layers: Sequence[int] = (3, 4, 9)) -> None:
        super().__init__()
        width = 64
        self.root = Root(channels, width)
        self.stages = nn.Sequential()
        self.out_channels = width  # of the root; each stage updates it
        for stage, count in enumerate(layers):
            stride = 1 if stage == 0 else 2
            units = nn.Sequential()
            for unit in range(count):
                units.append(Bottleneck(self.out_channels, width, stride if unit == 0 else 1))
                self.out_channels = 4 * width
            self.stages.append(units)
            width *= 2

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.root(images))  # (B, out_channels, H/stride, W/stride)
