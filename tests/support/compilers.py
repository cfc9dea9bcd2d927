"""What tests that compile need."""

from __future__ import annotations

import shutil

import pytest

from kvmesh.native.compiling import COMPILERS

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler: install g++")
