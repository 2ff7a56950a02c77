"""Weights of 16 bits that are to be float32: mapped from their file, and the same numbers once they are widened."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isopref.build.model import weight_bytes
from isopref.models import hf
from isopref.models.adapter import NewAdapter, add_adapter, save_adapter
from isopref.models.policy import Policy
from isopref.reference.key import identity, weights_digest
from isopref.testing.models import ARCHITECTURES, tiny_folder, tiny_model
from support.own_memory import own_bytes_per_weight

COMPUTED_IN_THE_FILES_TYPE = {"gemma2", "gemma3", "gemma3_vision"}  # the factor of their embedding
HAS_FLOAT32 = {("olmo_hybrid", torch.bfloat16), ("olmo_hybrid", torch.float16), ("gpt_oss", torch.float16)}  # always
IDS = torch.tensor([[5, 17, 3, 44, 9, 61, 20, 8]])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_widened_it_is_the_model_that_float32_loads(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    folder = str(tiny_folder(tmp_path / "model", architecture, dtype=dtype))
    narrow, wide = hf.load_narrow(folder), hf.load_model(folder, dtype=torch.float32)
    assert (narrow is None) == (architecture in COMPUTED_IN_THE_FILES_TYPE or (architecture, dtype) in HAS_FLOAT32)
    if narrow is None:
        return
    assert {parameter.dtype for parameter in narrow.parameters()} == {dtype}
    assert weights_digest(narrow, narrow=True) == weights_digest(wide) != weights_digest(narrow)
    assert identity(narrow, compute_dtype="float32", narrow=True) == identity(wide, compute_dtype="float32")
    policy = Policy(narrow, narrow=True)
    assert [weight_bytes(policy, one) for one in policy.parameters()] == [one.nbytes for one in wide.parameters()]
    policy.widen()
    assert not policy.narrow
    for found, expected in (
        (narrow.named_parameters(), wide.named_parameters()),
        (narrow.named_buffers(), wide.named_buffers()),
    ):
        tensors = dict(found)
        for name, tensor in expected:
            assert tensors[name].dtype == tensor.dtype, name
            assert torch.equal(tensors[name], tensor), name
    assert torch.equal(narrow(input_ids=IDS).logits, Policy(wide).model(input_ids=IDS).logits)


def test_what_is_not_all_of_one_narrow_type(tmp_path: Path) -> None:
    whole = tiny_folder(tmp_path / "whole")
    assert hf.load_narrow(str(whole)) is None
    mixed = tiny_folder(tmp_path / "mixed", dtype=torch.bfloat16)
    tensors = load_file(mixed / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    assert hf.load_narrow(str(mixed)) is None
    base = tiny_folder(tmp_path / "base", dtype=torch.bfloat16)
    model = hf.load_model(str(base), dtype=torch.bfloat16)
    add_adapter(model, NewAdapter("lora", rank=2, alpha=4.0), dtype=torch.float32, seed=0)
    save_adapter(model, dict(model.state_dict()), str(base), tmp_path / "adapter")
    assert hf.load_narrow(str(tmp_path / "adapter")) is None


def test_many_files_count_as_one(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert hf.load_narrow(str(tmp_path)) is not None
    save_file({name: one.float() for name, one in load_file(files[-1]).items()}, files[-1], {"format": "pt"})
    assert hf.load_narrow(str(tmp_path)) is None


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's count of a process's memory")
def test_the_process_holds_no_copy(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 8192}
    folder = str(tmp_path / "model")
    tiny_model("llama", dtype=torch.bfloat16, **wide).save_pretrained(folder)

    own_bytes_per_weight(folder, narrow=True)  # so that code is compiled, and files are cached
    assert own_bytes_per_weight(folder, narrow=True) < 0.3
    assert 3.7 < own_bytes_per_weight(folder, narrow=False) < 4.3
