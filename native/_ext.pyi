from typing import Any, TypedDict

from typing_extensions import CapsuleType

class Registrations(TypedDict):
    types: dict[str, Any]  # {"type_id": capsule, "type_info": capsule} each
    targets: dict[str, CapsuleType | dict[str, CapsuleType]]

ffi_api_version: tuple[int, int]

def registrations() -> dict[str, Registrations]: ...
