"""Fixtures of the tests of training."""

from tests.support.tiny_runs import data, one_thread

__all__ = ["data", "one_thread"]
