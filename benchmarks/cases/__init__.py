"""The cases: a file each."""
