"""What is said of a student's function: verdict, difference, first wrong tensor, errors by line."""

import pytest
import torch
from made_slips import ATTEND, FIRST, NORM1, NORM2, SECOND, TOKENS
from test_slips import BY_NAME, OTHER, one_thread, student  # noqa: F401

from vitrail.exercises.compare import problem
from vitrail.exercises.mark import described, mark
from vitrail.exercises.run import STUDENT


def marked(name, *changes):
    return mark(BY_NAME[name], student(*changes))


def test_a_difference_is_told_with_its_place():
    made = marked(
        "patches", ("return torch.stack(cut, dim=1)", "cut[4][1, 7] += 3\n    return torch.stack(cut, dim=1)")
    )
    assert made.verdict == "error"  # the second case has no such place
    made = marked(
        "patches", ("dim=1)", "dim=1) + 3 * (torch.arange(C * P * P) == 7)"), ("B, _, H", "B, C, H")
    )
    assert made.verdict == "wrong"
    assert made.likely == ""
    assert made.words.startswith(
        "Flat patches in reading order, channels first in each.\nThe largest difference is 3, at ["
    )


@pytest.mark.parametrize(
    ("came", "words"),
    [
        (None, "It must return a tensor, and returns nothing (is the return missing?)."),
        ([1.0], "It must return a tensor, and returns a list."),
        (torch.zeros(3, 2), "The shape must be (2, 3), and is (3, 2)."),
        (torch.zeros(2, 3, dtype=torch.int64), "It must return real numbers, and returns torch.int64."),
        (
            torch.tensor([[0, 0, 0], [0, torch.nan, 0]]),
            "There is a value that is no number, at [1, 1]: must be 0, is nan.",
        ),
        (
            torch.tensor([[0, 0, 0.5], [0, -2, 0]]),
            "The largest difference is 2, at [1, 1]: must be 0, is -2.",
        ),
        (torch.full((2, 3), 9e-7), None),
        (torch.zeros(2, 3, requires_grad=True), None),
    ],
)
def test_what_is_wrong_with_a_result(came, words):
    assert problem(came, torch.zeros(2, 3, dtype=torch.float64)) == words


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("block", [(NORM1, NORM1.replace("(z,", "(2 * z + z**2,"))], "z, as the first norm gets it"),
        ("block", [(FIRST, FIRST.replace("(normed", "(3 * normed"))], "LN(z), as attention gets it"),
        ("block", [(FIRST, FIRST.replace("+ z", "- z"))], "the first sum, z' = MSA(LN(z)) + z"),
        ("block", [(SECOND, SECOND.replace("(normed", "(3 * normed"))], "LN(z'), as the MLP gets it"),
        ("block", [(SECOND, SECOND.replace("+ z1", "- z1"))], "the second sum, MLP(LN(z')) + z'"),
        ("block", [(NORM2, NORM2.replace("norm2", "norm1"))], "weight of layer_norm, which makes LN(z')"),
        (
            "block",
            [(SECOND, 'return -mlp(normed, inside(weights, "mlp") | inside(weights, "attention")) + z1')],
            "the second sum, MLP(LN(z')) + z'",
        ),
        (
            "block",
            [
                (
                    SECOND,
                    'return mlp(normed, inside(weights, "mlp") | {"fc1.bias": 2 * weights["mlp.fc1.bias"]}) + z1',
                )
            ],
            "weights of mlp, which makes MLP(LN(z'))",
        ),
        ("vit", [(TOKENS, TOKENS.replace("+ E", "- E"))], "z_0 = [x_class; x_p E] + E_pos (Eq. 1)"),
        ("vit", [("z = block(z,", "z = block(z**2 if index == 1 else z,")], "z_1, after the first block"),
        ("vit", [("config.heads)\n", "config.heads)\n    z = z**2\n")], "z_3, as the last norm gets it"),
        ("vit", [("F.linear(y,", "F.linear(2 * y,")], "the logits, y head.weight^T + head.bias"),
        (
            "multi_head_attention",
            [(ATTEND, ATTEND.replace("k,", "2 * k,"))],
            "k of attention, which makes the heads' results",
        ),
        (
            "multi_head_attention",
            [("F.linear(out,", "F.linear(-out,")],
            "the heads side by side, or their projection",
        ),
        (
            "multi_head_attention",
            [
                (
                    ATTEND,
                    "    out = torch.stack([attention(q[:, i], k[:, i], v[:, i]).abs() for i in range(heads)], 1)\n",
                )
            ],
            "",
        ),
    ],
)
def test_the_first_wrong_tensor_of_a_composite(name, changes, where):
    made = marked(name, *changes)
    assert made.verdict == "wrong"
    assert made.words.partition("First wrong tensor: ")[2] == (where and f"{where}.")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "block",
            [(" + eps", " + eps + 1")],
            "LN(z), from layer_norm. With that one repaired, block is right.",
        ),
        ("block", [("F.gelu", "F.relu")], "MLP(LN(z')), from mlp. With that one repaired, block is right."),
        ("vit", [("F.gelu", "F.relu")], "z_1, from block. With that one repaired, vit is right."),
        (
            "vit",
            [("patch.reshape", "patch.mT.reshape")],
            "the patches x_p, from patches. With that one repaired, vit is right.",
        ),
        (
            "multi_head_attention",
            [("math.sqrt(d)", "1")],
            "the heads' results, from attention. With that one repaired, multi_head_attention is right.",
        ),
    ],
)
def test_a_wrong_part_is_not_held_against_the_whole(name, changes, words):
    made = marked(name, *changes)
    assert (made.verdict, made.likely) == ("wrong", "")
    assert made.words.endswith(f"First wrong tensor: {words}")


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        (
            "vit",
            ("unsqueeze(0)\n    for", "unsqueeze(0) * 2\n    for"),
            "z_0 = [x_class; x_p E] + E_pos (Eq. 1)",
        ),
        ("vit", ("z[:, 0]", "z[:, 1]"), "z_3, as the last norm gets it"),
        ("vit", ("return y @", "return -y @"), "the logits, y head.weight^T + head.bias"),
        (
            "block",
            ('weights["norm1.bias"], 1e-6)', 'weights["norm1.bias"], 1)'),
            "LN(z), as attention gets it",
        ),
        ("block", ("z1 = z + ", "z1 = z - "), "the first sum, z' = MSA(LN(z)) + z"),
        (
            "multi_head_attention",
            ("head * d, (head + 1) * d", "head, None, heads"),
            "q of attention, which makes the heads' results",
        ),
    ],
)
def test_what_is_written_out_is_passed_over(name, change, where):
    """A convolution in place of patches, a norm of torch's, one head at a time."""
    made = mark(BY_NAME[name], student(change, text=OTHER))
    assert made.words.endswith(f"First wrong tensor: {where}.")


