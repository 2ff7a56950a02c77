"""Settings that cannot work, or do nothing, together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isopref.config.values import SourceConfig
from isopref.objectives.registry import weights

if TYPE_CHECKING:
    from isopref.config.schema import Config, DataConfig

Conflict = tuple[str, str]  # the field; what is wrong with it, and the way out


def conflicts_of(config: Config) -> Iterator[Conflict]:
    """All conflicts of a config."""
    yield from _layout(config)
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
            f"{model.compute_dtype} differs from model.dtype: {model.dtype}. This mixed precision needs "
            f"FSDP, but layout.parallel is {layout.parallel}. Use layout.parallel: fsdp, or auto.",
        )
    if layout.offload and layout.parallel in ("single", "ddp"):
        yield (
            "layout.offload",
            f"needs FSDP, but layout.parallel is {layout.parallel}. Use layout.parallel: fsdp, or auto.",
        )
    needs = {
        "model.native: true": model.native,
        "layout.parallel: fsdp, hsdp or auto": layout.parallel not in ("single", "ddp"),
        "layout.rows: shared or packed": layout.rows in ("shared", "packed"),
    }
    missing = " and ".join(what for what, there in needs.items() if not there)
    if layout.tensor_parallel > 1 and missing:
        yield "layout.tensor_parallel", f"{layout.tensor_parallel} needs {missing}. Set that, or remove it."
    if layout.hsdp_shard is not None and layout.parallel != "hsdp":
        yield (
            "layout.hsdp_shard",
            f"{layout.hsdp_shard} does nothing with layout.parallel: {layout.parallel}. "
            "Use layout.parallel: hsdp, or remove hsdp_shard.",
        )
    if layout.hsdp_shard is None and layout.parallel == "hsdp":
        yield (
            "layout.hsdp_shard",
            "is missing, and layout.parallel: hsdp needs it. Set it to the ranks in one shard group, "
            "usually the GPUs of one node; or use layout.parallel: fsdp.",
        )
    if layout.parallel == "single" and layout.grad_sync != "auto":
        yield (
            "layout.grad_sync",
            f"{layout.grad_sync} does nothing with layout.parallel: single, where no gradients are added up. Remove "
            "one of the two.",
        )


def _adapter(config: Config) -> Iterator[Conflict]:
    adapter = config.model.adapter
    if adapter is None:
        return
    if config.model.native:
        yield "model.native", "does not go with model.adapter, which peft puts into transformers' modules. Remove one."
    if config.objective.reference_moves is not None:
        yield (
            "objective.reference_moves",
            "does not go with model.adapter: the weights of the reference are not those that are trained. Remove one.",
        )
    for name in ("kind", "rank", "alpha", "targets"):
        if adapter.path is not None and getattr(adapter, name) not in (None, "auto"):
            yield f"model.adapter.{name}", f"the adapter of path, {adapter.path}, has its own. Remove one of the two."
    if adapter.quantize is not None and adapter.kind == "dora":
        yield "model.adapter.quantize", "does not go with kind: dora, which needs whole weights. Use lora or rslora."


def _optim(config: Config) -> Iterator[Conflict]:
    kind, model = config.optim.kind, config.model
    if kind in ("adamw_8bit", "adamw_8bit_sr") and model.dtype == "float64":
        yield "optim.kind", f"{kind} steps in float32, but model.dtype is float64. Use adamw."
    if kind == "muon" and config.layout.offload:
        yield "layout.offload", "does not go with optim.kind: muon, whose products need the GPU. Remove one of the two."
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
        yield "model.reference", f"{reference} does nothing with objective.loss: {names}: no reference. Remove it."
    stays = objective.needs_reference and objective.reference_moves is None
    if tokens is not None and not stays and config.data.eval is None:
        yield (
            "layout.score_tokens",
            f"{tokens} does nothing without held-out pairs or a reference that stays. Set data.eval, or remove "
            "score_tokens.",
        )


def _data(data: DataConfig) -> Iterator[Conflict]:
    """The field of a list's third source is "data.train.2.weight", that of a single one "data.train.weight"."""
    if data.truncation != "drop" and data.max_length is None:
        yield (
            "data.truncation",
            f"{data.truncation} does nothing without a limit. Set data.max_length, or remove truncation.",
        )
    both = (("train", data.train), ("eval", data.eval_sources))
    named = [(name, sources) for name, sources in both if sources is not None]
    each = [source for _, sources in named for source in _listed(sources)]
    if data.columns and all(isinstance(source, SourceConfig) and source.columns is not None for source in each):
        yield "data.columns", "does nothing: every source has columns of its own. Remove it, or theirs."
    for name, sources in named:
        weighted = [isinstance(source, SourceConfig) and source.weight is not None for source in _listed(sources)]
        for index, source in enumerate(_listed(sources)):
            field = f"data.{name}.{index}" if isinstance(sources, list) else f"data.{name}"
            if isinstance(source, SourceConfig) and source.weight is not None and source.count is not None:
                yield (
                    f"{field}.count",
                    f"{source.count} pairs, but the source has a weight too. Keep one of the two.",
                )
            elif weighted == [True]:
                yield f"{field}.weight", "does nothing: there is no other source. Remove it."
            if any(weighted) and not weighted[index]:
                yield (
                    field,
                    "has no weight, but others in the list have one. Give a weight to all of them or to none.",
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
            f"{run.samples} does nothing without held-out pairs and run.export. Set data.eval and run.export: true, or "
            "remove samples.",
        )
    if run.spot_checks is not None and not run.export:
        yield (
            "run.spot_checks",
            f"{run.spot_checks} does nothing without run.export: the exported model is checked. Set run.export: true, "
            "or remove spot_checks.",
        )
    for name in {name for name in run.loggers if run.loggers.count(name) > 1}:
        yield "run.loggers", f"names {name} twice. Keep one of the two."
    if run.eval_every is not None and data.eval is None:
        yield (
            "run.eval_every",
            f"{run.eval_every} does nothing without held-out pairs. Set data.eval, or remove eval_every.",
        )
    if run.keep_best and run.eval_every is None:
        yield (
            "run.keep_best",
            "true does nothing without evaluations during training. Set run.eval_every, or remove keep_best.",
        )
