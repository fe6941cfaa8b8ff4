"""Parts of a benchmark, each in a process of its own, that print their results as JSON lines."""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence


def emit(**line) -> None:
    print(json.dumps(line), flush=True)


def run_parts(
    parser: argparse.ArgumentParser,
    parts: dict[str, Callable[[argparse.Namespace], None]],
    default: Sequence[str],
    table: Callable[[list[dict]], None],
) -> None:
    """Runs the `default` parts, or the one of `--part`, and shows a table of their lines.

    In processes of their own: JAX takes the GPU's memory, and a failure ends one part only.
    """
    parser.add_argument("--part", choices=parts, help="only this part")
    parser.add_argument("--json", type=pathlib.Path, help="also write all lines there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return parts[arguments.part](arguments)
    lines = []
    for part in [arguments.part] if arguments.part else default:
        command = [sys.executable, *sys.argv, "--inside", "--part", part]
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for text in process.stdout or ():
                    print(text, end="", flush=True)
                    if text.startswith("{"):
                        lines.append(json.loads(text))
        except KeyboardInterrupt:
            break
        if process.returncode:
            print(f"{part}: ended with {process.returncode}")
    table(lines)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
