"""A ``kvcal`` for a script or torchrun that a test runs: each call is a process of its own, forked from one
that has imported what commands import. That takes seconds, and a script calls many commands.

    python tests/support/kvcal_server.py SOCKET     serves the program of ``installed``, until it is killed
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import cli_cases

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({socket!r})
    socket.send_fds(server, [json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()], [0, 1, 2])
    sys.exit(int(server.recv(8)))
"""


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """The program ``kvcal`` in ``folder``, whose name is short: that of a socket takes 100 bytes."""
    address, program = folder / "socket", folder / "bin" / "kvcal"
    program.parent.mkdir()
    program.write_text(CLIENT.format(python=sys.executable, socket=str(address)))
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, __file__, address], env=environment, start_new_session=True)
    try:
        while not address.exists() and server.poll() is None:
            time.sleep(0.05)
        yield program
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # and what it forked
        server.wait()


def answer(client: socket.socket) -> None:
    """Run a call of kvcal or a script with the caller's folder, environment and streams; reply its code."""
    message, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
    folder, environment, arguments = json.loads(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    if arguments and arguments[0].endswith(".py"):
        sys.argv, code = arguments, 0
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    else:
        code = cli_cases.exit_code(*arguments)
    sys.stdout.flush()
    client.sendall(str(code).encode())


def serve(address: str) -> None:
    """Fork a process for each connection."""
    for name in ("kvcal.report", "kvcal.stages.pipeline", "kvcal.stages.compare"):
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)
        while True:
            client, _ = server.accept()
            if os.fork() == 0:
                try:
                    answer(client)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # those that ended
                    pass


if __name__ == "__main__":
    serve(sys.argv[1])
