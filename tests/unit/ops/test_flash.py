"""The package flash-attn-4 where it is missing, or installed and broken. What its kernels compute is for tests/gpu."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from isopref.ops import flash
from isopref.ops.attention import kernel_for

FILES = ("__init__.py", "cute/__init__.py", "cute/interface.py")
SYMBOL = "libcute_dsl.so: undefined symbol: _ZN3tvm"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been imported yet, on a card that the package knows."""
    monkeypatch.setattr(flash, "knows", lambda _device: True)
    flash.load.cache_clear()
    yield
    flash.load.cache_clear()


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A flash_attn on the path in which one file fails."""
    about = folder / "flash_attn_4-4.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    for file in FILES:
        (folder / "flash_attn" / file).write_text(f"raise ImportError({SYMBOL!r})\n" if file == broken else "")
    monkeypatch.syspath_prepend(folder)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("broken", FILES)
def test_a_package_that_cannot_be_imported_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    package(tmp_path, monkeypatch, broken)
    assert not flash.has_flash(torch.device("cuda"))
    assert flash.load() == flash.Package(None, f"ImportError: {SYMBOL}")


def test_a_package_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch, broken="nothing")
    assert flash.has_flash(torch.device("cuda"))
    assert flash.load().fault is None


@pytest.mark.parametrize(
    ("widths", "half", "softcap", "newer", "kernel"),
    [
        ((64, 64), True, None, True, "flash-attn-4"),
        ((128, 128), True, None, True, "flash-attn-4"),
        ((128, 128), True, None, False, "varlen_attn"),
        ((256, 256), True, None, True, "varlen_attn"),
        ((192, 128), True, None, True, "varlen_attn"),
        ((72, 64), True, None, True, "varlen_attn"),
        ((512, 512), True, None, True, "segments"),
        ((128, 320), True, None, False, "segments"),
        ((20, 20), True, None, False, "segments"),
        ((64, 64), False, None, True, "segments"),
        ((64, 64), True, 50.0, True, "segments"),
    ],
)
def test_the_kernel_of_a_head(
    widths: tuple[int, int], half: bool, softcap: float | None, newer: bool, kernel: str
) -> None:
    """One function chooses it for a run and for a plan."""
    assert kernel_for(*widths, half=half, softcap=softcap, newer=newer) == kernel


def test_another_flash_attention_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    package(tmp_path, monkeypatch, broken="__init__.py")
    monkeypatch.setattr(flash, "distribution", missing)
    assert not flash.has_flash(torch.device("cuda"))
    assert flash.load() == flash.Package(None, None)
