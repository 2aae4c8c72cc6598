"""Every common mistake, made in the text of the solution: exercise, changes of the text, explanation.

The explanation is given by its beginning; a test checks that no other explanation begins like that.
"""

STEM = "            patch = images[:, :, row : row + P, column : column + P]\n"
GRID = "    for row in range(0, H, P):\n        for column in range(0, W, P):\n"
TURNED = "    for column in range(0, W, P):\n        for row in range(0, H, P):\n"
FLAT, TABLE = "patch.reshape(B, -1)", "    return table\n"
CHANNELS_IN_FRONT = "return images.reshape(B, -1, H // P, P, W // P, P).transpose(3, 4).reshape(B, -1, images.shape[1] * P * P)"
SINE, COSINE = "table[p, 2 * i] = math.sin", "table[p, 2 * i + 1] = math.cos"
MEAN, VAR = "x.mean(dim=-1, keepdim=True)", "x.var(dim=-1, keepdim=True, correction=0)"
NORM = "(x - mean) / torch.sqrt(variance + eps) * weight + bias"
FILL, LAST = "scores.masked_fill(~mask, -math.inf)", "scores.softmax(dim=-1) @ v"
ATTEND = "    out = attention(q, k, v)\n"
SCALED = "q @ k.mT / math.sqrt(d)"
JOIN = "out.transpose(1, 2).reshape(B, T, D)"
OUT = 'F.linear(out, weights["out.weight"], weights["out.bias"])'
GELU, MLP_LAST = "F.gelu(hidden)", 'F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"])'
NORM1 = 'normed = layer_norm(z, weights["norm1.weight"], weights["norm1.bias"])'
NORM2 = 'normed = layer_norm(z1, weights["norm2.weight"], weights["norm2.bias"])'
FIRST = 'z1 = multi_head_attention(normed, inside(weights, "attention"), heads) + z\n'
SECOND = 'return mlp(normed, inside(weights, "mlp")) + z1'
TOKENS = "torch.cat([x_class, tokens], dim=1) + E_pos"
LAST_NORM = 'layer_norm(z, weights["norm.weight"], weights["norm.bias"])[:, 0]'
LOOP = 'z = block(z, inside(weights, f"blocks.{index}"), config.heads)'
NORM_IN_LOOP = f"{LOOP}; z = {LAST_NORM.removesuffix('[:, 0]')}"
DEPTH = "range(config.depth)"
MATRIX = 'weights["tokens.proj.weight"].flatten(1).T'
RESHAPED = MATRIX.replace(".flatten(1).T", '.reshape(-1, len(weights["tokens.proj.bias"]))')
LOGITS = 'F.linear(y, weights["head.weight"], weights["head.bias"])'


def over(dims):
    """Statistics over other dimensions."""
    return [(MEAN, MEAN.replace("-1", dims)), (VAR, VAR.replace("-1", dims))]


def split_by_reshape(*letters):
    return [(f"{x}.reshape(B, T, heads, d).transpose(1, 2)", f"{x}.reshape(B, heads, T, d)") for x in letters]


def interleaved(*letters):
    return [
        (f"{x}.reshape(B, T, heads, d).transpose(1, 2)", f"{x}.reshape(B, T, d, heads).permute(0, 3, 1, 2)")
        for x in letters
    ]


def written_out(scores=SCALED, last=LAST):
    """Attention written out, without a call of the function attention."""
    return [(ATTEND, f"    scores = {scores}\n    out = {last}\n")]


