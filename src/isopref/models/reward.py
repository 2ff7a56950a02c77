"""A reward model: a decoder with a linear head that turns the hidden state of an answer's last token into one number.

The model inside is transformers' own for sequence classification with one label, so
`AutoModelForSequenceClassification` can load what is exported. Everything else (rows, ranks, adapters, checkpoints) is
the same as for a policy.

Dimensions: A answers, Q sequences, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from isopref.errors import ModelError
from isopref.models import adapter, hf
from isopref.models.experts import routing
from isopref.models.head import REWARD_HEADS, reward_head_name
from isopref.models.policy import Policy, full
from isopref.ops.take import take
from isopref.types import LOGPS_ALONE, Microbatch, Needs, Readout

CLASSIFIER = "ForSequenceClassification"  # the end of transformers' names for such models


class RewardModel(Policy):
    """A policy whose readout holds rewards instead of log-probabilities."""

    scores: ClassVar[str] = "rewards"

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = getattr(self.model, str(reward_head_name(self.model)))
        return head

    def forward(self, microbatch: Microbatch, needs: Needs = LOGPS_ALONE) -> Readout:
        """The rewards of the microbatch's answers, and where routers sent the tokens, if requested."""
        assert not needs.heads, "a reward model has no log-probabilities"
        assert not needs.confidence, "a reward model has no log-probabilities"
        reward_A = routes = None
        for one in self._passes(microbatch):
            hidden_BTD, router_logits = self._hidden(one, needs.routing)
            last_QD = take(full(hidden_BTD).flatten(0, 1), one.last_index, one.last_copies)
            reward_Q = self._rewards(last_QD)
            of_pass = reward_Q.new_zeros(microbatch.num_answers).index_add(0, one.last_answer, reward_Q)
            reward_A = of_pass if reward_A is None else reward_A + of_pass
            if needs.routing:
                sent = routing(router_logits, self.experts_per_token, one.times)
                routes = sent if routes is None else routes + sent
        assert reward_A is not None
        return self._of_group(Readout(reward_A, routing=routes))

    def _rewards(self, last_QD: Tensor) -> Tensor:
        """In float32 or wider: the difference of two rewards is what counts, and bfloat16 would round most of it."""
        wide = torch.promote_types(last_QD.dtype, torch.float32)
        bias = None if self.head.bias is None else self.head.bias.to(wide)
        reward_Q: Tensor = nn.functional.linear(last_QD.to(wide), self.head.weight.to(wide), bias).squeeze(1)
        return reward_Q

    def own_score(self, prompt_T: Tensor, answer_C: Tensor) -> Tensor:
        """The reward that the model itself gives an answer."""
        reward: Tensor = self.own_logits(torch.cat([prompt_T, answer_C])[None])[0, 0].float()
        return reward


def is_reward_model(path: str, *, trust_remote_code: bool = False, setting: str = "model.path") -> bool:
    """Whether a path is that of a model for sequence classification, or of an adapter on one. Raises ModelError."""
    if adapter.is_adapter(Path(path)):
        return adapter.is_of_reward_model(path, setting=setting)
    if hf.is_olmo_core(path) or hf.locate(path, setting=setting).gguf_file is not None:
        return False
    return _is_classifier(hf.read_config(path, trust_remote_code=trust_remote_code, setting=setting))


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    head_dtype: torch.dtype | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    setting: str = "model.path",
) -> PreTrainedModel:
    """A model for sequence classification as it was saved, or a language model with a new head instead of its own.

    The folder of an adapter stands for its base with the adapter merged into it. `head_dtype` is the dtype of a new
    head; None: that of the model. Raises ModelError.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "setting": setting}
    if adapter.is_adapter(Path(path)):
        base = load_reward_model(adapter.base_of(path, setting=setting), **options)
        return adapter.merged(base, path, setting=setting)
    if not is_reward_model(path, trust_remote_code=trust_remote_code, setting=setting):
        return with_new_head(hf.load_model(path, **options), dtype=head_dtype, seed=seed, setting=setting)
    _check_labels(hf.read_config(path, trust_remote_code=trust_remote_code, setting=setting), path, setting)
    model = hf.load_model(path, kind=AutoModelForSequenceClassification, **options)
    _head_name(model, setting)
    return model


def load_narrow(path: str, *, seed: int, trust_remote_code: bool, setting: str) -> PreTrainedModel | None:
    """The same as `load_reward_model`, but narrow, as in `hf.load_narrow`; a new head is in float32."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "setting": setting}
    if is_reward_model(path, **options):
        _check_labels(hf.read_config(path, **options), path, setting)
        found = hf.load_narrow(path, kind=AutoModelForSequenceClassification, **options)
        if found is not None:
            _head_name(found, setting)
        return found
    found = hf.load_narrow(path, **options)
    return None if found is None else with_new_head(found, dtype=torch.float32, seed=seed, setting=setting)


