"""Shared by all tests: one thread, no network, CPU ranks that are started once."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from isopref.testing.ranks import Ranks

torch.set_num_threads(1)
hypothesis.settings.register_profile("same", derandomize=True)  # what is red is red for everyone
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests skip without a GPU; what soaks runs only where it is asked for: `-m soak`."""
    for item in items:
        if item.get_closest_marker("soak") and "soak" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="make soak"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
