"""What training cost, according to a run's spot checks: answers kept and lost, and how likely plain text still is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isopref.report.elements import fixed


@dataclass(frozen=True)
class Cost:
    """The results of a run's spot checks: its questions, and the log-probability of its texts."""

    questions: list[dict[str, Any]]
    text: dict[str, float] | None  # tokens, logp_before, logp_after

    @property
    def known(self) -> list[dict[str, Any]]:
        """The questions that the model answered correctly before training."""
        return [one for one in self.questions if one["correct_before"]]

    @property
    def lost(self) -> list[dict[str, Any]]:
        return [one for one in self.known if not one["correct_after"]]

    @property
    def num_kept(self) -> int:
        return len(self.known) - len(self.lost)

    @property
    def num_gained(self) -> int:
        return sum(one["correct_after"] and not one["correct_before"] for one in self.questions)

    @property
    def text_change(self) -> float | None:
        """The change in the log-probability of the texts, in nats per token."""
        return None if self.text is None else self.text["logp_after"] - self.text["logp_before"]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Label, before, after."""
        total = len(self.questions)
        if self.questions:
            correct = f"{len(self.known)} of {total}", f"{self.num_kept + self.num_gained} of {total}"
            yield ("correct answers", *correct)
            yield "still correct", "", f"{self.num_kept} of {len(self.known)}"
        if self.text is not None and self.text_change is not None:
            change = f" ({fixed(self.text_change, 3, '+')})"
            before, after = (fixed(self.text[f"logp_{when}"], 3) for when in ("before", "after"))
            yield "text, log-prob per token", before, after + change


def cost_of(spot_checks: Mapping[str, Any]) -> Cost:
    """The cost from a run's spot checks; empty if it had none."""
    return Cost(spot_checks.get("questions", []), spot_checks.get("text"))
