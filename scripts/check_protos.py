"""No released field changes meaning: compares the protos with `protos/fields.lock`.

    python scripts/check_protos.py             fail when a locked field, enum value or call changed or went away
    python scripts/check_protos.py --update    after an addition: lock it too (refused while the check fails)

A field that is no longer wanted goes into `reserved` of its message, number and name; then its line may go.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "protos" / "fields.lock"
_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def describe(files: list[FileDescriptor]) -> dict[str, str]:
    """What must not change: "message.number" → "name type", enum values and calls likewise."""
    found: dict[str, str] = {}
    for file in files:
        for message in file.message_types_by_name.values():
            _message(message, found)
        for enum in file.enum_types_by_name.values():
            _enum(enum, found)
        for service in file.services_by_name.values():
            for method in service.methods:
                sides = [
                    f"{'stream ' if streams else ''}{kind.full_name}"
                    for streams, kind in (
                        (method.client_streaming, method.input_type),
                        (method.server_streaming, method.output_type),
                    )
                ]
                found[f"{service.full_name}/{method.name}"] = " -> ".join(sides)
    return found


def _message(message: Descriptor, found: dict[str, str]) -> None:
    for field in message.fields:
        kind = _TYPES[field.type]
        if field.message_type is not None:
            kind = field.message_type.full_name
        elif field.enum_type is not None:
            kind = field.enum_type.full_name
        if field.is_repeated:
            kind = f"repeated {kind}"
        if field.containing_oneof is not None:
            kind = f"{kind} oneof {field.containing_oneof.name}"
        found[f"{message.full_name}.{field.number}"] = f"{field.name} {kind}"
    for nested in message.nested_types:
        _message(nested, found)
    for enum in message.enum_types:
        _enum(enum, found)


def _enum(enum: EnumDescriptor, found: dict[str, str]) -> None:
    for value in enum.values:
        found[f"{enum.full_name}={value.number}"] = value.name


def reserved(files: list[FileDescriptor]) -> set[str]:
    """Numbers that messages reserve, as "message.number"."""
    found = set()
    for file in files:
        for message in file.message_types_by_name.values():
            proto = DescriptorProto()
            message.CopyToProto(proto)
            for span in proto.reserved_range:
                found |= {
                    f"{message.full_name}.{number}" for number in range(span.start, min(span.end, span.start + 1000))
                }
    return found


def compare(locked: dict[str, str], found: dict[str, str], kept: set[str]) -> list[str]:
    """One line for each locked thing that changed; `kept` are reserved numbers, whose fields may be gone."""
    wrong = []
    for key, meaning in locked.items():
        now = found.get(key)
        if now is None and key not in kept:
            wrong.append(f"{key} was '{meaning}' and is gone: reserve its number and name")
        elif now is not None and now != meaning:
            wrong.append(f"{key} was '{meaning}' and is '{now}': take a new number")
    return wrong


def load_files() -> list[FileDescriptor]:
    """Descriptors of all generated modules."""
    package = importlib.import_module("kvmesh.rpc.pb")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.name.endswith("_pb2"))
    return [importlib.import_module(f"kvmesh.rpc.pb.{name}").DESCRIPTOR for name in names]


def read_lock(text: str) -> dict[str, str]:
    """The lock file's "key: meaning" lines."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split(": ", 1) for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Check or update; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--lock", type=Path, default=LOCK)
    args = parser.parse_args(argv)
    files = load_files()
    found = describe(files)
    locked = read_lock(args.lock.read_text(encoding="utf-8")) if args.lock.exists() else {}
    wrong = compare(locked, found, reserved(files))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if args.update:
        head = "# Every released field, enum value and call; written by scripts/check_protos.py --update.\n"
        args.lock.write_text(head + "".join(f"{key}: {found[key]}\n" for key in found), encoding="utf-8")
        return 0
    new = [key for key in found if key not in locked]
    if new:
        shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
        print(f"not locked yet: {shown}; run: python scripts/check_protos.py --update", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
