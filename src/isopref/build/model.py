"""The policy of a run: loaded, checked, distributed over ranks, scored."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from isopref.build import resolve
from isopref.build.hardware import compute_dtype, rounding_dtype, say_precision, use_float8
from isopref.build.microbatch import device_memory
from isopref.build.recurrence import check_recurrence
from isopref.build.run import Run
from isopref.config.values import AdapterConfig
from isopref.data.table import ExampleTable
from isopref.errors import ConfigError
from isopref.models import adapter, conversion, hf, reward
from isopref.models.finite import check_finite
from isopref.models.head import head_of
from isopref.models.parallel import Parallel, compile_layers, has_layers, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.models.probe import check_layout, check_tiles, own_logps
from isopref.models.reward import RewardModel
from isopref.models.tiles import tile_mlps
from isopref.models.unused import indexers, is_inside
from isopref.score import TableLogps, score_table
from isopref.types import Needs


def load_policy(run: Run, path: str | None = None, *, setting: str = "model.path") -> Policy:
    """The model at `path`, or by default the starting model, placed by `place`.

    `setting` names it in messages.
    """
    model, asked = run.config.model, run.config.model.adapter
    kind = RewardModel if run.loss.readout == "reward" else Policy
    _check_readout(run, path or model.path, setting)
    if asked is not None and path is None:
        policy = kind(_load_adapted(run, model.path, asked.path, "model.adapter.path"))
    elif asked is not None and path is not None and adapter.is_adapter(Path(path)):
        policy = kind(_load_adapted(run, adapter.base_of(path, setting=setting), path, setting))
    elif asked is not None and asked.quantize is not None and _same(path, model.path):  # the 4-bit reference
        policy = kind(_load_adapted(run, model.path, None, setting))
    else:
        policy = _load_whole(run, path or model.path, setting)
    place(run, policy)
    if not from_host(run, policy):  # otherwise after sharding
        check_finite(policy.model, f"{setting}: {path or model.path}")
    return policy


def _load_whole(run: Run, path: str, setting: str) -> Policy:
    """A model with all its weights in model.dtype, or still in 16 bits if `place` is to widen them.

    Until then, all ranks of a machine share one copy; casting the full model would take host memory once per rank.
    """
    model = run.config.model
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "setting": setting}
    is_reward = run.loss.readout == "reward"
    kind = RewardModel if is_reward else Policy
    if model.dtype == "float32" and not model.native and not hf.is_olmo_core(path):
        seed = run.config.optim.seed
        narrow = reward.load_narrow(path, seed=seed, **options) if is_reward else hf.load_narrow(path, **options)
        if narrow is not None:
            return kind(narrow, narrow=True)
    loaded = _load(run, path, getattr(torch, model.dtype), setting)
    if not model.native:
        return kind(loaded)
    check_finite(loaded, f"{setting}: {path}")  # before comparing logits
    return Policy(conversion.from_hf(loaded, setting=setting))


def _weight_dtype(run: Run) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, run.config.model.dtype)
    return dtype


def _check_readout(run: Run, path: str, setting: str) -> None:
    """Raise ConfigError for a reward model where log-probabilities are needed."""
    trust = run.config.model.trust_remote_code
    if run.loss.readout == "logp" and reward.is_reward_model(path, trust_remote_code=trust, setting=setting):
        raise ConfigError(
            f"{setting}: {path} is a reward model, which has no log-probabilities. Use a language model, or "
            "objective.loss: bradley_terry to train a reward model."
        )


def place(run: Run, policy: Policy) -> None:
    """Move the policy to this rank's device, unless the device must never hold all of it."""
    if not from_host(run, policy):
        policy.move_to(run.env.device)


