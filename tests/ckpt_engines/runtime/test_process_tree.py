import os
import subprocess

from weightlane.ckpt_engines.runtime.process_tree import children_by_parent

_RESTLESS = """
import os
print(flush=True)
while True:
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        os._exit(0)
"""


def test_children_are_found_while_others_start_and_end(children) -> None:
    lasting = children.start(["-c", "input()"], stdin=subprocess.PIPE)
    restless = children.start(["-c", _RESTLESS], stdout=subprocess.PIPE)
    restless.stdout.readline()
    for _ in range(300):  # each meets one that ends with a chance of a few per cent
        assert {lasting.pid, restless.pid} <= set(children_by_parent()[os.getpid()])
