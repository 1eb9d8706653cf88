"""The wire: messages of the Tinker API, checked and turned into batches, and results turned into its answers.

Requests are JSON (`requests`) or, if they carry tensors, Protocol Buffers (`batches`). The messages themselves are
declared in `messages`: nothing here imports the SDK whose programs send them.
"""
