"""How a model can be run: on the meta device, under FakeTensorMode, for its tokens, with checkpointing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vitrail as vt

FIELDS = [
    *({"position": position} for position in ("learned", "learned2d", "sincos2d", "rotary", "rotary-dinov3")),
    *({"position": position} for position in ("pairwise", "relative")),
    *({"embedding": embedding, "patch": 16} for embedding in ("conv", "resnet", "mlp")),
    *({"pool": pool} for pool in ("mean", "attention")),
    {"init": "timm", "drop_path": 0.1, "dropout": 0.1, "qk_norm": True, "layer_scale": 0.1},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_forward_without_values(fields):
    with torch.device("meta"):
        assert vt.create("mu/4", classes=7, **fields)(torch.empty(2, 3, 32, 32)).shape == (2, 7)
    assert vt.create("mu/4", classes=7, device="meta", **fields).head is not None
    with FakeTensorMode():
        model = vt.create("mu/4", classes=7, **fields)
        logits = model(torch.randn(2, 3, 32, 32))
        assert logits.shape == (2, 7)
        logits.sum().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_token_ids_without_values():
    fields = {"input": "text", "size": 9, "patch": 1, "vocabulary": 7, "classes": 2}
    with FakeTensorMode():
        assert vt.create("mu/4", **fields)(torch.randint(7, (2, 9))).shape == (2, 2)


def test_forward_features_are_the_tokens_after_the_last_norm():
    model = vt.create("mu/4", classes=7, registers=2).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 67, 32)
    assert torch.equal(model.head(model.pool(tokens)), model(images))


@pytest.mark.parametrize("position", ["learned", "rotary", "relative"])
def test_checkpointing_gives_the_same_gradients_and_stores_less(position):
    images = torch.randn(2, 3, 32, 32)

    def gradients(checkpointing):
        torch.manual_seed(0)
        model = vt.create("mu/4", depth=3, position=position, dropout=0.1, drop_path=0.2, init="timm")
        assert model.set_grad_checkpointing(checkpointing) is model
        stored = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.numel()) or t, lambda t: t):
            loss = model(images).square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], sum(stored)

    plain, stored = gradients(False)
    again, stored_less = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert stored_less < stored / 2


def test_checkpointing_does_nothing_without_gradients():
    model = vt.create("mu/4", init="timm").eval().set_grad_checkpointing()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), model.set_grad_checkpointing(False)(images))
