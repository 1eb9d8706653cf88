"""Commands about engines and the machine that they run on: ``engines``, ``doctor``, ``new-engine``, ``conformance``."""
