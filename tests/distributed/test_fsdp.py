"""What sharding could do to a run without anyone seeing it in the loss."""

from pathlib import Path

import pytest
import torch

from isopref.testing.ranks import Ranks
from support.counting import mixed_accumulation_error, own_answers_moved, unchanged_after_scoring
from support.exporting import exported


@pytest.mark.parametrize(
    ("narrow", "offload"), [(False, False), (True, False), (True, True)], ids=["wide", "narrow", "narrow-offload"]
)
@pytest.mark.parametrize("grad_sync", ["last", "every"])
def test_mixed_precision_adds_up_in_float32(two_ranks: Ranks, grad_sync: str, narrow: bool, offload: bool) -> None:
    """Sixty-four bfloat16 gradients of the same pair; in bfloat16 their sum would be off by percents."""
    for error in two_ranks(mixed_accumulation_error, 64, grad_sync, narrow, offload):
        assert error <= 1e-5


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_parameter_trains_after_scoring(two_ranks: Ranks, parallel: str) -> None:
    for unchanged in two_ranks(unchanged_after_scoring, parallel):
        assert unchanged == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_model_speaks_for_itself_when_it_is_spread(two_ranks: Ranks, parallel: str) -> None:
    for moved in two_ranks(own_answers_moved, parallel):
        assert moved <= 1e-10


@pytest.mark.parametrize("architecture", ["llama_tied", "llama"])
@pytest.mark.parametrize("native", [False, True], ids=["transformers", "native"])
def test_the_export_has_the_same_tensors_in_every_mode(
    two_ranks: Ranks, tmp_path: Path, native: bool, architecture: str
) -> None:
    """A tied weight is written once, as transformers writes it. FSDP gathers a copy of it for each of its names."""
    single = exported(architecture, "single", native, tmp_path / "single")
    assert ("lm_head.weight" in single) == (architecture == "llama")
    for mode in ("ddp", "fsdp"):
        tensors = two_ranks(exported, architecture, mode, native, tmp_path / mode)[0]
        assert tensors.keys() == single.keys(), mode
        assert all(torch.equal(tensors[name], single[name]) for name in single), mode
