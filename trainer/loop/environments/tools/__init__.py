"""The environment of tool calls: functions and a Python sandbox that the model calls in its own format."""
