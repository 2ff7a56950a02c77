"""Sends work to a server, several requests at a time and without losing any, and shows progress."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from isopref.build.run import Run

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(ask: Callable[[Item], Result], items: Sequence[Item], parallel: int) -> Iterator[tuple[Item, Result]]:
    """The results of all items as they arrive, with at most `parallel` requests in flight.

    After a failure, nothing new is started, requests in flight are still yielded, and then the failure is raised.
    """
    failure: Exception | None = None
    waiting = list(reversed(items))
    with ThreadPoolExecutor(parallel) as pool:
        pending: dict[Future[Result], Item] = {}
        while pending or (waiting and failure is None):
            while waiting and len(pending) < parallel and failure is None:
                item = waiting.pop()
                pending[pool.submit(ask, item)] = item
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                item = pending.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    failure = failure or error
                    continue
                yield item, result
    if failure is not None:
        raise failure


@contextmanager
def token_progress(run: Run, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of answers. Yields a function to call with the tokens of each finished answer."""
    started, tokens = time.perf_counter(), 0
    with run.display.bar(what, total) as advance:

        def progress(count: int) -> None:
            nonlocal tokens
            tokens += count
            advance(1, f"{tokens / (time.perf_counter() - started):.0f} tokens/s")

        yield progress