def from_host(run: Run, policy: Policy) -> bool:
    """Whether the policy stays in host memory until `spread` shards it."""
    layout = run.config.layout
    sharded = layout.offload or (run.env.world_size > 1 and layout.parallel in ("auto", "fsdp", "hsdp"))
    weights = sum(weight_bytes(policy, parameter) for parameter in policy.parameters())
    room = device_memory(run.env.device)
    return resolve.from_host(weights, room, sharded=sharded and layout.tensor_parallel == 1)


def weight_bytes(policy: Policy, parameter: nn.Parameter) -> int:
    """Bytes of a parameter once it is being trained."""
    return parameter.numel() * torch.float32.itemsize if policy.narrow else adapter.stored_bytes(parameter)


def _load(run: Run, path: str, dtype: torch.dtype, setting: str) -> PreTrainedModel:
    trust, seed, head_dtype = run.config.model.trust_remote_code, run.config.optim.seed, _weight_dtype(run)
    is_reward = run.loss.readout == "reward"
    if hf.is_olmo_core(path):
        read = conversion.read_checkpoint(path, dtype=dtype, trust_remote_code=trust, setting=setting)
        return reward.with_new_head(read, dtype=head_dtype, seed=seed, setting=setting) if is_reward else read
    if is_reward:
        return reward.load_reward_model(
            path, dtype=dtype, head_dtype=head_dtype, seed=seed, trust_remote_code=trust, setting=setting
        )
    return hf.load_model(path, dtype=dtype, trust_remote_code=trust, setting=setting)


def load_exported(run: Run) -> PreTrainedModel:
    """The exported model: a full model, or an adapter on its base."""
    model, folder = run.config.model, str(run.model_folder)
    if model.adapter is not None:
        return _load_adapted(run, model.path, folder, "run.folder")
    return hf.load_model(folder, dtype=getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code)


def _load_adapted(run: Run, base: str, path: str | None, setting: str) -> PreTrainedModel:
    """The model `base`, in 4 bits if requested, with the adapter in the folder `path`, if any.

    Not merged: the sum would be rounded to the base's dtype and differ from the trained model.
    """
    model = run.config.model
    check_base(base)
    loaded = _load(run, base, getattr(torch, model.pass_dtype), "model.path" if base == model.path else setting)
    if model.adapter is not None and model.adapter.quantize is not None:
        adapter.quantize_nf4(loaded, run.env.device, head=head_of(loaded))
    if path is not None:
        own = adapter.base_of(path, setting=setting)
        if not _same(own, base):
            run.display.say(f"warning: {setting}: the adapter {path} was made for {own}, but is used on {base}")
        adapter.load_adapter(loaded, path, dtype=getattr(torch, model.dtype), setting=setting)
    return loaded


def _same(path: str | None, other: str) -> bool:
    """Whether two folders or hub names refer to the same model."""
    return path is not None and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()


def check_base(path: str) -> None:
    """Raise ConfigError for a model that cannot be the base of an adapter."""
    if hf.is_olmo_core(path):
        raise ConfigError(
            f"model.adapter: {path} is an OLMo-core checkpoint, which peft cannot use as a base model. Use "
            "a Hugging Face folder: isopref writes one next to a checkpoint."
        )
    if adapter.is_adapter(Path(path)):
        raise ConfigError(
            f"model.adapter: {path} is itself an adapter, and other tools could not load an adapter on top of it. To "
            f"continue training it, set model.adapter: {{path: {path}}} and model.path to its base model. To train a "
            f"new adapter, merge this one first: isopref merge {path} FOLDER."
        )


def say_unused(run: Run, policy: Policy) -> None:
    """List the parts of a model that have no gradient and are not trained, if any."""
    for parts, kind, why in (
        (policy.unused, "modules", "not used when training on text"),
        (indexers(policy.model), "indexers", "they only select keys, which has no gradient"),
    ):
        if parts:
            named = ", ".join(parts) if len(parts) < 4 else f"{len(parts)} {kind}, such as {parts[0]}"
            weights = (w.numel() for name, w in policy.model.named_parameters() if is_inside(name, parts))
            run.display.say(f"frozen ({why}): {named} ({sum(weights):,} weights)")


