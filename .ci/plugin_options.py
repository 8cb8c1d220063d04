"""Writes the plugin sections of plugins.toml from what the plugins of this repository declare.

Run it after an option of a plugin has changed; a test compares the two.
"""

from __future__ import annotations

import json
from pathlib import Path

from uccl_ep_core import registry
from uccl_ep_core.options import Option

LAST_LINE = "# used. What follows is written by .ci/plugin_options.py from the plugins' own declarations.\n"


def line(name: str, option: Option) -> str:
    """``name = default  # help``, or the help above where the line would be long."""
    value = str(option.default).lower() if isinstance(option.default, bool) else json.dumps(option.default)
    words = ", ".join(str(choice) for choice in option.choices or () if choice != "")
    comment = f"# {option.help}{f' ({words})' if words else ''}"
    setting = f"{name} = {value}"
    one = f"{setting:<34} {comment}"
    return f"{one}\n" if len(one) <= 120 else f"{comment}\n{setting}\n"


def sections() -> str:
    """All plugin sections, in the order of the names."""
    text = ""
    for section, group in (("gpu_backends", registry.GPU_BACKENDS), ("transports", registry.TRANSPORTS)):
        for plugin in registry.plugins(group):
            if plugin.loaded is not None and plugin.loaded.OPTIONS and plugin.distribution.startswith("uccl_ep "):
                text += f"\n[{section}.{plugin.name}]\n"
                text += "".join(line(name, option) for name, option in plugin.loaded.OPTIONS.items())
    return text


if __name__ == "__main__":
    file = Path(__file__).parents[1] / "plugins.toml"
    head, marker, _ = file.read_text().partition(LAST_LINE)
    file.write_text(head + marker + sections())
