"""Shared by all tests: one thread, no network, CPU ranks that are started once, oracle results computed once."""

import gc
import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if "ISOPREF_EXPECTED" not in os.environ:  # ranks and pytest-xdist's workers inherit it
    _expected = tempfile.TemporaryDirectory(prefix="isopref-expected-")
    os.environ["ISOPREF_EXPECTED"] = _expected.name

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from isopref.testing.ranks import Ranks

torch.set_num_threads(1)
hypothesis.settings.register_profile("same", derandomize=True)  # what is red is red for everyone
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exempt what exists from garbage collection: runs collect often, which takes long with much imported code."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start ranks. GPU tests skip without a GPU, and soak tests unless `-m soak` asks for them."""
    for item in items:
        if {"two_ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("soak") and "soak" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="make soak"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
