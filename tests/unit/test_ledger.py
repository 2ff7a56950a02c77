"""The files that ledgers become can be read by everything that reads JSON lines."""

import json
from pathlib import Path

from isopref.ledger import Ledger


def test_half_a_surrogate_pair_does_not_make_a_file_unreadable(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out.jsonl")
    cut = json.loads('"caf\u00e9 \\ud83d"')
    ledger.append({"key": cut})
    assert ledger.read({"key"}) == {"key": cut}
    ledger.finish([{"responses": [cut, "\U0001f600"]}])
    (line,) = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"responses": ["caf\u00e9 \ufffd", "\U0001f600"]}
