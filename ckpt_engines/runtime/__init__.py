"""What engines and the sync library need of the machine: devices, memory, threads, processes."""
