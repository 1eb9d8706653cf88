"""The configuration files of ``weightlane train``, ``sft`` and ``tinker``: their sections, reading and checks."""
