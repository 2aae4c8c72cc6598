"""Looking at activations and changing them."""

from collections import OrderedDict

import pytest
import torch

import vitrail as vt

TAPS = [
    "embed",
    *[f"blocks.1.attention.{part}" for part in ("q", "k", "v", "scores", "weights", "heads", "out")],
    *[f"blocks.1.{part}" for part in ("norm1", "norm2", "mlp.hidden", "mlp.out", "out")],
    "encoded",
    "pooled",
    "logits",
]


def test_every_tap_has_its_shape(tiny, pictures):
    with vt.record(tiny, *TAPS) as tape:
        logits = tiny(pictures)
    c = tiny.config
    B, T, D, k, d = len(pictures), c.tokens, c.width, c.heads, c.d
    shapes = {name.rpartition(".")[2]: tuple(tensor.shape) for name, tensor in tape.items()}
    assert set(tape) == set(TAPS)
    for head in ("q", "k", "v", "heads"):
        assert shapes[head] == (B, k, T, d)
    assert shapes["scores"] == shapes["weights"] == (B, k, T, T)
    assert shapes["hidden"] == (B, T, c.F)
    assert shapes["pooled"] == (B, D)
    for tokens in ("embed", "norm1", "norm2", "out", "encoded"):
        assert shapes[tokens] == (B, T, D)
    assert torch.equal(tape["logits"], logits)
    assert (tape["encoded"] - tiny.encode(pictures).tokens).abs().max() < 1e-5


def test_recorded_attention_is_the_attention_that_was_used(tiny, pictures):
    with torch.no_grad(), vt.record(tiny, "blocks.0.attention.*") as tape:
        recorded = tiny(pictures)
    attention = {name.rpartition(".")[2]: tensor.double() for name, tensor in tape.items()}
    scores = attention["q"] @ attention["k"].transpose(-2, -1) / tiny.config.d**0.5
    assert (attention["scores"] - scores).abs().max() < 1e-5
    assert (attention["weights"] - scores.softmax(-1)).abs().max() < 1e-5
    assert (attention["heads"] - attention["weights"] @ attention["v"]).abs().max() < 1e-5
    with torch.no_grad():
        assert (tiny(pictures) - recorded).abs().max() < 1e-5


def test_only_the_blocks_concerned_work_step_by_step(tiny, pictures):
    first, second = (block.attention for block in tiny.blocks)
    with vt.record(tiny, "blocks.1.attention.weights"):
        assert (first.explicit, second.explicit) == (0, 1)
        with vt.record(tiny, "blocks.*.attention.scores", "blocks.*.attention.weights"):
            assert (first.explicit, second.explicit) == (2, 3)
        assert (first.explicit, second.explicit) == (0, 1)
    with vt.record(tiny, "blocks.*.attention.q", "blocks.*.attention.heads"):
        assert (first.explicit, second.explicit) == (0, 0)


def test_an_error_inside_leaves_the_model_as_it_was(tiny, pictures):
    before = tiny(pictures)
    with (
        pytest.raises(ZeroDivisionError),
        vt.edit(tiny, {"blocks.*.attention.weights": lambda w: w / (1 / 0)}),
    ):
        tiny(pictures)
    assert torch.equal(tiny(pictures), before)
    assert not any(module._forward_hooks for module in tiny.modules())
    assert not any(block.attention.explicit for block in tiny.blocks)


def test_gradients_of_activations(tiny, pictures):
    with vt.record(tiny, "blocks.0.attention.weights") as tape:
        logits = tiny(pictures)
    [gradient] = torch.autograd.grad(logits[:, 0].sum(), tape["blocks.0.attention.weights"])
    assert gradient.abs().max() > 0


def test_a_silenced_head_is_a_head_with_zero_output(tiny, pictures):
    def silence(weights):
        keep = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
        return weights * keep

    with torch.no_grad(), vt.edit(tiny, {"blocks.0.attention.weights": silence}):
        with vt.record(tiny, "blocks.0.attention.heads") as tape:
            edited = tiny(pictures)
        assert tape["blocks.0.attention.heads"][:, 1].abs().max() == 0

    with torch.no_grad():
        out = tiny.blocks[0].attention.out.weight
        out[:, 4:8] = 0  # the columns that read the second head
        assert (tiny(pictures) - edited).abs().max() < 1e-5


def test_layers_are_the_encoder_cut_short(tiny, pictures):
    with torch.no_grad(), vt.record(tiny, "blocks.0.out") as tape:
        enc = tiny.encode(pictures, layers=[0, 1])
        assert list(enc.layers) == [0, 1]
        assert torch.equal(enc.layers[1].tokens, enc.tokens)
        assert torch.equal(enc.layers[0].tokens, tiny.norm(tape["blocks.0.out"]))
        assert enc.layers[0].patches.shape == (4, 3, 2, 12)
        assert torch.equal(tiny.head(enc.layers[1].pooled), tiny(pictures))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "blocks.0.attention.wights",
            r"the model has. Got 'blocks.0.attention.wights'. Did you mean 'blocks.\*.attention.weights'",
        ),
        (
            "blocks.7.attention.weights",
            r"Got 'blocks.7.attention.weights'. Did you mean 'blocks.\*.attention.weights'\?.*0 to 1",
        ),
        ("blocks.*", r"Got 'blocks.\*'"),
        ("", r"Got ''"),
    ],
)
def test_names_that_match_nothing(tiny, pattern, message):
    with pytest.raises(vt.InputError, match=message), vt.record(tiny, pattern):
        pass
    with pytest.raises(vt.InputError, match=message), vt.edit(tiny, {pattern: torch.neg}):
        pass


@pytest.mark.parametrize(("result", "got"), [(None, "NoneType"), (torch.zeros(2), r"\(2,\)")])
def test_an_edit_must_keep_the_shape(tiny, pictures, result, got):
    must = r"An edit of embed must return a tensor of the same shape, \(4, 7, 12\). Got " + got
    with vt.edit(tiny, {"embed": lambda _: result}), pytest.raises(vt.InputError, match=must):
        tiny(pictures)


def test_the_tape_says_what_it_holds(tiny, pictures):
    with vt.record(tiny, "embed") as tape:
        with pytest.raises(vt.InputError, match="Call the model inside the `with` block first"):
            tape["embed"]
        tiny(pictures)
    with pytest.raises(vt.InputError, match=r"Got 'encoded'. .*There is: embed."):
        tape["encoded"]


def test_a_compiled_model_is_refused(tiny):
    compiled = torch.compile(tiny)
    with pytest.raises(
        vt.InputError, match=r"not compiled.* Got a compiled model. Keep the uncompiled model"
    ):
        vt.record(compiled, "embed").__enter__()
    tiny.blocks[1].compile()
    with pytest.raises(vt.InputError, match=r"Got a model whose blocks.1 is compiled"):
        vt.record(tiny, "embed").__enter__()


def test_other_modules_and_odd_names(tiny):
    with pytest.raises(vt.InputError, match=r"Got 'embed'. .*There is: module.tokens"):
        vt.record(torch.nn.Sequential(OrderedDict(module=tiny)), "embed").__enter__()
    with pytest.raises(vt.InputError, match=r"Got 'embed'. There is: 0, 1.$"):
        vt.record(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), "embed").__enter__()
    with pytest.raises(vt.InputError, match=r"Got \['embed'\]."):
        vt.record(tiny, ["embed"]).__enter__()
