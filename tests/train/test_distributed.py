"""Two processes of four devices each, over Gloo: one run, stopped by a signal to one of them."""

import re
import signal
import socket
import time

import jax
import numpy as np
import pytest

from normfuse.train import distributed
from normfuse.train.config import DistributedConfig
from normfuse.train.errors import UsageError

OPTIONS = {"steps": 40, "checkpoint.every": 10}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _two(spawn):
    together = {
        "distributed.coordinator": f"localhost:{_free_port()}",
        "distributed.num-processes": 2,
    }
    return [
        spawn(devices=4, **OPTIONS, **together, **{"distributed.process-id": index})
        for index in (0, 1)
    ]


@pytest.mark.parametrize("resumed_by", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_stop_together_and_others_continue(spawn, train, tmp_path, losses, resumed_by):
    first, second = _two(spawn)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
        assert time.monotonic() < deadline and first.poll() is None and second.poll() is None
        time.sleep(0.01)
    second.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=200)
    assert (first.returncode, second.wait(timeout=60)) == (0, 0), err
    stopped = re.search(r"stopped by another process after step (\d+) of 40", out)
    assert stopped and 3 <= int(stopped[1]) < 40
    assert "step" not in second.communicate()[0]  # one process speaks for all

    if resumed_by == 1:
        assert train(**OPTIONS)[0] == 0
    else:
        assert [process.communicate(timeout=200)[1] for process in _two(spawn)] == ["", ""]
    assert train(**OPTIONS, out_dir=tmp_path / "alone")[0] == 0
    found, expected = (
        [float.fromhex(loss) for loss in losses(tmp_path / name).values()]
        for name in ("run", "alone")
    )
    assert len(found) == 40
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.fixture
def joined(monkeypatch):
    """Gives what JAX is asked to join, in an environment of no cluster."""
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
        joined(JAX_NUM_PROCESSES="many")


def test_clusters_are_left_to_jax(joined, monkeypatch):
    import importlib.machinery
    import importlib.util

    assert joined(SLURM_NTASKS="2") == joined(OMPI_COMM_WORLD_SIZE="8") == [(None, None, None)]
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    for found in (None, importlib.machinery.ModuleSpec("kubernetes", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        assert joined(**pod) == ([(None, None, None)] if found else [])
