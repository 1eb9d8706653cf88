"""The service: training and sampling for programs that speak the Tinker API."""
