"""The reader of code object metadata, on the fake object and on damaged ones."""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
from fakes import KERNELS, FakeFiles, encode

from uccl_ep_hip import build
from uccl_ep_hip.code_object import CodeObjectError, _decode, parameter_sizes


def test_sizes_of_explicit_parameters(files: FakeFiles) -> None:
    if files.vendor != "hip":
        pytest.skip("the other vendor's objects have no such note")
    assert parameter_sizes(files.image.read_bytes()) == {name: ctypes.sizeof(kind) for name, kind in KERNELS.items()}


def test_a_kernel_of_two_arguments_is_refused(files: FakeFiles) -> None:
    if files.vendor != "hip":
        pytest.skip("the other vendor's objects have no such note")
    with pytest.raises(CodeObjectError, match=r"kernel uccl_ep_dispatch takes .* not one struct"):
        parameter_sizes(files.split.read_bytes())


@pytest.mark.parametrize(
    "value",
    [0, 127, 300, "short", "x" * 40, [1, [2, "three"]], {"a": {"b": [True, False]}}, list(range(15)), list(range(20))],
)
def test_values_decode_as_they_were_encoded(value: object) -> None:
    data = encode(value)
    assert _decode(data, 0) == (value, len(data))


@pytest.mark.parametrize(
    ("data", "value"), [(b"\xc0", None), (b"\xff", -1), (b"\xce\0\1\0\0", 65536), (b"\xd1\xff\0", -256)]
)
def test_other_encodings(data: bytes, value: object) -> None:
    assert _decode(data, 0) == (value, len(data))


def test_damage_is_an_error_and_not_a_guess(files: FakeFiles) -> None:
    if files.vendor != "hip":
        pytest.skip("the other vendor's objects have no such note")
    image = files.image.read_bytes()
    with pytest.raises(CodeObjectError, match="not an ELF"):
        parameter_sizes(b"garbage")
    with pytest.raises(CodeObjectError):
        parameter_sizes(image[: len(image) // 2])
    with pytest.raises(CodeObjectError, match="no metadata"):
        parameter_sizes(image.replace(b"AMDGPU", b"amdgpu"))


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="clang is not installed as a Python package")
@pytest.mark.parametrize("architecture", ["gfx942", "gfx1201"])
def test_real_code_objects_agree_with_the_bindings(architecture: str) -> None:
    (unit,) = build.OFFLINE.units()
    image = build.OFFLINE.compile(unit, architecture).image
    sizes = {name: ctypes.sizeof(KERNELS[name]) for name in unit.kernels}
    assert parameter_sizes(image) == sizes and set(KERNELS) - set(sizes) == {"uccl_ep_clock"}  # of use to a trace alone
