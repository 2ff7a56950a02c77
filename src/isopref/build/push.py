"""Uploads a run's model to a hub, with a model card made from the run."""

from collections.abc import Iterator
from pathlib import Path

from isopref.errors import RunError
from isopref.places import write_whole
from isopref.report.card import NO_LICENSE, model_card
from isopref.runs.files import CARD_FILE
from isopref.runs.read import RunRecord

IN_REPO = "README.md"  # what a hub shows
TOO_SOON = ("running",)


def write_card(run: RunRecord, repo: str, license_id: str | None) -> Path:
    """Write the card to the run folder. An existing card is kept: it may have been edited."""
    path = run.folder / CARD_FILE
    if path.exists() and license_id is not None:
        raise RunError(f"--license: {path} already exists. Edit its license there, or remove it.")
    if not path.exists():
        write_whole(path, model_card(run, repo, license_id).encode())
    return path


def check_repo(repo: str) -> None:
    """Raise RunError for a name that no repository can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RunError(f"REPO: {error} Write OWNER/NAME.") from error


def names_another(card: Path, repo: str) -> bool:
    """Whether a card that was there already loads the model from another repository."""
    text = card.read_text(encoding="utf-8")
    return "from_pretrained(" in text and f"from_pretrained({repo!r}" not in text


def states_license(card: Path) -> bool:
    """Whether the license has been filled in."""
    return NO_LICENSE not in card.read_text(encoding="utf-8")


def files_of(run: RunRecord, card: Path) -> dict[str, Path]:
    """What to upload: path in the repository -> file. Raises RunError for a run without a model."""
    folder = run.model_folder
    if run.status in TOO_SOON or folder is None:
        raise RunError(
            f"{run.folder}: no exported model; the run is {run.status}. Pass a finished run with run.export: true."
        )
    model = {path.relative_to(folder).as_posix(): path for path in sorted(_files(folder))}
    return {**model, IN_REPO: card}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def upload(files: dict[str, Path], repo: str, *, private: bool, message: str) -> str:
    """Create the repository if it is new, and upload the files in one commit. Returns its URL."""
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(library_name="isopref")
    try:
        created = api.create_repo(repo, private=private, exist_ok=True)
        adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
        api.create_commit(created.repo_id, adds, commit_message=message)
    except LocalTokenNotFoundError as error:
        raise RunError(f"{repo}: you are not logged in to {constants.ENDPOINT}. Try: hf auth login") from error
    except OfflineModeIsEnabled as error:
        raise RunError(f"{repo}: HF_HUB_OFFLINE is set, so nothing can be sent. Unset it.") from error
    except HfHubHTTPError as error:
        why = error.server_message or " ".join(str(error).split())
        code = error.response.status_code
        raise RunError(
            f"{repo}: {constants.ENDPOINT} refused the upload ({code}: {why}). "
            + (
                "Log in with an account that may write there: hf auth login"
                if code in (401, 403)
                else "Try again later."
            )
        ) from error
    except ValueError as error:  # about the card's metadata, which the hub validates first
        raise RunError(f"{files[IN_REPO]}: {' '.join(str(error).split())} Correct it and try again.") from error
    except httpx.HTTPError as error:
        raise RunError(f"{repo}: {constants.ENDPOINT} cannot be reached ({error}). Check the network.") from error
    return str(created.url)
