"""Docstrings as a terminal should show them."""

from __future__ import annotations


def plain(text: str | None) -> str:
    """Without the marks of code: a terminal has no other font for it."""
    return (text or "").replace("`", "")
