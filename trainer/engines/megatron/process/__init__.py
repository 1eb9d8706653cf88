"""Everything of megatron-core that is global to a process: its process groups, and its CUDA calls where there is no GPU."""
