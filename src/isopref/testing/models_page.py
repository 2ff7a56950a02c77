"""What works with each causal-LM architecture of transformers: `python -m isopref.testing.models_page docs/models.md`.

Every architecture is built as a tiny model with random weights and goes through the checks that a run makes before its
first step.
"""

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isopref.batch.packing import RowKind
from isopref.errors import ModelError, UserError
from isopref.models.conversion import from_hf
from isopref.models.hf import export, load_model
from isopref.models.policy import Policy
from isopref.models.probe import check_layout
from isopref.testing.families import FAMILIES, NotTinyError, tiny_family
from isopref.testing.models import byte_tokenizer, with_adapter

LAYOUTS: tuple[RowKind, ...] = ("shared", "packed", "padded")  # the page names the first one that works
FAILING = r"fails on (?:a sequence of tokens|padded rows in training mode)"  # in a refusal
IDS = torch.tensor([[5, 17, 3, 44, 9, 61, 20, 8]])


@dataclass(frozen=True)
class Support:
    """What works with one architecture."""

    family: str
    rows: RowKind | None  # None: cannot be trained, or was not built
    reason: str = ""  # why shared rows, or any rows, do not work
    built: bool = True
    unfolded: bool = False
    adapters: bool = False
    no_adapter: str = ""  # why an adapter on all linear layers cannot be trained
    native: bool = False
    exports: bool = False

    @property
    def name(self) -> str:
        """The name of the model's class in transformers."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family]


def is_decoder_only(family: str) -> bool:
    """Whether an architecture was made to be a causal LM: neither an encoder nor half of an encoder and a decoder."""
    try:
        config = CONFIG_MAPPING[family]()
    except Exception:  # the config's defaults do not fit together
        return True
    is_encoder = getattr(config, "is_decoder", True) is False and not family.startswith("gpt")
    return not is_encoder and not getattr(config, "is_encoder_decoder", False)


def supported_rows(family: str) -> Support:
    """The best kind of rows for an architecture, and why the better ones do not work."""
    try:
        model = tiny_family(family)
    except NotTinyError as error:
        return Support(family, None, str(error), built=False)
    reason = ""
    try:
        policy = Policy(model)
        for rows in LAYOUTS:
            try:
                check_layout(policy, rows)
            except ModelError as error:
                reason = reason if rows == "packed" else _short(str(error))
            else:
                return Support(family, rows, "" if rows == "shared" else reason, unfolded=bool(policy.unfolded))
    except ModelError as error:
        reason = _short(str(error))
    return Support(family, None, reason)


def support(family: str) -> Support:
    """Everything that works with an architecture."""
    found = supported_rows(family)
    if found.rows is None:
        return found
    rows = found.rows
    no_adapter = _why_not(lambda: check_layout(Policy(with_adapter(tiny_family(family), "lora")), rows))
    return Support(
        family,
        rows,
        found.reason,
        unfolded=found.unfolded,
        adapters=no_adapter is None,
        no_adapter=no_adapter or "",
        native=_why_not(lambda: check_layout(Policy(from_hf(tiny_family(family))), rows)) is None,
        exports=_why_not(lambda: _round_trip(family)) is None,
    )


def _why_not(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except UserError as error:
        return _short(str(error))
    return None


@torch.no_grad()
def _round_trip(family: str) -> None:
    """Raise ModelError unless the exported model loads again and gives the same logits."""
    model = tiny_family(family)
    policy = Policy(model).eval()
    with tempfile.TemporaryDirectory() as folder, policy.saved_form(policy.state_dict()) as (saved, state):
        try:
            export(saved, state, byte_tokenizer(), Path(folder) / "model")
            again = load_model(str(Path(folder) / "model"), dtype=torch.float32).eval()
            logits = policy.own_logits(IDS), again(input_ids=IDS, use_cache=False).logits
        except Exception as error:  # transformers' own, while it saves or loads
            raise ModelError(f"{family} cannot be exported: {error}") from error
    if not torch.allclose(*logits, rtol=1e-5, atol=1e-5):  # experts may be computed in another way
        raise ModelError(f"{family} gives different logits after it was exported and loaded")


def _short(message: str) -> str:
    """The reason in a refusal, without the words that all refusals share."""
    patterns = (
        rf"{FAILING} \((.*)\)\. (?:Train|Without) ",
        r"\([\w-]+ are off by [^;]*; that of a rejected [^;]*; (.*)\)\. (?:Set|Train) ",
        r"\((.*)\)\. (?:Set|Train|Without) ",
        r"cannot have this adapter: (.*) Incompatible modules: ",  # a set, in any order
        r"cannot have this adapter: (.*) Name other layers",
        r"layout\.rows: \w+\. (.*) Set layout",
    )
    found = next((match.group(1) for one in patterns if (match := re.search(one, message, re.S))), message)
    if failing := re.search(rf"its (own )?forward pass {FAILING}", message):
        found = f"{failing[0]}: {found}"
    return " ".join(found.replace("|", "\\|").split()).rstrip(".")


PAGE = """# Models

