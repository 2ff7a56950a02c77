"""torchrun without its traceback: when a rank fails, the rank has said why, and that is what a user should read."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(sys.argv[1:])
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:  # it could not say why itself
            sys.exit(f"error: rank {rank} was ended by signal {-failure.exitcode}.")
        sys.exit(1)
