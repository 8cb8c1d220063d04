"""Prints requirements of pyproject.toml, one a line, so that they are written down only there.

Usage: requirements.py SECTION ...   (build-system, dependencies, or the name of an extra)
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
sections = {
    "build-system": project["build-system"]["requires"],
    "dependencies": project["project"]["dependencies"],
    **project["project"]["optional-dependencies"],
}
for section in sys.argv[1:]:
    print("\n".join(sections[section]))
