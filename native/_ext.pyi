from typing import TypedDict

from typing_extensions import CapsuleType

class Registrations(TypedDict):
    types: dict[str, dict[str, CapsuleType]]
    targets: dict[str, CapsuleType | dict[str, CapsuleType]]

ffi_api_version: tuple[int, int]

def registrations() -> dict[str, Registrations]: ...
