"""Reads what an AMD code object says of its kernels: the size of the parameter struct each one takes.

The HIP runtime has no call for it, and without the check a library and kernels of different builds
would exchange garbage. The facts lie in an ELF note, encoded as MessagePack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from uccl_ep_core.errors import EPError

_NOTE_SECTION = 7  # SHT_NOTE
_METADATA_NOTE = 32  # NT_AMDGPU_METADATA
_OWNER = b"AMDGPU\0"


class CodeObjectError(EPError):
    """The bytes are no code object, its metadata cannot be read, or a kernel does not take one struct."""


def parameter_sizes(image: bytes) -> dict[str, int]:
    """Bytes of the parameter struct by kernel name.

    Raises:
        CodeObjectError: see there.
    """
    try:
        metadata = _decode(_metadata(image), 0)[0]
        return {
            kernel[".name"]: _struct_bytes(kernel[".name"], kernel.get(".args", ()))
            for kernel in metadata["amdhsa.kernels"]
        }
    except (struct.error, KeyError, IndexError, TypeError, ValueError) as error:
        raise CodeObjectError(f"the code object's metadata cannot be read: {error!r}") from error


def _struct_bytes(name: str, arguments: Sequence[dict[str, Any]]) -> int:
    # Behind the kernel's own arguments lie hidden ones, which the runtime fills in.
    own = [argument for argument in arguments if not argument[".value_kind"].startswith("hidden_")]
    layout = [(argument[".value_kind"], argument[".offset"], argument[".size"]) for argument in own]
    # A launch passes the address of one struct: the runtime would read a second argument from beyond it.
    if len(layout) != 1 or layout[0][:2] != ("by_value", 0):
        raise CodeObjectError(f"kernel {name} takes (kind, offset, bytes) {layout}, not one struct: of another build")
    return int(layout[0][2])


def _metadata(image: bytes) -> bytes:
    if image[:4] != b"\x7fELF":
        raise CodeObjectError("not an ELF file")
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    for index in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", image, sections + index * size + 4)
        end = offset + length
        while kind == _NOTE_SECTION and offset < end:
            name_bytes, data_bytes, note = struct.unpack_from("<III", image, offset)
            data = offset + 12 + _padded(name_bytes)
            if note == _METADATA_NOTE and image[offset + 12 : offset + 12 + name_bytes] == _OWNER:
                return image[data : data + data_bytes]
            offset = data + _padded(data_bytes)
    raise CodeObjectError("there is no metadata note")


def _padded(length: int) -> int:
    return -(-length // 4) * 4


def _decode(data: bytes, at: int) -> tuple[Any, int]:
    """The value at an offset and the offset behind it."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag < 0x90:
        return _decode_map(data, at, tag & 0x0F)
    if tag < 0xA0:
        return _decode_list(data, at, tag & 0x0F)
    if tag < 0xC0:
        return _decode_text(data, at, tag & 0x1F)
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _NUMBERS:
        form = _NUMBERS[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    form, decode = _SIZED[tag]
    (length,) = struct.unpack_from(form, data, at)
    value: tuple[Any, int] = decode(data, at + struct.calcsize(form), length)
    return value


def _decode_map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    result = {}
    for _ in range(count):
        key, at = _decode(data, at)
        result[key], at = _decode(data, at)
    return result, at


def _decode_list(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    result = []
    for _ in range(count):
        value, at = _decode(data, at)
        result.append(value)
    return result, at


def _decode_text(data: bytes, at: int, length: int) -> tuple[str, int]:
    return data[at : at + length].decode(), at + length


_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
            0xD3: ">q"}  # fmt: skip
_SIZED: dict[int, tuple[str, Any]] = {
    0xD9: (">B", _decode_text),
    0xDA: (">H", _decode_text),
    0xDB: (">I", _decode_text),
    0xDC: (">H", _decode_list),
    0xDD: (">I", _decode_list),
    0xDE: (">H", _decode_map),
    0xDF: (">I", _decode_map),
}
