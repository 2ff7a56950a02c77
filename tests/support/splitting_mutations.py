"""Planted bugs in how ranks split rows; mutations.py lists them with the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from isopref.ops import exchange


@contextmanager
def gradients_of_a_group_averaged() -> Iterator[None]:
    """The gradients of ranks that split a row are averaged, not added up."""
    with patch.object(exchange._Summed, "backward", lambda _ctx, grad: (grad, None, None)):
        yield


@contextmanager
def own_tokens_alone() -> Iterator[None]:
    """A rank attends to its own tokens alone: what it gets in an exchange is what it has."""
    with patch.object(exchange, "_all_to_all", lambda x, _name: x.clone()):
        yield


@contextmanager
def tokens_rank_by_rank() -> Iterator[None]:
    """After the exchange, a row has the tokens of the first rank, then those of the second one."""
    own = exchange.to_heads

    def by_rank(tensors: Any, group: Any) -> Any:
        return [
            one.unflatten(0, (-1, group.size)).transpose(0, 1).flatten(0, 1).contiguous() for one in own(tensors, group)
        ]

    with patch.object(exchange, "to_heads", by_rank):
        yield


@contextmanager
def heads_of_the_first_rank() -> Iterator[None]:
    """Every rank takes the first block of what it has for all heads."""
    with patch.object(exchange, "own_heads", lambda x, group: x.chunk(group.size)[0]):
        yield


SPLIT = {m.__name__: m for m in (gradients_of_a_group_averaged, own_tokens_alone, tokens_rank_by_rank)}
OWN_HEADS = {m.__name__: m for m in (heads_of_the_first_rank,)}
