"""`python -m isopref`."""

from isopref.cli.main import main

main()
