"""Whether the Hugging Face hub can be reached.

huggingface_hub retries every file six times, with pauses: half a minute or more without a network. So isopref checks
once, here; without a network, it tells transformers and datasets to use only their local caches.
"""

import time
from functools import cache

from huggingface_hub import constants, get_session

TIMEOUT_S = 5  # for a connection
ATTEMPTS, PAUSE_S = 2, 1


@cache
def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it responds at all."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
        except Exception as error:  # raised by httpx or a proxy: either way the hub is unreachable
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return None
    return reason
