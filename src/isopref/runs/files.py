"""Names of the files in a run folder.

Names of files in checkpoints are in engine/checkpoints.py.
"""

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.json"
REWARDS_FILE = "rewards.npz"
SAMPLES_FILE = "samples.jsonl"
SPOT_CHECKS_FILE = "spot_checks.json"
STARTS_FILE = "starts.jsonl"
STATE_FILE = "state.json"
REPORT_FILE = "report.html"
CARD_FILE = "card.md"  # the model card, from `isopref push`
LOG_FILE = "engine.log"
LOCK_FILE = ".lock"
MODELS_FILE = "reference.json"  # the models the run started with (build/beginning.py)
VALUES_FOLDER = "reference"  # the reference's log-probabilities of the pairs (build/beginning.py)
MICROBATCH_FILE = "microbatch.json"  # the microbatch size that fits, after running out of memory (engine/oom_retry.py)
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"
BEST_FOLDER = "model_best"
NATIVE_FOLDER = "olmo_core"
TENSORBOARD_FOLDER = "tensorboard"
MLFLOW_FILE = "mlflow.db"
PROFILE_FOLDER = "profile"
