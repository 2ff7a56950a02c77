"""One configuration for each kernel of flash-linear-attention, so that a measurement does not tune them for minutes.

The package tries 2 to 25 configurations of each kernel in the first step that uses it, and again for other batch sizes
of some. These are of its own lists and passed tests/gpu/test_states.py on an H200. Others may be faster.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {  # constants of a kernel; its stages where they are not 3
    "chunk_bwd_kernel_dqkwg": {},
    "chunk_bwd_kernel_dv_local": {},
    "chunk_fwd_kernel_o": {"BK": 64, "BV": 64},
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 32, "stages": 1},
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32, "stages": 2},
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64},
    "chunk_local_cumsum_scalar_kernel": {},
    "l2norm_bwd_kernel": {"BT": 64},
    "l2norm_fwd_kernel": {"BT": 64},
    "prepare_wy_repr_bwd_kernel": {},
    "recompute_w_u_fwd_kernel": {},
}


FOLDER = Path(tempfile.gettempdir()) / "isopref-fla-kernels"


def variables() -> dict[str, str]:
    """Write the configurations in the package's format. Returns the variables that tell the package to use them.

    The package reads them when it is imported, and OLMo-core imports it. So they must be set when a process starts.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for kernel, constants in CONFIGS.items():
        config = {
            "kwargs": {name: value for name, value in constants.items() if name != "stages"},
            "num_warps": 4,
            "num_stages": constants.get("stages", 3),
            "num_ctas": 1,
        }
        (FOLDER / f"{kernel}.json").write_text(json.dumps({"kernel_name": kernel, "default_config": config}))
    return {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": str(FOLDER)}


def are_fixed() -> bool:
    """Whether this process was started with these variables."""
    return os.environ.get("FLA_CONFIG_DIR") == str(FOLDER)
