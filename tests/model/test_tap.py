"""Recording and editing activations, and the repr without taps."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

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


def test_every_tap_has_its_shape(tiny, images):
    with vt.record(tiny, *TAPS) as tape:
        logits = tiny(images)
    c = tiny.config
    B, T, D, k, d = len(images), c.tokens, c.width, c.heads, c.d
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
    assert (tape["encoded"] - tiny.encode(images).tokens).abs().max() < 1e-5


def test_recorded_attention_is_consistent(tiny, images):
    with torch.no_grad(), vt.record(tiny, "blocks.0.attention.*") as tape:
        recorded = tiny(images)
    attention = {name.rpartition(".")[2]: tensor.double() for name, tensor in tape.items()}
    scores = attention["q"] @ attention["k"].transpose(-2, -1) / tiny.config.d**0.5
    assert (attention["scores"] - scores).abs().max() < 1e-5
    assert (attention["weights"] - scores.softmax(-1)).abs().max() < 1e-5
    assert (attention["heads"] - attention["weights"] @ attention["v"]).abs().max() < 1e-5
    with torch.no_grad():
        assert (tiny(images) - recorded).abs().max() < 1e-5


def test_only_recorded_blocks_compute_attention_explicitly(tiny, images):
    first, second = (block.attention for block in tiny.blocks)
    with vt.record(tiny, "blocks.1.attention.weights"):
        assert (first.explicit, second.explicit) == (0, 1)
        with vt.record(tiny, "blocks.*.attention.scores", "blocks.*.attention.weights"):
            assert (first.explicit, second.explicit) == (2, 3)
        assert (first.explicit, second.explicit) == (0, 1)
    with vt.record(tiny, "blocks.*.attention.q", "blocks.*.attention.heads"):
        assert (first.explicit, second.explicit) == (0, 0)


def test_hooks_are_removed_after_an_error(tiny, images):
    before = tiny(images)
    with (
        pytest.raises(ZeroDivisionError),
        vt.edit(tiny, {"blocks.*.attention.weights": lambda w: w / (1 / 0)}),
    ):
        tiny(images)
    assert torch.equal(tiny(images), before)
    assert not any(module._forward_hooks for module in tiny.modules())
    assert not any(block.attention.explicit for block in tiny.blocks)


def test_gradients_of_activations(tiny, images):
    with vt.record(tiny, "blocks.0.attention.weights") as tape:
        logits = tiny(images)
    [gradient] = torch.autograd.grad(logits[:, 0].sum(), tape["blocks.0.attention.weights"])
    assert gradient.abs().max() > 0


def test_ablating_a_head(tiny, images):
    def ablate(weights):
        mask = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
        return weights * mask

    with torch.no_grad(), vt.edit(tiny, {"blocks.0.attention.weights": ablate}):
        with vt.record(tiny, "blocks.0.attention.heads") as tape:
            edited = tiny(images)
        assert tape["blocks.0.attention.heads"][:, 1].abs().max() == 0

    with torch.no_grad():
        out = tiny.blocks[0].attention.out.weight
        out[:, 4:8] = 0  # the columns that read the second head
        assert (tiny(images) - edited).abs().max() < 1e-5


def test_layers_are_the_outputs_of_a_shorter_encoder(tiny, images):
    with torch.no_grad(), vt.record(tiny, "blocks.0.out") as tape:
        enc = tiny.encode(images, layers=[0, 1])
        assert list(enc.layers) == [0, 1]
        assert torch.equal(enc.layers[1].tokens, enc.tokens)
        assert torch.equal(enc.layers[0].tokens, tiny.norm(tape["blocks.0.out"]))
        assert enc.layers[0].patches.shape == (4, 3, 2, 12)
        assert torch.equal(tiny.head(enc.layers[1].pooled), tiny(images))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.0.attention.wights", r"'blocks.0.attention.wights'. .*'blocks.\*.attention.weights'\?"),
        ("blocks.7.attention.weights", r"'blocks.7.* mean 'blocks.\*.attention.weights'\?.*0 to 1"),
        ("blocks.*", r"no activation named 'blocks.\*'"),
        ("", r"no activation named ''"),
    ],
)
def test_names_that_match_nothing(tiny, pattern, message):
    with pytest.raises(vt.InputError, match=message), vt.record(tiny, pattern):
        pass
    with pytest.raises(vt.InputError, match=message), vt.edit(tiny, {pattern: torch.neg}):
        pass


@pytest.mark.parametrize(("result", "got"), [(None, "NoneType"), (torch.zeros(2), r"\(2,\)")])
def test_an_edit_must_not_change_the_shape(tiny, images, result, got):
    message = r"edit of embed .* same shape, \(4, 7, 12\), not " + got
    with vt.edit(tiny, {"embed": lambda _: result}), pytest.raises(vt.InputError, match=message):
        tiny(images)


def test_names_that_are_not_on_the_tape(tiny, images):
    with vt.record(tiny, "embed") as tape:
        with pytest.raises(vt.InputError, match=r"Call the model inside the `with` block"):
            tape["embed"]
        tiny(images)
    with pytest.raises(vt.InputError, match=r"'encoded' was not recorded. .*Choose from: embed."):
        tape["encoded"]


def test_a_compiled_model_is_refused(tiny):
    compiled = torch.compile(tiny)
    with pytest.raises(vt.InputError, match=r"the model is compiled; .* before torch.compile"):
        vt.record(compiled, "embed").__enter__()
    tiny.blocks[1].compile()
    with pytest.raises(vt.InputError, match=r"blocks.1 is compiled"):
        vt.record(tiny, "embed").__enter__()


def test_other_modules_and_odd_names(tiny):
    with pytest.raises(vt.InputError, match=r"named 'embed'. .*Choose from: module.tokens"):
        vt.record(torch.nn.Sequential(OrderedDict(module=tiny)), "embed").__enter__()
    with pytest.raises(vt.InputError, match=r"named 'embed'. Choose from: 0, 1.$"):
        vt.record(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), "embed").__enter__()
    with pytest.raises(vt.InputError, match=r"named \['embed'\]"):
        vt.record(tiny, ["embed"]).__enter__()


def test_repr_omits_taps_and_modules_that_do_nothing():
    lines = repr(vt.create("B/16", device="meta")).splitlines()
    assert len(lines) < 30
    assert lines[0] == "ViT("
    assert "    (0-11): 12 x Block(" in lines  # equal blocks are folded
    for name in ("Tap", "Identity", "DropPath", "Dropout"):
        assert not [line for line in lines if name in line]
    assert "        (qkv): QKV(in_features=768, out_features=2304, bias=True)" in lines


def test_repr_shows_the_modules_that_do_something():
    fields = dict(depth=2, dropout=0.1, drop_path=0.2, patch_dropout=0.3, qk_norm=True, mlp_hidden=2)
    text = repr(vt.create("mu/4", device="meta", **fields, position="learned"))
    for shown in (
        "DropPath(p=0.200)",
        "PatchDropout(p=0.3)",
        "Dropout(p=0.1",
        "(q_norm): LayerNorm",
        "(middle)",
    ):
        assert shown in text
    decoder = vt.Decoder(vt.DecoderConfig(vocabulary=9, width=8, depth=3, heads=2, length=4))
    assert "(0-2): 3 x Block(" in repr(decoder)
    assert "Tap" not in repr(decoder)


def test_other_threads_are_neither_recorded_nor_edited(tiny, images):
    expected = tiny(images)
    with ThreadPoolExecutor(1) as pool:
        with vt.record(tiny, "embed") as tape, vt.edit(tiny, {"logits": torch.zeros_like}):
            assert torch.equal(pool.submit(tiny, images).result(), expected)
            assert not tape
            assert not tiny(images).any()
            assert "embed" in tape
        assert torch.equal(tiny(images), expected)
