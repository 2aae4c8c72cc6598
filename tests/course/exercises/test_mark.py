"""The result of a student's function: verdict, difference, first wrong tensor, errors by line."""

import re

import pytest
import torch

from tests.support.mistakes import ATTEND, FIRST, NORM1, NORM2, SECOND, TOKENS
from tests.support.students import EXERCISE, OTHER_SOLUTION, run_student
from vitrail_course.exercises.compare import describe_difference
from vitrail_course.exercises.mark import check_exercise, describe_error
from vitrail_course.exercises.run import STUDENT


def check(name, *changes):
    return check_exercise(EXERCISE[name], run_student(*changes))


def test_a_difference_is_reported_with_its_index():
    mark = check(
        "patches", ("return torch.stack(cut, dim=1)", "cut[4][1, 7] += 3\n    return torch.stack(cut, dim=1)")
    )
    assert mark.verdict == "error"  # the second case has no such index
    mark = check("patches", ("dim=1)", "dim=1) + 3 * (torch.arange(C * P * P) == 7)"), ("B, _, H", "B, C, H"))
    assert mark.verdict == "wrong"
    assert mark.hint == ""
    assert mark.message.startswith(f"{EXERCISE['patches'].task}\nThe largest difference is 3, at [")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returns None.*return statement missing"),
        ([1.0], "returns a list"),
        (torch.zeros(3, 2), r"shape is \(3, 2\) but must be \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int64), "floating point but is torch.int64"),
        (
            torch.tensor([[0, 0, 0], [0, torch.nan, 0]]),
            r"NaN or infinity, at \[1, 1\]: expected 0, got nan",
        ),
        (
            torch.tensor([[0, 0, 0.5], [0, -2, 0]]),
            r"largest difference is 2, at \[1, 1\]: expected 0, got -2",
        ),
        (torch.full((2, 3), 9e-7), None),
        (torch.zeros(2, 3, requires_grad=True), None),
    ],
)
def test_differences_are_describe_error(result, message):
    description = describe_difference(result, torch.zeros(2, 3, dtype=torch.float64))
    assert (description is None) == (message is None)
    assert message is None or re.search(message, description)


@pytest.mark.parametrize(
    ("name", "changes", "tensor"),
    [
        ("block", [(NORM1, NORM1.replace("(z,", "(2 * z + z**2,"))], "z, the input of the first norm"),
        ("block", [(FIRST, FIRST.replace("(normed", "(3 * normed"))], "LN(z), the input of attention"),
        ("block", [(FIRST, FIRST.replace("+ z", "- z"))], "the first sum, z' = MSA(LN(z)) + z"),
        ("block", [(SECOND, SECOND.replace("(normed", "(3 * normed"))], "LN(z'), the input of the MLP"),
        ("block", [(SECOND, SECOND.replace("+ z1", "- z1"))], "the second sum, MLP(LN(z')) + z'"),
        (
            "block",
            [(NORM2, NORM2.replace("norm2", "norm1"))],
            "the argument weight of layer_norm, used for LN(z')",
        ),
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
            "the argument weights of mlp, used for MLP(LN(z'))",
        ),
        ("vit", [(TOKENS, TOKENS.replace("+ E", "- E"))], "z_0 = [x_class; x_p E] + E_pos (Eq. 1)"),
        ("vit", [("z = block(z,", "z = block(z**2 if index == 1 else z,")], "z_1, after the first block"),
        ("vit", [("config.heads)\n", "config.heads)\n    z = z**2\n")], "z_3, the input of the last norm"),
        ("vit", [("F.linear(y,", "F.linear(2 * y,")], "the logits, y head.weight^T + head.bias"),
        (
            "multi_head_attention",
            [(ATTEND, ATTEND.replace("k,", "2 * k,"))],
            "the argument k of attention, used for the outputs of the heads",
        ),
        (
            "multi_head_attention",
            [("F.linear(out,", "F.linear(-out,")],
            "the concatenated heads, or their projection",
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
def test_the_first_wrong_tensor(name, changes, tensor):
    mark = check(name, *changes)
    assert mark.verdict == "wrong"
    assert mark.message.partition("First wrong tensor: ")[2] == (tensor and f"{tensor}.")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "block",
            [(" + eps", " + eps + 1")],
            "LN(z), returned by layer_norm. Once layer_norm is fixed, block is correct.",
        ),
        (
            "block",
            [("F.gelu", "F.relu")],
            "MLP(LN(z')), returned by mlp. Once mlp is fixed, block is correct.",
        ),
        ("vit", [("F.gelu", "F.relu")], "z_1, returned by block. Once block is fixed, vit is correct."),
        (
            "vit",
            [("patch.reshape", "patch.mT.reshape")],
            "the patches x_p, returned by patches. Once patches is fixed, vit is correct.",
        ),
        (
            "multi_head_attention",
            [("math.sqrt(d)", "1")],
            "the outputs of the heads, returned by attention. Once attention is fixed, multi_head_attention is correct.",
        ),
    ],
)
def test_a_wrong_function_that_is_called_is_named(name, changes, words):
    mark = check(name, *changes)
    assert (mark.verdict, mark.hint) == ("wrong", "")
    assert mark.message.endswith(f"First wrong tensor: {words}")


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    [
        (
            "vit",
            ("unsqueeze(0)\n    for", "unsqueeze(0) * 2\n    for"),
            "z_0 = [x_class; x_p E] + E_pos (Eq. 1)",
        ),
        ("vit", ("z[:, 0]", "z[:, 1]"), "z_3, the input of the last norm"),
        ("vit", ("return y @", "return -y @"), "the logits, y head.weight^T + head.bias"),
        (
            "block",
            ('weights["norm1.bias"], 1e-6)', 'weights["norm1.bias"], 1)'),
            "LN(z), the input of attention",
        ),
        ("block", ("z1 = z + ", "z1 = z - "), "the first sum, z' = MSA(LN(z)) + z"),
        (
            "multi_head_attention",
            ("head * d, (head + 1) * d", "head, None, heads"),
            "the argument q of attention, used for the outputs of the heads",
        ),
    ],
)
def test_steps_without_a_call_are_skipped(name, change, tensor):
    """A convolution in place of patches, torch's layer norm, one head at a time."""
    mark = check_exercise(EXERCISE[name], run_student(change, text=OTHER_SOLUTION))
    assert mark.message.endswith(f"First wrong tensor: {tensor}.")


