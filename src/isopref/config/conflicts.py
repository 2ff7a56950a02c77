"""Combinations of settings that cannot work or have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isopref.config.values import SourceConfig
from isopref.objectives.registry import weights

if TYPE_CHECKING:
    from isopref.config.schema import Config, DataConfig

Conflict = tuple[str, str]  # the field; what is wrong and how to fix it


def conflicts_of(config: Config) -> Iterator[Conflict]:
    """All conflicts of a config."""
    yield from _layout(config)
    yield from _float8(config)
    yield from _adapter(config)
    yield from _optim(config)
    yield from _reference(config)
    yield from _data(config.data)
    for name, what in config.objective.problems():
        yield f"objective.{name}", what
    yield from _run(config)
    if config.objective.trains_reward_model:
        yield from _reward_model(config)


def _layout(config: Config) -> Iterator[Conflict]:
    model, layout = config.model, config.layout
    if model.is_mixed and layout.parallel in ("single", "ddp"):
        yield (
            "model.compute_dtype",
            f"{model.compute_dtype} differs from model.dtype: {model.dtype}. Mixed precision needs FSDP, but "
            f"layout.parallel is {layout.parallel}. Set layout.parallel to fsdp or auto.",
        )
    if layout.offload and layout.parallel in ("single", "ddp"):
        yield (
            "layout.offload",
            f"needs FSDP, but layout.parallel is {layout.parallel}. Set layout.parallel to fsdp or auto.",
        )
    if layout.offload_activations == "full" and layout.checkpointing != "full":
        yield (
            "layout.offload_activations",
            f"full has no effect with layout.checkpointing: {layout.checkpointing}, unless every layer recomputes. Set "
            "layout.checkpointing: full, or layout.offload_activations: auto.",
        )
    if isinstance(layout.mlp_tile_tokens, int):
        yield from _tiles(config, layout.mlp_tile_tokens)
    needs = {
        "model.native: true": model.native,
        "layout.parallel: fsdp, hsdp or auto": layout.parallel not in ("single", "ddp"),
        "layout.rows: shared or packed": layout.rows in ("shared", "packed"),
    }
    missing = " and ".join(what for what, there in needs.items() if not there)
    if layout.tensor_parallel > 1 and missing:
        yield (
            "layout.tensor_parallel",
            f"{layout.tensor_parallel} needs {missing}. Set that, or remove tensor_parallel.",
        )
    if layout.context_parallel > 1:
        yield from _context(config)
    if layout.hsdp_shard is not None and layout.parallel != "hsdp":
        yield (
            "layout.hsdp_shard",
            f"{layout.hsdp_shard} has no effect with layout.parallel: {layout.parallel}. "
            "Set layout.parallel: hsdp, or remove hsdp_shard.",
        )
    if layout.hsdp_shard is None and layout.parallel == "hsdp":
        yield (
            "layout.hsdp_shard",
            "is required with layout.parallel: hsdp. Set it to the number of ranks per shard group, "
            "usually the GPUs of one node, or set layout.parallel: fsdp.",
        )
    if layout.parallel == "single" and layout.grad_sync != "auto":
        yield (
            "layout.grad_sync",
            f"{layout.grad_sync} has no effect with layout.parallel: single, which has no gradients to reduce. "
            "Remove one of them.",
        )


def _context(config: Config) -> Iterator[Conflict]:
    layout = config.layout
    field, count = "layout.context_parallel", layout.context_parallel
    if layout.tensor_parallel > 1:
        yield field, f"{count} cannot be combined with layout.tensor_parallel. Remove one of them."
    needs = {
        "layout.parallel: fsdp, hsdp, ddp or auto": layout.parallel != "single",
        "layout.rows: shared or packed": layout.rows in ("shared", "packed"),
    }
    missing = " and ".join(what for what, there in needs.items() if not there)
    if missing:
        yield field, f"{count} needs {missing}. Set that, or remove context_parallel."


def _float8(config: Config) -> Iterator[Conflict]:
    model = config.model
    if not model.is_float8:
        return
    others = {
        "model.dtype: float64": model.dtype == "float64",
        "model.native: true": model.native,
        "model.adapter.quantize: nf4, whose weights have 4 bits": bool(model.adapter and model.adapter.quantize),
        "run.device: cpu, which has no float8 products": config.run.device == "cpu",
    }
    for other in (name for name, there in others.items() if there):
        yield (
            "model.compute_dtype",
            f"float8 cannot be combined with {other}. Use bfloat16, or change the other setting.",
        )


def _tiles(config: Config, tokens: int) -> Iterator[Conflict]:
    field, limit = "layout.mlp_tile_tokens", config.layout.microbatch_tokens
    if config.layout.tensor_parallel > 1:
        yield field, f"{tokens} cannot be combined with layout.tensor_parallel. Remove one of them."
    if config.objective.balance_weight:
        yield (
            field,
            f"{tokens} cannot be combined with objective.balance_weight, which needs the routers' decisions on all "
            "tokens together. Remove one of them.",
        )
    if limit != "auto" and tokens >= limit:
        yield (
            field,
            f"{tokens} has no effect with layout.microbatch_tokens: {limit}. Set a smaller tile, or null.",
        )


def _adapter(config: Config) -> Iterator[Conflict]:
    adapter = config.model.adapter
    if adapter is None:
        return
    if config.model.native:
        yield (
            "model.native",
            "cannot be combined with model.adapter, which needs transformers' modules. Remove one of them.",
        )
    if config.objective.reference_moves is not None:
        yield (
            "objective.reference_moves",
            "cannot be combined with model.adapter: the reference has no adapter to update. Remove one of them.",
        )
    for name in ("kind", "rank", "alpha", "targets"):
        if adapter.path is not None and getattr(adapter, name) not in (None, "auto"):
            yield (
                f"model.adapter.{name}",
                f"is already defined by the adapter in path, {adapter.path}. Remove {name} or path.",
            )
    if adapter.quantize is not None and adapter.kind == "dora":
        yield (
            "model.adapter.quantize",
            "cannot be combined with kind: dora, which needs unquantised weights. Use lora or rslora.",
        )


def _optim(config: Config) -> Iterator[Conflict]:
    kind, model = config.optim.kind, config.model
    if kind in ("adamw_8bit", "adamw_8bit_sr") and model.dtype == "float64":
        yield "optim.kind", f"{kind} computes updates in float32, but model.dtype is float64. Use adamw."
    if kind == "muon" and config.layout.offload:
        yield "layout.offload", "cannot be combined with optim.kind: muon, which needs the GPU. Remove one of them."
    if kind.endswith("_sr") and model.dtype != "bfloat16":
        yield (
            "optim.kind",
            f"{kind} rounds bfloat16 weights, but model.dtype is {model.dtype}. Use "
            f"{kind.removesuffix('_sr')}, or model.dtype: bfloat16.",
        )


def _reference(config: Config) -> Iterator[Conflict]:
    objective, reference, tokens = config.objective, config.model.reference, config.layout.score_tokens
    if reference is not None and not objective.needs_reference:
        names = ", ".join(weights(objective.loss))
        yield (
            "model.reference",
            f"{reference} has no effect with objective.loss: {names}, which uses no reference. Remove it.",
        )
    stays = objective.needs_reference and objective.reference_moves is None
    if tokens is not None and not stays and config.data.eval is None:
        yield (
            "layout.score_tokens",
            f"{tokens} has no effect without held-out pairs or a fixed reference. Set data.eval, or remove "
            "score_tokens.",
        )


def _data(data: DataConfig) -> Iterator[Conflict]:
    """A field of the third source in a list is "data.train.2.weight", of a single source "data.train.weight"."""
    if data.truncation != "drop" and data.max_length is None:
        yield (
            "data.truncation",
            f"{data.truncation} has no effect without a length limit. Set data.max_length, or remove truncation.",
        )
    both = (("train", data.train), ("eval", data.eval_sources))
    named = [(name, sources) for name, sources in both if sources is not None]
    each = [source for _, sources in named for source in _listed(sources)]
    if data.columns and all(isinstance(source, SourceConfig) and source.columns is not None for source in each):
        yield "data.columns", "has no effect: every source sets its own columns. Remove it, or theirs."
    for name, sources in named:
        weighted = [isinstance(source, SourceConfig) and source.weight is not None for source in _listed(sources)]
        for index, source in enumerate(_listed(sources)):
            field = f"data.{name}.{index}" if isinstance(sources, list) else f"data.{name}"
            if isinstance(source, SourceConfig) and source.weight is not None and source.count is not None:
                yield (
                    f"{field}.count",
                    f"{source.count} pairs, but the source also has a weight. Remove one of them.",
                )
            elif weighted == [True]:
                yield f"{field}.weight", "has no effect with a single source. Remove it."
            if any(weighted) and not weighted[index]:
                yield (
                    field,
                    "has no weight, but other sources in the list do. Set a weight for all of them or for none.",
                )


def _listed(sources: str | SourceConfig | list[str | SourceConfig]) -> list[str | SourceConfig]:
    return sources if isinstance(sources, list) else [sources]


def _reward_model(config: Config) -> Iterator[Conflict]:
    names = ", ".join(weights(config.objective.loss))
    if config.model.native:
        yield (
            "model.native",
            f"has no reward models, and objective.loss: {names} trains one. Remove native, or use another loss.",
        )
    for name in ("samples", "spot_checks"):
        if getattr(config.run, name):
            yield f"run.{name}", f"needs a model that writes text, and objective.loss: {names} trains none. Remove it."


def _run(config: Config) -> Iterator[Conflict]:
    data, run = config.data, config.run
    if run.samples and (data.eval is None or not run.export):
        yield (
            "run.samples",
            f"{run.samples} has no effect without held-out pairs and run.export. Set data.eval and run.export: true, "
            "or remove samples.",
        )
    if run.spot_checks is not None and not run.export:
        yield (
            "run.spot_checks",
            f"{run.spot_checks} has no effect without run.export, since it checks the exported model. Set run.export: "
            "true, or remove spot_checks.",
        )
    for name in {name for name in run.loggers if run.loggers.count(name) > 1}:
        yield "run.loggers", f"lists {name} twice. Remove one of them."
    if run.eval_every is not None and data.eval is None:
        yield (
            "run.eval_every",
            f"{run.eval_every} has no effect without held-out pairs. Set data.eval, or remove eval_every.",
        )
    if run.keep_best and run.eval_every is None:
        yield (
            "run.keep_best",
            "true has no effect without evaluations during training. Set run.eval_every, or remove keep_best.",
        )
