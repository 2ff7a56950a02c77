"""What a run keeps of its beginning."""

from pathlib import Path

import numpy as np
import pytest
import torch

from isopref.build.beginning import Beginning, Models, NamedTable
from isopref.build.run import Run
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.errors import CacheError
from isopref.reference.store import key_of
from isopref.score import TableLogps
from isopref.testing.models import random_pairs

MODELS = Models({"weights": "a"})
KEY = key_of({"weights": "a"})
PAIRS = ExampleTable.from_tokens(random_pairs(5, seed=0)).select([0, 1, 2, 3, 4, 2])
TRAINING, HELD_OUT = NamedTable("training", PAIRS), NamedTable("held-out", PAIRS.select([4, 0]))


@pytest.fixture
def beginning(tmp_path: Path) -> Beginning:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}})
    return Beginning(Run(config, tmp_path, Environment(0, 1, torch.device("cpu")), Display(quiet=True)), resumed=False)


def values(table: NamedTable, first: float) -> TableLogps:
    """The same for the same pair."""
    _, number = np.unique(table.pairs.ids, axis=0, return_inverse=True)
    return TableLogps.of_pairs(first - number.ravel(), first - 0.1 * number.ravel())


def test_every_bit_comes_back_for_each_table(beginning: Beginning) -> None:
    """A pair may be in both, with two values: the cache may have changed between the two."""
    training, held_out = values(TRAINING, -1 / 3), values(HELD_OUT, -1 / 3 + 1e-15)
    beginning.write(MODELS, [TRAINING, HELD_OUT], [training, held_out])
    for table, logps in ((TRAINING, training), (HELD_OUT, held_out)):
        found = beginning.known(table, KEY)
        assert len(found.missing) == 0
        assert found.logps.tobytes() == logps.answers.tobytes()
    assert beginning.known(TRAINING, key_of({"weights": "b"})).missing.tolist() == list(range(10))


def test_what_is_kept_is_not_written_over(beginning: Beginning) -> None:
    some = NamedTable("training", PAIRS.select([1, 3]))
    beginning.write(MODELS, [some], [values(some, -1.0)])
    beginning.write(MODELS, [TRAINING], [values(TRAINING, -7.0)])
    found, first, later = beginning.known(TRAINING, KEY).logps[::2], values(some, -1.0), values(TRAINING, -7.0)
    assert found[[1, 3]].tolist() == first.chosen.tolist()
    assert found[[0, 2, 4, 5]].tolist() == later.chosen[[0, 2, 4, 5]].tolist()
    beginning.forget_values()
    assert len(beginning.known(TRAINING, KEY).missing) == 10


def test_a_folder_without_room(beginning: Beginning, tmp_path: Path) -> None:
    (tmp_path / "reference").write_text("a file")
    with pytest.raises(
        CacheError, match=r"reference/training/.* cannot be written .* Set run\.folder to a writable folder"
    ):
        beginning.write(MODELS, [TRAINING], [values(TRAINING, -1.0)])