def test_a_mistake_is_found_behind_a_wrong_function():
    mark = check("block", ("F.gelu", "F.relu"), (SECOND, SECOND.replace("+ z1", "+ z")))
    assert mark.hint == "The second residual adds z. Add z', the first sum."


def test_functions_with_other_arguments_can_be_checked():
    changes = [
        ("def layer_norm(x, weight", "def layer_norm(D, x, weight"),
        ("layer_norm(z", "layer_norm(0, z"),
    ]
    assert check("block", *changes).verdict == "correct"
    mark = check("block", *changes, (FIRST, FIRST.replace(" + z\n", "\n")))
    assert mark.hint == "The first residual is missing: z' = MSA(LN(z)) + z."
    assert "First wrong" not in mark.message
    namespace = run_student()
    mark = check_exercise(EXERCISE["layer_norm"], {**namespace, "layer_norm": lambda x: x})
    assert (mark.verdict, mark.message[:10]) == ("error", "TypeError:")


def test_inputs_must_not_be_changed():
    mark = check("layer_norm", ("    return (x - mean)", "    x -= mean\n    return x"))
    assert mark.verdict == "wrong"
    assert "changes one in place" in mark.message
    mark = check("mlp", ("    hidden = F.gelu", '    weights["fc1.bias"].zero_()\n    hidden = F.gelu'))
    assert mark.verdict == "wrong"


def test_float32_intermediate_results_are_accepted():
    assert (
        check("positions", ("torch.zeros(count, width)", "torch.zeros(count, width).float()")).verdict
        == "correct"
    )


def test_functions_that_are_not_written_yet():
    mark = check("attention", ("    d = q.shape[-1]\n", "    raise NotImplementedError\n"))
    assert mark[1:] == ("not yet", EXERCISE["attention"].task, "")
    mark = check("block", ("    d = q.shape[-1]\n", "    raise NotImplementedError\n"))
    assert (mark.verdict, mark.hint) == ("not yet", "")
    assert "calls attention, which is not written yet" in mark.message
    namespace = run_student()
    del namespace["mlp"]
    mark = check_exercise(EXERCISE["mlp"], namespace)
    assert (mark.verdict, mark.message) == ("not yet", "There is no function mlp.")


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
def test_an_error_is_reported_with_its_line(line, words):
    namespace = {}
    exec(compile(f"\n\ndef layer_norm(x, weight, bias, eps):\n{line}\n", STUDENT, "exec"), namespace)
    mark = check_exercise(EXERCISE["layer_norm"], namespace)
    assert mark.verdict == "error"
    assert mark.message.startswith(f"Line 4, in layer_norm: {words}")
    assert "\n" not in mark.message


def test_an_import_error_is_reported_with_its_line():
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ny = = 2\n", STUDENT, "exec")
    assert describe_error(caught.value) == "Line 2: SyntaxError: invalid syntax"
    with pytest.raises(NameError) as caught:
        exec(compile("x = 1\nmissing\n", STUDENT, "exec"), {})
    assert describe_error(caught.value) == "Line 2: NameError: name 'missing' is not defined"
