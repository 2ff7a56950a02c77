"""`isopref push`: its arguments. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from isopref.runs.read import read_run


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="Repository on the hub, as OWNER/NAME.", show_default=False)
    ],
    license_id: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="ID", help="License for the model card, e.g. apache-2.0.", show_default=False
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private when creating it.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the model card and list the files, but send nothing.")
    ] = False,
) -> None:
    """Upload a run's model to the Hugging Face hub, with a model card.

    The card states what the model was trained on and how, held-out metrics with their intervals, and versions. It is
    written to RUN/card.md first. An existing card.md is used unchanged, so you can edit it before you push.

    \b
    Examples:
      isopref push runs/first me/my-model --dry-run
      isopref push runs/first me/my-model --license apache-2.0 --private
    """
    record = read_run(run)
    from isopref.build.push import check_repo, files_of, names_another, states_license, upload, write_card

    check_repo(repo)
    files_of(record, run)  # refuses a run without a model before it writes anything
    card = write_card(record, repo, license_id)
    files = files_of(record, card)
    if not states_license(card):
        print(f"note: the card states no license. Fill it in: {card}")
    if names_another(card, repo):
        print(f"note: {card} names another repository than {repo}. Edit it, or remove it to get a new one.")
    for name, path in files.items():
        print(f"  {path.stat().st_size:>14,}  {name}")
    if dry_run:
        print(f"Wrote {card}. Nothing was sent.")
        return
    print(f"Uploaded to {upload(files, repo, private=private, message=f'Upload {record.name}, made with isopref')}")