def test_a_slip_is_seen_through_a_wrong_part():
    made = marked("block", ("F.gelu", "F.relu"), (SECOND, SECOND.replace("+ z1", "+ z")))
    assert made.likely == "The second residual adds z. It adds z', the first sum."


def test_parts_of_another_form_do_not_stop_the_marking():
    changes = [
        ("def layer_norm(x, weight", "def layer_norm(D, x, weight"),
        ("layer_norm(z", "layer_norm(0, z"),
    ]
    assert marked("block", *changes).verdict == "right"
    made = marked("block", *changes, (FIRST, FIRST.replace(" + z\n", "\n")))
    assert made.likely == "The first residual is missing: z' = MSA(LN(z)) + z."
    assert "First wrong" not in made.words
    names = student()
    made = mark(BY_NAME["layer_norm"], {**names, "layer_norm": lambda x: x})
    assert (made.verdict, made.words[:10]) == ("error", "TypeError:")


def test_inputs_stay_as_they_are():
    made = marked("layer_norm", ("    return (x - mean)", "    x -= mean\n    return x"))
    assert made.verdict == "wrong"
    assert made.words.endswith("changes one in place. Write x = x - y, not x -= y.")
    made = marked("mlp", ("    hidden = F.gelu", '    weights["fc1.bias"].zero_()\n    hidden = F.gelu'))
    assert made.verdict == "wrong"


def test_float32_on_the_way_will_do():
    assert (
        marked("positions", ("torch.zeros(count, width)", "torch.zeros(count, width).float()")).verdict
        == "right"
    )


def test_not_yet():
    made = marked("attention", ("    d = q.shape[-1]\n", "    raise NotImplementedError\n"))
    assert made[1:] == ("not yet", "softmax(q k^T / sqrt(d)) v, within the mask.", "")
    made = marked("block", ("    d = q.shape[-1]\n", "    raise NotImplementedError\n"))
    assert made[1:] == ("not yet", "z' = MSA(LN(z)) + z; out = MLP(LN(z')) + z'. It waits for attention.", "")
    names = student()
    del names["mlp"]
    assert mark(BY_NAME["mlp"], names)[1:] == ("not yet", "There is no function mlp in the file.", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("    return x @ weight @ missing", "NameError: name 'missing' is not defined"),
        ("    return x @ x", "RuntimeError: "),
        ("    raise ValueError('a\\x1b[31m\\nb')", "ValueError: a\\x1b[31m b"),
        ("    raise ValueError", "ValueError"),
        ("    raise SystemExit(3)", "SystemExit: 3"),
        ("    raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("    raise NotImplementedError('aten::x')", "NotImplementedError: aten::x"),
        ("    return layer_norm(x, weight, bias, eps)", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_an_error_is_told_by_line(line, words):
    names = {}
    exec(compile(f"\n\ndef layer_norm(x, weight, bias, eps):\n{line}\n", STUDENT, "exec"), names)
    made = mark(BY_NAME["layer_norm"], names)
    assert made.verdict == "error"
    assert made.words.startswith(f"Line 4, in layer_norm: {words}")
    assert "\n" not in made.words


def test_an_error_while_importing_is_told_by_line():
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ny = = 2\n", STUDENT, "exec")
    assert described(caught.value) == "Line 2: SyntaxError: invalid syntax"
    with pytest.raises(NameError) as caught:
        exec(compile("x = 1\nmissing\n", STUDENT, "exec"), {})
    assert described(caught.value) == "Line 2: NameError: name 'missing' is not defined"