How isopref trains each causal-LM architecture of transformers {version}. `make models` generates this page; do not edit
it. It builds every architecture as a tiny model with random weights and runs the checks that every run makes before its
first step. Your own model is checked in the same way, so one that is not listed here is either trained correctly or
refused.

- **shared**: the default, and usually the fastest. Rows are packed without padding, and a prompt is computed once for
  all its answers.
- **packed**: set `layout.rows: packed`. Rows without padding, in which each answer repeats its prompt.
- **padded**: set `layout.rows: padded`. Same result, slower.
- *unfolded*: some layers cannot follow the segments of a row: Mamba's first version, most linear attention, sparse or
  chunked attention. They get the row's sequences as a padded batch and compute a prompt once per answer; all other
  layers compute it once. Gated DeltaNet, Mamba2 and the short convolutions of LFM2 can follow segments.
- **LoRA**: an adapter on all linear layers, the default, can be trained. **OLMo-core**: `model.native: true` works.
  **Export**: the tuned model loads in transformers and gives the same logits.

{summary}

| architecture | rows | LoRA | OLMo-core | export |
|---|---|---|---|---|
{shared}

## Without shared rows

| architecture | rows | LoRA | OLMo-core | export | why not shared |
|---|---|---|---|---|---|
{others}

## No LoRA on all linear layers

By default, an adapter covers all linear layers, which fails for these architectures. Set `model.adapter.targets` to
fewer layers, or train all weights.

{unadapted}

## Not trained

Runs with these models stop before their first step, with the reason given here. Choose a model of another architecture.

| architecture | why |
|---|---|
{refused}

## Not tried

`make models` could not build these as tiny models, for the reason given here. A run still checks such a model.

| architecture | why |
|---|---|
{unbuilt}
"""


def page(found: Sequence[Support]) -> str:
    """The page, from what works with each architecture."""
    shared = [one for one in found if one.rows == "shared"]
    others = [one for one in found if one.rows not in ("shared", None)]
    refused = [one for one in found if one.rows is None and one.built]
    return PAGE.format(
        version=transformers.__version__,
        summary=summary(found),
        shared="\n".join(_line(one) for one in shared),
        others="\n".join(f"{_line(one)} {one.reason} |" for one in others),
        unadapted="\n".join(f"- {_name(one)}: {one.no_adapter}" for one in [*shared, *others] if one.no_adapter),
        refused="\n".join(f"| {_name(one)} | {one.reason} |" for one in refused),
        unbuilt="\n".join(f"| {_name(one)} | {one.reason} |" for one in found if not one.built),
    )


def summary(found: Sequence[Support]) -> str:
    """How many architectures train, and how many with shared rows."""
    built = [one for one in found if one.built]
    decoders = [one for one in built if is_decoder_only(one.family)]
    lines = []
    for what, some in (("built", built), ("built decoder-only", decoders)):
        trained, shared = (sum(one.rows in rows for one in some) for rows in (LAYOUTS, ("shared",)))
        lines.append(
            f"Of {len(some)} {what} architectures, {trained} ({trained / len(some):.0%}) can be trained, {shared} "
            f"({shared / len(some):.0%}) with shared rows."
        )
    return f"transformers has {len(found)} such architectures. " + " ".join(lines)


def _name(one: Support) -> str:
    return f"`{one.family}` ({one.name})"


def _line(one: Support) -> str:
    marks = " | ".join("yes" if works else "no" for works in (one.adapters, one.native, one.exports))
    return f"| {_name(one)} | {one.rows}{', unfolded' if one.unfolded else ''} | {marks} |"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = [support(family) for family in sorted(FAMILIES)]
    Path(sys.argv[1]).write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
