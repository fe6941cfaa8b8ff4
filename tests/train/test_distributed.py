"""Two processes of four devices each, over Gloo: one run, stopped by a signal to one of them."""

import os
import shutil
import socket
import types

import jax
import numpy as np
import pytest
import signalled

from normfuse.train import UsageError, distributed
from normfuse.train.config import DistributedConfig

_TRAIN = ("-m", "normfuse.train")


def _signalled(phase: str, event: str) -> tuple[str, ...]:
    return signalled.__file__, f"{phase}={event}"


@pytest.fixture
def two(spawn):
    """Starts two processes of one run."""
    with socket.socket() as reserved:  # bound, so that nobody else is given the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("localhost", 0))
        address = f"localhost:{reserved.getsockname()[1]}"

        def start(options=types.MappingProxyType({}), programs=(_TRAIN, _TRAIN)):
            together = {"distributed.coordinator": address, "distributed.num-processes": 2}
            return [
                spawn(4, program, **options, **together, **{"distributed.process-id": index})
                for index, program in enumerate(programs)
            ]

        yield start


def test_processes_stop_together_and_others_continue(two, train, finished, tmp_path, losses):
    """The second process is told, and the first learns of it: flags are read a step later."""
    first, second = two(programs=[_TRAIN, _signalled("stepping", "SIGTERM")])
    out, err = first.communicate()
    assert (first.returncode, second.wait()) == (0, 0), err
    assert "stopped by another process after step 4 of 6" in out
    assert "step" not in second.communicate()[0]  # one process speaks for all

    assert train()[0] == 0
    found, expected = (
        [float.fromhex(loss) for loss in losses(run).values()]
        for run in (tmp_path / "run", finished[0])
    )
    assert len(found) == 6
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_what_one_process_cannot_read_none_uses(two, finished, options, tmp_path, losses):
    shutil.copytree(finished[0], tmp_path / "run")
    expected = losses(finished[0])
    processes = two(options, [_TRAIN, _signalled("restoring", "failure")])
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    reason = "another process could not read"
    assert f"checkpoint of step 6 is damaged and not used: {reason}" in said[0][0]
    assert "step 4" in said[0][0]
    found = losses(tmp_path / "run")
    assert list(found) == list(expected)
    as_float = lambda runs: [float.fromhex(loss) for loss in runs.values()]
    np.testing.assert_allclose(as_float(found), as_float(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("event", "at", "code"),
    [("failure", 0, 1), pytest.param("SIGTERM+SIGTERM", 1, 143, marks=pytest.mark.slow)],
)
def test_what_ends_one_process_ends_the_others(two, event, at, code):
    """By JAX's service: at once where process 0 had it, else when heartbeats have been missing."""
    programs = [_signalled("stepping", event) if i == at else _TRAIN for i in (0, 1)]
    processes = two({"steps": 4000}, programs)
    own, others = (processes[i].communicate()[1] for i in (at, 1 - at))
    assert processes[at].returncode == code
    assert own == ("error: a disk of this process is gone\n" if event == "failure" else "")
    assert processes[1 - at].returncode not in (0, None)
    late = "unhealthy (stopped sending heartbeats):\n1\n"
    assert (late if at else "the leader task was preempted/died") in others


@pytest.fixture
def joined(monkeypatch):
    """Gives the arguments with which JAX joins, in an environment without a cluster."""
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: asked.append(given))

    def join(config=DistributedConfig(), **environment):  # noqa: B008
        asked.clear()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            distributed.initialize(config)
        fields = ("coordinator_address", "num_processes", "process_id")
        return [tuple(given[field] for field in fields) for given in asked]

    return join


def test_alone_nothing_is_joined(joined):
    assert joined() == []
    assert joined(SLURM_NTASKS="1", KUBERNETES_SERVICE_HOST="10.0.0.1") == []


def test_environment_is_read_and_flags_come_first(joined):
    environment = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    }
    assert joined(**environment) == [("a:1", 4, 3)]
    flags = DistributedConfig(coordinator="b:2", num_processes=2, process_id=0)
    assert joined(flags, **environment) == [("b:2", 2, 0)]
    with pytest.raises(UsageError, match="JAX_NUM_PROCESSES='many' must be a number"):
        joined(**environment | {"JAX_NUM_PROCESSES": "many"})


def test_clusters_are_left_to_jax(joined, monkeypatch):
    import importlib.machinery
    import importlib.util

    assert joined(SLURM_NTASKS="2") == joined(OMPI_COMM_WORLD_SIZE="8") == [(None, None, None)]
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    for found in (None, importlib.machinery.ModuleSpec("kubernetes", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        assert joined(**pod) == ([(None, None, None)] if found else [])


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("8", "8")])
def test_gpus_begin_kernels_in_order_unless_told_otherwise(monkeypatch, given, found):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, given or "")  # so that it is put back
    if given is None:
        monkeypatch.delenv(name)
    distributed.initialize(DistributedConfig())
    assert os.environ[name] == found


def test_processes_wait_for_the_last_one(monkeypatch):
    """However late it comes: the first goes on only when the key of the second is there."""
    keys, looks = {}, []

    class Client:
        def key_value_set(self, key, value):
            assert key not in keys
            keys[key] = value

        def key_value_dir_get(self, folder):
            looks.append(len(keys))
            if len(looks) == 3:
                keys[f"{folder}1"] = ""
            return [key for key in keys if key.startswith(folder)]

    monkeypatch.setattr(distributed, "coordination_client", Client)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    distributed.meet("there")
    assert looks == [1, 1, 1] and len(keys) == 2
