"""Two processes of four devices each, over Gloo: one run, stopped by a signal to one of them."""

import re
import signal
import socket
import time

import numpy as np

OPTIONS = {"steps": 40, "checkpoint.every": 4}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_processes_stop_together_and_one_alone_continues(spawn, train, tmp_path, losses):
    together = {
        "distributed.coordinator": f"localhost:{_free_port()}",
        "distributed.num-processes": 2,
    }
    first, second = (
        spawn(devices=4, **OPTIONS, **together, **{"distributed.process-id": index})
        for index in (0, 1)
    )
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

    assert train(**OPTIONS)[0] == 0
    assert train(**OPTIONS, out_dir=tmp_path / "alone")[0] == 0
    found, expected = (
        [float.fromhex(loss) for loss in losses(tmp_path / name).values()]
        for name in ("run", "alone")
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
