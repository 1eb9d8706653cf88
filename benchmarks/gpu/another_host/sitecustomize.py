"""Python imports this at its start where this folder is in PYTHONPATH: NCCL then takes each process for one of another machine.

It refuses two ranks on one GPU of one machine, which it knows by this name. Ranks of different machines connect by sockets.
"""

import os


def be_another_host() -> None:
    """Name the machine after this process."""
    os.environ["NCCL_HOSTID"] = f"weightlane-{os.getpid()}"


be_another_host()
os.register_at_fork(after_in_child=be_another_host)
