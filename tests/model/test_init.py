"""The table in the docstring of `initialise` is what a fresh model holds."""

import math
from fnmatch import fnmatchcase

import pytest
import torch

import vitrail as vt
from vitrail.model.init import initialise

ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in initialise.__doc__.splitlines()
    if line.strip().startswith("| ")
][1:]


@pytest.fixture(scope="module")
def fresh():
    torch.manual_seed(0)
    return dict(vt.create("Ti/16", depth=2, classes=10).named_parameters())


def close(tensor, sigma):
    """Mean and deviation within five standard errors of what a normal with this sigma gives."""
    error = sigma / math.sqrt(tensor.numel())
    assert abs(tensor.mean().item()) < 5 * error
    assert abs(tensor.std().item() - sigma) < 5 * error


def check(value, tensor):
    match value.split(":")[0]:
        case "0" | "1":
            assert (tensor == float(value)).all()
        case "normal, sigma 0.02":
            close(tensor, 0.02)
            assert tensor.abs().max() > 0.06  # not cut off
        case "normal, sigma 1e-6":
            close(tensor, 1e-6)
        case "Xavier uniform":
            fan_out, fan_in = tensor.shape
            limit = math.sqrt(6 / (fan_in + fan_out))
            assert limit * 0.99 < tensor.abs().max() <= limit
            close(tensor, limit / math.sqrt(3))
        case "Xavier uniform, for q, k and v each by itself":
            for matrix in tensor.chunk(3):
                check("Xavier uniform", matrix)
        case "LeCun normal":
            sigma = math.sqrt(1 / tensor[0].numel())
            close(tensor, sigma)
            assert 2.2 * sigma < tensor.abs().max() < 2.28 * sigma  # cut at 2 sigma of the uncut one
        case _:
            pytest.fail(f"the table has a value that no check knows: {value}")


@pytest.mark.parametrize(("pattern", "value"), ROWS)
def test_the_table_tells_the_truth(fresh, pattern, value):
    matching = [parameter for name, parameter in fresh.items() if fnmatchcase(name, pattern)]
    assert matching
    for parameter in matching:
        check(value, parameter.detach())


def test_every_parameter_has_one_row(fresh):
    for name in fresh:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in ROWS) == 1, name


def test_the_same_seed_gives_the_same_model():
    def state(seed):
        torch.manual_seed(seed)
        return vt.create("mu/4").state_dict()

    one, same, other = state(1), state(1), state(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["tokens.proj.weight"], other["tokens.proj.weight"])
