"""Structured field values: data sources and an adapter. schema.py defines the fields that hold them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from isopref.config.section import Count, PathText, Positive, Section, Text

HUB_FIELDS = ("name", "split", "revision")


class SourceConfig(Section):
    """A source in data.train or data.eval that needs more than a path."""

    path: PathText = Field(description="Where the pairs are: any string that data.train takes.")
    name: Text | None = Field(
        default=None, description="Config of a hub dataset, if it has several. null: the default one."
    )
    split: Text | None = Field(
        default=None,
        description="Split of a hub dataset or of a folder written by save_to_disk; for the hub, also a slice such as "
        "'train[:1000]'. null: train.",
    )
    revision: Text | None = Field(
        default=None, description="Branch, tag or commit of a hub dataset. null: the latest available."
    )
    weight: Positive | None = Field(
        default=None,
        description="Share of the mix, relative to the other sources; set it for all sources or for none. The mix is "
        "the largest in which no pair is used twice. null: every pair.",
    )
    count: Count | None = Field(
        default=None,
        description="Number of pairs, selected by optim.seed. Cannot be combined with weight. null: use weight.",
    )
    columns: dict[str, str] | None = Field(
        default=None, description="Column names for this source, overriding data.columns. null: data.columns."
    )

    @model_serializer(mode="wrap")
    def _leave_out_hub_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unset hub fields, so that run ids are the same as before these fields existed."""
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if value is not None or name not in HUB_FIELDS}


# The kind of a value selects one branch, so an error is about the branch the user meant. The tags are not field names:
# load.py strips them from an error's location.
IS_TEXT, IS_LIST, IS_SOURCE, IS_SOURCES, IS_SHARE = TAGS = ("<text>", "<list>", "<source>", "<sources>", "<share>")


def _tag(value: Any) -> str:
    return IS_SOURCE if isinstance(value, dict | SourceConfig) else IS_TEXT


OneOfSources = Annotated[
    Annotated[PathText, Tag(IS_TEXT)] | Annotated[SourceConfig, Tag(IS_SOURCE)],
    Discriminator(_tag),
]
Sources = Annotated[
    Annotated[PathText, Tag(IS_TEXT)]
    | Annotated[SourceConfig, Tag(IS_SOURCE)]
    | Annotated[list[OneOfSources], Field(min_length=1), Tag(IS_LIST)],
    Discriminator(lambda value: IS_LIST if isinstance(value, list) else _tag(value)),
]
SourcesOrShare = Annotated[
    Annotated[Sources, Tag(IS_SOURCES)] | Annotated[float, Field(gt=0, lt=1), Tag(IS_SHARE)],
    Discriminator(lambda value: IS_SHARE if isinstance(value, int | float) else IS_SOURCES),
]


class AdapterConfig(Section):
    """The value of model.adapter."""

    kind: Literal["lora", "dora", "rslora"] | None = Field(
        default=None,
        description="lora; dora: direction and magnitude of each row learnt separately; rslora: scaled by alpha / "
        "sqrt(rank), for high ranks. null: lora, or the kind of the adapter in path.",
    )
    rank: Count | None = Field(
        default=None, description="Rank of the update. null: 16, or the rank of the adapter in path."
    )
    alpha: Positive | None = Field(
        default=None,
        description="The update is scaled by alpha / rank. null: twice the rank, or the alpha of the adapter in path.",
    )
    targets: Literal["auto"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="auto",
        description="Layers to adapt, by the end of their names, e.g. [q_proj, v_proj]. auto: every linear layer used "
        "for text except the output head, including experts and routers, or the targets of the adapter in path.",
    )
    path: PathText | None = Field(
        default=None,
        description="Folder of an existing adapter (peft format) to continue training. The reference is the model with "
        "this adapter. null: a new adapter, which changes nothing before the first step.",
    )
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: hold the adapted linear layers in 4 bits (QLoRA); the reference is that 4-bit model. "
        "null: keep them in model.compute_dtype.",
    )
