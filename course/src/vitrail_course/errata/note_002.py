"""Errata of note 002, a lecture with a practice on MNIST. Each function computes the evidence."""

from __future__ import annotations

import torch
from torch import nn

from vitrail.model import ViT, record
from vitrail.model.create import create
from vitrail.model.decoder import Decoder, DecoderConfig
from vitrail.model.presets import preset
from vitrail_course.errata.erratum import Evidence, erratum, max_difference, normal, outcome, tiny


@erratum(
    "002",
    "the recap of transformers, on the MLP",
    "wrong",
    claim="After attention and norms an MLP classifies, and this repeats L times.",
    correction="The MLP in each of the L blocks maps every token to a new vector of the same width. Classes "
    "are predicted once, by the head.",
)
def the_mlp_of_a_block_does_not_classify() -> Evidence:
    model = tiny(depth=3)
    with record(model, "blocks.*.mlp.out") as tape:
        logits = model(normal(1, 2, 8, 8))
    return {
        "MLPs of blocks": len(list(tape)),
        "output of each (T, D)": tuple(tape["blocks.0.mlp.out"].shape[1:]),
        "outputs of the head": logits.shape[1],
    }


@erratum(
    "002",
    "the recap of transformers, on large language models",
    "wrong",
    claim="Large language models consist of a decoder and an encoder.",
    correction="Some do. Others have only one of them, as 003 lists: GPT is a decoder, BERT an encoder. The "
    "language model of 003 has no encoder.",
)
def a_decoder_only() -> Evidence:
    model = Decoder(DecoderConfig(vocabulary=65, width=16, depth=2, heads=2, length=8))
    with torch.no_grad():
        logits = model(torch.zeros(1, 8, dtype=torch.long))
    readers = [name for name, _ in model.named_modules() if "encoder" in name or "cross" in name]
    return {"modules that read an encoder": len(readers), "logits": tuple(logits.shape)}


@erratum(
    "002",
    "the first slide on 16x16 words, on the paper's P",
    "imprecise",
    claim="In the paper P = 16.",
    correction="Also 14 and 32; the slides' own table of results has H/14. The number of patches N depends "
    "on P.",
)
def not_only_sixteen() -> Evidence:
    return {f"patches of {name}": preset(name).patches for name in ("L/32", "L/16", "H/14")}


@erratum(
    "002",
    "the first slide on 16x16 words, on x_class",
    "imprecise",
    claim="x_class is a class embedding, the same for every class.",
    correction="It does not depend on the classes: it is one vector for all images, whatever the number of "
    "classes.",
)
def the_class_token_does_not_depend_on_classes() -> Evidence:
    return {f"x_class for {K} classes": tuple(tiny(classes=K).prefix.shape) for K in (2, 1000)}


@erratum(
    "002",
    "both slides on 16x16 words, z_0",
    "imprecise",
    claim="z_0 is the class token and the patches times E, without positions.",
    correction='E_pos is introduced only under "Full architecture". Without it the model cannot know where a '
    "patch was: swapping patches does not change its output.",
)
def without_positions() -> Evidence:
    image = normal(1, 2, 8, 8)
    swapped = image.roll(4, dims=-1)  # left and right patches

    def change(model: ViT) -> float:
        return max_difference(model(image), model(swapped))

    return {"change of the logits without E_pos": change(tiny(position="none")), "with it": change(tiny())}


@erratum(
    "002",
    "the class PatchEmbedding, its comments on shapes",
    "imprecise",
    claim="The convolution gives (B, d_model, P_col, P_row), flattened to P.",
    correction="Rows come first: (B, D, H/P, W/P), which matters for images that are not square. P_col must "
    "be read as the number of patches in a column. And P, so far the side of a patch, is now the number of "
    "patches.",
)
def rows_come_first() -> Evidence:
    H, W, P = 32, 48, 16
    out = nn.Conv2d(3, 8, P, stride=P)(torch.zeros(1, 3, H, W))
    return {"columns, rows": (W // P, H // P), "output of the convolution": tuple(out.shape[2:])}


@erratum(
    "002",
    "the slide on convolution as matrix multiplication",
    "wrong",
    claim="A patch is 1 x patch_size^2, E is patch_size^2 x d_model, a kernel has patch_size^2 values.",
    correction="It is patch_size^2 * C each time, as on the slides before.",
)
def channels_dropped() -> Evidence:
    P, C, D = 16, 3, 1024
    patch = torch.zeros(1, P, P, C).flatten(1)
    with torch.device("meta"):
        kernel = nn.Conv2d(C, D, P, stride=P).weight[0]
    return {
        "patch_size^2": P**2,
        "values of a patch": patch.shape[1],
        "values of a kernel": kernel.numel(),
        "patch @ E as on the slide": outcome(lambda: patch @ torch.zeros(P**2, D)),
        "with C": outcome(lambda: patch @ torch.zeros(P**2 * C, D)),
    }


@erratum(
    "002",
    "Finetuning, which weights are kept",
    "imprecise",
    claim="E, the weights of query, key and value, and the MLPs are kept.",
    correction="Everything but the head is kept: also the projection after attention, every norm, the class "
    "token, the positions (resampled for larger images) and the bias of the projection.",
)
def what_fine_tuning_keeps() -> Evidence:
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in create("B/16", classes=0).named_parameters()}
    listed = sum(
        n for name, n in sizes.items() if name == "tokens.proj.weight" or ".qkv." in name or ".mlp." in name
    )
    return {"kept, B/16": sum(sizes.values()), "on the slide's list": listed}


@erratum(
    "002",
    "Evaluation, above its table",
    "imprecise",
    claim="ViT outperforms all other models.",
    correction="H/14, and L/16 on most data sets, do when trained on JFT. L/16 trained on ImageNet-21k is "
    "below BiT-L in every row of the slide's own table; the slides after it say that the amount of data "
    "decides.",
)
def which_vit_outperforms() -> Evidence:
    # ImageNet, ReaL, CIFAR-10, CIFAR-100, Pets, Flowers, VTAB, as in the table.
    bit = (87.54, 90.54, 99.37, 93.51, 96.62, 99.63, 76.29)
    vit = {
        "H/14, JFT": (88.55, 90.72, 99.50, 94.55, 97.56, 99.68, 77.63),
        "L/16, JFT": (87.76, 90.54, 99.42, 93.90, 97.32, 99.74, 76.28),
        "L/16, ImageNet-21k": (85.30, 88.62, 99.15, 93.25, 94.67, 99.61, 72.72),
    }
    return {
        f"rows of 7 above BiT-L: {name}": sum(a > b for a, b in zip(row, bit, strict=True))
        for name, row in vit.items()
    }


@erratum(
    "002",
    "the practice, where accuracy is printed",
    "imprecise",
    claim="Accuracy is 100 * correct // total.",
    correction="`//` truncates: 98 can be anything from 98 to just below 99.",
)
def accuracy_is_truncated() -> Evidence:
    correct, total = 9_899, 10_000
    return {"printed": 100 * correct // total, "accuracy": 100 * correct / total}


@erratum(
    "002",
    "the notes after the results",
    "wrong",
    claim="Google DeepMind took up the idea and scaled it.",
    correction="The authors were at Google Research, Brain Team (003 shows the title page). Google "
    "DeepMind was formed from Brain and DeepMind two and a half years after the paper.",
)
def not_deepmind() -> Evidence:
    paper, merger = (2020, 10), (2023, 4)  # arXiv 2010.11929; Google's announcement of 20 April 2023
    return {"months from the paper to Google DeepMind": 12 * (merger[0] - paper[0]) + merger[1] - paper[1]}
