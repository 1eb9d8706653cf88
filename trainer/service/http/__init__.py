"""The service over HTTP, as the Tinker SDK speaks it."""
