"""The paper in one file: the weights and the logits of a plain ViT, and a loop that learns the digits."""

import ast
import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail import paper
from vitrail.paper import PaperViT


@pytest.mark.parametrize(
    "fields",
    [
        dict(size=8, patch=2, channels=1, classes=10, width=64, depth=4, heads=4),
        dict(size=32, patch=8, channels=3, classes=7, width=24, depth=2, heads=3, mlp_width=60),
        dict(size=48, patch=16, channels=3, classes=1000, width=192, depth=12, heads=3),
    ],
    ids=["digits", "odd", "Ti"],
)
def test_the_weights_of_a_plain_vit_give_its_logits(fields):
    model = add_noise(vt.ViT(vt.ViTConfig(**fields))).eval()
    own = PaperViT.of(model)
    assert set(own.state_dict()) == set(model.state_dict())
    images = torch.randn(3, fields["channels"], fields["size"], fields["size"])
    with torch.no_grad():
        found, expected = own(images), model(images)
        assert (
            found - expected
        ).norm() < 5e-5 * expected.norm()  # the noise makes it large; in float64 below
        torch.testing.assert_close(
            own.double()(images.double()), model.double()(images.double()), rtol=1e-12, atol=1e-12
        )


def test_the_defaults_are_b16():
    with torch.device("meta"):
        own, model = PaperViT(), vt.create("B/16", classes=1000)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in own.state_dict().items()} == shapes


def test_a_model_with_options_is_refused():
    for fields in (dict(registers=2), dict(layer_scale=0.1), dict(position="rotary")):
        with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected key|Missing key"):
            PaperViT.of(vt.create("mu/16", classes=3, **fields))


def test_it_is_short_and_stands_alone():
    text = Path(paper.__file__).read_text()
    imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "typing", "torch"}
    code = text.replace(paper.__doc__, "")
    assert len([line for line in code.splitlines() if line.strip()]) <= 100
    assert [int(n) for n in re.findall(r"# Eq\. (\d)", code)][:1] == [1]


@pytest.mark.slow
def test_the_loop_in_its_docstring_learns_the_digits(capsys):
    _, _, loop = paper.__doc__.partition("    import torch\n")
    exec(compile(dedent("    import torch\n" + loop), "paper.py", "exec"), {})
    accuracy = float(re.search(r"([\d.]+)% of 360", capsys.readouterr().out)[1])
    assert accuracy >= 93
