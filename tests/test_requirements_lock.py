"""The lock of the image's packages fits pyproject.toml, and every package in it has hashes."""

from __future__ import annotations

import re

from scripts import lock_requirements


def test_the_lock_meets_what_is_required() -> None:
    assert lock_requirements.misfits() == [], "run: python -m scripts.lock_requirements"


def test_the_image_is_made_of_the_lock() -> None:
    text = (lock_requirements.ROOT / "compose" / "Dockerfile").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
    given = {"LOCKED": "yes", "EXTRAS": lock_requirements.EXTRAS, "PYTHON": lock_requirements.PYTHON}
    assert {name: defaults[name] for name in given} == given


def test_every_package_has_hashes_and_no_index_is_named() -> None:
    text = lock_requirements.LOCK.read_text(encoding="utf-8")
    packages = re.findall(r"^(\S+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert [name for name, _ in packages] == re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE)
    assert "://" not in text and "torch" not in {name for name, _ in packages}
