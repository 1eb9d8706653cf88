"""Links: the framework's end around one half of an engine."""
