"""Devices, memory, threads and processes of the machine, for engines and for the libraries above them."""