MISTAKES = [
    ("patches", [(GRID, TURNED)], "The grid is read column by column."),
    ("patches", [(FLAT, "patch.permute(0, 2, 3, 1).reshape(B, -1)")], "The channels come last"),
    (
        "patches",
        [("    cut = []\n", f"    {CHANNELS_IN_FRONT}\n")],
        "The channels stay in front",
    ),
    ("patches", [(FLAT, "patch.mT.reshape(B, -1)")], "Each patch is transposed"),
    (
        "patches",
        [("    cut = []\n", "    return images.reshape(B, -1, images.shape[1] * P * P)\n")],
        "A single reshape",
    ),
    (
        "patches",
        [("    cut = []\n", "    return F.unfold(images, P, stride=P)\n")],
        "The last two dimensions",
    ),
    (
        "positions",
        [(SINE, "table[p, i] = math.sin"), (COSINE, "table[p, i + width // 2] = math.cos")],
        "All sines",
    ),
    (
        "positions",
        [("math.sin(", "math.cos  ("), ("math.cos(", "math.sin(")],
        "Sine and cosine are swapped.",
    ),
    ("positions", [("angle = p /", "angle = (p + 1) /")], "The first position is 1."),
    ("positions", [("2 * i / width)", "i / width)")], "The exponent is i / width"),
    ("positions", [("2 * i / width)", "-2 * i / width)")], "The exponent has the wrong sign"),
    (
        "positions",
        [("cos(angle)", "cos(p / 10000 ** (2 * (2 * i + 1) / width))"), ("2 * i / width)", "4 * i / width)")],
        "The exponent is 2j / width",
    ),
    ("positions", [("cos(angle)", "cos(p / 10000 ** ((2 * i + 1) / width))")], "The exponent is j / width"),
    ("layer_norm", over("1"), "Mean and variance are computed over the tokens"),
    ("layer_norm", over("(0, 1, 2)"), "Mean and variance are computed over the whole batch"),
    ("layer_norm", over("(0, 1)"), "Mean and variance are computed over batch and tokens"),
    ("layer_norm", over("(1, 2)"), "Mean and variance are computed over all tokens"),
    ("layer_norm", [(", correction=0", "")], "The variance is the unbiased one, divided"),
    ("layer_norm", [("torch.sqrt(variance + eps)", "(torch.sqrt(variance) + eps)")], "eps is added outside"),
    ("layer_norm", [(" + eps", "")], "eps is missing."),
    ("layer_norm", [(" + eps", " + 1e-6")], "eps is always 1e-6."),
    ("layer_norm", [(NORM, "F.layer_norm(x, x.shape[-1:], weight, bias)")], "eps is always 1e-5."),
    (
        "layer_norm",
        [(NORM, "x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight + bias")],
        "The mean is not",
    ),
    (
        "layer_norm",
        [("torch.sqrt(variance + eps)", "(variance + eps)")],
        "The result is divided by the variance",
    ),
    (
        "layer_norm",
        [(NORM, "((x - mean) / torch.sqrt(variance + eps) + bias) * weight")],
        "The bias is added before",
    ),
    ("layer_norm", [(" * weight + bias", " * bias + weight")], "Weight and bias are swapped."),
    ("layer_norm", [(" * weight + bias", " + bias")], "The weight is missing."),
    ("layer_norm", [(" * weight + bias", " * weight")], "The bias is missing."),
    ("attention", [(" / math.sqrt(d)", "")], "The scale is missing."),
    ("attention", [("math.sqrt(d)", "d")], "The scores are divided by d."),
    (
        "attention",
        [("math.sqrt(d)", "math.sqrt(k.shape[-2])")],
        "The scores are divided by the square root of",
    ),
    ("attention", [("/ math.sqrt(d)", "* math.sqrt(d)")], "The scores are multiplied"),
    (
        "attention",
        [(" / math.sqrt(d)", ""), (LAST, "scores.softmax(dim=-1) / math.sqrt(d) @ v")],
        "The weights are divided by sqrt(d) after",
    ),
    ("attention", [("softmax(dim=-1)", "softmax(dim=-2)")], "The softmax is over the queries."),
    ("attention", [("softmax(dim=-1)", "softmax(dim=0)")], "The softmax is over dimension 0"),
    ("attention", [("softmax(dim=-1)", "softmax(dim=1)")], "The softmax is over dimension 1"),
    ("attention", [(FILL, "scores * mask"), (".softmax(dim=-1)", "")], "The softmax is missing."),
    ("attention", [("if mask is not None", "if False")], "The mask is not used."),
    ("attention", [("~mask", "mask")], "The mask is inverted."),
    (
        "attention",
        [(FILL, "scores"), (LAST, "(scores.softmax(-1) * (1 if mask is None else mask)) @ v")],
        "The mask is applied after",
    ),
    ("attention", [(FILL, "scores * mask")], "Masked scores are set to 0"),
    ("attention", [(FILL, "scores + mask.double()")], "The mask is added"),
    ("attention", [("q @ k.mT", "q @ v.mT"), ("(dim=-1) @ v", "(dim=-1) @ k")], "k and v are swapped."),
    ("multi_head_attention", written_out(SCALED.replace("(d)", "(D)")), "The scores are divided by sqrt(D)."),
    ("multi_head_attention", written_out("q @ k.mT"), "The scale is missing."),
    ("multi_head_attention", written_out("q @ k.mT / d"), "The scores are divided by d."),
    (
        "multi_head_attention",
        written_out("q @ k.mT / T**0.5"),
        "The scores are divided by the square root of",
    ),
    ("multi_head_attention", written_out("q @ k.mT * d**0.5"), "The scores are multiplied"),
    (
        "multi_head_attention",
        written_out(last="scores.softmax(dim=-2) @ v"),
        "The softmax is over the queries.",
    ),
    (
        "multi_head_attention",
        written_out(last="scores.softmax(dim=1) @ v"),
        "The softmax is over dimension 1",
    ),
    (
        "multi_head_attention",
        written_out("q @ k.mT", "scores.softmax(dim=-1) / math.sqrt(d) @ v"),
        "The weights are divided by sqrt(d) after",
    ),
    (
        "multi_head_attention",
        written_out(last="scores.softmax(dim=0) @ v"),
        "The softmax is over dimension 0",
    ),
    ("multi_head_attention", written_out(last="scores @ v"), "The softmax is missing."),
    ("multi_head_attention", interleaved("q", "k", "v"), "The heads are interleaved"),
    (
        "multi_head_attention",
        [*interleaved("q", "k", "v"), (JOIN, "out.permute(0, 2, 3, 1).reshape(B, T, D)")],
        "The heads are interleaved",
    ),
    (
        "multi_head_attention",
        split_by_reshape("q", "k", "v"),
        "The heads are split by a reshape to (B, k, T, d), which",
    ),
    ("multi_head_attention", [(JOIN, "out.reshape(B, T, D)")], "The heads are joined"),
    (
        "multi_head_attention",
        [*split_by_reshape("q", "k", "v"), (JOIN, "out.reshape(B, T, D)")],
        "The heads are split by a reshape to (B, k, T, d) and",
    ),
    (
        "multi_head_attention",
        [("    d = D // heads\n", "    heads = 1\n    d = D\n")],
        "There is only one head.",
    ),
    *(
        (
            "multi_head_attention",
            [("q, k, v = qkv", f"{', '.join(order)} = qkv")],
            f"q, k and v are mixed up: the rows are read as {', '.join(order)}.",
        )
        for order in ("kqv", "vkq", "qvk", "kvq", "vqk")
    ),
    (
        "multi_head_attention",
        [("qkv.chunk(3, dim=-1)", "(x.flatten(2) for x in qkv.reshape(B, T, heads, 3, d).unbind(3))")],
        "The rows of qkv are read head by head",
    ),
    ("multi_head_attention", [(', weights["qkv.bias"]', "")], "The bias of q, k and v"),
    ("multi_head_attention", [(OUT, "out")], "The output projection is missing."),
    ("multi_head_attention", [(', weights["out.bias"]', "")], "The output projection has no bias."),
    ("multi_head_attention", [('weights["out.weight"],', 'weights["out.weight"].T,')], "out.weight is not"),
    ("mlp", [(GELU, 'F.gelu(hidden, approximate="tanh")')], "The GELU is its tanh"),
    ("mlp", [(GELU, "hidden * torch.sigmoid(1.702 * hidden)")], "The GELU is the approximation x sigmoid"),
    ("mlp", [(GELU, "hidden * (1 + torch.erf(hidden)) / 2")], "erf gets x instead"),
    ("mlp", [(GELU, "F.relu(hidden)")], "The activation is a ReLU."),
    ("mlp", [(GELU, "torch.distributions.Normal(0, 1).cdf(hidden)")], "The activation is Phi(x)"),
    ("mlp", [(GELU, "hidden")], "There is no activation"),
    ("mlp", [(MLP_LAST, f"F.gelu({MLP_LAST})")], "There is a second GELU"),
    ("mlp", [(', weights["fc1.bias"]', "")], "The first bias is missing."),
    ("mlp", [(', weights["fc2.bias"]', "")], "The second bias is missing."),
    ("block", [(FIRST, FIRST.replace(" + z\n", "\n"))], "The first residual is missing"),
    ("block", [(SECOND, SECOND.removesuffix(" + z1"))], "The second residual is missing"),
    ("block", [(FIRST, FIRST.replace(" + z\n", " + normed\n"))], "The first residual adds the normalized"),
    ("block", [(SECOND, SECOND.replace("+ z1", "+ normed"))], "The second residual adds the normalized"),
    ("block", [(SECOND, SECOND.replace("+ z1", "+ z"))], "The second residual adds z."),
    (
        "block",
        [
            (NORM1, "normed = z"),
            (NORM2, NORM1.replace("normed = layer_norm(z,", "z1 = normed = layer_norm(z1,")),
            (
                SECOND,
                SECOND.replace("return ", "z2 = ")
                + '\n    return layer_norm(z2, weights["norm2.weight"], weights["norm2.bias"])',
            ),
        ],
        "This is post-norm",
    ),
    (
        "block",
        [
            (NORM1, "normed = z"),
            (
                FIRST,
                'a = multi_head_attention(z, inside(weights, "attention"), heads)\n'
                '    z1 = z + layer_norm(a, weights["norm1.weight"], weights["norm1.bias"])\n',
            ),
            (NORM2, 'm = mlp(z1, inside(weights, "mlp"))'),
            (SECOND, 'return z1 + layer_norm(m, weights["norm2.weight"], weights["norm2.bias"])'),
        ],
        "The norms come after attention and MLP",
    ),
    ("block", [(NORM2, NORM2.replace("(z1,", "(z,"))], "Attention and MLP both get"),
    ("block", [(NORM1, "normed = z")], "The first norm is missing."),
    ("block", [(NORM2, "normed = z1")], "The second norm is missing."),
    ("block", [(NORM2, NORM2.replace("norm2", "norm1"))], "Both norms use"),
    (
        "block",
        [
            (NORM1, NORM1.replace('.bias"])', '.bias"], 1e-5)')),
            (NORM2, NORM2.replace('.bias"])', '.bias"], 1e-5)')),
        ],
        "eps of the norms is 1e-5",
    ),
    ("vit", [("[x_class, tokens]", "[tokens, x_class]")], "The class token is at the end, but"),
    (
        "vit",
        [("[x_class, tokens]", "[tokens, x_class]"), ("[:, 0]\n    return", "[:, -1]\n    return")],
        "The class token is at the end, and",
    ),
    (
        "vit",
        [(TOKENS, "torch.cat([x_class, tokens + E_pos[1:]], dim=1)")],
        "The class token has no position.",
    ),
    ("vit", [(TOKENS, "torch.cat([x_class, tokens + E_pos[:-1]], dim=1)")], "Positions are added before"),
    ("vit", [(" + E_pos", "")], "The position embeddings are missing."),
    ("vit", [(MATRIX, RESHAPED)], "E is tokens.proj.weight reshaped"),
    ("vit", [(LOGITS, f"({LOGITS}).softmax(dim=-1)")], "A softmax, log-softmax or sigmoid"),
    ("vit", [(LOGITS, f"F.log_softmax({LOGITS}, dim=1)")], "A softmax, log-softmax or sigmoid"),
    ("vit", [(LOGITS, f"torch.sigmoid({LOGITS})")], "A softmax, log-softmax or sigmoid"),
    ("vit", [(LOGITS, f"F.softmax({LOGITS}, dim=0)")], "A softmax, log-softmax or sigmoid"),
    ("vit", [(' + weights["tokens.proj.bias"]', "")], "The bias of the patch projection"),
    ("vit", [(LAST_NORM, "z[:, 0]")], "The last norm is missing."),
    ("vit", [(LOOP, NORM_IN_LOOP), (LAST_NORM, "z[:, 0]")], "The last norm is applied after every block."),
    ("vit", [(LOOP, NORM_IN_LOOP)], "The last norm is applied after every block."),
    ("vit", [('weights["norm.bias"])[:, 0]', 'weights["norm.bias"], 1e-5)[:, 0]')], "eps of the last norm"),
    (
        "vit",
        [(LAST_NORM, LAST_NORM.replace("[:, 0]", ".mean(dim=1)"))],
        "The head is applied to the mean of all",
    ),
    (
        "vit",
        [(LAST_NORM, LAST_NORM.replace("(z,", "(z.mean(dim=1),").removesuffix("[:, 0]"))],
        "The head is applied to the mean of all",
    ),
    (
        "vit",
        [(LAST_NORM, LAST_NORM.replace("[:, 0]", "[:, 1:].mean(dim=1)"))],
        "The head is applied to the mean of the",
    ),
    (
        "vit",
        [(LAST_NORM, LAST_NORM.replace("(z,", "(z[:, 1:].mean(dim=1),").removesuffix("[:, 0]"))],
        "The head is applied to the mean of the",
    ),
    ("vit", [(LAST_NORM, LAST_NORM.replace("[:, 0]", "[:, -1]"))], "The head reads the last"),
    ("vit", [("blocks.{index}", "blocks.0")], "All blocks use"),
    ("vit", [(DEPTH, "range(1)")], "Only the first block"),
    ("vit", [(DEPTH, "range(config.depth - 1)")], "The last block is not run."),
    ("vit", [(DEPTH, "reversed(range(config.depth))")], "The blocks run in reverse order."),
]
