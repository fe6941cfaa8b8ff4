"""From a command line and a YAML file to a configuration: preset < file < flags."""

import argparse
import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any

import tyro
import yaml

from .config import Preset, TrainConfig
from .errors import UsageError
from .recipes import recipe


def parse(argv: list[str]) -> TrainConfig:
    """Reads a training run's configuration from its command line.

    Args:
      argv: the flags of `normfuse train`. `--config FILE` names a YAML file whose keys are the
        flags' names, nested (`mesh: {data: 2}`) or dotted.

    Raises:
      UsageError: a key of the file is unknown or its value of another type, with path and line.
      SystemExit: 2 for an unknown flag or value, 0 after `--help`.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--preset", choices=typing.get_args(Preset))
    try:
        found, _ = first.parse_known_args(argv)
        path, preset = found.config, found.preset
    except argparse.ArgumentError:
        path, preset = None, None  # tyro reports it better
    entries = _entries(path) if path else {}
    if preset is None:
        preset = _value(*entries["preset"], Preset) if "preset" in entries else "tiny"
    config = recipe(preset)
    for name, (value, where) in entries.items():
        config = _replace(config, name.split("."), value, where)
    return tyro.cli(TrainConfig, prog="normfuse train", args=argv, default=config)


def dump(config: TrainConfig) -> str:
    """Writes a configuration as YAML that `parse` reads back to the same configuration."""
    return yaml.safe_dump(as_dict(config), sort_keys=False)


def as_dict(config: Any) -> dict:
    """Gives a configuration as nested dictionaries of plain values; `config` itself is left out."""
    plain = lambda value: str(value) if isinstance(value, Path) else value
    return {
        f.name: as_dict(value) if dataclasses.is_dataclass(value) else plain(value)
        for f in dataclasses.fields(config)
        for value in [getattr(config, f.name)]
        if f.name != "config"
    }


def _entries(path: Path) -> dict[str, tuple[Any, str]]:
    """Reads a YAML file as dotted names, each with its value and its place, `FILE:LINE`."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path} is not YAML: {error}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"--config {path} must hold `name: value` lines at its top level.")
    found: dict[str, tuple[Any, str]] = {}
    _collect(root, "", path, yaml.SafeLoader(""), found)
    return found


def _collect(node, prefix, path, loader, found):
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = prefix + str(key.value).replace("-", "_")
        if name in found:
            raise UsageError(f"{where}: {name!r} is set twice, first at {found[name][1]}.")
        if isinstance(value, yaml.MappingNode):
            if not any(known.startswith(f"{name}.") for known in _names(TrainConfig)):
                raise UsageError(_unknown(name, where))
            _collect(value, f"{name}.", path, loader, found)
        else:
            found[name] = (loader.construct_object(value, deep=True), where)


def _replace(config: Any, parts: list[str], value: Any, where: str, prefix: str = "") -> Any:
    """Returns `config` with the field that `parts` leads to replaced by `value`."""
    name, *rest = parts
    full = prefix + name
    hints = _hints(type(config))
    nested = dataclasses.is_dataclass(hints.get(name))
    if name not in hints or nested != bool(rest) or full == "config":
        raise UsageError(_unknown(".".join([full, *rest]), where))
    if rest:
        new = _replace(getattr(config, name), rest, value, where, f"{full}.")
    else:
        new = _value(value, where, hints[name], full)
    return dataclasses.replace(config, **{name: new})


_hints = typing.get_type_hints  # without Annotated's extras


def _value(value: Any, where: str, hint: Any, name: str = "preset") -> Any:
    """Converts one YAML value to a field's type."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in options if option is not type(None))
    elif options:
        if value in options:
            return value
        listed = ", ".join(map(str, options))
        raise UsageError(f"{where}: {name} is {value!r}; it must be one of {listed}.")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and (is_number or _is_float(value)):
        return float(value)  # YAML 1.1 reads 1e-3 as a string
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is hint:
        return value
    raise UsageError(f"{where}: {name} is {value!r}; it must be of type {hint.__name__}.")


def _is_float(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def _names(cls: Any, prefix: str = "") -> list[str]:
    names = []
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            names += _names(hint, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _unknown(name: str, where: str) -> str:
    names = [known for known in _names(TrainConfig) if known != "config"]
    last = {known.rsplit(".")[-1]: known for known in reversed(names)}
    close = difflib.get_close_matches(name, names, 1) or [
        last[match] for match in difflib.get_close_matches(name.rsplit(".")[-1], last, 1)
    ]
    hint = f"Did you mean {close[0]!r}?" if close else "`normfuse train --help` lists them."
    return f"{where}: {name!r} is no setting. {hint}"
