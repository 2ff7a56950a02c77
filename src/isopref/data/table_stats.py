"""Statistics from building a token table, per source, stored in the table's file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

from isopref.types import Kind


@dataclass(frozen=True)
class SourceStats:
    """What was found in one source. Counts are examples (records for `read`, `dropped` and `grouped`)."""

    format: str
    shape: str
    read: int
    kept: int
    unused_columns: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    holds: Kind = "pairs"
    grouped: int = 0  # records that joined an earlier one with the same prompt
    boundary_backoffs: int = 0
    generation_prompt_backoffs: int = 0
    double_bos: int = 0
    added_ends: int = 0  # end tokens added to answers that the template does not end
    missing_eos: int = 0  # answers without an end token, because the template ends them with plain text
    truncated: int = 0
    repeated_prompts: int = 0  # examples whose answers all repeat the prompt
    unscored_answers: int = 0  # dropped from lists
    repeated_answers: int = 0  # in lists, where the first one is kept
    unused_inputs: int = 0  # records with a column 'input' or 'history' that is not read
    special_tokens: dict[str, int] = field(default_factory=dict)  # pairs with one in the text, by the first one


@dataclass(frozen=True)
class TableStats:
    """What building the table found, per source."""

    sources: tuple[SourceStats, ...]

    @property
    def read(self) -> int:
        return sum(source.read for source in self.sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """Records that did not yield a pair, by reason."""
        return dict(sum((Counter(source.dropped) for source in self.sources), Counter()))

    @property
    def dropped_note(self) -> str:
        """A suffix for errors about too few pairs; empty if none was dropped."""
        dropped = self.dropped
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        cut = " Raise data.max_length, or cut prompts with data.truncation: keep_end." * ("too_long" in dropped)
        return f" Of {self.read} records {sum(dropped.values())} were dropped: {reasons}.{cut}" if dropped else ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TableStats:
        sources = json.loads(text)["sources"]
        return cls(
            tuple(SourceStats(**{**source, "unused_columns": tuple(source["unused_columns"])}) for source in sources)
        )
