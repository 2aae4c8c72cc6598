"""torch.compile without graph breaks, and torch.export with a dynamic batch."""

import pytest
import torch


@pytest.mark.parametrize("training", [False, True])
def test_compile_without_graph_breaks(tiny, images, training):
    tiny.train(training)
    compiled = torch.compile(tiny, fullgraph=True, backend="aot_eager")
    assert (compiled(images) - tiny(images)).abs().max() < 1e-6


def test_other_batch_sizes_compile_at_most_once_more(tiny):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(tiny, fullgraph=True, backend=counter)
    for batch in (4, 4, 7, 3, 12, 5):
        compiled(torch.randn(batch, tiny.config.channels, *tiny.config.pixels))
    assert counter.frame_count <= 2


def test_export_with_a_dynamic_batch(tiny, images):
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(tiny, (images,), dynamic_shapes=({0: batch},))
    for count in (1, 2, 9):
        images = torch.randn(count, tiny.config.channels, *tiny.config.pixels)
        assert (program.module()(images) - tiny(images)).abs().max() < 1e-6
