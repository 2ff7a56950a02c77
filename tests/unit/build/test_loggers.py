"""What loggers say of themselves."""

from isopref.build.loggers import without_password


def test_no_password_of_a_tracking_server_is_shown() -> None:
    assert without_password("at https://me:secr@t@host:5000/a (and postgresql://u:p@db/x)") == (
        "at https://***@host:5000/a (and postgresql://***@db/x)"
    )
    assert without_password("sqlite:////tmp/a@b/mlflow.db") == "sqlite:////tmp/a@b/mlflow.db"