def settle_padding(run: Run, policy: RewardModel, tokenizer: Any) -> None:
    """Make transformers read rewards where this run does: at the last token of an answer. Raises ModelError."""
    model, stops = run.config.model, hf.stop_tokens(tokenizer.name_or_path)
    if adapter.is_adapter(Path(model.path)):
        reward.adopt_padding(policy.model, tokenizer)  # the one that the adapter was saved with
    elif reward.is_reward_model(model.path, trust_remote_code=model.trust_remote_code):
        reward.check_padding(policy.model, {*stops, tokenizer.eos_token_id}, name=f"model.path: {model.path}")
    elif not reward.set_padding(policy.model, tokenizer, stops):
        run.display.say(
            "warning: the tokenizer has no special token for padding besides those that end an answer, so transformers "
            "will score with this reward model one sequence at a time (isopref score is not affected)"
        )


def add_adapter(run: Run, policy: Policy) -> None:
    """Add the adapter from model.adapter to the policy, if it is a new one. Scores do not change."""
    asked = run.config.model.adapter
    if asked is None:
        return
    if asked.path is None:
        dtype = getattr(torch, run.config.model.dtype)
        adapter.add_adapter(policy.model, new_adapter(asked), dtype=dtype, seed=run.config.optim.seed)
        place(run, policy)
    weights = list(policy.parameters())
    trained, packed, every = (
        sum(weight.numel() for weight in some)
        for some in ([w for w in weights if w.requires_grad], filter(adapter.is_quantised, weights), weights)
    )
    run.display.say(f"adapter {trained:,} of {every:,} weights are trained ({trained / every:.2%})")
    if asked.quantize is not None:  # not for experts, which are not linear layers
        run.display.say(f"{asked.quantize}   {packed:,} of {every:,} weights are in 4 bits ({packed / every:.2%})")


def new_adapter(asked: AdapterConfig) -> adapter.NewAdapter:
    """The settings of a new adapter, from model.adapter."""
    rank = asked.rank or 16
    return adapter.NewAdapter(
        kind=asked.kind or "lora",
        rank=rank,
        alpha=asked.alpha or 2 * rank,
        targets=None if asked.targets == "auto" else asked.targets,
    )


def spread(run: Run, policy: Policy, *, trained: bool = True) -> nn.Module:
    """The policy distributed over all ranks by layout.parallel, checked to score correctly in the requested rows.

    A model that is not trained is not wrapped in DDP, which would reserve memory for its gradients.
    """
    # A model too large for a device is scored once it is sharded; a native model's own form is available only here.
    large = from_host(run, policy)
    if large:
        run.display.say(f"{policy.name} is sharded from host memory, because it does not fit on one device")
    own = None if large and policy.native is None else own_logps(policy)
    compiled = _compiles(run, policy)
    if run.config.model.is_float8:
        use_float8(run, policy, compiled)
    if compiled:
        compile_layers(policy)
    tile = run.config.layout.mlp_tile_tokens
    if isinstance(tile, int):
        tile_mlps(policy, tile)
    mode = _parallel(run, policy)
    whole = mode == "ddp" and not trained
    model = parallelize(
        policy,
        "single" if whole else mode,
        device=run.env.device,
        world_size=1 if whole else run.env.world_size,
        compute_dtype=compute_dtype(run),
        hsdp_shard=run.config.layout.hsdp_shard,
        offload=run.config.layout.offload,
        tensor_parallel=run.config.layout.tensor_parallel,
        context_parallel=run.config.layout.context_parallel,
    )
    if large:
        check_finite(unwrap(model).model, f"model {policy.name}")
    followed = policy.following
    check_layout(model, run.config.layout.rows, own=own, compute_dtype=rounding_dtype(run))
    check_recurrence(run, policy, followed, trained=trained)
    if isinstance(tile, int):
        check_tiles(model, run.config.layout.rows, compute_dtype=rounding_dtype(run))
    say_precision(run)
    return model


