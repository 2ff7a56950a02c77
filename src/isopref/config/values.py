"""What a field can hold beyond words and numbers: sources of data, an adapter. schema.py says what fields there are."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from isopref.config.section import Count, PathText, Positive, Section, Text

HUB_FIELDS = ("name", "split", "revision")


class SourceConfig(Section):
    """A source in data.train or data.eval, where its path alone does not say it all."""

    path: PathText = Field(description="Where the pairs are: what data.train takes as text.")
    name: Text | None = Field(
        default=None, description="Config of a hub data set, if it has several. null: the default one."
    )
    split: Text | None = Field(
        default=None,
        description="Split of a hub data set, or of a folder that save_to_disk wrote; of the hub also a part, as in "
        "'train[:1000]'. null: train.",
    )
    revision: Text | None = Field(
        default=None, description="Branch, tag or commit of a hub data set. null: the newest that is found."
    )
    weight: Positive | None = Field(
        default=None,
        description="Share of the mix, relative to the other sources; all of them have one or none has. The mix is "
        "the largest in which no pair comes twice. null: every pair.",
    )
    count: Count | None = Field(
        default=None, description="Pairs taken, drawn by optim.seed. Not together with weight. null: as weight says."
    )
    columns: dict[str, str] | None = Field(
        default=None, description="Names of this source's columns, in place of data.columns. null: data.columns."
    )

    @model_serializer(mode="wrap")
    def _leave_out_hub_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is of the hub alone and not set: ids of runs stay what they were before there was such."""
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if value is not None or name not in HUB_FIELDS}


# A value takes one branch by its kind, so that an error is about the branch that was meant. The tags are not field
# names: load.py takes them out of an error's place again.
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
    """What model.adapter holds."""

    kind: Literal["lora", "dora", "rslora"] | None = Field(
        default=None,
        description="lora; dora: direction and length of each row apart; rslora: scaled by alpha / sqrt(rank), for "
        "high ranks. null: lora, or the kind of path.",
    )
    rank: Count | None = Field(default=None, description="Rank of the update. null: 16, or that of path.")
    alpha: Positive | None = Field(
        default=None, description="The update is scaled by alpha / rank. null: twice the rank, or that of path."
    )
    targets: Literal["auto"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="auto",
        description="Layers that get an update, by the end of their names, as in [q_proj, v_proj]. auto: every linear "
        "layer that text uses but the output head, experts and routers too, or those of path.",
    )
    path: PathText | None = Field(
        default=None,
        description="Folder of an adapter to go on with (peft format). The model with it is the reference. null: a new "
        "one, which changes nothing before the first step.",
    )
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: hold the linear layers under the adapter in 4 bits (QLoRA). The reference is that model. "
        "null: in model.compute_dtype.",
    )
