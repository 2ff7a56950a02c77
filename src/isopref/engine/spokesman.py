"""Which rank reports an error that several ranks hit: the first one, if it is among them.

Most errors hit all ranks, but not at the same moment. Before it tears anything down, the first rank announces in the
ranks' store that it failed; the others look there before they report theirs. An error that the first rank does not hit,
such as a file missing on one machine, is reported by the rank that hit it.
"""

import os
import socket
import time

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

CONNECT_TIMEOUT_S = 10
POLL_S = 0.1
KEY = "the first rank failed"


def announce_failure() -> None:
    """Let the other ranks know that this one, the first, reports an error. Does nothing in a run of one process."""
    if (store := _store()) is not None:
        store.set(KEY, "")


def first_rank_failed(within_s: float) -> bool:
    """Whether the first rank announces a failure within this time, or exits and takes the store with it.

    False if there is no store to ask.
    """
    give_up = time.monotonic() + within_s
    store = _store()
    if store is None:
        return False
    try:
        while not store.check([KEY]):
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL_S)
    except RuntimeError:  # the connection broke: the store went with the first rank
        pass
    return True


def _store() -> Store | None:
    """The store in which torchrun's ranks found one another; None if there is none to connect to."""
    if "MASTER_ADDR" not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # A first attempt without torch, which would log a stack trace if it failed.
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    except (OSError, RuntimeError):
        return None
    return PrefixStore(f"isopref attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
