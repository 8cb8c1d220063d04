"""The parameter structs of Python have the fields of the kernels' own, at the compiler's offsets."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep_core import _native, kernel_parameters

ROOT = Path(__file__).parents[2]
CPP_NAMES = {"LayoutStruct": "Layout", "VerdictStruct": "Verdict"}
STRUCTS = {
    CPP_NAMES.get(name, name): struct
    for name, struct in vars(kernel_parameters).items()
    if isinstance(struct, type) and issubclass(struct, ctypes.Structure) and struct is not ctypes.Structure
}


def test_offsets_are_the_compilers(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            place = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'std::printf("{name}.{field} %zu %zu\\n", {place});')
    source = tmp_path / "offsets.cpp"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "primitives.hpp"\n#include "parameters.hpp"\n'
        "using namespace uccl_ep;\nint main() {\n" + "\n".join(lines) + "\n}\n"
    )
    folders = ("gpu_backends/host/native", "core/kernels", "core/native/include")
    command = [compiler, "-std=c++20", "-Wno-invalid-offsetof", *(f"-I{ROOT / folder}" for folder in folders)]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "offsets")], check=True, timeout=120)
    done = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True, timeout=60)
    mine = []
    for name, struct in STRUCTS.items():
        mine.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            mine.append(f"{name}.{field} {place.offset} {place.size}")
    assert done.stdout.splitlines() == mine


def test_every_kernels_struct_is_here() -> None:
    names = {
        line.split()[1]
        for line in (ROOT / "core/kernels/parameters.hpp").read_text().splitlines()
        if line.startswith("struct ") and line.endswith("{")
    }
    assert names - set(STRUCTS) == set()


@pytest.mark.parametrize("kind", ["PayloadType", "Quantization"])
def test_enumerations_agree(kind: str) -> None:
    text = (ROOT / "core/kernels/parameters.hpp").read_text()
    body = text[text.index(f"enum class {kind}") :].split("{", 1)[1].split("}", 1)[0]
    values = [line.split("=")[1].split(",")[0].strip() for line in body.splitlines() if "=" in line]
    ours = [int(member) for member in getattr(kernel_parameters, kind)]
    assert [int(value) for value in values] == ours[: len(values)]  # Python numbers further types of payload


def enumeration(path: str, name: str) -> dict[str, int]:
    text = (ROOT / path).read_text()
    body = text[text.index(f"enum class {name} ") :].split("{", 1)[1].split("}", 1)[0]
    pairs = (line.split("//")[0].split("=") for line in body.splitlines() if "=" in line)
    return {word.strip(): int(value.strip(" ,")) for word, value in pairs}


def test_numbers_that_both_sides_name() -> None:
    from uccl_ep import failures

    layout = "core/native/include/uccl_ep/layout.hpp"
    assert len(failures.REASONS) == len(enumeration(layout, "Reason")) == len(_native.Reason.__members__)
    assert len(failures.PHASES) == len(enumeration(layout, "Phase"))
    differences = enumeration("core/kernels/parameters.hpp", "Difference")
    own = {"kExpertRows": failures.EXPERT_ROWS, "kExpertIndex": failures.EXPERT_INDEX}
    assert set(differences.values()) == {*failures.DIFFERENCES, *own.values()}
    assert {name: differences[name] for name in own} == own


def test_spans_of_kernels_are_named() -> None:
    """By the names of the enumerations, in words, and each kernel by that under which it is launched."""
    from uccl_ep.tracing import names

    def words(name: str) -> str:
        return " ".join(re.findall("[A-Z][a-z]+", name)).lower()

    spans = "core/kernels/spans.hpp"
    activities = enumeration(spans, "Activity")
    assert tuple(map(words, activities)) == names.ACTIVITIES
    assert list(activities.values()) == list(range(len(activities)))
    kernels = enumeration(spans, "TracedKernel")
    assert list(kernels.values()) == list(range(len(kernels)))
    sources = [path.read_text() for path in (ROOT / "core/kernels").glob("*.hpp")]
    for name, mine in zip(kernels, names.KERNELS, strict=True):
        launched = words(name).replace("low latency", "ll").replace("direct", "ll direct").replace(" ", "_")
        assert launched == mine
        body = f"UCCL_EP_KERNEL(uccl_ep_{mine}, "
        (source,) = (text for text in sources if body in text)
        # Its own number is in it, not that of the kernel beside it.
        assert f"TracedKernel::{name})" in source[source.index(body) :].split("\n}\n")[0]
