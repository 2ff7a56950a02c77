"""model.adapter, optim.kind and layout.offload in a config: what is taken, and what is refused with which words."""

from pathlib import Path

import pytest

from isopref.config.load import dump_config, load_config
from isopref.config.schema import run_id
from isopref.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: some/model}\ndata: {train: pairs.jsonl}\n")
    return path


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value)


def test_an_empty_adapter_is_one(file: Path) -> None:
    assert load_config(file).model.adapter is None
    adapter = load_config(file, ["model.adapter={}"]).model.adapter
    assert adapter is not None
    assert adapter.targets == "auto"


@pytest.mark.parametrize(
    "override",
    [
        "model.adapter={kind: rslora, rank: 8, alpha: 4, targets: [q_proj, v_proj]}",
        "model.adapter={kind: lora, rank: 8, targets: auto, quantize: nf4}",
        "model.adapter={path: some/adapter}",
        "model.adapter.rank=8",
    ],
)
def test_what_is_written_is_read_back(file: Path, override: str) -> None:
    config = load_config(file, [override])
    again = file.with_name("again.yaml")
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_it_is_part_of_the_math(file: Path) -> None:
    ids = [run_id(load_config(file, [f"model.adapter={value}"])) for value in ("null", "{}", "{rank: 8}", "{rank: 4}")]
    assert len(set(ids)) == 4
    assert run_id(load_config(file, ["layout.offload=true"])) == ids[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.adapter=lora",
            'model.adapter: must be an adapter (kind, rank, alpha, targets, path, quantize), or null; found "lora". '
            "Write {kind: lora}.",
        ),
        ("model.adapter.rank=0", "model.adapter.rank: must be a whole number, at least 1, or null; found 0."),
        ("model.adapter.rnk=8", "model.adapter.rnk: no such field. Did you mean model.adapter.rank?"),
        (
            "model.adapter.kind=prefix",
            'model.adapter.kind: must be one of lora, dora, rslora, or null; found "prefix".',
        ),
        ("model.adapter.targets=[]", "model.adapter.targets: must be auto or a non-empty list of text; found []."),
        (
            "model.adapter.targets=q_proj",
            'model.adapter.targets: must be auto or a non-empty list of text; found "q_proj".',
        ),
        (
            "model.adapter={path: a, rank: 8}",
            "model.adapter.rank: is already defined by the adapter in path, a. Remove rank or path.",
        ),
        (
            "model.adapter={kind: dora, quantize: nf4}",
            "model.adapter.quantize: cannot be combined with kind: dora, which needs unquantised weights. "
            "Use lora or rslora.",
        ),
        (
            "optim.kind=adamw_sr",
            "optim.kind: adamw_sr rounds bfloat16 weights, but model.dtype is float32. Use adamw, or model.dtype: "
            "bfloat16.",
        ),
        (
            "optim.kind=adam",
            'optim.kind: must be one of adamw, adamw_8bit, adamw_sr, adamw_8bit_sr, adamw_skip, muon; found "adam".',
        ),
    ],
)
def test_what_is_refused(file: Path, override: str, message: str) -> None:
    assert refused(file, override) == f"override '{override}': {message}"


def test_offload_needs_fsdp(file: Path) -> None:
    message = refused(file, "layout.offload=true", "layout.parallel=ddp")
    assert message.endswith(
        "layout.offload: needs FSDP, but layout.parallel is ddp. Set layout.parallel to fsdp or auto."
    )


def test_olmo_core_s_modules_take_none(file: Path) -> None:
    told = "cannot be combined with model.adapter, which needs transformers' modules. Remove one of them."
    assert (
        refused(file, "model.adapter={}", "model.native=true") == f"override 'model.native=true': model.native: {told}"
    )
