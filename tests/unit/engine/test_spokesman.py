"""Which rank reports an error: the first, if it fails too, however long it then takes to end."""

import os

import pytest
from torch._C._distributed_c10d import TCPStore

from isopref.engine.environment import environment
from isopref.engine.spokesman import announce_failure, first_rank_failed
from isopref.errors import ConfigError


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that a launcher keeps, on a port of its own."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(kept.port))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return kept


@pytest.mark.usefixtures("store")
def test_another_rank_reports_what_the_first_does_not_meet() -> None:
    assert not first_rank_failed(within_s=0.2)


@pytest.mark.usefixtures("store")
def test_the_first_rank_reports_what_it_meets_too() -> None:
    announce_failure()
    assert first_rank_failed(within_s=0)


@pytest.mark.usefixtures("store")
def test_a_failure_of_an_earlier_attempt_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    announce_failure()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not first_rank_failed(within_s=0.2)


def test_a_rank_that_can_ask_nobody_reports_its_error_itself(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as other:  # a port that nobody listens on
        other.setenv("MASTER_PORT", "1")
        assert not first_rank_failed(within_s=0.2)
    monkeypatch.delenv("MASTER_ADDR")
    assert not first_rank_failed(within_s=0.2)
    announce_failure()  # of one process: nothing to tell
    assert not store.check(["isopref attempt 0/the first rank failed"])


@pytest.mark.usefixtures("store")
def test_it_is_announced_before_anything_is_torn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("isopref.engine.environment.init_distributed", lambda **_: None)
    seen = []
    monkeypatch.setattr("isopref.engine.environment.dist.is_initialized", lambda: True)
    monkeypatch.setattr("isopref.engine.environment.own_rank", lambda: 0)
    monkeypatch.setattr(
        "isopref.engine.environment.dist.destroy_process_group", lambda: seen.append(first_rank_failed(within_s=0))
    )
    with pytest.raises(ConfigError), environment(device="cpu", seed=0, process_group=True):
        raise ConfigError(f"of process {os.getpid()}")
    assert seen == [True]
