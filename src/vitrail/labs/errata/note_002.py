"""The lecture with a practice on MNIST. Each function is the evidence for what stands above it."""

from __future__ import annotations

import torch
from torch import nn

from vitrail.build import create
from vitrail.labs.errata.erratum import Evidence, apart, erratum, normal, outcome, tiny
from vitrail.model import ViT, record
from vitrail.model.decoder import Decoder, DecoderConfig
from vitrail.presets import preset


@erratum(
    "002",
    "the recap of transformers, on the MLP",
    "wrong",
    says="After attention and norms an MLP classifies, and this is repeated L times.",
    holds="The MLP in each of the L blocks gives every token a new vector of the same width. Classes "
    "come once, from the head.",
)
def the_mlp_of_a_block_does_not_classify() -> Evidence:
    model = tiny(depth=3)
    with record(model, "blocks.*.mlp.out") as tape:
        logits = model(normal(1, 2, 8, 8))
    return {
        "MLPs of blocks": len(list(tape)),
        "each gives (T, D)": tuple(tape["blocks.0.mlp.out"].shape[1:]),
        "the head gives classes": logits.shape[1],
    }


@erratum(
    "002",
    "the recap of transformers, on large language models",
    "wrong",
    says="Large language models consist of a decoder and an encoder.",
    holds="Some do. Others have one of them, as 003 lists: GPT is a decoder alone, BERT an encoder "
    "alone. 003's own language model runs without an encoder.",
)
def a_decoder_alone() -> Evidence:
    model = Decoder(DecoderConfig(vocabulary=65, width=16, depth=2, heads=2, length=8))
    with torch.no_grad():
        logits = model(torch.zeros(1, 8, dtype=torch.long))
    reads_others = [name for name, _ in model.named_modules() if "encoder" in name or "cross" in name]
    return {"parts that read an encoder": len(reads_others), "logits": tuple(logits.shape)}


@erratum(
    "002",
    "the first slide on 16x16 words, on the paper's P",
    "left open",
    says="In the paper P = 16.",
    holds="Also 14 and 32; the slides' own table of results has H/14. N follows from it, and T^2 from N.",
)
def not_only_sixteen() -> Evidence:
    return {f"patches of {name}": preset(name).patches for name in ("L/32", "L/16", "H/14")}


@erratum(
    "002",
    "the first slide on 16x16 words, on x_class",
    "left open",
    says="x_class is a class embedding, the same for every class.",
    holds="It has nothing to do with the classes: one vector for all pictures, however many classes "
    "there are.",
)
def the_class_token_knows_no_classes() -> Evidence:
    return {f"x_class for {K} classes": tuple(tiny(classes=K).prefix.shape) for K in (2, 1000)}


@erratum(
    "002",
    "both slides on 16x16 words, z_0",
    "left open",
    says="z_0 is the class token and the patches times E, without positions.",
    holds='E_pos comes only under "Full architecture". Without it a model cannot see where a patch was: '
    "exchanged patches give the same answer.",
)
def without_positions() -> Evidence:
    image = normal(1, 2, 8, 8)
    exchanged = image.roll(4, dims=-1)  # left and right patches

    def moved(model: ViT) -> float:
        return apart(model(image), model(exchanged))

    return {"logits move without E_pos": moved(tiny(position="none")), "with it": moved(tiny())}


@erratum(
    "002",
    "the class PatchEmbedding, its remarks on shapes",
    "left open",
    says="The convolution gives (B, d_model, P_col, P_row), flattened to P.",
    holds="Rows come first: (B, D, H/P, W/P), which shows where a picture is not square; P_col must be "
    "read as how many there are in a column. And P, the side of a patch before, is now how many "
    "patches there are.",
)
def rows_come_first() -> Evidence:
    H, W, P = 32, 48, 16
    out = nn.Conv2d(3, 8, P, stride=P)(torch.zeros(1, 3, H, W))
    return {"columns, rows": (W // P, H // P), "the convolution gives": tuple(out.shape[2:])}


@erratum(
    "002",
    "the slide on convolution as matrix multiplication",
    "wrong",
    says="A patch is 1 x patch_size^2, E is patch_size^2 x d_model, a kernel has patch_size^2 values.",
    holds="patch_size^2 * C each time, as the slides before have it.",
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
    "Finetuning, what is kept",
    "left open",
    says="E, the weights of query, key and value, and the MLPs are kept.",
    holds="And all else but the head: the projection after attention, every norm, the class token, the "
    "positions (resampled where the picture grows) and the projection's bias.",
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
    "left open",
    says="ViT outperforms all other models.",
    holds="H/14 and mostly L/16 do, trained on JFT. L/16 trained on ImageNet-21k is below BiT-L in every "
    "row of the slide's own table; the notes after it say that data decides.",
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
    "left open",
    says="Accuracy is 100 * correct // total.",
    holds="`//` cuts off: 98 stands for anything from 98 to just below 99.",
)
def accuracy_cut_off() -> Evidence:
    correct, total = 9_899, 10_000
    return {"printed": 100 * correct // total, "accuracy": 100 * correct / total}
