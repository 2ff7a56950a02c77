"""What only the tests of this repository need; `isopref.testing` holds what is useful to others' tests too."""
