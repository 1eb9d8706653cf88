"""``gloo``, ``nccl`` and ``hccl``: torch.distributed on three devices."""
