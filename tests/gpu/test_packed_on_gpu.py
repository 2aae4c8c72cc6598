"""Images of different sizes in one sequence, on a GPU."""

import pytest
import torch

from tests.model.test_packed import MODELS, build, images_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", MODELS)
def test_each_gets_the_vector_that_it_has_alone(name):
    model, images = build(name).cuda(), [image.cuda() for image in images_of()]
    with torch.no_grad():
        packed = model.encode_packed(images)
        alone = torch.cat([model.encode(image[None]).pooled for image in images])
    assert (packed - alone).abs().max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_flash_kernel(name):
    """In bfloat16, forward and backward, against the images one by one."""
    model, images = build(name).cuda().train(), [image.cuda() for image in images_of()]
    with torch.autocast("cuda", torch.bfloat16):
        packed, alone = model(images), torch.cat([model(image[None]) for image in images])
    assert (packed - alone).abs().max() < 0.05 * max(1, alone.abs().max())
    gradients = []
    for logits in (packed, alone):
        model.zero_grad()
        logits.float().square().sum().backward(retain_graph=True)
        gradients.append(model.blocks[0].attention.qkv.weight.grad.clone())
    assert (gradients[0] - gradients[1]).abs().max() < 0.1 * gradients[1].abs().max()
