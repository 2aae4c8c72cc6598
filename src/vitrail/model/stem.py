"""Stems for hybrids: convolutions that look at the picture first, so that tokens are cut from their
feature map instead of from pixels (paper, Section 3.1, "Hybrid Architecture").

A stem maps pictures (B, C, H, W) to a map (B, out_channels, H/stride, W/stride), rounded up where
the stride does not divide. `ConvStem` is two convolutions; `ResNetStem` is the R50 of R50+ViT-B/16.
What becomes of a picture does not depend on its batch: all norms are group norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.init import lecun_normal

# As in timm's hybrids. The paper's own code divides a kernel by (deviation + 1e-5) instead, and has
# an eps of 1e-6 in its group norms.
KERNEL_EPS = 1e-8
NORM_EPS = 1e-5
GROUPS = 32


def initialise_stem(module: nn.Module) -> None:
    """Give every parameter of a stem its first value; whoever builds the model calls it once.

    | parameter                 | first value                                          |
    |---------------------------|------------------------------------------------------|
    | weight of a convolution   | LeCun normal: variance 1/(C k k), cut off at 2 sigma |
    | weight of a norm          | 1                                                    |
    | bias of a norm            | 0                                                    |

    The default of flax, so what the paper's code does; except that there the last norm of a unit
    (norm3) starts with weight 0, so that a unit begins as its shortcut alone.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                lecun_normal(part.weight)
            elif isinstance(part, nn.GroupNorm):
                nn.init.ones_(part.weight)
                nn.init.zeros_(part.bias)


class ConvStem(nn.Module):
    """Two 3x3 convolutions of stride 2, each with a norm and a ReLU: C -> width/2 -> width channels.

    The start of the stem of Xiao et al. (2021), "Early convolutions help transformers see better":
    channels double where the sides halve. They go on to the stride of a patch; here the patches cut
    from the map do, with a patch of P/4. Theirs is a batch norm; here it is a group norm of one
    group, so that a picture gives the same tokens whatever the batch, in training too.

    Keys: `conv1.weight`, `norm1.{weight,bias}`, `conv2.weight`, `norm2.{weight,bias}`.
    """

    stride = 4

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


def standardise(kernel: Tensor) -> Tensor:
    """Mean 0 and variance 1 for the kernel of each output channel (Qiao et al. 2019)."""
    return F.layer_norm(kernel, kernel.shape[1:], eps=KERNEL_EPS)


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros round a map, so that the sides become ceil(side / stride): TensorFlow's "SAME".

    How many depends on the side, and the odd one goes to the right and the bottom. Symmetric
    padding gives maps of the same shape; where the side is even, they are shifted by a pixel.
    """
    before_and_after = []
    for side in (x.shape[3], x.shape[2]):  # F.pad starts with the last axis
        steps = -(-side // stride)  # rounded up
        missing = max((steps - 1) * stride + kernel - side, 0)
        before_and_after += [missing // 2, missing - missing // 2]
    return F.pad(x, before_and_after)


class StandardConv(nn.Conv2d):
    """A convolution with a standardised kernel, SAME padding and no bias."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, width, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, standardise(self.weight), stride=self.stride)


class Root(nn.Module):
    """Where a ResNet starts: 7x7 convolution, norm, ReLU, 3x3 maximum; each of the two halves the sides."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = StandardConv(channels, width, kernel=7, stride=2)
        self.norm = nn.GroupNorm(GROUPS, width, eps=NORM_EPS)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))  # (B, width, H/2, W/2)
        return self.pool(pad_same(x, kernel=3, stride=2))  # after a ReLU a padded zero changes no maximum


class Bottleneck(nn.Module):
    """A residual unit: 1x1 to `width`, 3x3 with the stride, 1x1 to 4 `width`; ReLU after the addition."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Identity()
        self.proj_norm: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:  # the shortcut must get the shape of the sum
            self.proj = StandardConv(channels, 4 * width, kernel=1, stride=stride)
            self.proj_norm = nn.GroupNorm(GROUPS, 4 * width, eps=NORM_EPS)
        self.conv1 = StandardConv(channels, width, kernel=1)
        self.norm1 = nn.GroupNorm(GROUPS, width, eps=NORM_EPS)
        self.conv2 = StandardConv(width, width, kernel=3, stride=stride)
        self.norm2 = nn.GroupNorm(GROUPS, width, eps=NORM_EPS)
        self.conv3 = StandardConv(width, 4 * width, kernel=1)
        self.norm3 = nn.GroupNorm(GROUPS, 4 * width, eps=NORM_EPS)
        self.out = nn.ReLU()  # a module, so that a unit's result has a name to tap

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.proj_norm(self.proj(x))
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.out(self.norm3(self.conv3(x)) + shortcut)  # (B, 4 width, H/stride, W/stride)


class ResNetStem(nn.Module):
    """A ResNet without its head; by default the stem of R50+ViT-B/16, of stride 16 and 1024 channels.

    The original order (convolution, norm, ReLU) with standardised kernels and group norms. The root
    has stride 4; every stage after the first halves the sides once more and doubles the width.

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

    Only the first unit of a stage has a proj. `weight` is their `kernel` (k, k, in, out), turned to
    (out, in, k, k), or their `scale`; `bias` is `bias`. Scales and biases may come as (1, 1, 1, C).

    Args:
        layers: how many units in each stage; (2, 2, 2, 2) is the R26 of stride 32, () the root alone.
        width_factor: multiplies all widths.
    """

    def __init__(self, channels: int = 3, layers: Sequence[int] = (3, 4, 9), width_factor: int = 1) -> None:
        super().__init__()
        width = 64 * width_factor
        self.root = Root(channels, width)
        self.stages = nn.Sequential()
        self.stride, self.out_channels = 4, width  # of the root; each stage brings them up to date
        for stage, count in enumerate(layers):
            stride = 1 if stage == 0 else 2
            units = nn.Sequential()
            for unit in range(count):
                units.append(Bottleneck(self.out_channels, width, stride if unit == 0 else 1))
                self.out_channels = 4 * width
            self.stages.append(units)
            self.stride *= stride
            width *= 2

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.root(images))  # (B, out_channels, H/stride, W/stride)
