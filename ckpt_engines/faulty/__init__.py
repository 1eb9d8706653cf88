"""``faulty:ENGINE``: any engine with faults injected on purpose."""
