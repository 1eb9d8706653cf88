"""One command for weightlane on GPUs: it checks and measures everything that the GPUs of a machine allow.

    make gpu                                  # one GPU, eight minutes at most
    make gpu PARTS=one,multi                  # and what takes two GPUs or more
    make gpu PARTS=vllm                       # real models in vLLM, out of the Hugging Face cache
    make gpu PYTHON=/opt/torch/bin/python     # with the Python that has torch, built for CUDA

It runs from the checkout: weightlane need not be installed. Every step is a process of its own with a time limit of its own,
and one that fails hides none of the others. Exit code 0 when all passed, 1 when one did not or none could run, 2 for bad usage.
"""
