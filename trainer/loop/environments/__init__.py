"""Environments: what a model takes turns with, from its first prompt to a reward.

An environment is a class with one coroutine method:

    >>> from weightlane.trainer.loop.environments import Environment, Verdict
    >>> class Guessing(Environment):
    ...     async def play(self, task, episode):
    ...         reply = await episode.reply()  # to the task's prompt
    ...         while not reply.is_last and reply.text != task["answer"]:
    ...             reply = await episode.reply("Wrong. Again: ")
    ...         return Verdict(float(reply.text == task["answer"]), {"guesses": 1.0})
"""

from .contract import Environment, EnvironmentContext, EpisodeView, Message, Options, Reply, Verdict
from .rendering import Renderer

__all__ = ["Environment", "EnvironmentContext", "EpisodeView", "Message", "Options", "Renderer", "Reply", "Verdict"]
