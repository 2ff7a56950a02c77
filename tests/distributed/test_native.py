"""OLMo-core's own models over ranks: what they write is the whole model, in both forms."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isopref.models.conversion import read_checkpoint
from isopref.testing.models import byte_tokenizer, tiny_model
from isopref.testing.ranks import Ranks
from support.native import write_both


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_both_forms_are_whole(two_ranks: Ranks, tmp_path: Path, parallel: str) -> None:
    two_ranks(write_both, str(tmp_path), "olmo3", parallel)
    expected = tiny_model("olmo3", vocab_size=len(byte_tokenizer())).state_dict()
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for found in (hf, read_checkpoint(str(tmp_path / "olmo_core"), dtype=torch.float32)):
        assert found.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
