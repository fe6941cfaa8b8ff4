"""Processes of their own for tests: workers that print one line of JSON."""

import json
import os
import pathlib
import subprocess
import sys

SECONDS = 120


def xla_flags(devices: int) -> str:
    """The flags that this process was given, for so many CPU devices."""
    given = os.environ.get("XLA_FLAGS", "").split()
    name = "--xla_force_host_platform_device_count"
    return " ".join([*(flag for flag in given if not flag.startswith(name)), f"{name}={devices}"])


def start(worker: pathlib.Path, devices: int, *arguments, **environment) -> subprocess.Popen:
    """A process of `worker` with so many CPU devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
        "XLA_FLAGS": xla_flags(devices),
        **environment,
    }
    command = [sys.executable, str(worker), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes)


def answers(*processes: subprocess.Popen) -> list:
    """The last output of the processes; all are ended, whatever happens to one."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def compilation_cache(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a process that keeps every program it compiles in `folder`."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
