"""The configuration files of ``weightlane train``, ``sft`` and ``serve``: their sections, reading and checks."""
