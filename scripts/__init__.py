"""Scripts of the repository, importable so that tests can share their pure functions."""
