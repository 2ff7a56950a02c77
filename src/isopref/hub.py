"""Whether the Hugging Face hub can be reached.

huggingface_hub asks for every file six times, with pauses: half a minute or more without a network. isopref therefore
asks once, here; without a network, transformers and datasets are told to look in their local caches only.
"""

import time
from functools import cache

from huggingface_hub import constants, get_session

TIMEOUT_S = 5  # for a connection
ATTEMPTS, PAUSE_S = 2, 1


@cache
def unreachable() -> str | None:
    """Why the hub cannot be reached; None where it answers, whatever it says."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
        except Exception as error:  # of httpx or of a proxy: in each case nothing can be had from there
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return None
    return reason
