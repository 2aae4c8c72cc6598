"""The order of an epoch: every image once, whatever the number of images, without a list of them all."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.shards import write_indexes
from tests.support.tiny_runs import SETTINGS, fingerprints, one_thread, train, write_arrays
from vitrail.base.errors import ConfigError, InputError
from vitrail.images import holdout, order
from vitrail.images.classes import class_counts
from vitrail.images.formats import lazy
from vitrail.images.formats.sources import Split, open_dataset, read_data
from vitrail.images.holdout import choose_held_out, choose_in_blocks
from vitrail.images.loader import batch_indices
from vitrail.images.order import GROUP, BlockOrder, KeyedPermutation, epoch_order
from vitrail.images.rng import random_permutation
from vitrail.training.run_directory import _name_bytes

__all__ = ["one_thread"]


def split_of(count, classes=3):
    labels = np.arange(count) % classes
    return Split(labels, [""] * count, None, np.zeros((1, 1, 1, 1), np.uint8))


# ---- permutations -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_keyed_permutation_has_every_number_once(count):
    first, other = (KeyedPermutation([7, epoch], count)[torch.arange(count)] for epoch in (0, 1))
    assert first.sort().values.tolist() == list(range(count))
    assert count < 5 or not torch.equal(first, other)


def test_it_is_uniform():
    """Where each of 20 numbers lands, over 2,000 keys: chi-squared with 361 degrees of freedom."""
    counts = torch.zeros(20, 20)
    for key in range(2000):
        counts[torch.arange(20), KeyedPermutation([key], 20)[torch.arange(20)]] += 1
    chi = ((counts - 100) ** 2 / 100).sum().item()
    assert 361 - 5 * 27 < chi < 361 + 5 * 27  # five standard deviations
    large = KeyedPermutation([0, 0], 2**27 + 5)
    seen = large[torch.arange(100_000)].double() / len(large)
    assert abs(seen.mean() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([seen[:-1], seen[1:]]))[0, 1]) < 0.02
    assert len(seen.unique()) == 100_000


def test_small_sets_keep_their_order_and_large_ones_have_no_list():
    small = epoch_order(split_of(1000), seed=3, epoch=2)
    assert torch.equal(small, random_permutation([3, 2], 1000))
    large = epoch_order(split_of(lazy.LARGE), seed=3, epoch=2)
    assert isinstance(large, KeyedPermutation)
    assert torch.equal(batch_indices(large, 5, 64), large[torch.arange(320, 384)])
    with pytest.raises(InputError, match=r"balanced is for at most 33,554,432 images"):
        order._balanced(Split(np.broadcast_to(np.int16(0), (2**26,)), (), None), 0, 0, 64)


# ---- balanced sampling ------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "batch"), [(10, 20), (2, 8), (9, 36), (16, 4)])
def test_neighbors_of_balanced_batches_are_of_all_classes(classes, batch):
    """Mixup mixes neighbors: over the epochs every two classes meet about equally often.

    Two images of one class meet less often, if a batch has few of each; never if it has one of each.
    """
    split, pairs = split_of(20 * classes, classes), torch.zeros(classes, classes)
    for epoch in range(400):
        order = epoch_order(split, seed=0, epoch=epoch, balanced_batch=batch)
        labels = torch.from_numpy(split.labels)[order]
        counts = labels.view(-1, max(batch, classes)).sort(1).values
        assert (counts == torch.arange(classes).repeat_interleave(max(1, batch // classes))).all()
        pairs.index_put_(tuple(labels.view(-1, 2).T), torch.ones(1), accumulate=True)
    pairs = pairs + pairs.T
    others = pairs[~torch.eye(classes, dtype=torch.bool)]
    assert ((others / others.mean() - 1).abs() < 0.25).all()
    each = max(1, batch // classes)  # images of a class in a batch, or in a cycle of the classes
    expected = (each - 1) / each * others.mean()
    assert ((pairs.diag() - expected).abs() < 0.15 * others.mean()).all()


def test_a_balanced_order_is_a_function_of_seed_and_epoch():
    split = split_of(60)
    first, again, epoch, seed = (
        epoch_order(split, seed=a, epoch=b, balanced_batch=12) for a, b in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, epoch)
    assert not torch.equal(first, seed)


# ---- block shuffle ----------------------------------------------------------------------------


@settings(deadline=None)
@given(count=st.integers(1, 500), block=st.integers(1, 60), epoch=st.integers(0, 3))
def test_a_block_order_has_every_image_once(count, block, epoch):
    blocks = BlockOrder([0, epoch], count, block)
    rows = torch.cat([blocks[part] for part in torch.arange(count).split(7)])
    assert rows.sort().values.tolist() == list(range(count))


def test_a_block_order_reads_few_blocks_at_a_time():
    count, block = 64_000, 100
    rows = BlockOrder([1, 0], count, block)[torch.arange(count)]
    for group in rows[:16_000].split(block * GROUP):
        runs = group.sort().values.diff()
        assert (runs > 1).sum() <= GROUP  # as many runs of consecutive images
    assert len((rows[:64] // block).unique()) > 12  # of 16 blocks
    other = BlockOrder([1, 1], count, block)[torch.arange(count)]
    assert not torch.equal(rows, other)


def test_the_setting_changes_the_order_and_nothing_else(tmp_path):
    data = write_arrays(tmp_path / "a.npz")
    train(data, recipe="small", out=tmp_path / "a", **{**SETTINGS, "epochs": 1, "shuffle_block": 10})
    train(data, recipe="small", out=tmp_path / "b", **{**SETTINGS, "epochs": 1, "shuffle_block": 10})
    train(data, recipe="small", out=tmp_path / "c", **{**SETTINGS, "epochs": 1})
    assert fingerprints(tmp_path / "a") == fingerprints(tmp_path / "b") != fingerprints(tmp_path / "c")
    with pytest.raises(ConfigError, match="set no shuffle_block"):
        train(data, recipe="small", out=tmp_path / "d", shuffle_block=10, sampling="balanced")


# ---- very many images -------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_held_out_in_blocks_is_the_same_choice(data):
    count = data.draw(st.integers(1, 60))
    numbers = np.array(data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)), np.uint64)
    numbers *= np.uint64(2**59)  # many equal images, and every fraction of held-out ones
    labels = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    blocks = lambda: iter(np.array_split(numbers, 5))  # noqa: E731
    counts = class_counts(Split(labels, [], None), 10)
    assert (choose_in_blocks(blocks, labels, counts, 0.3) == choose_held_out(numbers, labels, 0.3)).all()


@pytest.fixture
def indexes(tmp_path):
    write_indexes(tmp_path / "photos", 12_000, 3, classes=10)
    return tmp_path / "photos"


def test_large_data_is_the_same_data(indexes, monkeypatch):
    """Read as small data and, with another limit, as large data."""
    small = open_dataset(indexes)
    for module in (lazy, order):
        monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr("vitrail.images.formats.shards.LARGE", 1000)
    monkeypatch.setattr("vitrail.images.formats.lazy.BLOCK", 700)
    monkeypatch.setattr("vitrail.images.formats.shards.BLOCK", 700)
    large = open_dataset(indexes)
    assert large.train.labels.dtype == np.int16
    assert isinstance(large.train.paths.rows, lazy.Selection)
    assert large.notes == small.notes
    for name in ("train", "val"):
        one, other = getattr(small, name), getattr(large, name)
        assert (one.labels == other.labels).all()
        assert list(one.paths) == list(other.paths)
        assert (holdout.content_keys(one) == holdout.content_keys(other)).all()
    some = np.array([5, 9000, 17, 17])
    assert list(large.train.paths.take(some)) == [small.train.paths[i] for i in some]
    monkeypatch.setattr("vitrail.training.run_directory.LARGE", 1000)
    assert len(_name_bytes(large.train.names)) == 32
    assert _name_bytes(large.train.names) != _name_bytes(large.val.names)


def test_two_million_images_need_little_memory(tmp_path):
    write_indexes(tmp_path / "photos", 2_000_000, 4, classes=100)
    tracemalloc.start()
    try:
        data = open_dataset(tmp_path / "photos")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2_000_000 * 2 + 2**21  # two bytes for a label, a bit for its split, and some headers
    assert peak < 40 * 2**20
    assert 0.79 < len(data.train) / 2_000_000 < 0.81
    indices = batch_indices(epoch_order(data.train, seed=0, epoch=3), 900, 256)
    images = data.train.paths.take(indices.numpy())
    assert len({image.file for image in images}) == 4
    assert read_data(tmp_path / "photos").train.names[1_999_999] == ""


def test_an_index_with_a_damaged_description_is_not_used(indexes):
    path = indexes / "photos-000000.tar.index"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"class 3", b"class_3"))
    assert len(read_data(indexes).train) == 8_000  # the shard is read again: it is only zeros
