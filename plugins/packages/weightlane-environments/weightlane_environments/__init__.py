"""Environments for weightlane from other packages: reasoning-gym's tasks, TextArena's games and OpenEnv's servers.

Each is named in ``[environment]`` of a configuration: ``reasoning-gym``, ``textarena``, ``openenv``.
`weightlane_environments.tasks` writes their task files. This module imports nothing, since the processes of
`weightlane_environments.worker` import it, too.
"""