def load_empty(path: str, *, trust_remote_code: bool = False, setting: str = "model.path") -> PreTrainedModel:
    """The model without its weights, on the meta device. Raises ModelError."""
    config = hf.read_config(path, trust_remote_code=trust_remote_code, setting=setting)
    if _is_classifier(config):
        _check_labels(config, path, setting)
    model = empty_classifier(config, setting=setting)
    _head_name(model, setting)
    return model


def with_new_head(
    model: PreTrainedModel, *, seed: int, dtype: torch.dtype | None = None, setting: str = "model.path"
) -> PreTrainedModel:
    """The decoder of a language model with a new head instead of its own, drawn from the seed.

    The head is initialised as in transformers. Raises ModelError.
    """
    empty = empty_classifier(model.config, setting=setting)
    if type(empty.base_model) is not type(model.base_model):
        raise ModelError(
            f"{setting}: {type(model).__name__} and {type(empty).__name__} have different decoders, so this language "
            "model cannot become a reward model. Start from another model."
        )
    head: nn.Linear = getattr(empty, _head_name(empty, setting))
    setattr(empty, empty.base_model_prefix, model.base_model)
    empty.config = one_label(model.config)  # all parts must share one config: it also selects the attention
    like = next(model.base_model.parameters())
    drawn = torch.empty(head.weight.shape, dtype=torch.promote_types(like.dtype, torch.float32))
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    drawn.normal_(std=std, generator=torch.Generator().manual_seed(seed))
    head.weight = nn.Parameter(drawn.to(like.device, dtype or like.dtype))
    if head.bias is not None:
        head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
    empty.train(model.training)
    return empty


def empty_classifier(config: PreTrainedConfig, *, setting: str = "model.path") -> PreTrainedModel:
    """A model for sequence classification on the meta device, with one label if the config is a language model's.

    Raises ModelError.
    """
    own = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
                own if _is_classifier(own) else one_label(own)
            )
    except ValueError as error:
        raise ModelError(
            f"{setting}: transformers has no model for sequence classification of type {config.model_type}, so it "
            "cannot become a reward model. Start from another model."
        ) from error
    return model


def one_label(config: PreTrainedConfig) -> PreTrainedConfig:
    """Make the config of a language model that of a classifier with one label, in place."""
    config.num_labels = 1
    config.architectures = None  # transformers writes the new class when it saves the model
    return config


def _check_labels(config: PreTrainedConfig, path: str, setting: str) -> None:
    """Raise ModelError for a classifier with more than one output."""
    if config.num_labels != 1:
        raise ModelError(
            f"{setting}: {path} has {config.num_labels} labels (num_labels in its config), but a reward is one number. "
            "Start from a model with one label, or from the language model that it was made from."
        )


def _head_name(model: PreTrainedModel, setting: str) -> str:
    """The name of the head, which must hold all weights outside the decoder. Raises ModelError."""
    name = reward_head_name(model)
    decoder = f"{model.base_model_prefix}."
    besides = [one for one, _ in model.named_parameters() if not one.startswith((decoder, f"{name}."))]
    if name is None or besides:
        raise ModelError(
            f"{setting}: {type(model).__name__} must have one linear layer after its decoder, called "
            f"{' or '.join(REWARD_HEADS)}, and nothing else; found {', '.join(besides[:3]) or 'neither'}. Start from "
            "another model."
        )
    return name


def _is_classifier(config: PreTrainedConfig) -> bool:
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


# --- the padding token: transformers reads the reward at the last token that is not padding -----------------------


def set_padding(model: PreTrainedModel, tokenizer: Any, stops: Collection[int]) -> bool:
    """Set a padding token that ends no answer in the tokenizer and config of a new reward model.

    `stops`: tokens that end answers. Returns whether there is such a token; without one, transformers refuses batches.
    """
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {*stops, tokenizer.eos_token_id}
    preferred = (tokenizer.pad_token, tokenizer.unk_token, *special)
    chosen = next((token for token in preferred if token in special and special[token] not in ends), None)
    tokenizer.pad_token, tokenizer.padding_side = chosen, "right"
    adopt_padding(model, tokenizer)
    return chosen is not None


def adopt_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Set the tokenizer's padding token in the model's config."""
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def check_padding(model: PreTrainedModel, ends: Collection[int], *, name: str) -> None:
    """Raise ModelError if the padding token is one of `ends`, the tokens at which answers end and rewards are read."""
    pad = model.config.get_text_config().pad_token_id
    if pad is not None and pad in ends:
        raise ModelError(
            f"{name}: its padding token ({pad}) also ends answers, so transformers would read the reward one token "
            "before the end, while isopref reads it at the end. If the model was trained to score complete answers, "
            "set pad_token_id in its config.json to a token that ends no answer."
        )
