"""Prints what pyproject.toml requires, a line each, without torch: `requirements.py FILE EXTRA,EXTRA,...`."""

import sys
import tomllib
from pathlib import Path

path, extras = sys.argv[1:3]
project = tomllib.loads(Path(path).read_text())["project"]
wanted = list(project["dependencies"])
for extra in filter(None, extras.split(",")):
    wanted += project["optional-dependencies"][extra]
print(*(line for line in wanted if not line.startswith("torch")), sep="\n")
