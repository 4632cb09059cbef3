"""The needs of compiled kernels on a GPU, read from their cubins alone: a machine without a GPU holds them to
budgets.

A cubin is an ELF file: ``.nv.info`` holds attributes as (format, kind, size, content), of which the per-entry
ones are pairs of a symbol's index and a value; ``.text.<entry>`` holds the instructions of 16 bytes each (all
architectures since sm_70), and ``.nv.shared.<entry>`` the declared shared memory, after 1024 bytes that the
system keeps for itself since sm_90. Left out: spills apart from arrays in local memory, which only ptxas' own
log tells apart, and attributes of functions that are called (an entry's stack already includes theirs).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvcal.kernels.compile import nvrtc_version

INSTRUCTION_BYTES = 16
# Of an instruction's first two bytes, its operation without the kinds of its operands: DMUL, DADD, DSETP and
# DFMA.
_OPERATION, _FP64 = 0x1FF, range(0x28, 0x2C)

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ENTRY_FLAG = 0x10  # of a symbol's st_other: declared __global__
_REGISTERS, _STACK = 0x2F, 0x12  # EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE: (symbol, value)
_SIZED = 4  # the format of an attribute whose content has the size that follows; all others hold two bytes
_SYSTEM_SHARED = ".nv.shared.reserved.0"  # is there when every block's shared memory begins with the system's part
_SYSTEM_SHARED_BYTES = 1024


def old_compiler_bytes() -> int:
    """Local bytes beyond their budgets that NVRTC before 13.5 gives some kernels."""
    return 0 if tuple(map(int, nvrtc_version().split("."))) >= (13, 5) else 16


@dataclass(frozen=True)
class Resources:
    """One entry: ``registers`` a thread, ``local_bytes`` of stack and spills a thread,
    ``static_shared_bytes`` a block (the declared ones), and ``instructions``, the padding after the last one
    included (less than 16), of which ``fp64`` compute in double precision."""

    registers: int
    local_bytes: int
    static_shared_bytes: int
    instructions: int
    fp64: int


@dataclass(frozen=True)
class _Section:
    content: bytes
    size: int  # a section of shared memory has a size and no content
    link: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Every entry of a cubin by its name."""
    sections = _sections(cubin)
    symbols = _symbols(sections)
    values: dict[int, dict[int, int]] = {_REGISTERS: {}, _STACK: {}}
    for kind, content in _attributes(sections[".nv.info"].content):
        if kind in values:
            symbol, value = struct.unpack("<II", content)
            values[kind][symbol] = value
    reserved = _SYSTEM_SHARED_BYTES if _SYSTEM_SHARED in sections else 0
    found = {}
    for index, (name, is_entry) in enumerate(symbols):
        if is_entry:
            shared, code = sections.get(f".nv.shared.{name}"), sections[f".text.{name}"].content
            operations = (first & _OPERATION for (first,) in struct.iter_unpack("<H14x", code))
            found[name] = Resources(
                registers=values[_REGISTERS][index],
                local_bytes=values[_STACK].get(index, 0),
                static_shared_bytes=shared.size - reserved if shared else 0,
                instructions=len(code) // INSTRUCTION_BYTES,
                fp64=sum(operation in _FP64 for operation in operations),
            )
    return found


def _sections(cubin: bytes) -> dict[str, _Section]:
    """The sections by name, in their order: the symbol table names its strings by a section's number."""
    header = _ELF_HEADER.unpack_from(cubin)
    table, entry_bytes, count, names = header[6], header[11], header[12], header[13]
    headers = [_SECTION.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]
    return {
        _string(cubin, headers[names][4] + name): _Section(cubin[offset : offset + size], size, link)
        for name, _, _, _, offset, size, link, _, _, _ in headers
    }


def _symbols(sections: dict[str, _Section]) -> list[tuple[str, bool]]:
    """Every symbol's name and whether it is an entry, by index."""
    table = sections[".symtab"]
    strings = list(sections.values())[table.link].content
    return [
        (_string(strings, name), bool(other & _ENTRY_FLAG) and info & 0xF == 2)  # 2: a function
        for name, info, other, _, _, _ in _SYMBOL.iter_unpack(table.content)
    ]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of each attribute of a ``.nv.info`` section."""
    position = 0
    while position < len(content):
        form, kind, size = struct.unpack_from("<BBH", content, position)
        position += 4
        if form == _SIZED:
            yield kind, content[position : position + size]
            position += size


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