def _compiles(run: Run, policy: Policy) -> bool:
    """Whether to compile the layers; logged if layout.compile is null. Raises ConfigError."""
    asked, rows = run.config.layout.compile, run.config.layout.rows
    wrapped = adapter.has_wrapped_parameters(policy.model)
    balanced = bool(run.loss.balance_weight)
    unfolded = bool(policy.unfolded)
    can = resolve.can_compile(
        run.config, on_cuda=run.env.device.type == "cuda", balanced=balanced, wrapped=wrapped, unfolded=unfolded
    )
    if asked and balanced:
        raise ConfigError(
            "layout.compile: true with objective.balance_weight, but compiled layers do not expose their routers' "
            "decisions. Remove one of them."
        )
    if asked and wrapped:
        raise ConfigError(
            "layout.compile: true with an adapter of fused experts or routers, whose layers cannot be compiled. "
            "Remove layout.compile, or set model.adapter.targets without experts and routers."
        )
    if asked and unfolded and rows in ("shared", "packed"):
        raise ConfigError(
            f"layout.compile: true with layout.rows: {rows}, but {policy.name} has layers with a state "
            f"({policy.unfolded[0]}), whose shapes change with every row. Remove layout.compile."
        )
    if asked and not can and rows in ("shared", "packed"):
        raise ConfigError(
            f"layout.compile: true with layout.rows: {rows} needs a CUDA GPU and bfloat16 "
            "(model.compute_dtype), otherwise every row would be recompiled. Remove layout.compile."
        )
    chosen = resolve.compiles(run.config, can=can, has_layers=has_layers(policy))
    if chosen and asked is None:
        run.display.say("layout.compile: null: compiling the layers; the first steps take a minute longer")
    return chosen


def score_all(run: Run, model: nn.Module, table: ExampleTable, what: str) -> TableLogps:
    """Log-probabilities of a table, all ranks together."""
    model.eval()
    needs, mismatched = Needs(heads=run.loss.needs.heads), run.loss.needs_mismatched
    total = len(table.lengths.answer) + mismatched * len(table)
    with answer_progress(run, f"score {what}", total) as progress:
        return score_table(
            *(model, table, run.score_budget),
            device=run.env.device,
            needs=needs,
            mismatched=mismatched,
            progress=progress,
        )


@contextmanager
def answer_progress(run: Run, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar that shows how many answers are scored per second."""
    started, done = time.perf_counter(), 0
    with run.display.bar(what, total) as advance:

        def progress(count: int) -> None:
            nonlocal done
            count = min(count, total - done)  # other ranks are assumed to be equally far
            done += count
            advance(count, f"{done / (time.perf_counter() - started):.1f} answers/s")

        yield progress


def _parallel(run: Run, policy: Policy) -> Parallel:
    """How to distribute the policy over ranks; logged if layout.parallel is auto."""
    config, ranks = run.config, run.env.world_size
    whole = sum(weight_bytes(policy, parameter) for parameter in policy.parameters())
    trained = sum(weight_bytes(policy, parameter) for parameter in policy.parameters() if parameter.requires_grad)
    state = resolve.training_bytes(config, trained=trained, whole=whole)
    room = device_memory(run.env.device)
    chosen = resolve.parallel(config, state, room, ranks=ranks)
    if config.layout.parallel != "auto":
        return chosen
    if config.only_fsdp_for is not None:
        run.display.say(f"layout.parallel: auto is {chosen}, for {config.only_fsdp_for}")
    elif ranks > 1:
        run.display.say(
            f"layout.parallel: auto is {chosen}: {state / 2**30:.1f} GiB of weights, gradients and optimizer for "
            f"{room / 2**30:.0f} GiB on each rank"
        )
    return chosen
