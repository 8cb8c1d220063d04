"""Types of command-line arguments: a value that cannot be served is refused before anything runs."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """An integer of that size or more."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: at least {least} is needed")
        return value

    return integer


def seconds(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: a finite number of seconds above 0 is needed, for example 10")
    return value


def output_file(text: str) -> str:
    """A file that can be written when all is done: it may not exist yet, its folder does."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}, make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written by this user: name another file")
    return text
