"""Runs scripts that publish and end before they close anything, each in a forked process; prints how they ended as JSON.

Called with pairs of a moment and an end, such as ``published:exit``. What a script prints itself, and its exit status, must be
all there is.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile

MEMBER = """
from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.sync import Publisher
engine = CheckpointEngineRegistry().create("gloo")
member = Publisher("trainer-0", address, shards=[LocalShard.whole(SPEC, weight)], engine=engine)
member.publish(1)
member.fence()
"""
"""Takes part in a run of another process."""

MOMENTS = {
    "published": "weights.publish(1)",
    "committing": "shelf.stuck = True; weights.publish(1); assert shelf.committing.wait(60)",
    "member": MEMBER,
}
"""How far the script has come, after `BEGIN`."""

ENDS = {
    "file": "",
    "exception": "raise ValueError('mine')",
    "exit": "sys.exit(3)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "fork": "with weights:\n    child = os.fork()\n    if not child: sys.exit(5)\n    wait_for(child)\n    goes_on()",
    "forgotten": "del weights, shelf",
}
"""Last lines of a script, by the name of its end. They run after the lines of a moment."""

BEGIN = """
import asyncio, os, signal, sys, threading, time
import torch
from patience import PATIENT
from shelf import SPEC, Shelf
from weightlane.sync import CollectivePublisher, LocalShard, SyncConfig

class StuckShelf(Shelf):
    stuck = False
    committing = threading.Event()
    async def commit(self, version):
        self.committing.set()
        while self.stuck:
            await asyncio.sleep(0.01)
        return await super().commit(version)

def wait_for(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5

def goes_on():
    weight.fill_(7)
    weights.publish(7)
    weights.wait()
    assert shelf.shows(7.0)

weight, shelf = torch.zeros(3, 2), StuckShelf()
options = {"socket_dir": os.environ["SOCKETS"]}
shards, config = [LocalShard.whole(SPEC, weight)], SyncConfig(**PATIENT)
weights = CollectivePublisher(shards, [shelf], backend="shm", options=options, config=config)
"""


def of_this_session(process: int) -> bool:
    """Whether a process was started here, or by one that was."""
    try:
        return os.getsid(process) == os.getsid(0)
    except ProcessLookupError:
        return False


script, results = None, {}
if __name__ == "__main__":
    import known_entry_points  # noqa: F401 - once, and not in every process
    import psutil
    import shelf  # noqa: F401 - as above: it imports torch, too

    import weightlane.ckpt_engines.engines.shared_memory.shm  # noqa: F401 - as above
    from weightlane.sync import Rendezvous

    reading, writing = os.pipe()
    if not (host := os.fork()):  # a process of its own: none of the scripts' holds a part of it
        hosted = Rendezvous.host()
        os.write(writing, json.dumps(hosted.address.to_plain()).encode())
        signal.pause()
    address = json.loads(os.read(reading, 4096))
    gc.freeze()  # a script that ends passes over all that was imported, which takes a second
    for case in sys.argv[1:]:
        moment, _, how = case.partition(":")
        said, path = tempfile.mkstemp()
        if not (process := os.fork()):
            os.dup2(said, 2)
            script = "\n".join([BEGIN, MOMENTS[moment], ENDS[how]])
            break
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        results[case] = {"status": status, "said": os.pread(said, 1 << 20, 0).decode()}
        os.close(said)
        os.unlink(path)  # noqa: PTH108 - a path is all there is
    else:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        left = [process for process in psutil.pids() if process != os.getpid() and of_this_session(process)]
        print(json.dumps({"left": left, "results": results}))
if script is not None:
    exec(compile(script, "script", "exec"), globals())  # its names are those of the program
