"""One global batch and its layouts: a `Cell` says how the batch is laid out, `examples_of` what is in it.

matrix.py lists the cells that are measured, expected.py has the oracle's values for them, exactness.py measures.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np

from isopref.batch.packing import RowKind
from isopref.examples import Example, PairTokens
from isopref.models.adapter import Kind
from isopref.models.parallel import GradSync, Parallel
from isopref.normalize import Weighting
from isopref.testing.equations import LABEL_CASES
from isopref.testing.models import labelled_trees, random_pairs, tree_examples, with_context

Cut = Literal["pair", "tokens", "whole"]
Split = Literal["plan", "uneven", "idle"]
Context = Literal["none", "turns", "weights"]
KINDS: tuple[RowKind, ...] = get_args(RowKind)
FLOAT32_INSIDE = ("llama", "qwen3", "olmo2", "olmo3", "mistral", "gemma3")
NATIVE = ("llama", "qwen3", "olmo2", "olmo3", "gemma3")
MOE = "qwen3_moe"
WEIGHTINGS: tuple[Weighting, ...] = ("token", "completion", "example")  # of pairs and lists alike
# One model for each kind of layer beyond plain attention: sinks, Gated DeltaNet, short convolutions, Mamba2, and Mamba,
# which is unfolded; and one whose layers do not pass the segments on.
LAYER_KINDS = ("gpt_oss", "olmo_hybrid", "lfm2", "bamba", "mamba", "stablelm")
STATES = ("olmo_hybrid", "lfm2", "bamba")  # those with a state whose rows ranks can split
SPLIT_KINDS = ("gpt_oss", *STATES, "stablelm")  # all whose rows ranks can split
PACKED: tuple[RowKind, ...] = ("shared", "packed")


@dataclass(frozen=True)
class Cell:
    """One layout of a global batch: of `num_pairs` pairs, or of examples with other numbers of answers."""

    architecture: str = "gpt2"
    native: bool = False  # computed by OLMo-core's modules
    dtype: str = "float64"
    rows: RowKind = "shared"
    cut: Cut = "tokens"
    ranks: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    parallel: Parallel = "single"
    weighting: Weighting = "token"
    grad_sync: GradSync = "last"
    checkpointing: bool = False
    offload_activations: bool = False  # the inputs of the layer that recomputes
    mlp_tile_tokens: int | None = None
    own_weights: bool = False
    reverse: bool = False  # the batch's pairs in the opposite order
    split: Split = "plan"
    num_pairs: int = 8
    trees: bool = False  # examples of 1, 2, 3, 5 and 8 answers instead of pairs; labelled for a loss of labels
    at_start: bool = False  # the policy is its own reference, so the two differ only by rounding
    context: Context = "none"  # "turns": answers have untrained turns; "weights": their turns have any weights
    objective: str = "sigmoid"  # of equations.ALL_CASES
    nll_weight: float = 0.0
    ld_alpha: float = 1.0
    wpo: bool = False
    adapter: Kind | None = None
    balance_weight: float = 0.0
    quantize: bool = False  # the base in four bits
    float8: bool = False  # linear layers compute in emulated float8
    offload: bool = False
    collated: bool = False  # the batch comes from a script's collator, with padded rows

    @property
    def shares(self) -> int:
        """How many ways the batch is split: all ranks of a group work on the same pairs."""
        return self.ranks // self.tensor_parallel // self.context_parallel

    def __str__(self) -> str:
        default = Cell()
        told = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        told.pop("ranks", None)
        return f"{self.ranks} rank(s) " + " ".join(f"{name}={value}" for name, value in told.items())


@cache
def batch(num_pairs: int) -> tuple[list[PairTokens], list[float]]:
    """Pairs of very different lengths, up to 35 tokens per part, and their weights."""
    pairs = random_pairs(num_pairs, seed=3, longest=36)
    return pairs, np.random.default_rng(4).uniform(0.2, 3.0, num_pairs).tolist()


@cache
def tree_batch() -> tuple[list[Example], list[float]]:
    """Examples with any number of answers, and their weights."""
    examples = _with_gaps(tree_examples(seed=5))
    return examples, np.random.default_rng(4).uniform(0.2, 3.0, len(examples)).tolist()


def examples_of(cell: Cell) -> tuple[list[Example], list[float]]:
    """The batch of a cell."""
    if cell.trees:
        examples, own = tree_batch()
        examples = labelled_trees(examples) if cell.objective in LABEL_CASES else examples
    else:
        pairs, own = batch(cell.num_pairs)
        examples = [pair.example for pair in pairs]
        examples = examples if cell.objective in LABEL_CASES else _with_gaps(examples)
    if cell.context != "none":
        examples = with_context(examples, seed=6, fractions=cell.context == "weights")
    return examples, own


def _with_gaps(examples: list[Example]) -> list[Example]:
    """The examples, with gaps between the scores of compared answers, some below and some above 1."""
    rng = np.random.default_rng(6)
    return [one._replace(gaps=tuple(rng.uniform(0.2, 4.0, len(one.comparisons)).tolist())) for one in examples]
