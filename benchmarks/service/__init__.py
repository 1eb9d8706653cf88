"""The service behind the Tinker API: under load, while its processes are killed, and for several clients that train at once."""
