"""Servers under measurement: moed, and another one that is started here or runs already."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from tests.daemon import free_port

START_S = 300.0
STOP_S = 30.0
LAST_BYTES = 2000
VLLM = "{exe} serve {model} --port {port} --dtype bfloat16 --max-model-len {length}"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """A process that serves HTTP; use as a context. `ready_s` says how long its start took."""

    def __init__(self, command: Sequence[str], url: str, probe: str, num_threads: int) -> None:
        environment = {**os.environ, **VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)}
        started = time.monotonic()
        self.url = url
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait(url + probe)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started

    def _wait(self, probe: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                how = f"ended with {self.process.returncode}"
                raise RuntimeError(f"{self.process.args!r} {how}: {self._last_words()}")
            try:
                if httpx.get(probe, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(
            f"{self.process.args!r} is not ready after {START_S:.0f} s: {self._last_words()}"
        )

    def _last_words(self) -> str:
        """The end of what it printed."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LAST_BYTES))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_moed(model: str, num_ranks: int, num_threads: int, max_model_len: int) -> Server:
    """All threads together are `num_threads`."""
    port = free_port()
    command = [sys.executable, "-m", "moed.server", "serve", *([model] if model else [])]
    command += ["-dp", str(num_ranks), "--port", str(port), "--dtype", "bfloat16"]
    command += ["--num-threads", str(num_threads // num_ranks)]
    command += ["--max-model-len", str(max_model_len)]
    return Server(command, f"http://127.0.0.1:{port}", "/readyz", num_threads // num_ranks)


def start_peer(peer: str, model: str, num_threads: int, max_model_len: int) -> Server:
    """`peer` is vLLM's executable, or any command with {port}, and {model} where it wants one."""
    port = free_port()
    template = peer if "{port}" in peer else VLLM.replace("{exe}", shlex.quote(peer))
    command = shlex.split(template.format(port=port, model=model, length=max_model_len))
    return Server(command, f"http://127.0.0.1:{port}", "/health", num_threads)
